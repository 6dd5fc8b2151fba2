"""Evaluates frozen features with few labels: python -m vit_jax.fewshot --config=FILE ...

    python -m vit_jax.fewshot --config=configs/fewshot/linear.py --config.start_from=CHECKPOINT \\
        --config.data=DATA --workdir=DIR

By default it fits few-shot linear probes; --config.fewshot.* selects shots, seeds, data sets, and
other evaluations: kNN, logistic regression, episodes. DIR/fewshot.json receives the protocol and
all accuracies.
"""

import argparse

from vit_jax.cli import app
from vit_jax.distributed.processes import Job
from vit_jax.evaluation import probing
from vit_jax.experiment import probing_run


def main(arguments: argparse.Namespace, job: Job) -> int:
    """Evaluates the checkpoint, then prints the accuracies and the path of fewshot.json."""
    result, path = probing_run.probe(
        arguments.config, arguments.workdir, accept_changes=arguments.accept_config_changes, job=job
    )
    if job.index != 0:
        return 0
    for name, set_result in result['sets'].items():
        print(
            f'{name}: {set_result["test_images"]:,} test images, {set_result["classes"]:,} classes'
        )
        for label, score in probing.list_scores(set_result).items():
            print(f'{label:>14}  {score}')
        for note in set_result['notes']:
            print(note)
    for name, reason in result['missing'].items():
        print(f'{name}: skipped: {reason}')
    print(f'protocol and accuracies: {path}')
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    return app.new_job_parser('fewshot', __doc__, trains=False)


if __name__ == '__main__':
    app.run_job(main, make_parser())
