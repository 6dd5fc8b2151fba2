"""Trains a Vision Transformer: python -m vit_jax.train --config=configs/FILE.py --workdir=DIR."""

from collections.abc import Callable

from vit_jax.base import counted
from vit_jax.cli import app
from vit_jax.evaluation import probing
from vit_jax.experiment import reporter, training_run
from vit_jax.experiment.build import Experiment
from vit_jax.experiment.following import after_pretraining
from vit_jax.experiment.reporter import spent
from vit_jax.experiment.workdirs import METRICS


def run(
    asked: app.Invocation,
    following: Callable[[Experiment, str], str | None] = after_pretraining,
) -> None:
    """Trains; prints what was reached, where it was saved, and the command to go on with.

    `following` gives that command, for the work directory.
    """
    config, job = asked.config, asked.job
    result = training_run.train(
        config,
        asked.workdir,
        accept_changes=asked.accept_changes,
        accept_data=asked.accept_data_changes,
        job=job,
        profile=asked.profile,
    )
    if job.index != 0:
        return
    reached = reporter.eval_summary(result.evals)
    if result.fewshot:
        reached += f'; {probing.summary(result.fewshot)}'
    lines = {'reached': reached}
    if result.skipped:
        times = counted(result.skipped, 'time')
        lines['skipped'] = f'training images that cannot be read were skipped {times}'
    lines |= {
        'checkpoint': str(result.checkpoint),
        'metrics': str(result.folder / METRICS),
        'time': spent(result.seconds),
    }
    if result.earlier.get('step'):  # not of starts that were rejected
        lines['earlier'] = spent(result.earlier)
    if (command := following(result.experiment, str(result.folder))) is not None:
        lines['next'] = command
    print()
    for name, text in lines.items():
        print(f'{name:<11}{text}')


if __name__ == '__main__':
    app.run_job(run, name='train', description=__doc__)
