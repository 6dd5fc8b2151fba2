r"""Train steps of one network by us and by others, in one run: how fast each is beside the others.

    python -m benchmarks.peers --vision_transformer=FOLDER --big_vision=FOLDER --timm=PYTHON \
        --model=S/16 --batch=8 --out=FILE.jsonl

Nothing is fetched: FOLDER holds the repository of that name, PYTHON is an interpreter that has
torch and timm. What is not given is left out. The programs take turns, each turn in a new process,
so that each has the whole memory of the device (one: CUDA_VISIBLE_DEVICES chooses); of each the
fastest round counts. On a CPU, of which they get one core, time is processor time. What is
compiled is kept for the next rounds: the first says what that takes. The share of the peak counts
6 operations for each multiply-add of the forward pass.
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

from benchmarks.peer_programs import OURS, SCAN, Work, python_path
from vit_jax.cli import app
from vit_jax.models import Compute, ViTConfig, count_multiply_adds, variant
from vit_jax.models.compute import resolve_compute

# Operations per second in bfloat16, from the maker's data sheets.
_PEAKS = {'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA H200': 989e12}
_PROGRAM = pathlib.Path(__file__).with_name('peer_programs.py')


def turn(name: str, where: str, work: Work, cache: str) -> dict[str, Any]:
    """One round of one program, in a process of its own; `error` where it fails, such as for want
    of memory.
    """
    python, folder = (where, '') if name == 'timm' else (sys.executable, where)
    command = [python, '-P', str(_PROGRAM), name, folder, json.dumps(work._asdict())]
    told = {
        'JAX_COMPILATION_CACHE_DIR': f'{cache}/jax',
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
        'TORCHINDUCTOR_CACHE_DIR': f'{cache}/torch',
        'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.92',
    }
    if name in OURS:
        told['PYTHONPATH'] = python_path(_PROGRAM.parents[1])
    try:
        done = subprocess.run(command, env=os.environ | told, text=True, capture_output=True)
    except OSError as error:  # the interpreter
        return {'error': str(error)}
    if done.returncode:
        return {'error': (done.stderr.strip().splitlines() or [f'exit {done.returncode}'])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(
    programs: dict[str, str], work: Work, rounds: int, *, platform: str | None = None
) -> dict[str, dict[str, Any]]:
    """The result of each program: the first round's, with the seconds of the fastest."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        platform = platform or turn('matmul', '', work._replace(steps=1), cache).get('platform')
        if platform == 'cpu':  # all others inherit what is set here
            os.environ['JAX_PLATFORMS'] = 'cpu'  # else libtpu, where installed, takes 100 MB
            if hasattr(os, 'sched_setaffinity'):
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for number in range(rounds):
            for name, where in programs.items():
                if 'error' in results.get(name, {}):
                    continue
                print(f'round {number + 1} of {rounds}: {name}', file=sys.stderr, flush=True)
                result = turn(name, where, work, cache)
                first = results.setdefault(name, result)
                if 'seconds' in result:
                    first['seconds'] = min(first['seconds'], result['seconds'])
                elif 'operations_per_second' in result:
                    first |= max(first, result, key=lambda one: one['operations_per_second'])
    return results


def operations(name: str, config: ViTConfig, platform: str) -> int:
    """Those of an image in a train step of the program, in products and convolutions."""
    if name not in OURS:
        return 6 * count_multiply_adds(config)
    compute = resolve_compute(Compute(**OURS[name]), config, platform=platform)
    assert compute.last_block != 'auto'  # `choose` chose
    return 6 * count_multiply_adds(config, last_block=compute.last_block)


def table(results: dict[str, dict[str, Any]], work: Work, config: ViTConfig) -> list[str]:
    """The lines to print."""
    product = results.get('matmul', {})
    measured, platform = product.get('operations_per_second'), product.get('platform', 'cpu')
    done = {name: one for name, one in results.items() if 'seconds' in one}
    base = next(iter(done.values()), {}).get('seconds')
    lines = []
    for name, one in results.items():
        if 'error' in one:
            lines.append(f'{name:<26}{one["error"]}')
        elif name in done:
            speed = work.batch / one['seconds']
            rate = speed * operations(name, config, platform)
            share, peak = [], _PEAKS.get(one['device'])
            if peak is not None:
                share.append(f'{rate / peak:5.1%} of the peak')
            if measured is not None:
                share.append(f'{rate / measured:5.1%} of a product')
            temporary = one['temporary_bytes']
            kept = '?' if temporary is None else f'{temporary / 1e6:,.0f}'
            lines.append(
                f'{name:<26}{base / one["seconds"]:5.2f} {speed:9,.1f} images/s  '
                f'{"  ".join(share)}  {kept:>7} MB of temporaries  '
                f'{one["peak_bytes"] / 1e6:8,.0f} MB at most  '
                f'compiled in {one["trace_seconds"]:.1f} + {one["compile_seconds"]:.1f} CPU s'
            )
    if measured is not None:
        lines.append(f'{"a product of matrices":<26}{measured / 1e12:.3f} TFLOP/s')
    return lines


def main() -> None:
    """Prints a line for each program, and appends all numbers to a file of JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--vision_transformer', metavar='FOLDER')
    parser.add_argument('--big_vision', metavar='FOLDER')
    parser.add_argument('--timm', metavar='PYTHON')
    parser.add_argument('--model', default='S/16', help='SIZE/PATCH, as in the papers')
    parser.add_argument('--pool', choices=['cls', 'gap'], default='cls')
    parser.add_argument('--batch', type=app.positive_int, default=8)
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], default='float32')
    parser.add_argument('--optimizer', choices=['sgd', 'adamw'], default='sgd')
    parser.add_argument('--steps', type=app.positive_int, default=1, help='in a round')
    parser.add_argument('--rounds', type=app.positive_int, default=3)
    parser.add_argument('--only', nargs='*', metavar='NAME', help='of: ' + '; '.join(OURS))
    parser.add_argument('--out', metavar='FILE.jsonl')
    asked = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')  # of this process, which only counts
    config = variant(asked.model, pool=asked.pool, num_classes=1000)
    assert isinstance(config, ViTConfig), 'the peers have no such network'
    given = {name: getattr(asked, name) for name in ('batch', 'precision', 'optimizer', 'steps')}
    work = Work.of(config, **given)
    peers = {'vision_transformer': asked.vision_transformer, 'big_vision': asked.big_vision}
    peers |= {SCAN: asked.big_vision, 'timm': asked.timm}
    if asked.precision == 'bfloat16' and peers.pop('vision_transformer'):
        print('vision_transformer is left out: its network computes in float32 only')
    programs = {'matmul': ''} | {name: where for name, where in peers.items() if where}
    programs |= dict.fromkeys(asked.only or OURS, '')
    results = compare(programs, work, asked.rounds)
    lines = table(results, work, config)
    versions: dict[str, str] = {}
    for one in results.values():
        versions |= one.get('versions', {})
    devices = {one['device'] for one in results.values() if 'device' in one}
    print(
        f'{asked.model} {asked.pool}, batch {asked.batch}, {asked.precision}, {asked.optimizer}; '
        f'{", ".join(sorted(devices))}; {", ".join(f"{k} {v}" for k, v in versions.items())}'
    )
    print('\n'.join(lines))
    if asked.out:
        said = {'model': asked.model} | work._asdict() | {'rounds': asked.rounds}
        with open(asked.out, 'a') as file:
            file.write(json.dumps(said | {'results': results}) + '\n')


if __name__ == '__main__':
    main()
