"""ImageNet's test sets: validation, ReaL, V2, A, R, Sketch, ObjectNet and C.

Each set is in its own folder below one root, as its authors distribute it. The labels are classes
of ILSVRC 2012, which the model must have.
"""

import csv
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vit_jax.base import MissingFile, require, usable
from vit_jax.base.files import read_json
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
    read_image_file,
    replace_labels,
)
from vit_jax.data.sources.folders import files_by_class, image_files
from vit_jax.evaluation import head
from vit_jax.evaluation.evaluator import WrapBatches
from vit_jax.evaluation.head import HeadReport
from vit_jax.pretrained import LoadedModel


class TestSet(NamedTuple):
    """A test set: a line of imagenet_suite.csv. c/NAME is a corruption of ImageNet-C."""

    name: str
    only_data_classes: bool  # whether only classes of the set are predicted
    alexnet_error: float | None  # mean error of AlexNet over the severities, from ImageNet-C's code
    command: str  # gets the set; to be run in the root folder

    def open(self, root: pathlib.Path) -> Source:
        """Opens the set, whose classes are WordNet ids. Raises MissingFile if it is missing."""
        if self.name in _OPENERS:
            return _OPENERS[self.name](root)
        return join([_open_folder(f'imagenet-{self.name}/{level}', root) for level in range(1, 6)])


def get_class_names(loaded: LoadedModel) -> tuple[str, ...]:
    """Returns the names of the model's classes. Raises UserError unless there are 1,000."""
    names = loaded.class_names or imagenet_classes.ids()
    num_classes = loaded.config.num_classes
    require(
        num_classes == len(names) == 1000,
        f"the checkpoint has {num_classes} classes; expected ImageNet's 1,000",
    )
    return names


def evaluate(
    test_set: TestSet,
    loaded: LoadedModel,
    source: Source,
    *,
    batch_size: int,
    wrap: WrapBatches = iter,
    **options: Any,
) -> HeadReport:
    """Evaluates a classifier on a test set.

    Args:
      test_set: The test set.
      loaded: A classifier of ImageNet's classes.
      source: The opened test set, with the classes of the model (see `get_class_names`).
      batch_size: Images per batch.
      wrap: Wraps the iterator of batches, for example to show progress.
      **options: Further fields of `ImageReader`.
    """
    reader = head.make_model_reader(loaded, source, **options)
    if test_set.alexnet_error is not None:  # the images of ImageNet-C are cropped already
        crop = loaded.preprocessing.crop
        method = crop.resize if isinstance(crop, Resize | CentralCrop) else 'bilinear'
        reader = dataclasses.replace(reader, crop=Resize(resize=method))
    return head.evaluate_head(
        loaded,
        reader,
        batch_size=batch_size,
        relabeled=True,
        only_data_classes=test_set.only_data_classes,
        calibrate=False,
        wrap=wrap,
    )


def mean_corruption_error(means: Mapping[str, Mapping[str, float]]) -> float | None:
    """Computes the mCE of ImageNet-C from the means of each test set; None if some are missing."""
    alexnet_errors = {test.name: test.alexnet_error for test in TEST_SETS if test.alexnet_error}
    if not alexnet_errors.keys() <= means.keys():
        return None
    relative_errors = [
        (1 - means[name]['accuracy']) / alexnet_error
        for name, alexnet_error in alexnet_errors.items()
    ]
    return sum(relative_errors) / len(relative_errors)


def _open_val(root: pathlib.Path) -> Source:
    """Opens folders of classes, or ImageNet's own files (see `imagenet.py`)."""
    if any(path.is_dir() for path in (root / 'val').glob('n*')):
        return _open_folder('val', root)
    splits = imagenet.KIND.open_splits(str(root))
    if 'val' not in splits:
        raise MissingFile(f'{root / "val"}: missing')
    return splits['val']()


def _open_real(root: pathlib.Path) -> Source:
    labels = root / 'real.json'
    _require_path(labels)
    return drop_unlabeled(replace_labels(_open_val(root), str(labels)))


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
    class_names = imagenet_classes.names()
    paths: list[str] = []
    classes_of_images: list[list[int]] = []
    with usable(folder, 'ObjectNet as it is distributed, with images/ and mappings/'):
        labels = read_json(folder / 'mappings' / 'folder_to_objectnet_label.json')
        imagenet_names = read_json(folder / 'mappings' / 'objectnet_to_imagenet_1k.json')
        for name, label in sorted(labels.items()):
            if label in imagenet_names:
                numbers = [class_names.index(c) for c in imagenet_names[label].split('; ')]
                images = image_files(folder / 'images' / name)
                paths += images
                classes_of_images += [numbers] * len(images)
    rows = multi_hot(classes_of_images, len(class_names))
    return labeled_source(paths, rows, imagenet_classes.ids(), read=_read_without_border)


def _read_without_border(path: str) -> EncodedImage:
    image = decode(read_image_file(path), exif_rotation=True)
    return image[2:-2, 2:-2]  # a red frame of 2 pixels


_OPENERS: dict[str, Callable[[pathlib.Path], Source]] = {
    'val': _open_val,
    'real': _open_real,
    'v2': _open_v2,
    'a': functools.partial(_open_folder, 'imagenet-a'),
    'r': functools.partial(_open_folder, 'imagenet-r'),
    'sketch': functools.partial(_open_folder, 'sketch'),
    'objectnet': _open_objectnet,
}
_ROWS = csv.reader(
    pathlib.Path(__file__).with_suffix('.csv').read_text(encoding='utf-8').splitlines()[1:]
)
TEST_SETS = tuple(
    TestSet(
        name=name,
        only_data_classes=bool(only_data_classes),
        alexnet_error=float(alexnet_error) if alexnet_error else None,
        command=command,
    )
    for name, only_data_classes, alexnet_error, command in _ROWS
)
