"""Tables of names: where each of our arrays stands in another layout, read in both directions."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats.array_files import Stored
from vit_jax.models import ModelConfig


class Turn(NamedTuple):
    """How one array (of one layer) is laid out there and here."""

    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


SAME = Turn(lambda a: a, lambda a: a)
TRANSPOSED = Turn(lambda a: a.T, lambda a: a.T)
# Positions without a row for the class token, whose own is then zero.
NO_CLASS_ROW = Turn(
    lambda a: np.concatenate([np.zeros_like(a[:, :1]), a], axis=1), lambda a: a[:, 1:]
)
CONVOLUTION = Turn(lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))


class Rule(NamedTuple):
    """Our arrays, joined along their first axis where there are several, and their name there.

    {stage} and {unit} in names count from 1, {layer0}, {stage0} and {unit0} from 0. Where theirs
    has no {layer0}, it is stacked as ours is.
    """

    theirs: str
    ours: str | tuple[str, ...]
    turn: Turn = SAME


class Entry(NamedTuple):
    """A rule for the arrays of one network: one name there for each layer that ours stacks."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    turn: Turn
    stacked: bool


def dense(theirs: str, ours: str) -> list[Rule]:
    """The same kernel and bias under another name."""
    return [Rule(f'{theirs}/{leaf}', f'{ours}/{leaf}') for leaf in ('kernel', 'bias')]


def norm(theirs: str, ours: str, turn: Turn = SAME) -> list[Rule]:
    """The same scale and bias under another name."""
    return [Rule(f'{theirs}/{leaf}', f'{ours}/{leaf}', turn) for leaf in ('scale', 'bias')]


def torch_linear(theirs: str, ours: str, turn: Turn = TRANSPOSED) -> list[Rule]:
    """A layer of PyTorch: `weight` and `bias`."""
    return [
        Rule(f'{theirs}.weight', f'{ours}/kernel', turn),
        Rule(f'{theirs}.bias', f'{ours}/bias'),
    ]


def torch_norm(theirs: str, ours: str) -> list[Rule]:
    """A norm of PyTorch: `weight` and `bias`."""
    return [Rule(f'{theirs}.weight', f'{ours}/scale'), Rule(f'{theirs}.bias', f'{ours}/bias')]


def torch_projections(
    theirs: str, ours: str, names: tuple[str, ...], *, num_heads: int
) -> list[Rule]:
    """Projections to heads that PyTorch keeps as one matrix of all heads, and of all `names`."""
    kernel = Turn(
        lambda a: a.T.reshape(a.shape[1], num_heads, -1),
        lambda a: a.reshape(a.shape[0], -1).T,
    )
    bias = Turn(lambda a: a.reshape(num_heads, -1), lambda a: a.reshape(-1))
    return [
        Rule(f'{theirs}.weight', tuple(f'{ours}/{name}/kernel' for name in names), kernel),
        Rule(f'{theirs}.bias', tuple(f'{ours}/{name}/bias' for name in names), bias),
    ]


def torch_output(theirs: str, ours: str, *, num_heads: int) -> list[Rule]:
    """The projection of all heads back to the width."""
    kernel = Turn(
        lambda a: a.T.reshape(num_heads, -1, a.shape[0]),
        lambda a: a.reshape(-1, a.shape[-1]).T,
    )
    return torch_linear(theirs, ours, kernel)


def torch_backbone(convolution: str, root_norm: str, unit: str) -> list[Rule]:
    """A bottleneck ResNet of PyTorch: its root, and where {stage0} and {unit0} stand in a unit."""
    ours = 'backbone/stage{stage}/unit{unit}'
    rules = [
        Rule(f'{convolution}.weight', 'backbone/conv_root/kernel', CONVOLUTION),
        *torch_norm(root_norm, 'backbone/norm_root'),
        Rule(f'{unit}.downsample.conv.weight', f'{ours}/conv_proj/kernel', CONVOLUTION),
        *torch_norm(f'{unit}.downsample.norm', f'{ours}/norm_proj'),
    ]
    for index in ('1', '2', '3'):
        rules.append(Rule(f'{unit}.conv{index}.weight', f'{ours}/conv{index}/kernel', CONVOLUTION))
        rules += torch_norm(f'{unit}.norm{index}', f'{ours}/norm{index}')
    return rules


