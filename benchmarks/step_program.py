"""Counts what a train step costs a GPU or a TPU that is not attached.

    python -m benchmarks.step_program --topology=h200:1x1 --model=B/16 --batch=256
    python -m benchmarks.step_program --topology=v5e:2x2 --model=B/16 --batch=64 --depth=2

It compiles the train step (AdamW, clipped gradients, all else as `vit_jax.train` chooses it, unless
`--compute remat=dots unroll=2` sets it) with the options of a real run. For a GPU it prints the
kernels that are launched, and the megabytes per image that kernels other than matrix products and
fused attention read and write; for a TPU the cycles that the compiler estimates for all
instructions; for both the temporary memory. Nothing is timed. A GPU times each matrix product as a
Triton kernel and by cuBLAS, and runs the faster. Without a GPU, XLA uses Triton for all products;
`--xla xla_gpu_enable_triton_gemm=false` gives cuBLAS for all. A run lies between the two. cuDNN's
attention is assumed to compile. `--big_vision=FOLDER`, which holds that repository, compiles its
step (`benchmarks.peer_programs`) instead, with `--scan` its loop.
"""

import argparse
import collections
import dataclasses
import math
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from benchmarks import peer_programs
from benchmarks.our_step import make_config, trace_step
from benchmarks.program_text import Instruction, computations, size, trips
from vit_jax.cli import app
from vit_jax.data.augmentation import AUGREG_LEVELS, augreg
from vit_jax.models import Compute, ViTConfig, variant
from vit_jax.planning import ahead_of_time

# What is no kernel: names for memory that is there already.
_FREE = 'parameter constant get-tuple-element tuple bitcast after-all opt-barrier iota'.split()
_FREE += ['partition-id', 'replica-id', 'async-done']
_CALLS = 'call', 'async-start'
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


def executed(
    found: dict[str, list[Instruction]], name: str, times: int = 1
) -> Iterator[tuple[Instruction, int, dict[str, str]]]:
    """Each instruction that a computation runs, how often, and the types around it by name."""
    by_name = {one.name: one for one in found[name]}
    types = {one.name: one.type for one in found[name]}
    for one in found[name]:
        if one.operation == 'while':
            yield from executed(found, one.called('body'), times * trips(one, by_name, found))
        elif one.operation == 'conditional':
            yield from executed(found, one.branches[-1], times)  # one of them
        elif one.operation in _CALLS:
            yield from executed(found, one.called('(?:to_apply|calls)'), times)
        elif one.operation not in _FREE:
            yield one, times, types


def cycles(text: str) -> int:
    """What a TPU's compiler estimates, of all instructions of its program one after the other."""
    estimates = (
        (re.search(r'estimated_cycles":"(\d+)"', one.rest), times)
        for one, times, _ in executed(*computations(text))
    )
    return sum(int(found[1]) * times for found, times in estimates if found)


class Kernel(NamedTuple):
    """One kernel of a program."""

    name: str
    result: str  # its type, with shapes
    times: int  # in one step
    moved: int | None  # bytes that it reads and writes; None for a product
    operations: int | None  # of a product of matrices; None where they are not known


def kernels(text: str) -> Iterator[Kernel]:
    """The kernels of a GPU's program, in their order."""
    found, entry = computations(text)
    for one, times, types in executed(found, entry):
        body = found[one.called('calls')] if one.operation == 'fusion' else []
        moved = operations = None
        if any(_is_product(part) for part in body or [one]):
            inside = {part.name: part.type for part in body} or types
            operations = sum(_operations(part, inside) or 0 for part in body or [one]) or None
        elif body:
            moved = traffic(body, one.type)
        elif 'slice' in one.operation:
            updates = one.operation == 'dynamic-update-slice'
            moved = 2 * size(types.get(one.operands[1], '') if updates else one.type)
        else:
            moved = sum(size(types.get(operand, '')) for operand in one.operands) + size(one.type)
        yield Kernel(one.name, one.type, times, moved, operations)


