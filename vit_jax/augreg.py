"""Lists the published checkpoints that have short names: python -m vit_jax.augreg.

Programs take these names in place of a path, for example augreg:B/16 or vit:L/16-in21k.
"""

import argparse

from vit_jax.checkpoints.published import FILES
from vit_jax.cli import app


def main(arguments: argparse.Namespace) -> int:
    """Prints name, size, address and copy of each checkpoint."""
    for short, file in FILES.items():
        copy = f' or {file.copy}' if file.copy else ''
        print(f'{short:<22}{file.mebibytes:>6,} MiB  {file.address}{copy}')
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    return app.new_parser('augreg', __doc__)


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True, on_devices=False)