def expanded(
    rules: Iterable[Rule], config: ModelConfig, ours: Mapping[str, object], *, layout: str
) -> list[Entry]:
    """The entries that hold all of our arrays, each once.

    Raises UserError where the layout has no place for one of them.
    """
    depth = getattr(config, 'depth', 0)
    entries = [
        Entry(
            theirs=tuple(theirs.replace('{layer0}', str(i)) for i in range(depth))
            if '{layer0}' in theirs
            else (theirs,),
            ours=names,
            turn=turn,
            stacked='{layer0}' in theirs,
        )
        for rule in rules
        for theirs, names, turn in _units(rule, config)
        if set(names) <= set(ours)
    ]
    covered = list(itertools.chain.from_iterable(entry.ours for entry in entries))
    assert len(covered) == len(set(covered)), 'two rules for one array'
    homeless = [name for name in ours if name not in covered]
    if homeless:
        raise UserError(f'the {layout} layout has no place for {", ".join(homeless[:4])}')
    return entries


def check_names(
    entries: Iterable[Entry], stored: Mapping[str, Stored], ignored: str | None
) -> list[str]:
    """The names that are ignored, those that match the pattern.

    Raises UserError for arrays that are missing, and for any that nothing reads.
    """
    wanted = {name for entry in entries for name in entry.theirs}
    missing = sorted(wanted - set(stored))
    extra = sorted(set(stored) - wanted)
    skipped = [name for name in extra if ignored and re.fullmatch(ignored, name)]
    unknown = [name for name in extra if name not in skipped]
    if missing or unknown:
        said = [f'{len(missing)} arrays are missing: {_some(missing)}'] if missing else []
        said += [f'{len(unknown)} arrays are not known: {_some(unknown)}'] if unknown else []
        raise UserError('; '.join(said))
    return skipped


def read(
    entries: Iterable[Entry], stored: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Our arrays, in float32. Raises UserError for one whose shape does not fit."""
    arrays = {}
    for entry in entries:
        layers = [_parts(entry, name, stored[name], expected) for name in entry.theirs]
        for index, name in enumerate(entry.ours):
            parts = [layer[index] for layer in layers]
            arrays[name] = np.stack(parts) if entry.stacked else parts[0]
    return arrays


def write(entries: Iterable[Entry], ours: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their arrays: the inverse of `read`."""
    arrays = {}
    for entry in entries:
        for layer, name in enumerate(entry.theirs):
            parts = [np.asarray(ours[n])[layer] if entry.stacked else ours[n] for n in entry.ours]
            turned = [entry.turn.to_theirs(np.asarray(part)) for part in parts]
            arrays[name] = np.concatenate(turned) if len(turned) > 1 else turned[0]
    return arrays


def _parts(
    entry: Entry, name: str, stored: Stored, expected: Mapping[str, tuple[int, ...]]
) -> list[np.ndarray]:
    """One of their arrays as the ones of ours that it joins."""
    shapes = [expected[ours][1:] if entry.stacked else expected[ours] for ours in entry.ours]
    problem = UserError(
        f'{name} has the shape {stored.shape}, which does not become '
        + ' and '.join(f'{n} {s}' for n, s in zip(entry.ours, shapes, strict=True))
    )
    if not stored.shape or stored.shape[0] % len(shapes):
        raise problem
    array = stored.read()
    try:
        parts = [entry.turn.to_ours(part) for part in np.split(array, len(shapes))]
    except ValueError as error:
        raise problem from error
    if [part.shape for part in parts] != shapes:
        raise problem
    return [np.ascontiguousarray(part) for part in parts]


def _units(rule: Rule, config: ModelConfig) -> Iterable[tuple[str, tuple[str, ...], Turn]]:
    """The rule for each stage and unit of the backbone, where it speaks of them."""
    ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    if '{unit}' not in ours[0]:
        yield rule.theirs, ours, rule.turn
        return
    blocks = config.backbone.blocks if config.backbone else ()
    for stage, units in enumerate(blocks, 1):
        for unit in range(1, units + 1):
            numbers = {'stage': stage, 'unit': unit, 'stage0': stage - 1, 'unit0': unit - 1}
            theirs = rule.theirs
            for place, number in numbers.items():
                theirs = theirs.replace(f'{{{place}}}', str(number))
            yield theirs, tuple(n.format(**numbers) for n in ours), rule.turn


def _some(names: list[str]) -> str:
    return ', '.join(names[:4]) + (', ...' if len(names) > 4 else '')
