"""The 19 tasks of the Visual Task Adaptation Benchmark, as `vtab:TASK`, from prepared TFDS data.

Paper: Zhai et al. 2019, "A Large-scale Study of Representation Learning with the Visual Task
Adaptation Benchmark". Data sets, splits and labels follow its code, task_adaptation of
google-research. Each task has the splits `train`, `validation` and `test`. The 1,000 training
images of VTAB-1k are `train[:800]+validation[:200]`, in TFDS's order.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax.base import UserError, records
from vit_jax.data.image_decoding import decode
from vit_jax.data.sources import base, tfds
from vit_jax.data.sources.base import EncodedImage, Label, Source, Splits, take_split, warn_once
from vit_jax.data.sources.tfds import Example, LabelReader

VTAB_1K_SPLIT = 'train[:800]+validation[:200]'  # the training images of VTAB-1k


class VtabTask(NamedTuple):
    """One task: images of a TFDS data set, and their labels.

    In some tasks, cropping or flipping an image changes its label. Kolesnikov et al. 2020, "Big
    Transfer (BiT)", appendix F, lists them; the ViT paper uses that preprocessing.
    """

    group: Literal['natural', 'specialized', 'structured']
    data: str  # name in TFDS
    version: int  # major version, within which TFDS keeps images and their order
    train: str  # the benchmark's splits, as splits of the TFDS data set
    validation: str
    test: str
    label: str | LabelReader = 'label'
    crop: bool = True  # whether cropping keeps the label
    flip: bool = True  # whether flipping keeps the label


def _bin_label(
    bounds: Sequence[float], class_names: Sequence[str], value: Callable[[Example], Any]
) -> LabelReader:
    """Returns a reader whose label is the number of bounds that are below a value."""
    return LabelReader(tuple(class_names), lambda e: np.searchsorted(bounds, value(e)))


def _grouped(column: str, old: int, new: int) -> LabelReader:
    """Returns a reader that merges `old` labels into `new` groups of consecutive labels."""
    return LabelReader(tuple(map(str, range(new))), lambda e: int(e[column]) * new // old)


def _nearest_object(example: Example) -> Any:
    """Returns the least distance of CLEVR's objects from the camera (the third coordinate)."""
    return min(coordinates[2] for coordinates in example['objects']['pixel_coords'])


def _nearest_vehicle(example: Example) -> Any:
    """Returns the meters along the camera's axis to the nearest car, van or truck, or infinity."""
    types = example['objects']['type']
    locations = example['objects']['location']
    distances = (location[2] for kind, location in zip(types, locations, strict=True) if kind < 3)
    return min(distances, default=np.inf)


_OBJECTS = LabelReader(
    tuple(f'{count} objects' for count in range(3, 11)), lambda e: len(e['objects']['size']) - 3
)
_DISTANCES = 'to 8', '8 to 8.5', '8.5 to 9', '9 to 9.5', '9.5 to 10', 'over 10'
_CLEVR_DISTANCE = _bin_label((8.0, 8.5, 9.0, 9.5, 10.0), _DISTANCES, _nearest_object)
_VEHICLES = 'to 8 m', '8 to 20 m', 'over 20 m', 'no vehicle'
_KITTI_DISTANCE = _bin_label((8.0, 20.0, 999.0), _VEHICLES, _nearest_vehicle)


def _task(
    group: Literal['natural', 'specialized', 'structured'],
    data: str,
    version: int,
    splits: str = 'train validation test',
    **options: Any,
) -> VtabTask:
    """Returns a task; `splits` are the splits for training, validation and testing."""
    train, validation, test = splits.split()
    return VtabTask(group, data, version, train, validation, test, **options)


_CLEVR = _task('structured', 'clevr', 3, 'train[:90%] train[90%:] validation', crop=False)
_DSPRITES = _task('structured', 'dsprites', 2, 'train[:80%] train[80%:90%] train[90%:]', flip=False)
_SMALLNORB = _task('structured', 'smallnorb', 2, 'train test[:50%] test[50%:]')

TASKS = {
    'caltech101': _task('natural', 'caltech101', 3, 'train[:90%] train[90%:] test'),
    'cifar100': _task('natural', 'cifar100', 3, 'train[:90%] train[90%:] test'),
    'dtd': _task('natural', 'dtd', 3),
    'flowers102': _task('natural', 'oxford_flowers102', 2),
    'pets': _task('natural', 'oxford_iiit_pet', 3, 'train[:80%] train[80%:] test'),
    'sun397': _task('natural', 'sun397/tfds', 4),
    'svhn': _task('natural', 'svhn_cropped', 3, 'train[:90%] train[90%:] test'),
    'camelyon': _task('specialized', 'patch_camelyon', 2),
    'eurosat': _task('specialized', 'eurosat/rgb', 2, 'train[:60%] train[60%:80%] train[80%:]'),
    'resisc45': _task('specialized', 'resisc45', 3, 'train[:60%] train[60%:80%] train[80%:]'),
    'retinopathy': _task('specialized', 'diabetic_retinopathy_detection/btgraham-300', 3),
    'clevr_count': _CLEVR._replace(label=_OBJECTS),
    'clevr_distance': _CLEVR._replace(label=_CLEVR_DISTANCE),
    'dmlab': _task('structured', 'dmlab', 2, crop=False),
    'dsprites_location': _DSPRITES._replace(label=_grouped('label_x_position', 32, 16), crop=False),
    'dsprites_orientation': _DSPRITES._replace(label=_grouped('label_orientation', 40, 16)),
    'kitti_distance': _task('structured', 'kitti', 3, label=_KITTI_DISTANCE, crop=False),
    'smallnorb_azimuth': _SMALLNORB._replace(label='label_azimuth', flip=False),
    'smallnorb_elevation': _SMALLNORB._replace(label='label_elevation'),
}


def _open_splits(data: str) -> Splits:
    """Opens the splits of `vtab:TASK`. Raises UserError if the task or its data do not exist."""
    name = data.removeprefix('vtab:')
    if name not in TASKS:
        raise UserError(f'{data}: unknown task; {records.closest(name, TASKS)}')
    task = TASKS[name]
    splits = tfds.open_splits(_folder(name, task), task.label)

    def whole(split: str) -> Source:
        if split not in splits:
            raise UserError(f'{data}: {task.data} has no split {split!r}')
        source = splits[split]()
        return _brighten(source) if task.data == 'dsprites' else source

    splits_of_data = {'train': task.train, 'validation': task.validation, 'test': task.test}
    return {
        name: functools.partial(take_split, split, whole, of=data)
        for name, split in splits_of_data.items()
    }


KIND = base.SourceKind('vtab:TASK', lambda data: data.startswith('vtab:'), _open_splits)


def _folder(name: str, task: VtabTask) -> str:
    """Returns the folder of the task's data set; warns if only another version is prepared."""
    try:
        return tfds.find_prepared(f'{task.data}:{task.version}.*.*')
    except UserError:
        folder = tfds.find_prepared(task.data)
    version = pathlib.Path(folder).name
    warn_once(
        f'vtab:{name}: found version {version} of tfds:{task.data}; '
        f'the benchmark uses version {task.version}, so results may differ'
    )
    return folder


def _brighten(source: Source) -> Source:
    """Scales the images of dSprites, whose pixels are stored as 0 and 1, to 0 and 255."""

    def read(index: int) -> tuple[EncodedImage, Label]:
        stored, label = source.read(index)
        return decode(stored, exif_rotation=False) * np.uint8(255), label

    return dataclasses.replace(source, read=read)
