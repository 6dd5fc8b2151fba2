r"""Compares the speed of train steps of one model in vit_jax and in other libraries.

    python -m benchmarks.peers --vision_transformer=FOLDER --big_vision=FOLDER --timm=PYTHON \
        --model=S/16 --batch=8 --out=FILE.jsonl

FOLDER is a clone of the repository of that name, and PYTHON an interpreter that has torch and timm.
Nothing is downloaded, and libraries without a flag are left out. The programs run in turns, each
time in a new process with all memory of one device (CUDA_VISIBLE_DEVICES selects it). The fastest
round of each program counts. On a CPU the programs use one core, and time is CPU time. Compiled
programs are cached, so compile time is from the first round. The shares of peak and matmul
FLOP/s count 6 operations per multiply-add of the forward pass.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax

from benchmarks.peer_programs import COMPUTE_BY_NAME, SCAN, Workload, python_path
from vit_jax.cli import app
from vit_jax.models import Compute, ViTConfig, count_multiply_adds, variant
from vit_jax.models.compute import resolve_compute

# Operations per second in bfloat16, from the maker's data sheets.
_PEAKS = {'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA H200': 989e12}
_PROGRAM = pathlib.Path(__file__).with_name('peer_programs.py')


def run_program(name: str, where: str, work: Workload, cache: str) -> dict[str, Any]:
    """Runs one round of a program in its own process.

    Returns its result, or `error` if it fails, for example because it runs out of memory.
    """
    python, folder = (where, '') if name == 'timm' else (sys.executable, where)
    command = [python, '-P', str(_PROGRAM), name, folder, json.dumps(work._asdict())]
    variables = {
        'JAX_COMPILATION_CACHE_DIR': f'{cache}/jax',
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
        'TORCHINDUCTOR_CACHE_DIR': f'{cache}/torch',
        'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.92',
    }
    if name in COMPUTE_BY_NAME:
        variables['PYTHONPATH'] = python_path(_PROGRAM.parents[1])
    try:
        finished = subprocess.run(
            command, env=os.environ | variables, text=True, capture_output=True
        )
    except OSError as error:  # no such interpreter
        return {'error': str(error)}
    if finished.returncode:
        return {
            'error': (finished.stderr.strip().splitlines() or [f'exit {finished.returncode}'])[-1]
        }
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def run_rounds(
    programs: dict[str, str], work: Workload, rounds: int, *, platform: str | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the first result of each program, with the seconds of its fastest round."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        platform = platform or run_program('matmul', '', work._replace(steps=1), cache).get(
            'platform'
        )
        if platform == 'cpu':  # later processes inherit these settings
            os.environ['JAX_PLATFORMS'] = 'cpu'  # else libtpu, where installed, takes 100 MB
            if hasattr(os, 'sched_setaffinity'):
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for number in range(rounds):
            for name, where in programs.items():
                if 'error' in results.get(name, {}):
                    continue
                print(f'round {number + 1} of {rounds}: {name}', file=sys.stderr, flush=True)
                result = run_program(name, where, work, cache)
                first = results.setdefault(name, result)
                if 'seconds' in result:
                    first['seconds'] = min(first['seconds'], result['seconds'])
                elif 'operations_per_second' in result:
                    first |= max(first, result, key=lambda one: one['operations_per_second'])
    return results


def count_operations(name: str, config: ViTConfig, platform: str) -> int:
    """Returns the operations per image in matrix products and convolutions of a train step."""
    if name not in COMPUTE_BY_NAME:
        return 6 * count_multiply_adds(config)
    compute = resolve_compute(Compute(**COMPUTE_BY_NAME[name]), config, platform=platform)
    assert compute.last_block != 'auto'  # resolve_compute replaced it
    return 6 * count_multiply_adds(config, last_block=compute.last_block)


def format_table(
    results: dict[str, dict[str, Any]], work: Workload, config: ViTConfig
) -> list[str]:
    """Formats a line for each result."""
    matmul = results.get('matmul', {})
    matmul_rate = matmul.get('operations_per_second')
    platform = matmul.get('platform', 'cpu')
    finished = {name: result for name, result in results.items() if 'seconds' in result}
    base_seconds = next(iter(finished.values()), {}).get('seconds')
    lines = []
    for name, result in results.items():
        if 'error' in result:
            lines.append(f'{name:<26}{result["error"]}')
        elif name in finished:
            speed = work.batch / result['seconds']
            rate = speed * count_operations(name, config, platform)
            shares = []
            peak = _PEAKS.get(result['device'])
            if peak is not None:
                shares.append(f'{rate / peak:5.1%} of peak FLOP/s')
            if matmul_rate is not None:
                shares.append(f'{rate / matmul_rate:5.1%} of matmul FLOP/s')
            temporary = result['temporary_bytes']
            temporary_text = '?' if temporary is None else f'{temporary / 1e6:,.0f}'
            lines.append(
                f'{name:<26}{base_seconds / result["seconds"]:5.2f} {speed:9,.1f} images/s  '
                f'{"  ".join(shares)}  {temporary_text:>7} MB of temporaries  '
                f'{result["peak_bytes"] / 1e6:8,.0f} MB peak memory  '
                f'traced in {result["trace_seconds"]:.1f} CPU s, '
                f'compiled in {result["compile_seconds"]:.1f} CPU s'
            )
    if matmul_rate is not None:
        lines.append(f'{"large matrix product":<26}{matmul_rate / 1e12:.3f} TFLOP/s')
    return lines


def main() -> None:
    """Prints a line for each program, and appends all numbers to a file of JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--vision_transformer', metavar='FOLDER', help='clone of the repository')
    parser.add_argument('--big_vision', metavar='FOLDER', help='clone of the repository')
    parser.add_argument('--timm', metavar='PYTHON', help='interpreter that has torch and timm')
    parser.add_argument('--model', default='S/16', help='SIZE/PATCH, as in the papers')
    parser.add_argument('--pool', choices=['cls', 'gap'], default='cls')
    parser.add_argument('--batch', type=app.positive_int, default=8)
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], default='float32')
    parser.add_argument('--optimizer', choices=['sgd', 'adamw'], default='sgd')
    parser.add_argument('--steps', type=app.positive_int, default=1, help='steps per round')
    parser.add_argument('--rounds', type=app.positive_int, default=3)
    parser.add_argument(
        '--only', nargs='*', metavar='NAME', help=f'among: {"; ".join(COMPUTE_BY_NAME)}'
    )
    parser.add_argument('--out', metavar='FILE.jsonl')
    arguments = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')  # this process only counts operations
    config = variant(arguments.model, pool=arguments.pool, num_classes=1000)
    assert isinstance(config, ViTConfig), 'the peers have no such model'
    names = 'batch', 'precision', 'optimizer', 'steps'
    work = Workload.of(config, **{name: getattr(arguments, name) for name in names})
    peers = {'vision_transformer': arguments.vision_transformer, 'big_vision': arguments.big_vision}
    peers |= {SCAN: arguments.big_vision, 'timm': arguments.timm}
    if arguments.precision == 'bfloat16' and peers.pop('vision_transformer'):
        print('vision_transformer is left out: its model supports float32 only')
    programs = {'matmul': ''} | {name: where for name, where in peers.items() if where}
    programs |= dict.fromkeys(arguments.only or COMPUTE_BY_NAME, '')
    results = run_rounds(programs, work, arguments.rounds)
    lines = format_table(results, work, config)
    versions: dict[str, str] = {}
    for one in results.values():
        versions |= one.get('versions', {})
    devices = {one['device'] for one in results.values() if 'device' in one}
    print(
        f'{arguments.model} {arguments.pool}, batch {arguments.batch}, {arguments.precision}, '
        f'{arguments.optimizer}; {", ".join(sorted(devices))}; '
        f'{", ".join(f"{k} {v}" for k, v in versions.items())}; first column: relative speed'
    )
    print('\n'.join(lines))
    if arguments.out:
        values = {'model': arguments.model} | work._asdict() | {'rounds': arguments.rounds}
        with open(arguments.out, 'a') as file:
            file.write(json.dumps(values | {'results': results}) + '\n')


if __name__ == '__main__':
    main()
