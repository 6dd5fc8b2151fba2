"""Seconds to compile a train step at two depths, and their ratio: blocks are stacked and scanned.

Command: python benchmarks/compile_time.py
"""

import importlib.metadata
import time

import jax

from vit_jax.config import TrainConfig
from vit_jax.models import variant
from vit_jax.runs import compilation
from vit_jax.runs.experiment import decide
from vit_jax.runs.memory_plan import without_data
from vit_jax.training.duration import Duration

DEPTHS, REPEATS = (8, 32), 3


def compile_seconds(depth: int) -> float:
    """Of a train step of Ti/16 at this depth: tracing and compiling, nothing cached."""
    model = variant('Ti/16', depth=depth)
    config = TrainConfig(data='digits', model=model, batch_size=8, total=Duration(steps=10))
    experiment = decide(without_data(config, num_classes=2, num_images=80))
    jax.clear_caches()
    began = time.perf_counter()
    state = compilation.abstract_state(experiment)
    compilation.lower_update(experiment, state).compile()
    compilation.compile_eval_steps(experiment, state.eval_params)
    return time.perf_counter() - began


def main() -> None:
    """Prints the best of some repetitions, taken in turns, and the ratio."""
    jax.config.update('jax_enable_compilation_cache', False)
    best = dict.fromkeys(DEPTHS, float('inf'))
    for _ in range(REPEATS):
        for depth in DEPTHS:
            best[depth] = min(best[depth], compile_seconds(depth))
    for depth, seconds in best.items():
        print(f'depth {depth:>2}: {seconds:.2f} s')
    print(f'ratio: {best[DEPTHS[1]] / best[DEPTHS[0]]:.2f}')
    versions = ', '.join(f'{n} {importlib.metadata.version(n)}' for n in ('jax', 'flax'))
    print(f'{jax.devices()[0].device_kind}, {versions}')


if __name__ == '__main__':
    main()
