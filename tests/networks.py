"""Networks as they come out of files, and the arrays of files as other libraries read them."""

import dataclasses
import pathlib

import jax
import numpy as np
from safetensors.numpy import load_file

from tests import tiny
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import google
from vit_jax.checkpoints.formats.opening import FORMATS, OURS
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.models import Backbone, ResNetConfig
from vit_jax.pretrained import LoadedModel

HYBRID = tiny.model(
    image_size=(64, 32), patch_size=(1, 1), backbone=Backbone(blocks=(1, 2, 1), width=32)
)
ROOT_ALONE = tiny.model(
    image_size=(64, 64), patch_size=(8, 8), backbone=Backbone(blocks=(), width=32)
)
RESNET = ResNetConfig(
    image_size=(64, 64), backbone=Backbone(blocks=(2, 1), width=32), num_classes=tiny.CLASSES
)


# What a path ends with, by the name of the format.
ENDINGS = {form.name: '' if form.file_name else form.suffix for form in FORMATS} | {OURS: ''}


def loaded(config, format=google.GOOGLE, layout=None, **card) -> LoadedModel:
    """A network with random parameters, as if it had been read from a file of such a layout."""
    params = jax.tree.map(np.asarray, tiny.built(config)[1])
    card = {'preprocessing': Preprocessing(exif_rotation=False)} | card
    card = Card(model=config, grid=config.grid, **card)
    layout = layout or format.usual_layout(config)
    return LoadedModel(card, params, format=format.name, layout=layout)


def changed(network: LoadedModel, *, params=None, **card) -> LoadedModel:
    """The network with other parameters, or other values of its card."""
    card = dataclasses.replace(network.card, **card)
    return dataclasses.replace(network, card=card, params=params or network.params)


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
