"""Parses the text of a compiled program (HLO) into computations of instructions."""

import collections
import math
import re
from typing import NamedTuple

_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 'f32': 4, 's32': 4, 'u32': 4, 'f64': 8}
_BYTES |= {'s64': 8, 'u64': 8, 's16': 2, 'u16': 2}
_HEADER = re.compile(r'(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{')
_INSTRUCTION = re.compile(r'\s*(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)')


class Instruction(NamedTuple):
    """An instruction: its result with type, its operation and its operands."""

    name: str
    type: str
    operation: str
    operands: list[str]
    rest: str  # attributes, and the names of computations that it calls

    def called(self, label: str) -> str:
        """Returns the computation in this attribute, such as `body`; '' if there is none."""
        match = re.search(rf'{label}=%?([\w.-]+)', self.rest)
        return match[1] if match else ''

    @property
    def branches(self) -> list[str]:
        """The names of the computations that a conditional chooses from."""
        listed = re.search(r'branch_computations=\{(.*?)\}', self.rest)
        pair = re.findall(r'(?:true|false)_computation=%?([\w.-]+)', self.rest)
        return re.findall(r'[\w.-]+', listed[1]) if listed else pair


def total_bytes(types: str) -> int:
    """Returns the bytes of all arrays in a type."""
    return sum(array_bytes(types))


def array_bytes(types: str) -> list[int]:
    """Returns the bytes of each array in a type."""
    arrays = re.findall(r'(\w+)\[([\d,]*)\]', types)
    return [_BYTES.get(t, 0) * math.prod(map(int, filter(None, s.split(',')))) for t, s in arrays]


def parse_computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns the computations of a program by name, and the name of the entry computation."""
    bodies: dict[str, list[Instruction]] = collections.defaultdict(list)
    entry = current = ''
    for line in text.splitlines():
        if header := _HEADER.fullmatch(line):
            current = header[2]
            entry = current if header[1] else entry
        elif line == '}':  # lines of a kernel's configuration have more text
            current = ''
        elif current and (match := _INSTRUCTION.match(re.sub(r'/\*.*?\*/', '', line))):
            name, kind, operation, rest = match.groups()
            operands = re.findall(r'%([\w.-]+)', rest.partition('), ')[0])
            bodies[current].append(Instruction(name, kind, operation, operands, rest))
    return bodies, entry


def count_iterations(
    loop: Instruction, before: dict[str, Instruction], found: dict[str, list[Instruction]]
) -> int:
    """Returns the number of iterations of a loop that counts from, by and up to constants.

    Returns 1 for other loops without a known trip count.
    """
    if trip_count := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(trip_count[1])
    condition, body = found[loop.called('condition')], found[loop.called('body')]
    try:
        inside = {one.name: one for one in condition}
        test = condition[-1]
        counter, limit = (inside[name] for name in test.operands)
        position = re.search(r'index=(\d+)', counter.rest)
        end = _constant(limit.name, inside)
        if test.operation != 'compare' or 'direction=LT' not in test.rest or not position:
            return 1
        results = {one.name: one for one in body}
        steps = results[body[-1].operands[int(position[1])]].operands
        step = next((n for name in steps if (n := _constant(name, results)) is not None), 1)
        first = before[before[loop.operands[0]].operands[int(position[1])]]
    except (LookupError, ValueError):  # not such a loop
        return 1
    return 1 if end is None else -(-(end - (_constant(first.name, before) or 0)) // step)


def _constant(name: str, inside: dict[str, Instruction]) -> int | None:
    """Returns the integer constant with this name, looking through copies; None if not constant."""
    while name in inside and inside[name].operation == 'copy':
        name = inside[name].operands[0]
    if name not in inside or inside[name].operation != 'constant':
        return None
    value = re.match(r'(\d+)\)', inside[name].rest)
    return int(value[1]) if value else None
