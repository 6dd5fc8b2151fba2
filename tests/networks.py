"""Networks as they come out of files, and the arrays of files as other libraries read them."""

import pathlib

import jax
import numpy as np
from safetensors.numpy import load_file

from tests import tiny
from vit_jax.data import image_preprocessing
from vit_jax.models import Backbone, ResNetConfig, build
from vit_jax.pretrained import Loaded

HYBRID = tiny.model(
    image_size=(64, 32), patch_size=(1, 1), backbone=Backbone(blocks=(1, 2, 1), width=32)
)
ROOT_ALONE = tiny.model(
    image_size=(64, 64), patch_size=(8, 8), backbone=Backbone(blocks=(), width=32)
)
RESNET = ResNetConfig(
    image_size=(64, 64), backbone=Backbone(blocks=(2, 1), width=32), num_classes=tiny.CLASSES
)


def loaded(config, layout=None, format='google', **values) -> Loaded:
    """A network with random parameters, as if it had been read from such a file."""
    params = jax.eval_shape(build(config).init, jax.random.key(0))
    params = jax.tree.map(np.asarray, tiny.random_params(params))
    origin = {'format': layout.name if layout else format, 'layout': layout}
    rest = {
        'preprocessing': image_preprocessing.Preprocessing(),
        'class_names': (),
        'report': (),
        'ignored': (),
    }
    return Loaded(config=config, params=params, **(rest | origin | values))


def contents(path):
    """The arrays of a file, as numpy or safetensors itself reads them."""
    path = pathlib.Path(path)
    path = path / 'model.safetensors' if path.is_dir() else path
    if path.suffix == '.safetensors':
        return load_file(path)
    with np.load(path) as file:
        return dict(file)


def assert_same_arrays(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype and array.shape == other[name].shape, name
        assert array.tobytes() == other[name].tobytes(), name
