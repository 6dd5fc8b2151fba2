"""Writes a checkpoint in another layout: python -m vit_jax.convert IN OUT --format=FORMAT.

IN is a checkpoint of any kind: ours, an npz of vision_transformer or big_vision, a safetensors or
PyTorch file of timm, a directory of Hugging Face. Without --format, OUT has the layout of IN,
or the one that its ending names: timm for .safetensors, stablehlo for .stablehlo.

stablehlo is a program, from photos to probabilities, that needs jax alone: it is run, and not
read back (the page "A network as a program" of the documentation).
"""

import argparse
import pathlib

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats.opening import NAMES
from vit_jax.checkpoints.formats.writing import format_for, is_free
from vit_jax.checkpoints.remote import require_local
from vit_jax.cli import app
from vit_jax.pretrained import load, save


def main(arguments: argparse.Namespace) -> int:
    """Converts a checkpoint; prints what was read, and what a reader of OUT needs to know."""
    output = pathlib.Path(arguments.output)
    require_local(arguments.output)
    if not (arguments.overwrite or is_free(output)):
        raise UserError(f'{output}: exists already; --overwrite replaces it')
    changes = app.overrides(arguments)
    if arguments.drop_head:
        changes['num_classes'] = None
    loaded = load(arguments.input, **{'image_size': 'stored'} | changes)
    format = format_for(output, arguments.format, loaded.format)
    notes = save(loaded, output, format, overwrite=arguments.overwrite, dtype=arguments.dtype)
    print('\n'.join([*loaded.report, *notes]))
    print(f'written: {output} ({format} layout)')
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('convert', __doc__)
    parser.add_argument('input', metavar='IN', help='a checkpoint of any format')
    parser.add_argument('output', metavar='OUT', help='a file; huggingface, vit_jax: a directory')
    parser.add_argument('--format', choices=NAMES, help='the layout to write')
    text = "of the numbers in OUT (the file's; bfloat16 rounds them, and no npz says it)"
    parser.add_argument('--dtype', choices=['float32', 'bfloat16'], help=text)
    parser.add_argument('--overwrite', action='store_true', help='replace OUT')
    app.add_overrides(parser)
    parser.add_argument('--drop_head', action='store_true', help='write it without its head')
    return parser


if __name__ == '__main__':
    app.run(main, make_parser())
