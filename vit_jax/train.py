"""Trains a Vision Transformer: python -m vit_jax.train --config=configs/FILE.py --workdir=DIR."""

import shlex

from vit_jax.command_line import app
from vit_jax.runs import probing, training_run
from vit_jax.runs.reporting import spent
from vit_jax.runs.workdirs import METRICS


def run(asked: app.Invocation, following: str = 'finetune/transfer.py') -> None:
    """Trains; prints what was reached, where it was saved, and the command to go on with.

    `following` is the program of that command and, in configs/, its configuration.
    """
    config, job = asked.config, asked.job
    result = training_run.train(config, asked.workdir, accept_changes=asked.accept_changes, job=job)
    if job.index != 0:
        return
    reached = training_run.eval_summary(result.evals)
    if result.fewshot:
        reached += f'; {probing.summary(result.fewshot)}'
    lines = {'reached': reached}
    if result.skipped:
        lines['skipped'] = f'{result.skipped:,} uses of training images that cannot be read'
    workdir, program = result.folder, following.partition('/')[0]
    command = ['python', '-m', f'vit_jax.{program}', f'--config=configs/{following}']
    command += [f'--config.start_from={workdir}']
    command += [f'--config.data={config.data}'] if isinstance(config.data, str) else []
    command += [f'--workdir={workdir}-{program}']
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
