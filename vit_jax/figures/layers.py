"""The layers of a network in the order of the computation, as the figures name and count them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.base import Array
from vit_jax.models import Backbone, ModelConfig, ResNetConfig
from vit_jax.models.taps import Reduction

_BLOCK = 'norm1', 'attention/out', 'norm2', 'mlp/hidden', 'mlp/out', 'tokens'
_UNIT = 'conv1', 'norm1', 'conv2', 'norm2', 'conv3', 'norm3', 'out'


class Layer(NamedTuple):
    """One array of a network: the name of a tap, and the block if each block has one."""

    tap: str
    block: int | None = None

    def __str__(self) -> str:
        if self.block is None:
            return self.tap
        return f'block{self.block}/{self.tap.replace("/", " ")}'


def all_layers(config: ModelConfig) -> list[Layer]:
    """Returns norms, branches, hidden layers and sums, as in Raghu et al.: 74 of ViT-B/16."""
    found = []
    if config.backbone is not None:
        found = [Layer(tap) for tap in ('conv_root', 'norm_root', 'root')]
        found += [Layer(f'{unit}/{part}') for unit in units(config.backbone) for part in _UNIT]
    if isinstance(config, ResNetConfig):
        return found
    found.append(Layer('embedding'))
    taps = [tap for tap in _BLOCK if not (config.parallel and tap == 'norm2')]
    found += [Layer(tap, block) for block in range(config.depth) for tap in taps]
    return found + ([Layer('norm')] if config.final_norm == 'before_pool' else [])


def outputs(config: ModelConfig) -> list[Layer]:
    """Returns the embedding and the output of each block, or the root and each unit."""
    if isinstance(config, ResNetConfig):
        return [Layer('root'), *(Layer(f'{unit}/out') for unit in units(config.backbone))]
    return [Layer('embedding'), *(Layer('tokens', block) for block in range(config.depth))]


def units(backbone: Backbone) -> list[str]:
    """Returns the names of all units of a ResNet."""
    counts = enumerate(backbone.blocks, start=1)
    return [f'stage{s}/unit{unit}' for s, count in counts for unit in range(1, count + 1)]


def same_reduction(layers: Sequence[Layer], reduction: Reduction) -> dict[str, Reduction]:
    """Returns the argument of `Model.capture` that reduces all these layers in the same way."""
    return dict.fromkeys((layer.tap for layer in layers), reduction)


def select(captured: dict[str, Any], layers: Sequence[Layer]) -> list[Any]:
    """Returns what was captured of each of these layers."""

    def of_block(value: Any, block: int | None) -> Any:
        return value if block is None else jax.tree.map(lambda x: x[block], value)

    return [of_block(captured[tap], block) for tap, block in layers]


def stack(captured: dict[str, Any], layers: Sequence[Layer]) -> Array:
    """Returns the captured arrays of t layers, of equal shape, as (t ...)."""
    return jnp.stack(select(captured, layers))