def _operations(one: Instruction, types: dict[str, str]) -> int | None:
    """Floating-point operations of a product of matrices; None for other instructions."""
    axes = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]+)', one.rest)
    if axes is None or not one.operands:
        return None
    left = _shape(types.get(one.operands[0], ''))
    summed = [left[int(axis)] for axis in re.findall(r'\d+', axes[1]) if int(axis) < len(left)]
    return 2 * math.prod(_shape(one.type)) * math.prod(summed)


def _shape(kind: str) -> list[int]:
    found = re.search(r'\w+\[([\d,]*)\]', kind)
    return [int(side) for side in found[1].split(',') if side] if found else []


def count(text: str) -> tuple[int, int]:
    """Kernels of a program, and bytes that others than products read and write."""
    all_of_it = [*kernels(text)]
    moved = sum(one.times * one.moved for one in all_of_it if one.moved is not None)
    return sum(one.times for one in all_of_it), moved


def _is_product(one: Instruction) -> bool:
    is_call = one.operation == 'custom-call' and bool(_PRODUCTS.search(one.rest))
    return one.operation in ('dot', 'convolution') or is_call


def network(asked: argparse.Namespace) -> ViTConfig:
    """The network that is asked for."""
    model = variant(asked.model, pool=asked.pool)
    assert isinstance(model, ViTConfig)
    return dataclasses.replace(model, depth=asked.depth or model.depth)


def our_step(asked: argparse.Namespace, device: jax.Device) -> Any:
    """The update of `vit_jax.train` for a device, traced."""
    fields: dict[str, Any] = dict(text.split('=') for text in asked.compute)
    fields |= {'unroll': int(fields['unroll'])} if 'unroll' in fields else {}
    config = make_config(network(asked), asked.batch, compute=Compute(**fields))
    if asked.augreg is not None:
        config = dataclasses.replace(config, augmentation=augreg(asked.augreg))
    step = trace_step(config, num_classes=1000, devices=[device])
    print(step.experiment.compute)
    return step.lowered


def their_step(asked: argparse.Namespace, device: jax.Device) -> Any:
    """big_vision's, of the same network and batch."""
    model = network(asked)
    work = peer_programs.Work.of(model, batch=asked.batch, precision='bfloat16', optimizer='adamw')
    with jax.default_device(device):
        return peer_programs.big_vision(asked.big_vision, work, scan=asked.scan)[0]


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition('=')
    if not (name and equals):
        raise argparse.ArgumentTypeError(f'{text!r}: expected OPTION=VALUE')
    return name, {'true': True, 'false': False}.get(value, value)


def main() -> None:
    """Prints what was chosen, and what was counted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--topology', default='h200:1x1', help='as of vit_jax.plan: one of it')
    parser.add_argument('--model', default='B/16')
    parser.add_argument('--depth', type=app.positive_int, help='another than the model has')
    parser.add_argument('--pool', default='gap')
    parser.add_argument('--batch', type=app.positive_int, default=256)
    parser.add_argument('--compute', nargs='*', default=[], help='fields, such as remat=dots')
    add = parser.add_argument
    add('--xla', nargs='*', type=_option, default=[], metavar='OPTION=VALUE', help='of XLA')
    parser.add_argument(
        '--augreg', choices=AUGREG_LEVELS, help='a level of AugReg; none: no augmentation'
    )
    parser.add_argument('--big_vision')
    parser.add_argument('--scan', action='store_true')
    asked = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
    where = ahead_of_time.find_topology(asked.topology)
    lowered = (their_step if asked.big_vision else our_step)(asked, where.devices[0])
    began = time.process_time()
    program = ahead_of_time.compile_for(where, lowered, options=dict(asked.xla))
    taken, text = time.process_time() - began, program.as_text()
    if where.devices[0].platform == 'tpu':
        found = f'{cycles(text) / 1e6:,.1f} M cycles'
    else:
        kernels, others = count(text)
        megabytes = others / asked.batch / 1e6
        found = f'{kernels:,} kernels, {megabytes:,.0f} MB an image beside products'
    temporary = program.memory_analysis().temp_size_in_bytes / 1e9
    print(f'{found}, {temporary:.1f} GB of temporaries, compiled in {taken:.0f} CPU s')


if __name__ == '__main__':
    main()
