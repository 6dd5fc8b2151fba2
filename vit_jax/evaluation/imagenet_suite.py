"""ImageNet's test sets: validation, ReaL, V2, A, R, Sketch, ObjectNet and C.

Each set is in its own folder below one root, as its authors distribute it. The labels are classes
of ILSVRC 2012, which the model must have.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.base import MissingFile, require, usable
from vit_jax.data import imagenet_classes
from vit_jax.data.image_decoding import decode
from vit_jax.data.image_preprocessing import CentralCrop, Resize
from vit_jax.data.sources import imagenet
from vit_jax.data.sources.base import (
    EncodedImage,
    Source,
    drop_unlabeled,
    join,
    labeled_source,
    multi_hot,
    read_file,
    renumber_classes,
    replace_labels,
)
from vit_jax.data.sources.folders import files_by_class, image_files
from vit_jax.evaluation import head
from vit_jax.evaluation.evaluator import Watch
from vit_jax.pretrained import LoadedModel

# Mean error of AlexNet over the five severities of each corruption, from the code of ImageNet-C
# (Hendrycks and Dietterich 2019).
ALEXNET_ERRORS = {
    'gaussian_noise': 0.886428,
    'shot_noise': 0.894468,
    'impulse_noise': 0.922640,
    'defocus_blur': 0.819880,
    'glass_blur': 0.826268,
    'motion_blur': 0.785948,
    'zoom_blur': 0.798360,
    'snow': 0.866816,
    'frost': 0.826572,
    'fog': 0.819324,
    'brightness': 0.564592,
    'contrast': 0.853204,
    'elastic_transform': 0.646056,
    'pixelate': 0.717840,
    'jpeg_compression': 0.606500,
}
_BORDER = 2  # width of the red frame around the photos of ObjectNet, in pixels
_BERKELEY = 'https://people.eecs.berkeley.edu/~hendrycks'
_HUB = 'https://huggingface.co/datasets'


class TestSet(NamedTuple):
    """A test set. `open` takes the root folder, and returns images with WordNet ids as classes."""

    name: str
    command: str  # gets the set; to be run in the root folder
    open: Callable[[pathlib.Path], Source]
    only_data_classes: bool = False  # whether only classes of the set are predicted
    is_cropped: bool = False  # whether images are cropped already, so that they are only resized


def check_model(loaded: LoadedModel) -> None:
    """Raises UserError unless the model classifies ImageNet's 1,000 classes."""
    names, count = loaded.class_names, loaded.config.num_classes
    fits = count == 1000 and (not names or imagenet_classes.match(names) or _are_ids(names))
    classes = f'{names[0]!r}, ...' if names else 'without names'
    wrong = f'--suite=imagenet: the checkpoint has {count} classes ({classes})'
    require(fits, f"{wrong}; expected ImageNet's 1,000 classes")


def _are_ids(names: Sequence[str]) -> bool:
    return {*names} == {*imagenet_classes.ids()}


def evaluate(
    test_set: TestSet,
    loaded: LoadedModel,
    root: pathlib.Path,
    *,
    batch_size: int,
    watch: Watch = iter,
    **options: Any,
) -> dict[str, float]:
    """Evaluates a classifier on a test set.

    Args:
      test_set: The test set.
      loaded: A classifier of ImageNet's classes (see `check_model`).
      root: The folder that contains the folder of the test set.
      batch_size: Images per batch.
      watch: Wraps the iterator of batches, for example to show progress.
      **options: Further fields of `ImageReader`.

    Returns:
      Mean metrics by name, and the number of `images`.

    Raises:
      MissingFile: If the test set is missing.
      UserError: If its files are damaged.
    """
    source = renumber_classes(test_set.open(root), loaded.class_names or imagenet_classes.ids())
    reader = head.make_model_reader(loaded, source, **options)
    if test_set.is_cropped:
        crop = loaded.preprocessing.crop
        method = crop.resize if isinstance(crop, Resize | CentralCrop) else 'bilinear'
        reader = dataclasses.replace(reader, crop=Resize(resize=method))
    report = head.evaluate_head(
        loaded,
        reader,
        batch_size=batch_size,
        relabeled=True,
        only_data_classes=test_set.only_data_classes,
        calibrate=False,
        watch=watch,
    )
    return report.means | {'images': report.num_images}


def mean_corruption_error(means: Mapping[str, Mapping[str, float]]) -> float | None:
    """Computes the mCE of ImageNet-C from the means of each test set; None if some are missing."""
    names = {f'c/{name}': error for name, error in ALEXNET_ERRORS.items()}
    if not names.keys() <= means.keys():
        return None
    ratios = [(1 - means[name]['accuracy']) / error for name, error in names.items()]
    return sum(ratios) / len(ratios)


