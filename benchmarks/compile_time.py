"""Processor seconds to compile a train step at two depths, to make parameters, and to start.

    python -m benchmarks.compile_time [--big_vision=FOLDER]

The step of Ti/16, batch 8, float32, momentum, clipped gradients: traced and compiled, nothing
cached, on one core, the best of some turns; with a folder that holds big_vision's repository, its
step as a loop beside it. Parameters at depth 32 are made with the loop over blocks rolled and
unrolled. The quickstart runs to the end of one step, with evaluation and a checkpoint, twice in
processes of their own: the second finds what the first compiled.
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

DEPTHS, TURNS = (8, 32), 5


def work(depth: int) -> peer_programs.Work:
    """The step that is compiled."""
    model = variant('Ti/16', depth=depth)
    return peer_programs.Work.of(model, batch=8, precision='float32', optimizer='sgd')


def compile_seconds(program: Callable[[peer_programs.Work], Any], depth: int) -> float:
    """Of a train step at this depth: tracing and compiling."""
    jax.clear_caches()
    began = time.process_time()
    program(work(depth))[0].compile()
    return time.process_time() - began


def init_seconds(unroll: int) -> float:
    """To compile, and to run, what makes the parameters at the larger depth."""
    _, first = peer_programs.ours(work(DEPTHS[-1]), {'unroll': unroll})
    jax.clear_caches()
    began = time.process_time()
    first()
    return time.process_time() - began


def start_seconds(folder: str, number: int) -> float:
    """Of a process that trains the quickstart for one step."""
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
    """Prints a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--big_vision', help='a folder that holds that repository')
    folder = parser.parse_args().big_vision
    with tempfile.TemporaryDirectory() as cache:
        for number, which in enumerate(('first', 'second')):
            print(f'{which} start of the quickstart: {start_seconds(cache, number):.1f} s')
    jax.config.update('jax_enable_compilation_cache', False)
    if hasattr(os, 'sched_setaffinity'):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    programs: dict[str, Callable[[peer_programs.Work], Any]] = {
        'vit_jax': lambda work: peer_programs.ours(work, {}),
        'vit_jax, last block whole': lambda work: peer_programs.ours(work, {'last_block': 'whole'}),
    }
    if folder is not None:
        programs['big_vision'] = lambda work: peer_programs.big_vision(folder, work, scan=True)
    taken: dict[tuple[str, int], list[float]] = {}
    for turn in range(TURNS + 1):
        for depth in DEPTHS:
            for name, program in programs.items():
                seconds = compile_seconds(program, depth)
                if turn:  # the first imports
                    taken.setdefault((name, depth), []).append(seconds)
    for (name, depth), each in taken.items():
        print(f'compile, depth {depth:>2}, {name}: {min(each):.2f} s')
    for unroll in 1, DEPTHS[-1]:
        print(f'parameters, depth {DEPTHS[-1]}, unroll={unroll}: {init_seconds(unroll):.1f} s')
    versions = ', '.join(f'{n} {importlib.metadata.version(n)}' for n in ('jax', 'flax'))
    print(f'{jax.devices()[0].device_kind}, {versions}')


if __name__ == '__main__':
    main()
