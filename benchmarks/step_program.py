"""What a train step is to a GPU: kernels, memory traffic, memory. Compiled; no GPU is needed.

    python -m benchmarks.step_program --gpu=h200:1x1 --model=B/16 --batch=256 [--compute remat=dots]

Prints, of the program that XLA makes for bfloat16 and AdamW: the kernels that are launched, the
megabytes of an image that others than matrix products and fused attention read and write, and the
temporary memory. Kernels are not timed where there is no GPU, so that XLA's choices are the usual
ones; fused attention is taken to be there (cuDNN), unless `--compute attention=xla`.
"""

import argparse
import collections
import re
import time
from typing import Any

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn

from vit_jax.config import TrainConfig
from vit_jax.models import Compute, variant
from vit_jax.parallel import ahead_of_time
from vit_jax.parallel.program_text import Instruction, computations, size
from vit_jax.runs import compilation, memory_plan
from vit_jax.runs.experiment import decide
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig

# What is no kernel: names for memory that is there already.
_FREE = 'parameter constant get-tuple-element tuple bitcast after-all opt-barrier iota'.split()
_FREE += ['partition-id', 'replica-id', 'async-done']
_CALLS = 'conditional', 'call', 'async-start'
_PRODUCTS = re.compile(r'gemm|matmul|fmha|convolution|cudnn')


def traffic(body: list[Instruction], result: str) -> int:
    """Bytes that a fusion reads and writes; of what it slices or updates in place, the part."""
    types = {one.name: one.type for one in body}
    users = collections.defaultdict(list)
    for one in body:
        for operand in one.operands:
            users[operand].append(one)
    updates = [one for one in body if one.operation == 'dynamic-update-slice']
    in_place = {_origin(one.operands[0], body) for one in updates}
    total = 0
    for one in body:
        if one.operation != 'parameter' or one.name in in_place:
            continue
        uses = _uses(one.name, users)
        sliced = uses and all(use.operation in ('slice', 'dynamic-slice') for use in uses)
        total += sum(size(use.type) for use in uses) if sliced else size(one.type)
    written = size(result) - sum(size(one.type) for one in updates)
    return total + max(written, 0) + sum(size(types.get(one.operands[1], '')) for one in updates)


def _origin(name: str, body: list[Instruction]) -> str:
    by_name = {one.name: one for one in body}
    while by_name[name].operation in ('bitcast', 'copy', 'convert', 'transpose', 'reshape'):
        name = by_name[name].operands[0]
    return name


def _uses(name: str, users: dict[str, list[Instruction]]) -> list[Instruction]:
    """What uses a value, behind bitcasts."""
    found = []
    for use in users[name]:
        found += _uses(use.name, users) if use.operation == 'bitcast' else [use]
    return found


def count(text: str) -> tuple[int, int]:
    """Kernels of a program, and bytes that others than products read and write."""
    found, entry = computations(text)
    kernels = total = 0

    def walk(name: str, times: int) -> None:
        nonlocal kernels, total
        types = {one.name: one.type for one in found[name]}
        for one in found[name]:
            if one.operation == 'while':
                walk(one.called('body'), times * one.trips)
            elif one.operation in _CALLS:
                walk(one.called('(?:to_apply|calls)'), times)
            elif one.operation not in _FREE:
                kernels += times
                body = found[one.called('calls')] if one.operation == 'fusion' else []
                if any(_is_product(part) for part in body or [one]):
                    continue
                if body:
                    total += times * traffic(body, one.type)
                elif 'slice' in one.operation:
                    updates = one.operation == 'dynamic-update-slice'
                    moved = types.get(one.operands[1], '') if updates else one.type
                    total += 2 * times * size(moved)
                else:
                    read = sum(size(types.get(operand, '')) for operand in one.operands)
                    total += times * (read + size(one.type))

    walk(entry, 1)
    return kernels, total


def _is_product(one: Instruction) -> bool:
    is_call = one.operation == 'custom-call' and bool(_PRODUCTS.search(one.rest))
    return one.operation in ('dot', 'convolution') or is_call


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--gpu', default='h200:1x1', help='as --topology of vit_jax.plan')
    parser.add_argument('--model', default='B/16')
    parser.add_argument('--pool', default='gap')
    parser.add_argument('--batch', type=int, default=256)
    parser.add_argument('--compute', nargs='*', default=[], help='fields, such as remat=dots')
    asked = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
    for name in 'check_cudnn_version', 'check_compute_capability':  # they ask the GPU
        setattr(cudnn, name, lambda *_, **__: 91000)
    cudnn.is_cuda_compute_capability_equal = lambda *_: False
    fields: dict[str, Any] = {'dtype': 'bfloat16', 'attention': 'cudnn'}
    fields |= dict(text.split('=') for text in asked.compute)
    fields |= {'unroll': int(fields['unroll'])} if 'unroll' in fields else {}
    config = TrainConfig(
        data='digits',
        model=variant(asked.model, pool=asked.pool),
        total=Duration(steps=1000),
        batch_size=asked.batch,
        optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
        compute=Compute(**fields),
    )
    config = memory_plan.without_data(config, num_classes=1000, num_images=10**6)
    where = ahead_of_time.find_topology(asked.gpu)
    experiment = decide(config, devices=where.devices)
    lowered = compilation.lower_update(experiment, compilation.abstract_state(experiment))
    began = time.monotonic()
    program = ahead_of_time.compile_for(where, lowered)
    kernels, others = count(program.as_text())
    temporary = program.memory_analysis().temp_size_in_bytes
    print(
        f'{asked.model} {asked.pool} batch {asked.batch} {" ".join(asked.compute)}: '
        f'{kernels:,} kernels, {others / asked.batch / 1e6:,.0f} MB an image beside products, '
        f'{temporary / 1e9:.1f} GB of temporaries, compiled in {time.monotonic() - began:.0f} s'
    )


if __name__ == '__main__':
    main()
