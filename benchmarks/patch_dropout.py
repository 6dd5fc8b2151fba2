"""Measures how much faster a training step is with PatchDropout, in one process.

    python -m benchmarks.patch_dropout [--model=B/16] [--batch=8] [--rate=0.5] [--turns=3]

Steps without and with PatchDropout take turns on the same train state, so that other work on the
machine slows both. The first pair of steps warms up and is not counted. CPU seconds are summed
over the threads of the process. On an accelerator, only the wall time is meaningful.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import our_step
from vit_jax.models import Regularization, ViTConfig, count_multiply_adds, variant


def time_step(program: Any, state: Any, inputs: Sequence[Any]) -> tuple[Any, tuple[float, float]]:
    """Runs one step. Returns the next state, and the wall and CPU seconds."""
    began = time.perf_counter(), time.process_time()
    state, metrics = program(state, *inputs)
    jax.block_until_ready((state, metrics))
    ended = time.perf_counter(), time.process_time()
    return state, (ended[0] - began[0], ended[1] - began[1])


def measure(arguments: argparse.Namespace) -> dict[float, list[tuple[float, float]]]:
    """Returns the wall and CPU seconds of each step, by rate of PatchDropout."""
    model = variant(arguments.model)
    programs = {}
    for rate in 0.0, arguments.rate:
        regularization = Regularization(patch_dropout=rate)
        config = our_step.make_config(model, arguments.batch, regularization=regularization)
        step = our_step.trace_step(config, num_classes=1000)
        programs[rate] = step.lowered.compile()
        assert isinstance(step.experiment.model.config, ViTConfig)
        operations = count_multiply_adds(
            step.experiment.model.config, regularization=regularization
        )
        tokens = regularization.num_tokens(step.experiment.model.config)
        print(f'rate {rate:g}: {tokens} tokens, {operations / 1e9:.2f} G multiply-adds per image')
    state, *inputs = step.make_inputs()
    seconds = dict[float, list[tuple[float, float]]]()
    for turn in range(arguments.turns + 1):
        for rate, program in programs.items():
            state, spent = time_step(program, state, inputs)
            if turn > 0:
                seconds.setdefault(rate, []).append(spent)
    return seconds


def main() -> None:
    """Prints images per second, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--model', default='B/16')
    parser.add_argument('--rate', type=float, default=0.5)
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--turns', type=int, default=3)
    arguments = parser.parse_args()
    seconds = measure(arguments)
    for index, clock in enumerate(('wall', 'CPU')):
        medians = [statistics.median(spent[index] for spent in seconds[r]) for r in seconds]
        rates = ', '.join(f'{arguments.batch / median:.3f}' for median in medians)
        ratio = medians[0] / medians[1]
        print(f'{clock:<5}{rates} images per second, ratio {ratio:.2f}')


if __name__ == '__main__':
    main()
