"""Downloads a TFDS data set and writes it as ArrayRecord: python -m vit_jax.prepare NAME.

Needs TensorFlow (pip install 'vit_jax[tf]') and, for most data sets, an internet connection.
--config.data=tfds:NAME then reads the files without either. The environment variable TFDS_DATA_DIR
replaces the default of --data_dir.
"""

import argparse

from vit_jax.cli import app
from vit_jax.data.sources import tfds


def main(arguments: argparse.Namespace) -> int:
    """Prepares the data set, then prints its directory."""
    print(tfds.download_and_prepare(arguments.name, arguments.data_dir))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('prepare', __doc__)
    parser.add_argument('name', metavar='NAME', help='data set of TFDS, such as cifar10')
    text = 'directory to write; default: ~/tensorflow_datasets'
    parser.add_argument('--data_dir', metavar='DIR', help=text)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
