"""Name maps: convert arrays between our parameters and another layout, in both directions.

A map is a list of rules. For example, timm stores the queries, keys and values of all heads of a
block in one matrix, `blocks.0.attn.qkv.weight` of shape (3 * width, width). Our model has a kernel
for each, stacked over the blocks, such as `encoder/block/attention/query/kernel` of shape (depth,
width, heads, width / heads). The rule is:

    NameRule(
        'blocks.{layer0}.attn.qkv.weight',
        ('encoder/block/attention/query/kernel', ...key/kernel, ...value/kernel),
        ArrayTransform(to_ours=transposed and split into heads, to_theirs=the inverse),
    )

`resolve` expands {layer0} to the numbers of all blocks, 0 to 11. To read, each of the 12 arrays is
split into 3, each part is transformed, and the parts of the 12 blocks are stacked. Writing inverts
these steps. "Theirs" are the arrays in a file, "ours" are the parameters of the model.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import UserError, require
from vit_jax.checkpoints.formats.array_files import LazyArray
from vit_jax.models import ModelConfig


class ArrayTransform(NamedTuple):
    """Converts an array, or one block's part of a stacked array, between a file and the model."""

    to_ours: Callable[[np.ndarray], np.ndarray]  # from the file to the model
    to_theirs: Callable[[np.ndarray], np.ndarray]  # the inverse


SAME = ArrayTransform(lambda a: a, lambda a: a)
TRANSPOSED = ArrayTransform(lambda a: a.T, lambda a: a.T)
# Position embeddings without a row for the class token; ours gets a row of zeros.
NO_CLASS_ROW = ArrayTransform(
    lambda a: np.concatenate([np.zeros_like(a[:, :1]), a], axis=1), lambda a: a[:, 1:]
)
NO_BATCH = ArrayTransform(lambda a: a[None], lambda a: a[0])  # (n, d); ours (1, n, d)
VECTOR = ArrayTransform(lambda a: a[None, None], lambda a: a[0, 0])  # (d,); ours (1, 1, d)
CONVOLUTION = ArrayTransform(lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))


