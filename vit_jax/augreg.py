"""Finds an AugReg checkpoint: python -m vit_jax.augreg INDEX.csv [NAME].

INDEX.csv is a copy of the published index of "How to train your ViT?". Without a name it lists
the variants; with one, `B/16` or `R26+S/32`, its checkpoints, the best first, and which one the
published rule picks: the best of those pre-trained on ImageNet-21k, by its validation accuracy.
"""

import argparse

from vit_jax.checkpoints import augreg_index
from vit_jax.command_line import app


def main(arguments: argparse.Namespace) -> int:
    """Prints what the index has."""
    rows = augreg_index.read_index(arguments.index)
    if arguments.name is None:
        for name in sorted({row.name for row in rows}):
            count = len(augreg_index.listed(rows, name))
            best = augreg_index.pick(rows, name).filename
            print(f'{name:<10} {count:>4} checkpoints, picked: {best}')
        return 0
    picked = augreg_index.pick(rows, arguments.name)
    if not augreg_index.is_file_name(arguments.name):
        for row in augreg_index.listed(rows, arguments.name):
            print(f'{row.final_val:8.4f}  {row.ds:<12} {row.filename}')
    print(f'picked    {picked.filename}.npz')
    for row in augreg_index.fine_tuned(rows, picked.filename):
        accuracies = f'{row.adapt_final_val:.4f} validation, {row.adapt_final_test:.4f} test'
        where = f'{row.adapt_ds} {row.adapt_resolution}'
        print(f'  tuned   {where}: {accuracies}  {row.adapt_filename}')
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = app.new_parser('augreg', __doc__)
    parser.add_argument('index', metavar='INDEX.csv', help='a copy of the published index')
    parser.add_argument('name', nargs='?', metavar='NAME', help='a variant, or a file name')
    return parser


if __name__ == '__main__':
    app.run(main, _parser(), only_prints=True)
