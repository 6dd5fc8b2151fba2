"""ImageNet's own forms, made here in miniature: 3 classes, 4 and 2 images each."""

import io
import tarfile

import numpy as np
import pytest
from scipy import io as scipy_io

from vit_jax.base import UserError
from vit_jax.data.sources import opening

CLASSES = 'n01440764', 'n01443537', 'n02000001'
NUMBERS = {'n01440764': 2, 'n01443537': 3, 'n02000001': 1}  # the kit has an order of its own
VAL = ['n02000001', 'n01440764', 'n01443537', 'n01440764', 'n02000001', 'n01443537']


def train_images():
    return {
        name: {f'{name}_{i}.JPEG': f'{name} {i}'.encode() for i in range(4)} for name in CLASSES
    }


def val_images():
    return {f'ILSVRC2012_val_{i:08}.JPEG': f'{name} {i}'.encode() for i, name in enumerate(VAL, 1)}


def tar(path_or_file, files, mode='w'):
    kind = 'fileobj' if isinstance(path_or_file, io.BytesIO) else 'name'
    with tarfile.open(**{kind: path_or_file}, mode=mode) as out:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


def write_files(root, files):
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def kit_files():
    synsets = np.array(
        [(n, name, 'a fish') for name, n in NUMBERS.items()] + [(1001, 'n0', 'animal')],
        dtype=[('ILSVRC2012_ID', object), ('WNID', object), ('words', object)],
    )
    table = io.BytesIO()
    scipy_io.savemat(table, {'synsets': synsets})
    truth = '\n'.join(str(NUMBERS[name]) for name in VAL)
    folder = 'ILSVRC2012_devkit_t12/data'
    return {
        f'{folder}/meta.mat': table.getvalue(),
        f'{folder}/ILSVRC2012_validation_ground_truth.txt': truth.encode(),
    }


def write_kit(root, kind):
    if kind == 'kit.tar.gz':
        tar(root / 'ILSVRC2012_devkit_t12.tar.gz', kit_files(), 'w:gz')
    elif kind == 'kit':
        write_files(root, kit_files())
    else:
        lines = ['ImageId,PredictionString'] + [
            f'ILSVRC2012_val_{i:08},{name} 1 2 3 4 {name} 5 6 7 8' for i, name in enumerate(VAL, 1)
        ]
        (root / 'LOC_val_solution.csv').write_text('\n'.join(lines))


@pytest.fixture(params=['tars', 'folders'])
def root(request, tmp_path):
    root = tmp_path / 'Data'
    root.mkdir()
    if request.param == 'tars':
        inner = {}
        for name, images in reversed(train_images().items()):
            packed = io.BytesIO()
            tar(packed, images)
            inner[f'{name}.tar'] = packed.getvalue()
        tar(root / 'ILSVRC2012_img_train.tar', inner)
        tar(root / 'ILSVRC2012_img_val.tar', val_images())
    else:
        for name, images in train_images().items():
            write_files(root / 'train' / name, images)
        write_files(root / 'val', val_images())
    return root


@pytest.mark.parametrize('kind', ['kit.tar.gz', 'kit', 'solution', 'solution above'])
def test_every_validation_image_comes_with_its_class(root, kind):
    write_kit(root.parent if kind == 'solution above' else root, kind)
    train, test = (opening.make_opener()(str(root), split) for split in ('train', 'test'))
    assert train.class_names == test.class_names == CLASSES
    assert len(train) == 12 and len(test) == 6
    for stored, label in map(test.read, range(6)):
        assert stored.decode().split()[0] == CLASSES[label]
    assert sorted(train.labels) != train.labels.tolist()  # in an order of its own


def test_validation_images_need_labels_unless_they_are_in_folders_of_classes(root):
    with pytest.raises(UserError, match='ILSVRC2012_devkit_t12'):
        opening.make_opener()(str(root), 'val')
    for split in 'train', 'val':
        for name, images in train_images().items():
            write_files(root / 'sorted' / split / name, images)
    assert opening.make_opener()(str(root / 'sorted'), 'test').class_names == CLASSES


@pytest.mark.parametrize('damaged', [b'<html>', b''])
@pytest.mark.parametrize('kind', ['kit.tar.gz', 'kit', 'solution'])
def test_a_damaged_file_of_labels_or_images_is_named(root, kind, damaged):
    write_kit(root, kind)
    for file in [*root.glob('*.*'), *root.glob('*kit*/data/meta.mat')]:
        whole = file.read_bytes()
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=root.name):
            for split in 'train', 'val':
                opening.make_opener()(str(root), split)
        file.write_bytes(whole)


@pytest.mark.parametrize('root', ['tars'], indirect=True)
@pytest.mark.parametrize('split', ['train', 'val'])
def test_an_archive_that_is_cut_off_between_two_files_is_named(root, split):
    write_kit(root, 'solution')
    path = root / f'ILSVRC2012_img_{split}.tar'
    with tarfile.open(path) as archive:
        *_, last = archive.getmembers()
    path.write_bytes(path.read_bytes()[: last.offset])
    with pytest.raises(UserError, match='ILSVRC2012_img_.*cut off at byte'):
        opening.make_opener()(str(root), split)
