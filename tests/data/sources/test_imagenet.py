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


def tar(path_or_file, files):
    opened = (
        {'fileobj': path_or_file}
        if isinstance(path_or_file, io.BytesIO)
        else {'name': path_or_file}
    )
    with tarfile.open(**opened, mode='w') as out:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


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
        with tarfile.open(root / 'ILSVRC2012_devkit_t12.tar.gz', 'w:gz') as out:
            for name, data in kit_files().items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                out.addfile(info, io.BytesIO(data))
    elif kind == 'kit':
        for name, data in kit_files().items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
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
            (root / 'train' / name).mkdir(parents=True)
            for file, data in images.items():
                (root / 'train' / name / file).write_bytes(data)
        (root / 'val').mkdir()
        for file, data in val_images().items():
            (root / 'val' / file).write_bytes(data)
    return root


@pytest.mark.parametrize('kind', ['kit.tar.gz', 'kit', 'solution', 'solution above'])
def test_every_image_comes_with_its_class(root, kind):
    write_kit(root.parent if kind == 'solution above' else root, kind)
    train, test = (opening.make_opener()(str(root), split) for split in ('train', 'test'))
    assert train.class_names == test.class_names == CLASSES
    for source, count in (train, 12), (test, 6):
        assert len({source.name_of(i) for i in range(len(source))}) == count == len(source)
        for i in range(count):
            stored, label = source.read(i)
            assert stored.decode().split()[0] == CLASSES[label] and label == source.labels[i]
            assert source.read_sizes([i]) == [len(stored)]
    assert sorted(train.labels) != train.labels.tolist()  # in an order of its own


@pytest.mark.parametrize(
    'kinds', [('solution', 'kit.tar.gz', 'kit'), ('kit.tar.gz', 'kit'), ('solution', 'kit')]
)
def test_of_several_files_of_labels_the_first_is_read_and_the_others_are_named(root, kinds, caplog):
    files = {'solution': 'LOC_val_solution.csv'}
    files |= {kind: f'ILSVRC2012_devkit_t12{kind[3:]}' for kind in ('kit.tar.gz', 'kit')}
    for kind in kinds:
        write_kit(root, kind)
    for name in kinds[1:]:  # and not looked at
        place = root / files[name]
        if place.is_dir():
            (place / 'data' / 'meta.mat').unlink()
        else:
            place.write_bytes(b'')
    assert opening.make_opener()(str(root), 'val').class_names == CLASSES
    others = ', '.join(str(root / files[kind]) for kind in kinds[1:])
    assert f'{root / files[kinds[0]]}: read in place of {others}' in caplog.text


def test_a_tar_file_is_read_in_place_of_a_folder_and_that_is_said(root, caplog):
    write_kit(root, 'kit')
    for split in 'train', 'val':
        other = root / f'ILSVRC2012_img_{split}.tar'
        if other.exists():
            (root / split).mkdir()
            assert len(opening.make_opener()(str(root), split)) == {'train': 12, 'val': 6}[split]
            assert f'{other}: read in place of {root / split}' in caplog.text


def test_labels_that_are_not_to_be_found_are_asked_for(root):
    assert len(opening.make_opener()(str(root), 'train')) == 12
    with pytest.raises(ValueError, match='labels of the validation images are missing: expected'):
        opening.make_opener()(str(root), 'val')


def test_validation_images_in_folders_of_classes_need_no_table(tmp_path):
    for split, images in ('train', train_images()), ('val', train_images()):
        for name, files in images.items():
            (tmp_path / split / name).mkdir(parents=True)
            for file, data in files.items():
                (tmp_path / split / name / file).write_bytes(data)
    assert opening.make_opener()(str(tmp_path), 'test').class_names == CLASSES


DAMAGES = {
    'cut': lambda data: data[: len(data) // 2],
    'empty': lambda data: b'',
    'a web page': lambda data: b'<html>',
    'zeros': lambda data: bytes(len(data)),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_file_is_named_in_one_sentence(root, damage):
    write_kit(root, 'kit.tar.gz')
    for file in sorted(root.glob('*.tar*')):
        whole = file.read_bytes()
        file.write_bytes(DAMAGES[damage](whole))
        for split in 'train', 'val':
            try:
                source = opening.make_opener()(str(root), split)
                assert 'img_train' not in file.name or len(source) == 6 or split == 'val'
            except UserError as error:
                assert str(root) in str(error) and '\n' not in str(error)
        file.write_bytes(whole)
    for name in 'LOC_val_solution.csv', 'ILSVRC2012_devkit_t12/data/meta.mat':
        (root / 'ILSVRC2012_devkit_t12.tar.gz').unlink(missing_ok=True)
        kind = 'solution' if name.endswith('.csv') else 'kit'
        write_kit(root, kind)
        (root / name).write_bytes(DAMAGES[damage]((root / name).read_bytes()))
        with pytest.raises(UserError, match=f'{root}') as refused:
            opening.make_opener()(str(root), 'val')
        assert '\n' not in str(refused.value)
        (root / name).unlink()
