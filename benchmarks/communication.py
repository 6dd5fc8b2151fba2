"""Counts the bytes that a device sends in a compiled program, and the minimum for a mesh."""

import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from benchmarks.program_text import Instruction, count_iterations, parse_computations, total_bytes

# Bytes that one of n devices in a ring sends per byte of its operand.
_RING_FACTORS = {
    'all-gather': lambda n: n - 1,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
}
_CALLS = 'body', 'condition', 'calls', 'to_apply'


class Traffic(NamedTuple):
    """All collectives of one kind in one run of a program."""

    times: int
    size: int  # bytes that each device sends, summed over these collectives


class _Collective(NamedTuple):
    kind: str
    times: int
    size: float


def count_sent_bytes(text: str, devices: int) -> dict[str, Traffic]:
    """Returns what each device sends in one run of the program, by kind of collective.

    Bytes are counted for ring algorithms. A loop counts as often as it runs, or once if the program
    does not state the number of iterations.
    """
    bodies, entry = parse_computations(text)
    collectives: dict[str, _Collective] = {}

    def walk(name: str, times: int) -> None:
        body = bodies[name]
        by_name = {one.name: one for one in body}
        slices = [one for one in body if one.operation == 'dynamic-slice']
        sliced = {_origin(one.operands[0], by_name) for one in slices}
        for one in body:
            kind = one.operation.removesuffix('-start')
            if kind in _RING_FACTORS:
                # On TPUs, an all-reduce fused with a slice of its result is a reduce-scatter.
                kind = 'reduce-scatter' if kind == 'all-reduce' and one.name in sliced else kind
                operand = sum(total_bytes(by_name[x].type) for x in one.operands if x in by_name)
                factor = _RING_FACTORS[kind](_group_size(one.rest, devices))
                # An asynchronous collective occurs in several fusions, also inside loops, with the
                # same channel. It is counted once.
                channel = re.search(r'channel_id=(\d+)', one.rest)
                key = f'channel {channel[1]}' if channel else f'{name} {one.name}'
                if key not in collectives or collectives[key].times > times:
                    collectives[key] = _Collective(kind, times, times * factor * operand)
            elif one.operation == 'while':
                iterations = times * count_iterations(one, by_name, bodies)
                walk(one.called('condition'), iterations)
                walk(one.called('body'), iterations)
            else:
                for called in filter(None, [*map(one.called, _CALLS), *one.branches]):
                    walk(called, times)

    walk(entry, 1)
    kinds = [
        kind for kind in _RING_FACTORS if any(one.kind == kind for one in collectives.values())
    ]
    by_kind = {kind: [one for one in collectives.values() if one.kind == kind] for kind in kinds}
    return {
        kind: Traffic(sum(one.times for one in group), round(sum(one.size for one in group)))
        for kind, group in by_kind.items()
    }


def minimum_sent_bytes(params: Any, mesh: Mesh, *, itemsize: int, branches: int = 0) -> int:
    """Returns the minimum number of bytes that each device sends in a training step.

    Gradients of replicated parameters are all-reduced over data and fsdp. Parameters that are
    sharded over fsdp are gathered for the forward pass and again for the backward pass; their
    gradients are reduce-scattered over fsdp and all-reduced over data. The tensor axis needs an
    all-reduce of the output of each residual branch, and of the gradient of its input
    ("Megatron-LM", section 3).

    Args:
      params: Abstract parameters with shardings.
      mesh: Mesh with the axes data, fsdp and tensor.
      itemsize: Bytes per number that is sent.
      branches: Number of elements in the outputs of all residual branches on one device.
    """
    data, fsdp = mesh.shape['data'], mesh.shape['fsdp']
    total = 2.0 * branches * itemsize * _RING_FACTORS['all-reduce'](mesh.shape['tensor'])
    for leaf in jax.tree.leaves(params):
        local_bytes = math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize
        if 'fsdp' in leaf.sharding.spec:
            rings = 2 * _RING_FACTORS['all-gather'](fsdp) + fsdp * _RING_FACTORS['reduce-scatter'](
                fsdp
            )
            total += local_bytes * (rings + _RING_FACTORS['all-reduce'](data))
        else:
            total += local_bytes * _RING_FACTORS['all-reduce'](data * fsdp)
    return round(total)


def _origin(name: str, by_name: dict[str, Instruction]) -> str:
    """Returns the instruction that computed a value, before bitcasts and reshapes."""
    while name in by_name and by_name[name].operation in ('bitcast', 'reshape', 'all-reduce-done'):
        name = by_name[name].operands[0]
    return name


def _group_size(rest: str, devices: int) -> int:
    """Returns the number of devices in each replica group."""
    if named := re.search(r'replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}', rest):
        sizes = {name: int(n) for name, n in re.findall(r"('\w+')=(\d+)", named[1])}
        count = 1
        for name, part in re.findall(r"('\w+')(?::\(\d+\)(\d+))?", named[2]):
            count *= int(part) if part else sizes[name]
        return count
    if counted := re.search(r'replica_groups=\[\d+,(\d+)\]', rest):
        return int(counted[1])
    if listed := re.search(r'replica_groups=\{\{([\d,]+)\}', rest):
        return len(listed[1].split(','))
    return devices
