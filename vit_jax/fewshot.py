"""Probes a checkpoint with few labels: python -m vit_jax.fewshot --config.start_from=CHECKPOINT."""

import argparse

from vit_jax.cli import app
from vit_jax.distributed.processes import Job
from vit_jax.experiment import probing_run


def main(arguments: argparse.Namespace, job: Job) -> int:
    """Evaluates; prints the results and the file that holds the whole protocol."""
    result, path = probing_run.probe(
        arguments.config,
        arguments.workdir,
        accept_changes=arguments.accept_config_changes,
        job=job,
    )
    if job.index != 0:
        return 0
    for name, values in result['sets'].items():
        print(f'{name}: {values["test_images"]:,} test images, {values["classes"]:,} classes')
        for shots, mean in values['mean'].items():
            print(f'{shots:>3} shots  {mean:7.2%} +- {values["deviation"][shots]:.2%}')
        if 'l2_taken' in values:
            taken = values['l2_taken'].values()
            print(f'l2 of the draws: {min(taken):g} to {max(taken):g}')
        if 'left_out' in values:
            print(values['left_out'])
        if 'nearest_neighbours' in values:
            nearest = values['nearest_neighbours']
            print(f'{nearest["neighbours"]:>3} nearest {nearest["accuracy"]:6.2%}')
        if 'logistic' in values:
            linear = values['logistic']
            stopped = f', stopped after {linear["iterations"]} iterations'
            more = '' if linear['converged'] else stopped
            print(f'logistic    {linear["accuracy"]:6.2%} (l2 {linear["l2"]:g}{more})')
        if 'episodes' in values:
            drawn = values['episodes']
            for shots, mean in drawn['mean'].items():
                interval = (
                    f'{drawn["interval"][shots]:.2%} (95 % of {drawn["episodes"]:,} episodes)'
                )
                print(f'{drawn["ways"]}-way {shots}-shot {mean:.2%} +- {interval}')
    for name, reason in result['missing'].items():
        print(f'{name}: left out: {reason}')
    print(f'protocol and accuracies: {path}')
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('fewshot', __doc__)
    app.add_job(parser, trains=False)
    return parser


if __name__ == '__main__':
    app.run_job(main, make_parser())
