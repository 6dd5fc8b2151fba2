"""Fine-tunes a checkpoint: python -m vit_jax.finetune --config=... --config.start_from=CHECKPOINT.

The same training as vit_jax.train, from the parameters of a checkpoint.
"""

import argparse

from vit_jax import train
from vit_jax.base import require
from vit_jax.cli import app
from vit_jax.distributed.processes import Job


def main(arguments: argparse.Namespace, job: Job) -> int:
    """Trains. Raises UserError if no checkpoint is given."""
    how = '--config.start_from=FILE, WORKDIR or a name such as augreg:S/16-in21k'
    given = arguments.config.start_from is not None
    require(given, f'fine-tuning needs a checkpoint: {how}')
    return train.main(arguments, job)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    return app.new_job_parser('finetune', __doc__)


if __name__ == '__main__':
    app.run_job(main, make_parser())
