"""Counts the bytes that each TPU chip sends in a training step: python -m benchmarks.collectives.

Prints them with the minimum for the mesh and the ratio of both. Bytes are counted in programs of
the TPU compiler (`pip install -e '.[tpu]'`); no TPU is needed. The step uses bfloat16, AdamW and 16
images per chip, where chips along `tensor` share the same images. It recomputes blocks unless
--remat selects another policy. ROW arguments select rows. --quickly lowers the compiler's
optimization effort, which takes a fifth of the time; L-fsdp-8 and g-fsdp-64 send the same number of
bytes either way. For each all-reduce that overlaps with other work, the program prints how many
compute instructions are scheduled between its start and its end. LIBTPU_INIT_ARGS sets compiler
options. B-data-8-gpu runs only if it is named, because it needs jax's CUDA plugin.
"""

import argparse
import re
import time

import jax

from benchmarks import communication
from benchmarks.program_text import Instruction, parse_computations
from vit_jax.config import TrainConfig
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import Compute, ViTConfig, variant
from vit_jax.models.compute import POLICIES, Remat
from vit_jax.planning import ahead_of_time, memory_plan
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig

_COMPUTE_OPERATIONS = 'fusion', 'convolution', 'dot'
_ALL_REDUCES = 'all-reduce', 'all-reduce-start'
_LIBRARY_CALL = re.compile(r'custom_call_target="(__cu|tpu_custom_call)')  # cuBLAS, cuDNN, kernels
IMAGES = 16  # per chip; chips along `tensor` share the same images

# Model, topology, sizes of the mesh axes data, fsdp and tensor.
ROWS = {
    'B-data-8': ('B/16', 'v5e:2x4', 8, 1, 1),
    'B-data-8-v6e': ('B/16', 'v6e:2x4', 8, 1, 1),
    'B-data-8-gpu': ('B/16', 'h200:1x8', 8, 1, 1),
    'B-data-256': ('B/16', 'v5e:16x16', 256, 1, 1),
    'L-data-1024': ('L/16', 'v5p:8x8x16', 1024, 1, 1),
    'L-fsdp-8': ('L/16', 'v5e:2x4', 1, 8, 1),
    'L-fsdp-32': ('L/16', 'v5e:4x8', 1, 32, 1),
    'L-fsdp-64': ('L/16', 'v5e:8x8', 1, 64, 1),
    'L-data-2-fsdp-32': ('L/16', 'v5e:8x8', 2, 32, 1),
    'L-data-2-fsdp-64': ('L/16', 'v5e:8x16', 2, 64, 1),
    'L-2-slices-fsdp-64': ('L/16', '2*v5e:8x8', 2, 64, 1),
    'L-2-slices-fsdp-32': ('L/16', '2*v5e:8x8', 4, 32, 1),
    'L-tensor-8': ('L/16', 'v5e:2x4', 1, 1, 8),
    'L-data-8-tensor-2': ('L/16', 'v5e:4x4', 8, 1, 2),
    'H-fsdp-4-tensor-4': ('H/14', 'v5e:4x4', 1, 4, 4),
    'H-fsdp-16': ('H/14', 'v5e:4x4', 1, 16, 1),
    'g-data-4-fsdp-16': ('g/14', 'v5p:4x4x4', 4, 16, 1),
    'g-data-2-fsdp-32': ('g/14', 'v5p:4x4x4', 2, 32, 1),
    'g-fsdp-64': ('g/14', 'v5p:4x4x4', 1, 64, 1),
    'g-data-2-fsdp-64': ('g/14', 'v5p:4x4x8', 2, 64, 1),
    'g-data-4-fsdp-64': ('g/14', 'v5p:4x8x8', 4, 64, 1),
}


def main() -> None:
    """Prints a line for each selected row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('rows', nargs='*', metavar='ROW', help=f'rows: {", ".join(ROWS)}')
    parser.add_argument('--quickly', action='store_true')
    parser.add_argument('--remat', choices=POLICIES, default='block')
    arguments = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
    for row in arguments.rows or [row for row in ROWS if not row.endswith('-gpu')]:
        print(row, _count_row(*ROWS[row], arguments.remat, quickly=arguments.quickly), flush=True)


def _count_row(
    network: str,
    topology: str,
    data: int,
    fsdp: int,
    tensor: int,
    remat: Remat,
    *,
    quickly: bool,
) -> str:
    target = ahead_of_time.find_topology(topology)
    model = variant(network, pool='gap')
    assert isinstance(model, ViTConfig)
    config = TrainConfig(
        data='digits',
        model=model,
        total=Duration(steps=1000),
        batch_size=IMAGES * data * fsdp,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        compute=Compute(dtype='bfloat16', remat=remat),
        mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor),
    )
    config = memory_plan.with_dummy_data(config, num_classes=1000, num_images=10**6)
    experiment = build_experiment(config, devices=target.devices)
    state = training_run.abstract_state(experiment)
    began = time.process_time()
    lowered = training_run.lower_update(experiment, state)
    text = ahead_of_time.compile_for(target, lowered, quickly=quickly).as_text()
    sent = communication.count_sent_bytes(text, len(target.devices))
    branches = 2 * model.depth * IMAGES * model.num_tokens * model.width
    least = communication.minimum_sent_bytes(
        state.params, experiment.mesh, itemsize=2, branches=branches
    )
    seconds = time.process_time() - began
    total = sum(collective.size for collective in sent.values())
    parts = ', '.join(f'{kind} {collective.size / 1e6:,.1f}' for kind, collective in sent.items())
    setting = f'{topology} data={data} fsdp={fsdp} tensor={tensor} remat={remat}'
    ratio = f'minimum {least / 1e6:,.1f} MB, ratio {total / least:.3f}'
    volume = f'{total / 1e6:,.1f} MB sent per device, {ratio}'
    counts = _count_overlapping(text)
    overlap = f'; instructions during each all-reduce: {counts}' if counts else ''
    return f'{network} {setting}: {volume} ({parts}){overlap}; {seconds:.0f} CPU s'


def _count_overlapping(text: str) -> list[int]:
    """Counts the compute instructions scheduled during each asynchronous all-reduce.

    An all-reduce on a TPU's SparseCores is a call of a computation that contains the all-reduce.
    """
    bodies = parse_computations(text)[0]
    counts = []
    for body in bodies.values():
        positions = {instruction.name: index for index, instruction in enumerate(body)}
        for end in body:
            if end.operation.endswith('-done'):
                scheduled = body[positions[end.operands[0]] : positions[end.name]]
                started = scheduled[0], *bodies.get(scheduled[0].called('to_apply'), [])
                if any(instruction.operation in _ALL_REDUCES for instruction in started):
                    counts.append(sum(map(_is_compute, scheduled)))
    return counts


def _is_compute(one: Instruction) -> bool:
    return one.operation in _COMPUTE_OPERATIONS or bool(_LIBRARY_CALL.search(one.rest))


if __name__ == '__main__':
    main()
