"""Trains a Vision Transformer: python -m vit_jax.train --config=configs/FILE.py --workdir=DIR."""

import argparse

from vit_jax.base import counted
from vit_jax.cli import app
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import probing
from vit_jax.experiment import reporter, training_run
from vit_jax.experiment.lineage import next_command
from vit_jax.experiment.workdirs import METRICS


def main(arguments: argparse.Namespace, job: Job) -> int:
    """Trains; prints the metrics, the saved files, and the command to continue with."""
    result = training_run.train(
        arguments.config,
        arguments.workdir,
        accept_changes=arguments.accept_config_changes,
        accept_data=arguments.accept_data_changes,
        job=job,
        profile=arguments.profile_steps or range(0),
    )
    if job.index != 0:
        return 0
    few_shot = f'; {probing.summary(result.fewshot)}' if result.fewshot else ''
    print(f'\nreached    {reporter.eval_summary(result.evals)}{few_shot}')
    if skipped := result.reporter.skipped:
        times = counted(skipped, 'time')
        print(f'skipped    training images that cannot be read were skipped {times}')
    print(f'checkpoint {result.checkpoint}')
    print(f'metrics    {result.folder / METRICS}')
    print(f'time       {reporter.spent(result.reporter.clock.seconds)}')
    if earlier := result.reporter.earlier:
        print(f'earlier    {reporter.spent(earlier)}')
    if command := next_command(result.experiment.config, str(result.folder)):
        print(f'next       {command}')
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    return app.new_job_parser('train', __doc__)


if __name__ == '__main__':
    app.run_job(main, make_parser())
