"""Trains a Vision Transformer: python -m vit_jax.train --config=configs/FILE.py --workdir=DIR."""

import shlex

from vit_jax.command_line import app
from vit_jax.command_line.app import Invocation
from vit_jax.runs import probing, training_run
from vit_jax.runs.reporting import spent
from vit_jax.runs.training_run import Result
from vit_jax.runs.workdirs import METRICS


def run(asked: Invocation) -> None:
    """Trains; prints what was reached, where it was saved, and the command to go on with."""
    config, job = asked.config, asked.job
    result = training_run.train(config, asked.workdir, accept_changes=asked.accept_changes, job=job)
    if job.index == 0:
        data = config.data if isinstance(config.data, str) else None
        print_summary(result, next_program='finetune', config='finetune/transfer.py', data=data)


def print_summary(result: Result, *, next_program: str, config: str, data: str | None) -> None:
    """Prints what a run reached, where it is, and the command that would come next."""
    reached = training_run.eval_summary(result.evals)
    if result.fewshot:
        reached += f'; {probing.summary(result.fewshot)}'
    lines = {'reached': reached}
    if result.skipped:
        lines['skipped'] = f'{result.skipped:,} uses of training images that cannot be read'
    workdir = str(result.folder)
    command = ['python', '-m', f'vit_jax.{next_program}', f'--config=configs/{config}']
    command += [f'--config.start_from={workdir}', *([f'--config.data={data}'] if data else [])]
    command += [f'--workdir={workdir}-{next_program}']
    lines |= {
        'checkpoint': str(result.checkpoint),
        'metrics': str(result.folder / METRICS),
        'time': spent(result.seconds),
        'next': shlex.join(command),
    }
    print()
    for name, text in lines.items():
        print(f'{name:<11}{text}')


if __name__ == '__main__':
    app.run_job(run, name='train', description=__doc__)
