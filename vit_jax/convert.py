"""Converts a checkpoint to another format: python -m vit_jax.convert IN OUT --format=FORMAT.

IN is a vit_jax checkpoint, an npz file of vision_transformer or big_vision, a safetensors or
PyTorch file of timm or OpenCLIP, or a Hugging Face directory. OUT is a directory for the formats
vit_jax, huggingface and open_clip, else a file. Without --format, OUT keeps the format of IN,
unless the ending of OUT implies another one: timm for .safetensors, stablehlo for .stablehlo.

--average IN IN ... OUT averages the parameters of fine-tuned copies of one model (model soups).
--weights=W,W,... weights them, for example a model before and after fine-tuning (WiSE-FT). OUT
gets the description of the first IN.

stablehlo is an exported program that maps photos to probabilities. It needs only jax to run, and
cannot be converted back (docs/export.md).
"""

import argparse
import dataclasses
import pathlib

from vit_jax.base import UserError, plural, require
from vit_jax.checkpoints.formats.opening import NAMES
from vit_jax.checkpoints.formats.writing import format_for, is_free
from vit_jax.checkpoints.remote import require_local
from vit_jax.checkpoints.transfer import average_params
from vit_jax.cli import app
from vit_jax.pretrained import load, save


def main(arguments: argparse.Namespace) -> int:
    """Converts a checkpoint; prints what was read, and notes for users of the new file."""
    output = pathlib.Path(arguments.output)
    require_local(arguments.output)
    if not (arguments.overwrite or is_free(output)):
        raise UserError(f'{output}: exists already; pass --overwrite to replace it')
    changes = app.checkpoint_options(arguments)
    if arguments.drop_head:
        changes['num_classes'] = None
    paths = arguments.inputs
    averages = arguments.average or arguments.weights is not None
    given = plural(len(paths), 'checkpoint')
    require(
        (len(paths) > 1) == averages,
        f'IN: got {given}; expected several with --average, otherwise one',
    )
    models = [load(path, **{'image_size': 'stored'} | changes) for path in paths]
    loaded = models[0]
    if averages:
        named = [
            (path, model.card, model.params) for path, model in zip(paths, models, strict=True)
        ]
        weights = arguments.weights or [1 / len(paths)] * len(paths)
        params = average_params(named, weights)
        loaded = dataclasses.replace(loaded, params=params, origin=())
        print(f'average of {given}; OUT gets the description of {paths[0]}')
    format = format_for(output, arguments.format, loaded.format)
    notes = save(loaded, output, format, overwrite=arguments.overwrite, dtype=arguments.dtype)
    print('\n'.join([*loaded.report, *notes]))
    print(f'written: {output} ({format} format)')
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('convert', __doc__)
    parser.add_argument('inputs', nargs='+', metavar='IN', help='checkpoint to convert')
    parser.add_argument('output', metavar='OUT', help='file or directory to write (see above)')
    parser.add_argument('--format', choices=NAMES, help='default: as IN, or by the ending of OUT')
    parser.add_argument(
        '--dtype',
        choices=['float32', 'bfloat16'],
        help='type of the parameters in OUT (bfloat16: rounded, not in npz files); '
        'default: as in IN',
    )
    parser.add_argument(
        '--average',
        action='store_true',
        help='average the parameters of several IN with the same architecture',
    )
    parser.add_argument(
        '--weights',
        type=app.numbers,
        metavar='W,W',
        help='weight of each IN in the average, with a sum of 1; default: equal weights',
    )
    parser.add_argument('--overwrite', action='store_true', help='replace OUT if it exists')
    app.add_checkpoint_flags(parser)
    parser.add_argument('--drop_head', action='store_true', help='leave out the head')
    return parser


if __name__ == '__main__':
    app.run(main, make_parser())
