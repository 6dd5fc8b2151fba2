"""A network as a program that jax alone can run: photos to probabilities. It is only written.

`numpy.load` opens the file: `program` is what `jax.export.deserialize` takes, `card` is JSON, and
every other array is a parameter, which the program is given together with the images. Parameters
are no part of the program: each size of images would compile and hold them anew, and a program of
more than 2 GiB cannot be stored. The page "A network as a program" has an example.
"""

import json
import pathlib

import jax
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
from vit_jax.data.compiled_preprocessing import prepare
from vit_jax.models import build, has_trained_head
from vit_jax.models.options import ANYWHERE

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
    model = build(card.model, compute=ANYWHERE)
    expected = jax.eval_shape(model.init, jax.random.key(0))

    def outputs(arrays: dict[str, Array], images: UInt8[Array, 'b h w 3']) -> Float[Array, 'b ...']:
        def parameter(name: str, _: object) -> Array:
            array = arrays[name]
            if array.dtype == np.uint16:
                array = jax.lax.bitcast_convert_type(array, 'bfloat16')
            return array.astype(np.float32)

        with jax.default_matmul_precision('highest'):
            prepared = prepare(images, card.model.image_size, card.preprocessing)
            found = model.apply(tree_names.map_named(parameter, expected), prepared)
        has_classes = card.model.num_classes is not None and not card.projects
        return card.probabilities(found) if has_classes else found

    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
    images = jax.ShapeDtypeStruct(export.symbolic_shape('b, h, w, 3'), np.uint8)
    return export.export(jax.jit(outputs), platforms=_PLATFORMS)(shapes, images)
