"""Lists published checkpoints: python -m vit_jax.augreg [NAME].

Without NAME it lists the checkpoints that have short names. Programs take these names in place of a
path, for example augreg:B/16. With NAME, such as B/16 or R26+S/32, it downloads the index of "How
to train your ViT?", lists all checkpoints of that variant, best first, and picks one by the paper's
rule: pre-trained on ImageNet-21k, with the best validation accuracy. --download fetches it.
If the index cannot be downloaded, --index=FILE.csv reads another copy.
"""

import argparse

from vit_jax.base import require
from vit_jax.checkpoints import published, remote
from vit_jax.checkpoints.published import AUGREG_FOLDER, FILES, Row
from vit_jax.cli import app

INDEX = f'{AUGREG_FOLDER}/index.csv'


def main(arguments: argparse.Namespace) -> int:
    """Prints the table of short names, or the checkpoints of one variant."""
    if arguments.name is not None:
        is_url = arguments.index.startswith(('gs://', 'https://'))
        path = str(remote.fetch_url(arguments.index)[0]) if is_url else arguments.index
        _print_variant(published.read_index(path), arguments.name, arguments.download)
        return 0
    require(not arguments.download, '--download: NAME is missing; pass a variant, such as B/16')
    for short, file in FILES.items():
        copy = f' or {file.copy}' if file.copy else ''
        print(f'{short:<22}{file.mebibytes:>6,} MiB  {file.address}{copy}')
    return 0


def _print_variant(rows: list[Row], name: str, download: bool) -> None:
    """Prints the checkpoints of a variant, and the picked one with its fine-tuned versions."""
    picked = published.pick_checkpoint(rows, name)
    for row in published.list_variant(rows, name):
        print(f'validation accuracy {row.final_val:.4f}  {row.ds:<12} {row.filename}')
    address = f'{AUGREG_FOLDER}/{picked.filename}.npz'
    print(f'selected  {address}')
    for row in published.list_fine_tunings(rows, picked.filename):
        accuracies = f'{row.adapt_final_val:.4f} validation, {row.adapt_final_test:.4f} test'
        where = f'{row.adapt_ds} {row.adapt_resolution}'
        print(f'  fine-tuned on {where}: {accuracies}  {row.adapt_filename}')
    if download:
        short = {file.address: short for short, file in FILES.items()}
        local = remote.fetch(short.get(address, address))
        print('\n'.join([*local.origin, f'local     {local.path}']))


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('augreg', __doc__)
    parser.add_argument('name', nargs='?', metavar='NAME', help='variant, such as B/16')
    text = f'file or URL of the AugReg index; default: {INDEX}'
    parser.add_argument('--index', default=INDEX, metavar='FILE.csv', help=text)
    parser.add_argument('--download', action='store_true', help='download the selected file')
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True, on_devices=False)
