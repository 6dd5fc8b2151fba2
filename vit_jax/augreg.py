"""Finds published checkpoints: python -m vit_jax.augreg [INDEX.csv] [NAME].

Alone it lists the files with short names, which go wherever a checkpoint goes: augreg:B/16.
With a NAME, `B/16` or `R26+S/32`, it takes the published index of "How to train your ViT?" and
lists the checkpoints of that variant, the best first, and which one the published rule picks: the
best of those pre-trained on ImageNet-21k, by its validation accuracy; --download fetches that one.
INDEX.csv is another copy of the index, a local one or a name; alone it lists its variants.
"""

import argparse
import os

from vit_jax.base import require
from vit_jax.checkpoints import augreg_index, names
from vit_jax.checkpoints.augreg_index import Row
from vit_jax.checkpoints.published import AUGREG_FOLDER, FILES
from vit_jax.cli import app

INDEX = f'{AUGREG_FOLDER}/index.csv'


def main(arguments: argparse.Namespace) -> int:
    """Prints what was published."""
    index, name = arguments.index, arguments.name
    if name is None and index is not None and not _is_index(index):
        index, name = None, index
    if name is None:
        require(not arguments.download, '--download: of which? give a NAME, such as B/16')
    if index is None and name is None:
        for short, file in FILES.items():
            copy = f' or {file.copy}' if file.copy else ''
            print(f'{short:<22}{file.mebibytes:>6,} MiB  {file.address}{copy}')
        return 0
    rows = augreg_index.read_index(index or INDEX)
    if name is None:
        for variant in sorted({row.name for row in rows}):
            count = len(augreg_index.listed(rows, variant))
            best = augreg_index.pick(rows, variant).filename
            print(f'{variant:<10} {count:>4} checkpoints, picked: {best}')
        return 0
    picked = augreg_index.pick(rows, name)
    if not augreg_index.is_file_name(name):
        for row in augreg_index.listed(rows, name):
            print(f'{row.final_val:8.4f}  {row.ds:<12} {row.filename}')
    _say_picked(rows, picked, download=arguments.download)
    return 0


def _say_picked(rows: list[Row], picked: Row, *, download: bool) -> None:
    address = f'{AUGREG_FOLDER}/{picked.filename}.npz'
    print(f'picked    {address}')
    for row in augreg_index.fine_tuned(rows, picked.filename):
        accuracies = f'{row.adapt_final_val:.4f} validation, {row.adapt_final_test:.4f} test'
        where = f'{row.adapt_ds} {row.adapt_resolution}'
        print(f'  tuned   {where}: {accuracies}  {row.adapt_filename}')
    if download:
        short = {file.address: short for short, file in FILES.items()}
        local = names.local(short.get(address, address))
        print('\n'.join([*local.origin, f'local     {local.path}']))


def _is_index(word: str) -> bool:
    return word.endswith('.csv') or os.path.exists(word)


def _parser() -> argparse.ArgumentParser:
    parser = app.new_parser('augreg', __doc__)
    parser.add_argument('index', nargs='?', metavar='INDEX.csv', help=f'({INDEX})')
    parser.add_argument('name', nargs='?', metavar='NAME', help='a variant, or a file name')
    text = 'fetch the file that is picked'
    parser.add_argument('--download', action='store_true', help=text)
    return parser


if __name__ == '__main__':
    app.run(main, _parser(), only_prints=True)
