"""Measures CPU seconds and memory of a linear few-shot evaluation for one seed.

    python -m benchmarks.fewshot_speed [--big_vision=FOLDER]

The data has 1,000 classes, 10,000 training images, 50,000 test images and 768 features; one core is
used. FOLDER is a clone of big_vision, whose solver (evaluators/fewshot_lsr.py) is measured too.
"""

import argparse
import functools
import importlib
import os
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Labeled

CLASSES = 1000
WIDTH = 768
POOL = 10_000
TESTED = 50_000
L2 = 1024.0


def make_features(count: int, seed: int) -> Labeled:
    """Returns features around class means that are close to each other. Makes no copy."""
    means = 0.15 * np.random.default_rng(0).standard_normal((CLASSES, WIDTH), np.float32)
    values = np.random.default_rng(seed).standard_normal((count, WIDTH), np.float32)
    for start in range(0, count, CLASSES):
        values[start : start + CLASSES] += means
    return Labeled(values, np.arange(count) % CLASSES)


def load_big_vision_solver(folder: str) -> Callable[[Labeled, Labeled], float]:
    """Returns big_vision's solver. Stubs replace modules that it imports but does not use."""
    sys.path.insert(0, folder)
    parts = 'datasets', 'datasets.core', 'input_pipeline', 'pp', 'pp.builder', 'utils'
    for name in (f'big_vision.{part}' for part in parts):
        sys.modules[name] = types.ModuleType(name)
    compiled: Any = lambda **options: functools.partial(jax.jit, **options)  # noqa: E731
    sys.modules['big_vision.utils'].jit_cpu = compiled  # type: ignore[attr-defined]
    lsr: Any = importlib.import_module('big_vision.evaluators.fewshot_lsr')

    def accuracy(train: Labeled, test: Labeled) -> float:
        cache = lsr._precompute_cache(train.features, train.labels, CLASSES)
        return float(lsr._eig_fewshot_acc_fn(cache, test.features, test.labels, L2))

    return accuracy


def main() -> None:
    """Prints a line for each solver and number of shots. Each solver has its own process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--big_vision', metavar='FOLDER', help='clone of big_vision')
    parser.add_argument('--solver', choices=['ours', 'big_vision'], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.solver is None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # child processes inherit this
        for solver in ['ours', *(['big_vision'] if arguments.big_vision else [])]:
            command = [sys.executable, '-m', 'benchmarks.fewshot_speed', *sys.argv[1:]]
            subprocess.run([*command, f'--solver={solver}'], check=True)
        return
    jax.config.update('jax_platforms', 'cpu')
    solve: Any = functools.partial(ridge.accuracy, l2=L2)
    if arguments.solver == 'big_vision':
        solve = load_big_vision_solver(arguments.big_vision)
    pool, test = make_features(POOL, 1), make_features(TESTED, 2)
    before = peak_megabytes()
    for shots in 10, 5, 1:  # 10 shots take the most memory
        train = Labeled(pool.features[: shots * CLASSES], pool.labels[: shots * CLASSES])
        solve(train, test)  # compiles
        memory = f', +{peak_megabytes() - before:,.0f} MB peak memory' if shots == 10 else ''
        best = float('inf')
        for _ in range(3):
            began = time.process_time()
            accuracy = solve(train, test)
            best = min(best, time.process_time() - began)
        result = f'{best:6.2f} CPU s, accuracy {accuracy:.4f}{memory}'
        print(f'{arguments.solver:<22}{shots:>2} shots{result}')


def peak_megabytes() -> float:
    """Returns the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == '__main__':
    main()
