"""Measures CPU seconds to compile a train step, to initialize parameters, and to start training.

    python -m benchmarks.compile_time [--big_vision=FOLDER]

The step of Ti/16 (batch 8, float32, momentum, clipped gradients) is traced and compiled at two
depths, on one core and without a cache; the fastest of five repetitions counts. FOLDER holds a
clone of big_vision, whose step with a scan over blocks is compiled too. Parameters at depth 32 are
initialized with the loop over blocks rolled and unrolled. The quickstart trains one step, with
evaluation and a checkpoint, in two processes: the second loads the programs that the first
compiled.
"""

import argparse
import importlib.metadata
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import peer_programs
from vit_jax.models import variant

DEPTHS = (8, 32)
TURNS = 5


def make_workload(depth: int) -> peer_programs.Workload:
    """Returns the step to compile."""
    model = variant('Ti/16', depth=depth)
    return peer_programs.Workload.of(model, batch=8, precision='float32', optimizer='sgd')


def measure_compile(program: Callable[[peer_programs.Workload], Any], depth: int) -> float:
    """Returns the CPU seconds to trace and compile a train step of this depth."""
    jax.clear_caches()
    began = time.process_time()
    program(make_workload(depth))[0].compile()
    return time.process_time() - began


def measure_init(unroll: int) -> float:
    """Returns the CPU seconds to compile and run the initialization at the larger depth."""
    _, make_inputs = peer_programs.trace_vit_jax(make_workload(DEPTHS[-1]), {'unroll': unroll})
    jax.clear_caches()
    began = time.process_time()
    make_inputs()
    return time.process_time() - began


def measure_start(folder: str, number: int) -> float:
    """Returns the CPU seconds of a process that trains the quickstart for one step."""
    command = [sys.executable, '-m', 'vit_jax.train', '--config=configs/quickstart.py']
    command += ['--config.total.steps=1', '--config.schedule.warmup.steps=0']
    command += [f'--workdir={folder}/{number}']
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cwd = pathlib.Path(__file__).parents[1]
    environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': f'{folder}/compiled'}
    subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints a line for each measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--big_vision', help='clone of big_vision')
    folder = parser.parse_args().big_vision
    with tempfile.TemporaryDirectory() as cache:
        for number, which in enumerate(('first', 'second')):
            seconds = measure_start(cache, number)
            print(f'quickstart, one step, {which} process: {seconds:.1f} CPU s')
    jax.config.update('jax_enable_compilation_cache', False)
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    programs: dict[str, Callable[[peer_programs.Workload], Any]] = {
        'vit_jax': lambda work: peer_programs.trace_vit_jax(work, {}),
        'vit_jax, last_block=whole': lambda work: peer_programs.trace_vit_jax(
            work, {'last_block': 'whole'}
        ),
    }
    if folder is not None:
        programs['big_vision'] = lambda work: peer_programs.trace_big_vision(
            folder, work, scan=True
        )
    measured: dict[tuple[str, int], list[float]] = {}
    for repetition in range(TURNS + 1):
        for depth in DEPTHS:
            for name, program in programs.items():
                seconds = measure_compile(program, depth)
                if repetition:  # the first repetition includes imports
                    measured.setdefault((name, depth), []).append(seconds)
    for (name, depth), repetitions in measured.items():
        print(f'compile, depth {depth:>2}, {name}: {min(repetitions):.2f} CPU s')
    for unroll in 1, DEPTHS[-1]:
        seconds = measure_init(unroll)
        print(f'initialize, depth {DEPTHS[-1]}, unroll={unroll}: {seconds:.1f} CPU s')
    versions = ', '.join(f'{n} {importlib.metadata.version(n)}' for n in ('jax', 'flax'))
    print(f'{jax.devices()[0].device_kind}, {versions}')


if __name__ == '__main__':
    main()
