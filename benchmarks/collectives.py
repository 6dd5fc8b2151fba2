"""What each chip sends in a training step, beside the least: python -m benchmarks.collectives.

Counted in programs that the TPU's compiler makes (`pip install -e '.[tpu]'`), no TPU is needed;
bfloat16, AdamW, 16 images a chip. Names of rows choose some of them. With --quickly the compiler
looks less for the fastest program, which takes a fifth of the time; L-fsdp-8 sends as much then.
"""

import argparse
import time

import jax

from vit_jax.config import TrainConfig
from vit_jax.models import Compute, variant
from vit_jax.parallel import ahead_of_time, communication
from vit_jax.parallel.meshes import MeshConfig
from vit_jax.runs import compilation, memory_plan
from vit_jax.runs.experiment import decide
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig

# Network, topology, data x fsdp.
ROWS = {
    'B-data-8': ('B/16', 'v5e:2x4', 8, 1),
    'B-data-256': ('B/16', 'v5e:16x16', 256, 1),
    'L-data-1024': ('L/16', 'v5p:8x8x16', 1024, 1),
    'L-fsdp-8': ('L/16', 'v5e:2x4', 1, 8),
    'H-fsdp-16': ('H/14', 'v5e:4x4', 1, 16),
    'g-data-4-fsdp-16': ('g/14', 'v5p:4x4x4', 4, 16),
    'g-fsdp-64': ('g/14', 'v5p:4x4x4', 1, 64),
    'g-data-4-fsdp-64': ('g/14', 'v5p:4x8x8', 4, 64),
}


def main() -> None:
    """Prints a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('rows', nargs='*', help=', '.join(ROWS))
    parser.add_argument('--quickly', action='store_true')
    asked = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')
    for row in asked.rows or ROWS:
        print(row, _measured(*ROWS[row], quickly=asked.quickly), flush=True)


def _measured(network: str, topology: str, data: int, fsdp: int, *, quickly: bool) -> str:
    where = ahead_of_time.find_topology(topology)
    config = TrainConfig(
        data='digits',
        model=variant(network, pool='gap'),
        total=Duration(steps=1000),
        batch_size=16 * data * fsdp,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        compute=Compute(dtype='bfloat16', remat='block'),
        mesh=MeshConfig(data=data, fsdp=fsdp),
    )
    config = memory_plan.without_data(config, num_classes=1000, num_images=10**6)
    experiment = decide(config, devices=where.devices)
    state, began = compilation.abstract_state(experiment), time.process_time()
    lowered = compilation.lower_update(experiment, state)
    text = ahead_of_time.compile_for(where, lowered, quickly=quickly).as_text()
    sent = communication.sent(text, len(where.devices))
    least = communication.least(state.params, experiment.mesh, itemsize=2)
    seconds = time.process_time() - began
    total = sum(one.size for one in sent.values())
    parts = ', '.join(f'{kind} {one.size / 1e6:,.1f}' for kind, one in sent.items())
    return (
        f'{network} {topology} data={data} fsdp={fsdp}: {total / 1e6:,.1f} MB sent, at least '
        f'{least / 1e6:,.1f}: {total / least:.3f} ({parts}); {seconds:.0f} CPU s'
    )


if __name__ == '__main__':
    main()
