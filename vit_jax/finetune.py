"""Fine-tunes a checkpoint: python -m vit_jax.finetune --config=... --config.start_from=CHECKPOINT.

The same training as vit_jax.train; only the first parameters come from somewhere.
"""

from vit_jax import train
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.command_line import app
from vit_jax.config import TrainConfig
from vit_jax.parallel.processes import Job
from vit_jax.runs import training_run


def run(config: TrainConfig, workdir: str, accept_changes: bool, job: Job) -> None:
    """Trains from the parameters of another run. Raises UserError where none is named."""
    if config.start_from is None:
        raise UserError('fine-tuning needs a checkpoint: --config.start_from=FILE or WORKDIR')
    result = training_run.train(config, workdir, accept_changes=accept_changes, job=job)
    if job.index == 0:
        data = records.text_of(config.data)
        train.print_summary(result, next_program='fewshot', config='fewshot/linear.py', data=data)


if __name__ == '__main__':
    app.train(run, __doc__ or '')
