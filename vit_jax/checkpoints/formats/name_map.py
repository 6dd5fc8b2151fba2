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

which `resolve` gives the names of all blocks: blocks.0 to blocks.11. To read, each of their 12
arrays is split into 3, each part is transformed, and the parts of the 12 are stacked. To write, all
that is undone.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.base import UserError, require
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
NO_BATCH = ArrayTransform(lambda a: a[None], lambda a: a[0])  # tokens (n, d), ours (1, n, d)
VECTOR = ArrayTransform(lambda a: a[None, None], lambda a: a[0, 0])  # a token (d), ours (1, 1, d)
CONVOLUTION = ArrayTransform(lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))


class NameRule(NamedTuple):
    """Their array, and those of ours that it joins along its first axis.

    {layer0} in a name of theirs counts the blocks from 0; without it, their array is stacked over
    the blocks as ours is.
    """

    theirs: str
    ours: tuple[str, ...]
    transform: ArrayTransform = SAME

    @property
    def per_layer(self) -> bool:
        """Has theirs an array for each layer, which ours stacks?"""
        return '{layer0}' in self.theirs


# Rules for one network: the names of theirs, of all layers; none of arrays that are zero.
Resolved = Mapping[NameRule, list[str]]


def flax_module(theirs: str, ours: str, transform: ArrayTransform = SAME) -> list[NameRule]:
    """The same module under another name."""
    leaves = 'kernel', 'scale', 'bias'
    return [NameRule(f'{theirs}/{leaf}', (f'{ours}/{leaf}',), transform) for leaf in leaves]


def torch_module(
    theirs: str, *ours: str, num_heads: int = 1, separator: str = '.'
) -> list[NameRule]:
    """Weight and bias of a module of PyTorch, which may join several of ours.

    Between its name and theirs is the `separator`: `.weight`, or `_weight`. The last part of our
    name says the transform: query, key, value and out have heads, embedding and conv are
    convolutions, else it is a matrix. `resolve` drops leaves that a network lacks.
    """
    kernel, bias = TRANSPOSED, SAME
    name = ours[0].rpartition('/')[2]
    if name in ('query', 'key', 'value'):  # one matrix for all heads
        kernel = ArrayTransform(
            lambda a: a.T.reshape(a.shape[1], num_heads, -1), lambda a: a.reshape(a.shape[0], -1).T
        )
        bias = ArrayTransform(lambda a: a.reshape(num_heads, -1), lambda a: a.reshape(-1))
    elif name == 'out':  # of all heads, back to the width
        kernel = ArrayTransform(
            lambda a: a.T.reshape(num_heads, -1, a.shape[0]), lambda a: a.reshape(-1, a.shape[-1]).T
        )
    elif name == 'embedding' or name.startswith('conv'):
        kernel = CONVOLUTION
    leaves = ('weight', 'kernel', kernel), ('weight', 'scale', SAME), ('bias', 'bias', bias)
    return [
        NameRule(
            f'{theirs}{separator}{there}', tuple(f'{module}/{here}' for module in ours), transform
        )
        for there, here, transform in leaves
    ]


def torch_backbone(config: ModelConfig, conv: str, norm: str, unit: str) -> list[NameRule]:
    """A bottleneck ResNet of PyTorch: names of its root, and of unit {unit0} in stage {stage0}."""
    rules = torch_module(conv, 'backbone/conv_root') + torch_module(norm, 'backbone/norm_root')
    parts = {f'{kind}{i}': f'{kind}{i}' for i in (1, 2, 3) for kind in ('conv', 'norm')}
    parts |= {f'downsample.{kind}': f'{kind}_proj' for kind in ('conv', 'norm')}
    for stage, number in units(config):
        theirs = unit.format(stage0=stage - 1, unit0=number - 1)
        for there, here in parts.items():
            rules += torch_module(f'{theirs}.{there}', f'backbone/stage{stage}/unit{number}/{here}')
    return rules


def units(config: ModelConfig) -> list[tuple[int, int]]:
    """Stage and number, from 1, of every unit of the backbone."""
    stages = enumerate(config.backbone.blocks if config.backbone else (), 1)
    return [(stage, unit + 1) for stage, count in stages for unit in range(count)]


def resolve(
    rules: Iterable[NameRule],
    config: ModelConfig,
    ours: Iterable[str],
    *,
    format: str,
    zeros: Collection[str],
) -> Resolved:
    """The rules that hold all of our arrays, each once; `zeros` are names of theirs without array.

    Raises UserError where the format has no place for one of them.
    """
    ours = set(ours)
    chosen = [rule for rule in rules if ours.issuperset(rule.ours)]
    if homeless := sorted(ours.difference(*(rule.ours for rule in chosen))):
        raise UserError(f'the {format} layout has no place for {", ".join(homeless[:4])}')
    resolved = {}
    for rule in chosen:
        layers = range(getattr(config, 'depth', 0) if rule.per_layer else 1)
        names = [rule.theirs.replace('{layer0}', str(i)) for i in layers]
        resolved[rule] = [] if rule.theirs in zeros else names
    return resolved


def check_names(rules: Resolved, stored: Mapping[str, LazyArray], ignored: str | None) -> list[str]:
    """The names in the file that no rule reads, but the pattern `ignored` matches.

    Raises UserError for arrays that are missing, and for others that no rule reads.
    """
    wanted = {name for names in rules.values() for name in names}
    extra = sorted(set(stored) - wanted)
    skipped = [name for name in extra if ignored and re.fullmatch(ignored, name)]
    unknown = sorted({*extra} - {*skipped})
    found = (sorted(wanted - set(stored)), 'missing'), (unknown, 'not known')
    problems = [f'{len(n)} arrays are {what}: {", ".join(n[:4])}' for n, what in found if n]
    require(not problems, '; '.join(problems))
    return skipped


def to_ours(
    rules: Resolved, stored: Mapping[str, LazyArray], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Our arrays, in float32; `shapes` are their shapes."""
    arrays: dict[str, np.ndarray] = {}
    for rule, theirs in rules.items():
        if not theirs:
            arrays |= {name: np.zeros(shapes[name], np.float32) for name in rule.ours}
            continue
        layers = [_split(rule, stored[name].read()) for name in theirs]
        for index, name in enumerate(rule.ours):
            parts = [layer[index] for layer in layers]
            arrays[name] = np.stack(parts) if rule.per_layer else parts[0]
    return arrays


def to_theirs(rules: Resolved, ours: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their arrays: the inverse of `to_ours`."""
    arrays = {}
    for rule, theirs in rules.items():
        for layer, name in enumerate(theirs):
            parts = [ours[n][layer] if rule.per_layer else ours[n] for n in rule.ours]
            arrays[name] = np.concatenate([rule.transform.to_theirs(part) for part in parts])
    return arrays


def _split(rule: NameRule, array: np.ndarray) -> list[np.ndarray]:
    """Splits one of their arrays into the arrays of ours that it joins."""
    parts = np.split(array, len(rule.ours))
    return [np.ascontiguousarray(rule.transform.to_ours(part)) for part in parts]