class NameRule(NamedTuple):
    """Maps an array in a file to the parameters that it concatenates along its first axis.

    If `theirs` contains {layer0}, the number of a block from 0, the file has one array per block.
    Otherwise the array is stacked over the blocks like our parameters, or belongs to no block.
    """

    theirs: str  # name of the array in the file
    ours: tuple[str, ...]  # names of the parameters
    transform: ArrayTransform = SAME

    @property
    def per_layer(self) -> bool:
        """Whether the file has one array per block, which our parameters stack."""
        return '{layer0}' in self.theirs

    def shape_in_file(self, parameters: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the shape of the array in the file; if `per_layer`, of each block's array.

        Args:
          parameters: Our parameters by name, which may be abstract.
        """
        shapes = []
        for name in self.ours:
            shape = parameters[name].shape
            if self.per_layer:
                shape = shape[1:]
            parameter = jax.ShapeDtypeStruct(shape, parameters[name].dtype)
            shapes.append(jax.eval_shape(self.transform.to_theirs, parameter).shape)
        if not shapes[0]:  # a scalar, which is not concatenated
            return ()
        length = sum(shape[0] for shape in shapes)
        return (length, *shapes[0][1:])


# The names in the file for each rule, one per block; empty if the file leaves out arrays of zeros.
Resolved = Mapping[NameRule, list[str]]


def flax_module(theirs: str, ours: str, transform: ArrayTransform = SAME) -> list[NameRule]:
    """Returns rules for a Flax module that has another name."""
    leaves = 'kernel', 'scale', 'bias'
    return [NameRule(f'{theirs}/{leaf}', (f'{ours}/{leaf}',), transform) for leaf in leaves]


def torch_module(
    theirs: str, *ours: str, num_heads: int = 1, separator: str = '.'
) -> list[NameRule]:
    """Returns rules for weight and bias of a PyTorch module, which may concatenate several of ours.

    The last part of our name determines the transform: query, key, value and out have heads;
    embedding and conv are convolutions; all others are matrices or norms. `resolve` drops rules for
    arrays that a model does not have.

    Args:
      theirs: Name of the PyTorch module.
      *ours: Names of our modules.
      num_heads: Number of attention heads.
      separator: Characters between the module and `weight` or `bias`.
    """
    kernel = TRANSPOSED
    bias = SAME
    name = ours[0].rpartition('/')[2]
    if name in ('query', 'key', 'value'):  # one matrix for all heads
        kernel = ArrayTransform(
            lambda a: a.T.reshape(a.shape[1], num_heads, -1), lambda a: a.reshape(a.shape[0], -1).T
        )
        bias = ArrayTransform(lambda a: a.reshape(num_heads, -1), lambda a: a.reshape(-1))
    elif name == 'out':  # projects all heads to the width
        kernel = ArrayTransform(
            lambda a: a.T.reshape(num_heads, -1, a.shape[0]), lambda a: a.reshape(-1, a.shape[-1]).T
        )
    elif name == 'embedding' or name.startswith('conv'):
        kernel = CONVOLUTION
    leaves = ('weight', 'kernel', kernel), ('weight', 'scale', SAME), ('bias', 'bias', bias)
    return [
        NameRule(
            f'{theirs}{separator}{leaf}', tuple(f'{module}/{flax}' for module in ours), transform
        )
        for leaf, flax, transform in leaves
    ]


def torch_backbone(config: ModelConfig, conv: str, norm: str, unit: str) -> list[NameRule]:
    """Returns rules for a bottleneck ResNet of PyTorch.

    Args:
      config: The model.
      conv: Name of the first convolution.
      norm: Name of the first norm.
      unit: Name of unit {unit0} in stage {stage0}.
    """
    rules = torch_module(conv, 'backbone/conv_root') + torch_module(norm, 'backbone/norm_root')
    modules = {f'{kind}{i}': f'{kind}{i}' for i in (1, 2, 3) for kind in ('conv', 'norm')}
    modules |= {f'downsample.{kind}': f'{kind}_proj' for kind in ('conv', 'norm')}
    for stage, number in units(config):
        their_unit = unit.format(stage0=stage - 1, unit0=number - 1)
        our_unit = f'backbone/stage{stage}/unit{number}'
        for theirs, ours in modules.items():
            rules += torch_module(f'{their_unit}.{theirs}', f'{our_unit}/{ours}')
    return rules


def units(config: ModelConfig) -> list[tuple[int, int]]:
    """Lists stage and number, both from 1, of every unit of the backbone."""
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
    """Selects the rules for the arrays of a model, and expands their names.

    Args:
      rules: All rules of the format.
      config: The model.
      ours: Names of all parameters of the model.
      format: Name of the format, for errors.
      zeros: Their names of arrays that the file leaves out because they are zero.

    Raises:
      UserError: If the format has no array for a parameter.
    """
    ours = set(ours)
    chosen = [rule for rule in rules if ours.issuperset(rule.ours)]
    if unmapped := sorted(ours.difference(*(rule.ours for rule in chosen))):
        raise UserError(f'the {format} format has no array for {", ".join(unmapped[:4])}')
    resolved = {}
    for rule in chosen:
        layers = range(getattr(config, 'depth', 0) if rule.per_layer else 1)
        names = [rule.theirs.replace('{layer0}', str(i)) for i in layers]
        resolved[rule] = [] if rule.theirs in zeros else names
    return resolved


def check_names(rules: Resolved, stored: Mapping[str, LazyArray], ignored: str | None) -> list[str]:
    """Compares the names in a file with the rules.

    Returns:
      Names that no rule reads and that the regular expression `ignored` matches.

    Raises:
      UserError: If arrays are missing, or are neither read by a rule nor ignored.
    """
    expected = {name for names in rules.values() for name in names}
    extra = sorted(set(stored) - expected)
    skipped = [name for name in extra if ignored and re.fullmatch(ignored, name)]
    unknown = sorted({*extra} - {*skipped})
    missing = sorted(expected - set(stored))
    problems = [
        f'{len(names)} arrays are {state}: {", ".join(names[:4])}'
        for state, names in {'missing': missing, 'unknown': unknown}.items()
        if names
    ]
    require(not problems, '; '.join(problems))
    return skipped


def to_ours(
    rules: Resolved, stored: Mapping[str, LazyArray], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Reads our arrays as float32; `shapes` are their shapes by name."""
    arrays: dict[str, np.ndarray] = {}
    for rule, theirs in rules.items():
        if not theirs:
            arrays |= {name: np.zeros(shapes[name], np.float32) for name in rule.ours}
            continue
        layers = [_split(rule, stored[name].read()) for name in theirs]
        for index, name in enumerate(rule.ours):
            of_layers = [layer[index] for layer in layers]
            arrays[name] = np.stack(of_layers) if rule.per_layer else of_layers[0]
    return arrays


def to_theirs(rules: Resolved, ours: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts our arrays to theirs; the inverse of `to_ours`."""
    arrays = {}
    for rule, theirs in rules.items():
        for layer, name in enumerate(theirs):
            parameters = [ours[n][layer] if rule.per_layer else ours[n] for n in rule.ours]
            arrays[name] = np.concatenate([rule.transform.to_theirs(p) for p in parameters])
    return arrays


def _split(rule: NameRule, array: np.ndarray) -> list[np.ndarray]:
    """Splits one of their arrays into the arrays of ours that it concatenates."""
    parts = np.split(array, len(rule.ours))
    return [np.ascontiguousarray(rule.transform.to_ours(part)) for part in parts]
