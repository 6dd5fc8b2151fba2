"""Fine-tunes a checkpoint: python -m vit_jax.finetune --config=... --config.start_from=CHECKPOINT.

The same training as vit_jax.train; only the first parameters come from somewhere.
"""

from vit_jax import experiment, program, train
from vit_jax.config import TrainConfig


def run(config: TrainConfig, workdir: str, accept_changes: bool) -> None:
    """Trains from the parameters of another run. Raises ValueError where none is named."""
    if config.start_from is None:
        raise ValueError('fine-tuning needs a checkpoint: --config.start_from=FILE or WORKDIR')
    result = experiment.train(config, workdir, accept_changes=accept_changes)
    train.say(result, next_program='fewshot', next_config='fewshot/linear.py', data=config.data)


if __name__ == '__main__':
    program.start(run, __doc__ or '')
