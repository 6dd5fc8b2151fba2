"""Every configuration of configs/, and one hash of each: tests/golden/hashes.txt.

A hash is of the values that are not the defaults of their fields: a new field or default changes
no hash. python -m tests.golden writes the hashes. python -m tests.golden NAME prints how a
configuration differs from that of the last commit, defaults included.
"""

import copy
import dataclasses
import functools
import hashlib
import importlib.util
import json
import pathlib

from tests import tiny
from vit_jax.base import records
from vit_jax.studies.config import Study
from vit_jax.training.objectives import Distillation

ROOT = pathlib.Path(__file__).parent.parent.parent
HASHES = pathlib.Path(__file__).parent / 'hashes.txt'
FILES = sorted((ROOT / 'configs').rglob('*.py'))


def module(path):
    spec = importlib.util.spec_from_file_location('experiment', path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def names_of(path):
    """The configurations of a file, as --config= takes them: FILE.py, or FILE.py:ARGUMENT."""
    name = str(path.relative_to(ROOT))
    arguments = getattr(module(path), 'ARGUMENTS', (None,))
    return [name if argument is None else f'{name}:{argument}' for argument in arguments]


def config(name):
    return copy.deepcopy(_build(name))


@functools.cache
def _build(name):
    path, *argument = name.split(':', 1)
    return module(ROOT / path).get_config(*argument)


NAMES = [name for path in FILES for name in names_of(path)]
STUDIES = [
    name
    for name in NAMES
    if name.startswith('configs/studies/') and isinstance(config(name), Study)
]


def stated(value):
    """The values that are not the defaults of their fields, as JSON values."""
    if isinstance(value, records.Record):
        names = {
            field.name
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
        values = {name: stated(getattr(value, name)) for name in sorted(names)}
        return {'kind': type(value).__name__} | values
    if isinstance(value, dict):
        return {name: stated(each) for name, each in value.items()}
    return [stated(each) for each in value] if isinstance(value, tuple) else value


def _default(field):
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def hashes():
    """A line for each configuration: the first half of the SHA-256 of its values, and its name."""
    texts = {name: json.dumps(stated(config(name))) for name in NAMES}
    return [f'{hashlib.sha256(text.encode()).hexdigest()[:32]} {n}' for n, text in texts.items()]


# Number of training images by data source, from TFDS; the number of JFT is from the paper.
IMAGES = {
    'JFT-300M': 303_000_000,
    'tfds:imagenet21k': 14_197_122,
    'tfds:cifar10': 50_000,
    'tfds:cifar100': 50_000,
    'tfds:oxford_iiit_pet': 3_680,
    'tfds:oxford_flowers102': 1_020,
    'tfds:eurosat/rgb': 27_000,
    'cifar10': 50_000,
    'digits': 1_438,
}


def num_images(data):
    """Returns the number of training images. Data that is not in the table counts as ImageNet."""
    return 1_000 if data.startswith('vtab:') else IMAGES.get(data, 1_281_167)


def small(experiment):
    """The experiment without a teacher, a stand-in for a checkpoint's model, and small stages."""
    if (found := experiment.model) is None:
        size = experiment.image_size or (32, 32)
        patch = 14 if size == (518, 518) else 16
        found = tiny.model(num_classes=None, image_size=size, patch_size=(patch, patch))
    if found.backbone is not None:
        blocks = (1,) * len(found.backbone.blocks)
        found = dataclasses.replace(
            found, backbone=dataclasses.replace(found.backbone, blocks=blocks)
        )
    return dataclasses.replace(experiment, model=found, distillation=Distillation())
