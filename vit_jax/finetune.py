"""Fine-tunes a checkpoint: python -m vit_jax.finetune --config=... --config.start_from=CHECKPOINT.

The same training as vit_jax.train; only the first parameters come from somewhere.
"""

from vit_jax import train
from vit_jax.base.errors import UserError
from vit_jax.cli import app
from vit_jax.experiment.following import after_fine_tuning


def run(asked: app.Invocation) -> None:
    """Trains from the parameters of another run. Raises UserError where none is named."""
    if asked.config.start_from is None:
        how = '--config.start_from=FILE, WORKDIR or a name such as augreg:S/16-in21k'
        raise UserError(f'fine-tuning needs a checkpoint: {how}')
    train.run(asked, following=after_fine_tuning)


if __name__ == '__main__':
    app.run_job(run, name='finetune', description=__doc__)
