"""Name maps: where each of our arrays is in another layout, used in both directions.

A map is a list of rules. timm, for example, has one matrix for the queries, keys and values of all
heads of one block, `blocks.0.attn.qkv.weight` of (3 * width, width); we have a kernel of each,
stacked over the blocks: `encoder/block/attention/query/kernel` of (depth, width, heads, width /
heads), and so on. That is the rule

    NameRule(
        'blocks.{layer0}.attn.qkv.weight',
        ('encoder/block/attention/query/kernel', ...key/kernel, ...value/kernel),
        ArrayTransform(to_ours=transposed and split into heads, to_theirs=the inverse),
    )

which `resolve` makes a ResolvedRule of, with the names of all blocks: blocks.0 to blocks.11. To
read, each of their 12 arrays is split into 3, each part is transformed, and the parts of the 12 are
stacked. To write, all that is undone.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.base.errors import UserError
from vit_jax.checkpoints.formats.array_files import LazyArray
from vit_jax.models import ModelConfig


class ArrayTransform(NamedTuple):
    """How one array (of one layer) becomes ours, and the inverse."""

    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


SAME = ArrayTransform(lambda a: a, lambda a: a)
TRANSPOSED = ArrayTransform(lambda a: a.T, lambda a: a.T)
# Positions without a row for the class token: ours is then zero.
NO_CLASS_ROW = ArrayTransform(
    lambda a: np.concatenate([np.zeros_like(a[:, :1]), a], axis=1), lambda a: a[:, 1:]
)
CONVOLUTION = ArrayTransform(lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))


class NameRule(NamedTuple):
    """Their array, and ours: several names where theirs joins them along its first axis.

    {stage} and {unit} in names count from 1, {layer0}, {stage0} and {unit0} from 0. A name of
    theirs without {layer0} is of an array that is stacked over the layers as ours is.
    """

    theirs: str
    ours: str | tuple[str, ...]
    transform: ArrayTransform = SAME


class ResolvedRule(NamedTuple):
    """A rule for one network: `theirs` are the names of all layers."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transform: ArrayTransform
    per_layer: bool  # theirs has an array for each layer, which ours stacks


def dense(theirs: str, ours: str) -> list[NameRule]:
    """The same kernel and bias under another name."""
    return [NameRule(f'{theirs}/{leaf}', f'{ours}/{leaf}') for leaf in ('kernel', 'bias')]


def norm(theirs: str, ours: str, transform: ArrayTransform = SAME) -> list[NameRule]:
    """The same scale and bias under another name."""
    return [NameRule(f'{theirs}/{leaf}', f'{ours}/{leaf}', transform) for leaf in ('scale', 'bias')]


def torch_linear(theirs: str, ours: str, transform: ArrayTransform = TRANSPOSED) -> list[NameRule]:
    """A layer of PyTorch: `weight` and `bias`."""
    return [
        NameRule(f'{theirs}.weight', f'{ours}/kernel', transform),
        NameRule(f'{theirs}.bias', f'{ours}/bias'),
    ]


def torch_norm(theirs: str, ours: str) -> list[NameRule]:
    """A norm of PyTorch: `weight` and `bias`."""
    names = {'weight': 'scale', 'bias': 'bias'}
    return [NameRule(f'{theirs}.{there}', f'{ours}/{here}') for there, here in names.items()]


def torch_projections(
    theirs: str, ours: str, names: tuple[str, ...], *, num_heads: int
) -> list[NameRule]:
    """Projections to heads that PyTorch keeps as one matrix of all heads, and of all `names`."""
    kernel = ArrayTransform(
        lambda a: a.T.reshape(a.shape[1], num_heads, -1), lambda a: a.reshape(a.shape[0], -1).T
    )
    bias = ArrayTransform(lambda a: a.reshape(num_heads, -1), lambda a: a.reshape(-1))
    return [
        NameRule(f'{theirs}.weight', tuple(f'{ours}/{name}/kernel' for name in names), kernel),
        NameRule(f'{theirs}.bias', tuple(f'{ours}/{name}/bias' for name in names), bias),
    ]


def torch_output(theirs: str, ours: str, *, num_heads: int) -> list[NameRule]:
    """The projection of all heads back to the width."""
    kernel = ArrayTransform(
        lambda a: a.T.reshape(num_heads, -1, a.shape[0]),
        lambda a: a.reshape(-1, a.shape[-1]).T,
    )
    return torch_linear(theirs, ours, kernel)


