"""Counts the kernels or cycles of a train step on a GPU or TPU that is not attached.

    python -m benchmarks.step_program --topology=h200:1x1 --model=B/16 --batch=256
    python -m benchmarks.step_program --topology=v5e:2x2 --model=B/16 --batch=64 --depth=2

Compiles the train step (AdamW, clipped gradients, other options as in `vit_jax.train` or as set by
`--compute remat=dots unroll=2`) with the compiler options of a training run. Nothing is timed. For
a GPU it prints the number of launched kernels, and the megabytes per image that kernels other than
matrix products and fused attention read and write. For a TPU it prints the cycles that the compiler
estimates, summed over all instructions. For both it prints the temporary memory.

With a GPU, XLA times each matrix product as a Triton kernel and with cuBLAS, and keeps the faster.
Without a GPU it uses Triton for all products, or cuBLAS for all with `--xla
xla_gpu_enable_triton_gemm=false`; the counts of a training run are between these two. cuDNN
attention is assumed to compile. `--big_vision=FOLDER`, a clone of big_vision, compiles its step
(`benchmarks.peer_programs`) instead; `--scan` selects its loop over blocks.
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
from benchmarks.program_text import Instruction, count_iterations, parse_computations, total_bytes
from vit_jax.cli import app
from vit_jax.data.augmentation import AUGREG_LEVELS, augreg
from vit_jax.models import Compute, ViTConfig, variant
from vit_jax.planning import ahead_of_time

# Operations without a kernel, such as names for existing memory.
_FREE = 'parameter constant get-tuple-element tuple bitcast after-all opt-barrier iota'.split()
_FREE += ['partition-id', 'replica-id', 'async-done']
_CALLS = 'call', 'async-start'
_PRODUCTS = re.compile(r'gemm|matmul|fmha|convolution|cudnn')


def count_traffic(body: list[Instruction], result: str) -> int:
    """Returns the bytes that a fusion reads and writes, without unused parts of sliced arrays."""
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
        total += sum(total_bytes(use.type) for use in uses) if sliced else total_bytes(one.type)
    written = total_bytes(result) - sum(total_bytes(one.type) for one in updates)
    return (
        total
        + max(written, 0)
        + sum(total_bytes(types.get(one.operands[1], '')) for one in updates)
    )


def _origin(name: str, body: list[Instruction]) -> str:
    by_name = {one.name: one for one in body}
    while by_name[name].operation in ('bitcast', 'copy', 'convert', 'transpose', 'reshape'):
        name = by_name[name].operands[0]
    return name


def _uses(name: str, users: dict[str, list[Instruction]]) -> list[Instruction]:
    """Returns the instructions that use a value, looking through bitcasts."""
    instructions = []
    for use in users[name]:
        instructions += _uses(use.name, users) if use.operation == 'bitcast' else [use]
    return instructions


def executed(
    bodies: dict[str, list[Instruction]], name: str, times: int = 1
) -> Iterator[tuple[Instruction, int, dict[str, str]]]:
    """Yields each instruction that runs, how often, and the types in its computation by name."""
    by_name = {one.name: one for one in bodies[name]}
    types = {one.name: one.type for one in bodies[name]}
    for one in bodies[name]:
        if one.operation == 'while':
            yield from executed(
                bodies, one.called('body'), times * count_iterations(one, by_name, bodies)
            )
        elif one.operation == 'conditional':
            yield from executed(bodies, one.branches[-1], times)  # one branch runs
        elif one.operation in _CALLS:
            yield from executed(bodies, one.called('(?:to_apply|calls)'), times)
        elif one.operation not in _FREE:
            yield one, times, types


def count_cycles(text: str) -> int:
    """Sums the cycles that the TPU compiler estimates for all instructions of a program."""
    estimates = (
        (re.search(r'estimated_cycles":"(\d+)"', one.rest), times)
        for one, times, _ in executed(*parse_computations(text))
    )
    return sum(int(match[1]) * times for match, times in estimates if match)


class Kernel(NamedTuple):
    """One kernel of a program."""

    name: str
    result: str  # its type, with shapes
    times: int  # in one step
    moved: int | None  # bytes that it reads and writes; None for a matrix product
    operations: int | None  # operations of a matrix product; None if unknown


def list_kernels(text: str) -> Iterator[Kernel]:
    """Yields the kernels of a GPU program in order."""
    bodies, entry = parse_computations(text)
    for one, times, types in executed(bodies, entry):
        body = bodies[one.called('calls')] if one.operation == 'fusion' else []
        moved = operations = None
        if any(_is_product(part) for part in body or [one]):
            inside = {part.name: part.type for part in body} or types
            operations = sum(_operations(part, inside) or 0 for part in body or [one]) or None
        elif body:
            moved = count_traffic(body, one.type)
        elif 'slice' in one.operation:
            updates = one.operation == 'dynamic-update-slice'
            moved = 2 * total_bytes(types.get(one.operands[1], '') if updates else one.type)
        else:
            moved = sum(
                total_bytes(types.get(operand, '')) for operand in one.operands
            ) + total_bytes(one.type)
        yield Kernel(one.name, one.type, times, moved, operations)


def _operations(one: Instruction, types: dict[str, str]) -> int | None:
    """Returns the floating-point operations of a matrix product; None for other instructions."""
    axes = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]+)', one.rest)
    if axes is None or not one.operands:
        return None
    left = _shape(types.get(one.operands[0], ''))
    summed = [left[int(axis)] for axis in re.findall(r'\d+', axes[1]) if int(axis) < len(left)]
    return 2 * math.prod(_shape(one.type)) * math.prod(summed)


def _shape(kind: str) -> list[int]:
    match = re.search(r'\w+\[([\d,]*)\]', kind)
    return [int(side) for side in match[1].split(',') if side] if match else []


def count_kernels(text: str) -> tuple[int, int]:
    """Returns the number of kernels, and the bytes of those that are not matrix products."""
    program_kernels = [*list_kernels(text)]
    moved = sum(one.times * one.moved for one in program_kernels if one.moved is not None)
    return sum(one.times for one in program_kernels), moved


def _is_product(one: Instruction) -> bool:
    is_call = one.operation == 'custom-call' and bool(_PRODUCTS.search(one.rest))
    return one.operation in ('dot', 'convolution') or is_call


def make_model_config(asked: argparse.Namespace) -> ViTConfig:
    """Returns the model with the pooling and depth of the flags."""
    model = variant(asked.model, pool=asked.pool)
    assert isinstance(model, ViTConfig)
    return dataclasses.replace(model, depth=asked.depth or model.depth)


def trace_vit_jax_step(asked: argparse.Namespace, device: jax.Device) -> Any:
    """Returns the traced update of `vit_jax.train` for a device."""
    fields: dict[str, Any] = dict(text.split('=') for text in asked.compute)
    fields |= {'unroll': int(fields['unroll'])} if 'unroll' in fields else {}
    config = make_config(make_model_config(asked), asked.batch, compute=Compute(**fields))
    if asked.augreg is not None:
        config = dataclasses.replace(config, augmentation=augreg(asked.augreg))
    step = trace_step(config, num_classes=1000, devices=[device])
    print(step.experiment.compute)
    return step.lowered


def trace_big_vision_step(asked: argparse.Namespace, device: jax.Device) -> Any:
    """Returns the traced step of big_vision for the same model and batch."""
    model = make_model_config(asked)
    work = peer_programs.Workload.of(
        model, batch=asked.batch, precision='bfloat16', optimizer='adamw'
    )
    with jax.default_device(device):
        return peer_programs.trace_big_vision(asked.big_vision, work, scan=asked.scan)[0]


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition('=')
    if not (name and equals):
        raise argparse.ArgumentTypeError(f'{text!r}: expected OPTION=VALUE')
    return name, {'true': True, 'false': False}.get(value, value)


def main() -> None:
    """Prints the compute options and the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--topology', default='h200:1x1', help='as in vit_jax.plan; uses a device')
    parser.add_argument('--model', default='B/16')
    parser.add_argument('--depth', type=app.positive_int, help='blocks; default: as in the model')
    parser.add_argument('--pool', default='gap')
    parser.add_argument('--batch', type=app.positive_int, default=256)
    parser.add_argument('--compute', nargs='*', default=[], help='fields, such as remat=dots')
    add = parser.add_argument
    add('--xla', nargs='*', type=_option, default=[], metavar='OPTION=VALUE', help='XLA options')
    parser.add_argument(
        '--augreg', choices=AUGREG_LEVELS, help='level of AugReg; default: no augmentation'
    )
    parser.add_argument('--big_vision', metavar='FOLDER', help='clone of big_vision')
    parser.add_argument('--scan', action='store_true', help='loop over blocks in big_vision')
    arguments = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
    topology = ahead_of_time.find_topology(arguments.topology)
    lowered = (trace_big_vision_step if arguments.big_vision else trace_vit_jax_step)(
        arguments, topology.devices[0]
    )
    began = time.process_time()
    program = ahead_of_time.compile_for(topology, lowered, options=dict(arguments.xla))
    seconds = time.process_time() - began
    text = program.as_text()
    if topology.devices[0].platform == 'tpu':
        counts = f'{count_cycles(text) / 1e6:,.1f} M cycles'
    else:
        kernels, moved = count_kernels(text)
        megabytes = moved / arguments.batch / 1e6
        counts = f'{kernels:,} kernels, {megabytes:,.0f} MB per image outside matrix products'
    temporary = program.memory_analysis().temp_size_in_bytes / 1e9
    print(f'{counts}, {temporary:.1f} GB of temporaries, compiled in {seconds:.0f} CPU s')


if __name__ == '__main__':
    main()
