"""Fine-tunes a checkpoint: python -m vit_jax.finetune --config=... --config.start_from=CHECKPOINT.

Trains like vit_jax.train, with initial parameters from CHECKPOINT: a file, a work directory, or a
name such as augreg:S/16-in21k.
"""

import argparse

from vit_jax import train
from vit_jax.base import require
from vit_jax.cli import app
from vit_jax.distributed.processes import Job


def main(arguments: argparse.Namespace, job: Job) -> int:
    """Fine-tunes like `train.main`. Raises UserError if `config.start_from` is not set."""
    require(
        arguments.config.start_from is not None,
        'config.start_from is not set; pass --config.start_from=FILE or WORKDIR',
    )
    return train.main(arguments, job)


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    return app.new_job_parser('finetune', __doc__)


if __name__ == '__main__':
    app.run_job(main, make_parser())
