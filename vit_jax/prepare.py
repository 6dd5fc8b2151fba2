"""Prepares a named data set of TFDS as ArrayRecord: python -m vit_jax.prepare NAME.

Needs the extra `tf` and, for most sets, a network. Neither is needed to read what it writes, with
--config.data=tfds:NAME.
"""

import argparse

from vit_jax.cli import app
from vit_jax.data.sources import tfds


def main(arguments: argparse.Namespace) -> int:
    """Prepares it and prints its folder."""
    print(tfds.download_and_prepare(arguments.name, arguments.data_dir))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('prepare', __doc__)
    parser.add_argument('name', metavar='NAME', help='such as cifar10, or imagenet2012')
    parser.add_argument('--data_dir', metavar='DIR', help='TFDS_DATA_DIR, or ~/tensorflow_datasets')
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
