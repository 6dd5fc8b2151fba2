"""Trains a Vision Transformer: python -m vit_jax.train --config=configs/FILE.py --workdir=DIR."""

from vit_jax import experiment, program
from vit_jax.config import TrainConfig
from vit_jax.reporting import spent


def run(config: TrainConfig, workdir: str, accept_changes: bool) -> None:
    """Trains, and says at the end what was reached, where it lies, and what comes next."""
    result = experiment.train(config, workdir, accept_changes=accept_changes)
    lines = {'reached': f'test accuracy {result.test["accuracy"]:.2%}'}
    if result.fewshot:
        lines['reached'] += f'; {experiment.summary(result.fewshot)}'
    if result.skipped:
        lines['skipped'] = f'{result.skipped:,} uses of training images that cannot be read'
    lines['checkpoint'] = str(result.checkpoint)
    lines['metrics'] = str(result.folder / 'metrics.jsonl')
    lines['time'] = spent(result.clock)
    lines['next'] = (
        f'python -m vit_jax.finetune --config=configs/finetune/transfer.py '
        f'--config.start_from={workdir} --config.data={config.data} '
        f'--workdir={workdir.rstrip("/")}-finetuned'
    )
    print()
    for name, text in lines.items():
        print(f'{name:<11}{text}')


if __name__ == '__main__':
    program.start(run, __doc__ or '')
