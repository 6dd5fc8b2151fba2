"""A network as a program that jax alone can run: photos to probabilities. It is only written.

`numpy.load` opens the file: `program` is what `jax.export.deserialize` takes, `card` is JSON, and
every other array is a parameter, which the program is given together with the images. Parameters
are no part of the program: each size of images would compile and hold them anew, and a program of
more than 2 GiB cannot be stored. The page "A network as a program" has an example.

The program resizes and crops photos by matrix products. As OpenCV and Pillow do, it rounds to 8
bits after resizing, and between the two passes of Pillow's methods too.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from vit_jax.base import (
    Array,
    Float,
    Params,
    UInt8,
    UserError,
    records,
    require,
    tree_names,
    usable,
)
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.checkpoints.transfer import has_trained_head
from vit_jax.data.image_preprocessing import Preprocessing, ResizeMethod, Sides, Size, normalize
from vit_jax.models import build
from vit_jax.models.compute import PORTABLE

NAME, SUFFIX = 'stablehlo', '.stablehlo'
PROGRAM, CARD = 'program', 'card'  # arrays of bytes in the file
_PLATFORMS = 'cpu', 'cuda', 'tpu'


def write(path: pathlib.Path, card: Card, params: Params) -> list[str]:
    """Writes the program, and returns what its user has to know, line by line.

    It computes in float32 from parameters of float32 or bfloat16. Raises UserError for a network
    that gives nothing for a photo.
    """
    channels = card.model.channels
    require(channels == 3, f'channels={channels}: a program takes photos, which have 3 channels')
    has_head = card.model.num_classes is not None
    if has_head and not has_trained_head(params):
        text = (
            'the head is all zeros: a program gives features once it is dropped (num_classes=None'
        )
        raise UserError(f'{text}, --drop_head)')
    # numpy has no bfloat16 in files: these are its bits, which the program takes.
    arrays = {
        name: leaf.view(np.uint16) if leaf.dtype.name == 'bfloat16' else leaf
        for name, leaf in tree_names.named_leaves(params).items()
    }
    exported = _exported(card, arrays)
    try:
        program = exported.serialize()
    except ImportError as error:
        raise UserError("stablehlo needs flatbuffers: pip install 'vit_jax[export]'") from error
    kind = 'sigmoid' if card.loss == 'sigmoid' else 'softmax'
    outputs = f'probabilities ({kind})' if has_head else 'features'
    outputs = 'projections' if card.projects else outputs
    about = {
        'inputs': ['parameters by name', f'images: {exported.in_avals[-1].str_short()}'],
        'outputs': f'{outputs}: {exported.out_avals[0].str_short()}',
        'platforms': _PLATFORMS,
        'jax': jax.__version__,
        'card': records.to_dict(card),
    }
    stored = {PROGRAM: bytes(program), CARD: json.dumps(about).encode()}
    with usable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_npz(path, arrays | {n: np.frombuffer(v, np.uint8) for n, v in stored.items()})
    images, platforms = exported.in_avals[-1].str_short(), ', '.join(_PLATFORMS)
    notes = [f'images {images} to {about["outputs"]}, for {platforms}']
    if card.preprocessing.exif_rotation:
        notes.append('photos are to be turned as their camera says before the program sees them')
    return notes


def _exported(card: Card, arrays: dict[str, np.ndarray]) -> export.Exported:
    """The program of parameters by name and images (b h w 3), of any number and size."""
    model = build(card.model, compute=PORTABLE)
    expected = jax.eval_shape(model.init, jax.random.key(0))

    def outputs(arrays: dict[str, Array], images: UInt8[Array, 'b h w 3']) -> Float[Array, 'b ...']:
        def parameter(name: str, _: object) -> Array:
            array = arrays[name]
            if array.dtype == np.uint16:
                array = jax.lax.bitcast_convert_type(array, 'bfloat16')
            return array.astype(np.float32)

        with jax.default_matmul_precision('highest'):
            prepared = preprocess(images, card.model.image_size, card.preprocessing)
            found = model.apply(tree_names.map_named(parameter, expected), prepared)
        has_classes = card.model.num_classes is not None and not card.projects
        return card.probabilities(found) if has_classes else found

    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
    images = jax.ShapeDtypeStruct(export.symbolic_shape('b, h, w, 3'), np.uint8)
    return export.export(jax.jit(outputs), platforms=_PLATFORMS)(shapes, images)


def preprocess(
    images: UInt8[Array, 'b _ _ 3'], size: Size, preprocessing: Preprocessing
) -> Float[Array, 'b _ _ 3']:
    """Images (b h w 3) as a network takes them, of the size (height, width).

    Cut and resized as `preprocessing.crop` does it, within one of 255 grey levels, of white noise
    two in one of 100,000 pixels; exactly where nothing is resized. Height and width may be
    symbolic (`jax.export`).
    """
    shape = jnp.int32(images.shape[1]), jnp.int32(images.shape[2])
    crop: Any = preprocessing.crop  # none that is random
    (resized, corner), method = crop.placement(shape, size), crop.resize
    rows, columns = (
        _weights(images.shape[i + 1], resized[i], first=corner[i], count=size[i], method=method)
        for i in (0, 1)
    )

    def across(pixels: Array) -> Array:
        return jnp.einsum('qw,bhwc->bhqc', columns, pixels)

    def down(pixels: Array) -> Array:
        return jnp.einsum('ph,bhwc->bpwc', rows, pixels)

    pixels = images.astype(jnp.float32)
    with jax.default_matmul_precision('highest'):
        if method == 'bilinear':
            pixels = _grey_levels(down(across(pixels)))
        else:
            pixels = jax.lax.cond(
                _is_vertical_first(shape, resized),
                lambda pixels: _grey_levels(across(_grey_levels(down(pixels)))),
                lambda pixels: _grey_levels(down(_grey_levels(across(pixels)))),
                pixels,
            )
    return normalize(pixels, preprocessing)


def _is_vertical_first(shape: Sides, resized: Sides) -> Array:
    """Does Pillow resize columns first? Before its version 13 it never did."""
    fewer_rows, fewer_columns = shape[0] - resized[0], shape[1] - resized[1]
    return (fewer_rows > 0) & (fewer_rows > 2 * fewer_columns)


def _weights(
    length: Any, resized: Any, *, first: Any, count: int, method: ResizeMethod
) -> Float[Array, 'p q']:
    """How a side of `length` pixels is resized: row p weighs them for the pixel `first` + p.

    `count` pixels are wanted, of a side that is `resized` to so many.
    """
    # From the middle of the side, in half pixels: no product can be too large for 32 bits, and
    # whole numbers are exact.
    wanted = 2 * (jnp.arange(count) + first) + 1 - resized
    whole, rest = jnp.divmod(wanted * length, resized)
    there = 2 * jnp.arange(length) + 1 - length
    distances = (there - whole[:, None] - (rest / resized)[:, None]) / 2  # in pixels
    if method != 'bilinear':  # smoothed where the image shrinks
        distances *= jnp.minimum(resized / length, 1)
    weights = _KERNELS[method](distances)
    return weights / weights.sum(axis=1, keepdims=True)


def _triangle(x: Float[Array, 'p q']) -> Float[Array, 'p q']:
    return jnp.maximum(0, 1 - jnp.abs(x))


def _cubic(x: Float[Array, 'p q']) -> Float[Array, 'p q']:
    """Keys' cubic with a = -1/2, which is Pillow's."""
    x = jnp.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return jnp.where(x < 1, near, jnp.where(x < 2, far, 0))


def _lanczos(x: Float[Array, 'p q']) -> Float[Array, 'p q']:
    return jnp.where(jnp.abs(x) < 3, jnp.sinc(x) * jnp.sinc(x / 3), 0)


_KERNELS: dict[ResizeMethod, Callable[[Array], Array]] = {
    'bilinear': _triangle,
    'bilinear_antialias': _triangle,
    'bicubic_antialias': _cubic,
    'lanczos_antialias': _lanczos,
}


def _grey_levels(pixels: Float[Array, '...']) -> Float[Array, '...']:
    """Rounded as 8 bits hold it, half up."""
    return jnp.clip(jnp.floor(pixels + 0.5), 0, 255)
