"""Exports a model, including preprocessing, as a StableHLO program that needs only jax to run.

`numpy.load` opens the file: `program` is the input of `jax.export.deserialize`, `card` is JSON, and
every other array is a parameter. The program takes the parameters and the images as arguments.
Parameters are not constants of the program, because every image size would then compile and hold
them again, and because a program of more than 2 GiB cannot be stored. docs/export.md has an
example.
"""

import importlib.util
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from vit_jax.base import Array, Float, Params, UInt8, records, require, tree_names
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.checkpoints.transfer import has_trained_head
from vit_jax.data.image_preprocessing import Preprocessing, Size, normalize
from vit_jax.models import build
from vit_jax.models.compute import PORTABLE

NAME = 'stablehlo'
SUFFIX = '.stablehlo'
# Arrays of bytes in the file.
PROGRAM = 'program'
CARD = 'card'
_PLATFORMS = 'cpu', 'cuda', 'tpu'


def write(path: pathlib.Path, card: Card, params: Params) -> list[str]:
    """Writes the program, which computes in float32, and returns notes for its users.

    Raises:
      UserError: If the model does not have 3 channels, or has an untrained head, or if a package
        that jax needs is missing.
    """
    has_flatbuffers = importlib.util.find_spec('flatbuffers') is not None
    require(has_flatbuffers, "the stablehlo format needs: pip install 'vit_jax[export]'")
    channels = card.model.channels
    require(channels == 3, f'the stablehlo format needs 3 channels; the model has {channels=}')
    has_head = card.model.num_classes is not None
    require(
        not has_head or has_trained_head(params),
        'the head is all zeros; to export features, use num_classes=None or --drop_head',
    )
    # numpy files have no bfloat16: the program gets the same bits as uint16.
    arrays = {
        name: leaf.view(np.uint16) if leaf.dtype.name == 'bfloat16' else leaf
        for name, leaf in tree_names.named_leaves(params).items()
    }
    exported = _export(card, arrays)
    if card.is_projection:
        kind = 'projections'
    elif has_head:
        kind = f'probabilities ({"sigmoid" if card.loss == "sigmoid" else "softmax"})'
    else:
        kind = 'features'
    images = f'images: {exported.in_avals[-1].str_short()}'
    outputs = f'{kind}: {exported.out_avals[0].str_short()}'
    about = {
        'inputs': ['parameters by name', images],
        'outputs': outputs,
        'platforms': _PLATFORMS,
        'jax': jax.__version__,
        'card': records.to_dict(card),
    }
    program = np.frombuffer(bytes(exported.serialize()), np.uint8)
    card_json = np.frombuffer(json.dumps(about).encode(), np.uint8)
    write_npz(path, arrays | {PROGRAM: program, CARD: card_json})
    notes = [f'program for {", ".join(_PLATFORMS)}: {images} -> {outputs}']
    if card.preprocessing.exif_rotation:
        notes.append('the program expects photos that are already rotated by their EXIF tag')
    return notes


def _export(card: Card, arrays: dict[str, np.ndarray]) -> export.Exported:
    """Exports a function of parameters by name and of images; batch and image size are symbolic."""
    model = build(card.model, compute=PORTABLE)
    expected = jax.eval_shape(model.init, jax.random.key(0))

    def predict(arrays: dict[str, Array], images: UInt8[Array, 'b h w 3']) -> Float[Array, 'b ...']:
        def parameter(name: str, _: object) -> Array:
            array = arrays[name]
            if array.dtype == np.uint16:
                array = jax.lax.bitcast_convert_type(array, 'bfloat16')
            return array.astype(np.float32)

        with jax.default_matmul_precision('highest'):
            prepared = preprocess(images, card.model.image_size, card.preprocessing)
            outputs = model.apply(tree_names.map_named(parameter, expected), prepared)
        has_classes = card.model.num_classes is not None and not card.is_projection
        return card.probabilities(outputs) if has_classes else outputs

    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
    images = jax.ShapeDtypeStruct(export.symbolic_shape('b, h, w, 3'), np.uint8)
    return export.export(jax.jit(predict), platforms=_PLATFORMS)(shapes, images)


def preprocess(
    images: UInt8[Array, 'b _ _ 3'], size: Size, preprocessing: Preprocessing
) -> Float[Array, 'b _ _ 3']:
    """Crops, resizes and normalizes images in jax, as `preprocessing.crop` does.

    Most pixels differ from OpenCV's and Pillow's by at most 1 of 255 gray levels; all are equal if
    nothing is resized.

    Args:
      images: Images of one size, which may be symbolic (`jax.export`).
      size: The target (height, width).
      preprocessing: The crop and the normalization.
    """
    shape = jnp.int32(images.shape[1]), jnp.int32(images.shape[2])
    crop: Any = preprocessing.crop  # Resize or CentralCrop
    method = crop.resize.removesuffix('_antialias').replace('lanczos', 'lanczos3')
    resized, corner = crop.placement(shape, size)
    pixels = images.astype(jnp.float32)
    for side in (1, 0):  # Pillow resizes the width first and rounds each result to 8 bits
        pixels = jax.image.scale_and_translate(
            pixels,
            (*pixels.shape[: side + 1], size[side], *pixels.shape[side + 2 :]),
            (side + 1,),
            jnp.float32(resized[side] / shape[side])[None],
            -jnp.float32(corner[side])[None],
            method,
            antialias=crop.resize != 'bilinear',
            precision=jax.lax.Precision.HIGHEST,
        )
        if side == 0 or crop.resize != 'bilinear':
            pixels = jnp.clip(jnp.floor(pixels + 0.5), 0, 255)
    return normalize(pixels, preprocessing)