def _open_val(root: pathlib.Path) -> Source:
    if imagenet.KIND.recognizes(str(root)):
        return imagenet.KIND.open_splits(str(root))['val']()
    return _open_folder('val', root)


def _open_real(root: pathlib.Path) -> Source:
    labels = root / 'real.json'
    source = _open_val(root)
    _require_path(labels)
    return drop_unlabeled(replace_labels(source, str(labels)))


def _open_folder(name: str, root: pathlib.Path) -> Source:
    _require_path(root / name)
    return files_by_class(root / name)


def _require_path(path: pathlib.Path) -> None:
    if not path.exists():
        raise MissingFile(f'{path}: missing')


def _open_v2(root: pathlib.Path) -> Source:
    """Opens ImageNetV2, whose folders are class numbers instead of WordNet ids."""
    source = _open_folder('imagenetv2-matched-frequency-format-val', root)
    with usable(root, 'folders 0 to 999 in imagenetv2-matched-frequency-format-val'):
        names = [imagenet_classes.ids()[int(number)] for number in source.class_names]
    return dataclasses.replace(source, class_names=tuple(names))


def _open_objectnet(root: pathlib.Path) -> Source:
    """Opens the photos of ObjectNet whose class has one or several counterparts in ImageNet."""
    folder = root / 'objectnet-1.0'
    _require_path(folder)
    names, paths, numbers = imagenet_classes.names(), list[str](), list[list[int]]()
    with usable(folder, 'ObjectNet as it is distributed, with images/ and mappings/'):
        files = 'folder_to_objectnet_label.json', 'objectnet_to_imagenet_1k.json'
        labels, classes = (json.loads((folder / 'mappings' / f).read_bytes()) for f in files)
        for name, label in sorted(labels.items()):
            if label in classes:
                images = image_files(folder / 'images' / name)
                paths += images
                numbers += [[names.index(c) for c in classes[label].split('; ')]] * len(images)
    rows = multi_hot(numbers, len(names))
    return labeled_source(paths, rows, imagenet_classes.ids(), read=_read_without_border)


def _read_without_border(path: str) -> EncodedImage:
    image = decode(read_file(path), exif_rotation=True)
    return image[_BORDER:-_BORDER, _BORDER:-_BORDER]


def _open_corruption(name: str, root: pathlib.Path) -> Source:
    """Opens a corruption of ImageNet-C at all severities."""
    return join([_open_folder(f'imagenet-c/{name}/{level}', root) for level in range(1, 6)])


_REAL = 'https://raw.githubusercontent.com/google-research/reassessed-imagenet/master/real.json'
_V2 = 'vaishaal/ImageNetV2/resolve/main/imagenetv2-matched-frequency.tar.gz'
_SKETCH = 'songweig/imagenet_sketch/resolve/main/data/ImageNet-Sketch.zip'
_OBJECTNET = 'https://objectnet.dev/downloads/objectnet-1.0.zip'
_C = 'https://zenodo.org/records/2235448/files'
_GET_C = f'mkdir -p imagenet-c; for f in noise blur weather digital; do curl -L {_C}/$f.tar | '
_GET_C += 'tar x -C imagenet-c; done'
_GET_VAL = 'download ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from image-net.org'
TEST_SETS = (
    TestSet('val', _GET_VAL, _open_val),
    TestSet('real', f'curl -LO {_REAL}', _open_real),
    TestSet('v2', f'curl -L {_HUB}/{_V2} | tar xz', _open_v2),
    TestSet(
        'a',
        f'curl -L {_BERKELEY}/imagenet-a.tar | tar x',
        functools.partial(_open_folder, 'imagenet-a'),
        only_data_classes=True,
    ),
    TestSet(
        'r',
        f'curl -L {_BERKELEY}/imagenet-r.tar | tar x',
        functools.partial(_open_folder, 'imagenet-r'),
        only_data_classes=True,
    ),
    TestSet(
        'sketch',
        f'curl -LO {_HUB}/{_SKETCH} && unzip ImageNet-Sketch.zip',
        functools.partial(_open_folder, 'sketch'),
    ),
    TestSet(
        'objectnet',
        f'curl -LO {_OBJECTNET} && unzip -P objectnetisatestset objectnet-1.0.zip',
        _open_objectnet,
        only_data_classes=True,
    ),
    *(
        TestSet(f'c/{name}', _GET_C, functools.partial(_open_corruption, name), is_cropped=True)
        for name in ALEXNET_ERRORS
    ),
)
