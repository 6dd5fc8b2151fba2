"""Fine-tunes a checkpoint: python -m vit_jax.finetune --config=... --config.start_from=CHECKPOINT.

The same training as vit_jax.train; only the first parameters come from somewhere.
"""

from vit_jax import experiment, program, train
from vit_jax.config import TrainConfig
from vit_jax.parallel.processes import Job


def run(config: TrainConfig, workdir: str, accept_changes: bool, job: Job) -> None:
    """Trains from the parameters of another run. Raises ValueError where none is named."""
    if config.start_from is None:
        raise ValueError('fine-tuning needs a checkpoint: --config.start_from=FILE or WORKDIR')
    result = experiment.train(config, workdir, accept_changes=accept_changes, job=job)
    if job.index == 0:
        train.say(result, next_program='fewshot', next_config='fewshot/linear.py', data=config.data)


if __name__ == '__main__':
    program.train(run, __doc__ or '')
