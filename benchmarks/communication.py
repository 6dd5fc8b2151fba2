"""What one device sends to the others in a compiled program, and the least that a mesh demands."""

import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from benchmarks.program_text import Instruction, computations, size, trips

# Bytes that one of n devices in a ring sends, of each byte of its operand.
_RING = {
    'all-gather': lambda n: n - 1,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'reduce-scatter': lambda n: (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
}
_CALLS = 'body', 'condition', 'calls', 'to_apply'


class Sent(NamedTuple):
    """All collectives of one kind in one run of a program."""

    times: int
    size: int  # bytes that each device sends in all of them


class _Collective(NamedTuple):
    kind: str
    times: int
    size: float


def sent(text: str, devices: int) -> dict[str, Sent]:
    """What each device sends in one run of the program, by kind of collective.

    The bytes are those of an algorithm on a ring. The body of a loop counts as often as it runs,
    where the program says it, and once elsewhere.
    """
    found, entry = computations(text)
    seen: dict[str, _Collective] = {}

    def walk(name: str, times: int) -> None:
        body = found[name]
        by_name = {one.name: one for one in body}
        slices = [one for one in body if one.operation == 'dynamic-slice']
        sliced = {_origin(one.operands[0], by_name) for one in slices}
        for one in body:
            kind = one.operation.removesuffix('-start')
            if kind in _RING:
                # TPUs: the fusion of an all-reduce and the slice of it is a reduce-scatter.
                kind = 'reduce-scatter' if kind == 'all-reduce' and one.name in sliced else kind
                operand = sum(size(by_name[x].type) for x in one.operands if x in by_name)
                ring = _RING[kind](_group_size(one.rest, devices))
                # What overlaps with other work stands in a chain of fusions, in loops as well.
                channel = re.search(r'channel_id=(\d+)', one.rest)
                key = f'channel {channel[1]}' if channel else f'{name} {one.name}'
                if key not in seen or seen[key].times > times:
                    seen[key] = _Collective(kind, times, times * ring * operand)
            elif one.operation == 'while':
                often = times * trips(one, by_name, found)
                walk(one.called('condition'), often)
                walk(one.called('body'), often)
            else:
                for called in filter(None, [*map(one.called, _CALLS), *one.branches]):
                    walk(called, times)

    walk(entry, 1)
    kinds = [kind for kind in _RING if any(one.kind == kind for one in seen.values())]
    every = {kind: [one for one in seen.values() if one.kind == kind] for kind in kinds}
    return {
        kind: Sent(sum(one.times for one in ones), round(sum(one.size for one in ones)))
        for kind, ones in every.items()
    }


def least(params: Any, mesh: Mesh, *, itemsize: int, branches: int = 0) -> int:
    """Bytes that each device has to send in a training step, in numbers of `itemsize` bytes.

    `params` are abstract, with shardings. The gradient of what every device has whole is summed
    over all that split the batch. What fsdp splits is gathered for the forward and again for the
    backward pass; its gradient is scattered, and then summed over data. Over tensor each device has
    a part of the sum that a branch of a block gives, and of the gradient of what it is given
    ("Megatron-LM", section 3): `branches` is how many numbers all branches give on one device.
    """
    data, fsdp = mesh.shape['data'], mesh.shape['fsdp']
    total = 2.0 * branches * itemsize * _RING['all-reduce'](mesh.shape['tensor'])
    for leaf in jax.tree.leaves(params):
        here = math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize
        if 'fsdp' in leaf.sharding.spec:
            rings = 2 * _RING['all-gather'](fsdp) + fsdp * _RING['reduce-scatter'](fsdp)
            total += here * (rings + _RING['all-reduce'](data))
        else:
            total += here * _RING['all-reduce'](data * fsdp)
    return round(total)


def _origin(name: str, by_name: dict[str, Instruction]) -> str:
    """Whose result this is, but for its shape."""
    while name in by_name and by_name[name].operation in ('bitcast', 'reshape', 'all-reduce-done'):
        name = by_name[name].operands[0]
    return name


def _group_size(rest: str, devices: int) -> int:
    """The number of devices that take part together."""
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