def torch_backbone(convolution: str, root_norm: str, unit: str) -> list[NameRule]:
    """A bottleneck ResNet of PyTorch; `unit` is the name of a unit, with {stage0} and {unit0}."""
    ours = 'backbone/stage{stage}/unit{unit}'
    rules = [
        NameRule(f'{convolution}.weight', 'backbone/conv_root/kernel', CONVOLUTION),
        *torch_norm(root_norm, 'backbone/norm_root'),
        NameRule(f'{unit}.downsample.conv.weight', f'{ours}/conv_proj/kernel', CONVOLUTION),
        *torch_norm(f'{unit}.downsample.norm', f'{ours}/norm_proj'),
    ]
    for i in (1, 2, 3):
        rules.append(NameRule(f'{unit}.conv{i}.weight', f'{ours}/conv{i}/kernel', CONVOLUTION))
        rules += torch_norm(f'{unit}.norm{i}', f'{ours}/norm{i}')
    return rules


def resolve(
    rules: Iterable[NameRule], config: ModelConfig, ours: Iterable[str], *, format: str
) -> list[ResolvedRule]:
    """The rules that hold all of our arrays, each once.

    Raises UserError where the format has no place for one of them.
    """
    ours = set(ours)
    layers = range(getattr(config, 'depth', 0))
    resolved = []
    for theirs, names, transform in (each for rule in rules for each in _units(rule, config)):
        if set(names) <= ours:
            per_layer = '{layer0}' in theirs
            each = [theirs.replace('{layer0}', str(i)) for i in layers] if per_layer else [theirs]
            resolved.append(ResolvedRule(tuple(each), names, transform, per_layer))
    covered = [name for rule in resolved for name in rule.ours]
    assert len(covered) == len(set(covered)), 'two rules for one array'
    if homeless := sorted(ours - set(covered)):
        raise UserError(f'the {format} layout has no place for {", ".join(homeless[:4])}')
    return resolved


def check_names(
    rules: Iterable[ResolvedRule], stored: Mapping[str, LazyArray], ignored: str | None
) -> list[str]:
    """The names in the file that no rule reads, but the pattern `ignored` matches.

    Raises UserError for arrays that are missing, and for others that no rule reads.
    """
    wanted = {name for rule in rules for name in rule.theirs}
    extra = sorted(set(stored) - wanted)
    skipped = [name for name in extra if ignored and re.fullmatch(ignored, name)]
    unknown = [name for name in extra if name not in skipped]
    problems = {'missing': sorted(wanted - set(stored)), 'not known': unknown}
    if lines := [f'{len(n)} arrays are {what}: {_some(n)}' for what, n in problems.items() if n]:
        raise UserError('; '.join(lines))
    return skipped


def to_ours(
    rules: Iterable[ResolvedRule],
    stored: Mapping[str, LazyArray],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, np.ndarray]:
    """Our arrays, in float32. Raises UserError for one that does not get its shape in `shapes`."""
    arrays = {}
    for rule in rules:
        layers = [_parts(rule, name, stored[name], shapes) for name in rule.theirs]
        for index, name in enumerate(rule.ours):
            parts = [layer[index] for layer in layers]
            arrays[name] = np.stack(parts) if rule.per_layer else parts[0]
    return arrays


def to_theirs(
    rules: Iterable[ResolvedRule], ours: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Their arrays: the inverse of `to_ours`."""
    arrays = {}
    for rule in rules:
        for layer, name in enumerate(rule.theirs):
            parts = [ours[n][layer] if rule.per_layer else ours[n] for n in rule.ours]
            arrays[name] = np.concatenate([rule.transform.to_theirs(part) for part in parts])
    return arrays


def _parts(
    rule: ResolvedRule, name: str, stored: LazyArray, expected: Mapping[str, tuple[int, ...]]
) -> list[np.ndarray]:
    """One of their arrays, split into those of ours that it joins."""
    shapes = [expected[ours][1:] if rule.per_layer else expected[ours] for ours in rule.ours]
    problem = UserError(
        f'{name} has the shape {stored.shape}, which does not become '
        + ' and '.join(f'{n} {s}' for n, s in zip(rule.ours, shapes, strict=True))
    )
    if not stored.shape or stored.shape[0] % len(shapes):
        raise problem
    array = stored.read()
    try:
        parts = [rule.transform.to_ours(part) for part in np.split(array, len(shapes))]
    except ValueError as error:
        raise problem from error
    if [part.shape for part in parts] != shapes:
        raise problem
    return [np.ascontiguousarray(part) for part in parts]


def _units(
    rule: NameRule, config: ModelConfig
) -> Iterable[tuple[str, tuple[str, ...], ArrayTransform]]:
    """The rule once, or for each stage and unit of the backbone where it names those."""
    ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    if '{unit}' not in ours[0]:
        yield rule.theirs, ours, rule.transform
        return
    blocks = config.backbone.blocks if config.backbone else ()
    for stage, units in enumerate(blocks, 1):
        for unit in range(1, units + 1):
            numbers = {'stage': stage, 'unit': unit, 'stage0': stage - 1, 'unit0': unit - 1}
            theirs = rule.theirs.format(**numbers, layer0='{layer0}')
            yield theirs, tuple(n.format(**numbers) for n in ours), rule.transform


def _some(names: list[str]) -> str:
    return ', '.join(names[:4]) + (', ...' if len(names) > 4 else '')
