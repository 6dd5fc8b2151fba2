"""Lists the layers of a model in the order of computation, with their names in the figures."""

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
    """An intermediate array of a model."""

    tap: str  # its name for `Model.capture`
    block: int | None = None  # index of the block; None: not in a block

    def __str__(self) -> str:
        if self.block is None:
            return self.tap
        return f'block{self.block}/{self.tap.replace("/", " ")}'


def all_layers(config: ModelConfig) -> list[Layer]:
    """Lists norms, branches, hidden layers and sums, as in Raghu et al. (74 in ViT-B/16)."""
    layers = []
    if config.backbone is not None:
        layers = [Layer(tap) for tap in ('conv_root', 'norm_root', 'root')]
        layers += [Layer(f'{unit}/{tap}') for unit in units(config.backbone) for tap in _UNIT]
    if isinstance(config, ResNetConfig):
        return layers
    layers.append(Layer('embedding'))
    taps = [tap for tap in _BLOCK if not (config.parallel and tap == 'norm2')]
    layers += [Layer(tap, block) for block in range(config.depth) for tap in taps]
    if config.final_norm == 'before_pool':
        layers.append(Layer('norm'))
    return layers


def output_layers(config: ModelConfig) -> list[Layer]:
    """Lists the embedding and the block outputs of a ViT, or the root and the units of a ResNet."""
    if isinstance(config, ResNetConfig):
        return [Layer('root'), *(Layer(f'{unit}/out') for unit in units(config.backbone))]
    return [Layer('embedding'), *(Layer('tokens', block) for block in range(config.depth))]


def units(backbone: Backbone) -> list[str]:
    """Lists the names of the units of a ResNet."""
    return [
        f'stage{stage}/unit{unit}'
        for stage, count in enumerate(backbone.blocks, start=1)
        for unit in range(1, count + 1)
    ]


def same_reduction(layers: Sequence[Layer], reduction: Reduction) -> dict[str, Reduction]:
    """Returns the argument of `Model.capture` that applies one reduction to all layers."""
    return dict.fromkeys((layer.tap for layer in layers), reduction)


def select_layers(captured: dict[str, Any], layers: Sequence[Layer]) -> list[Any]:
    """Returns the captured value of each layer."""

    def of_block(value: Any, block: int | None) -> Any:
        return value if block is None else jax.tree.map(lambda x: x[block], value)

    return [of_block(captured[tap], block) for tap, block in layers]


def stack_layers(captured: dict[str, Any], layers: Sequence[Layer]) -> Array:
    """Stacks the captured arrays of t layers, which have equal shapes, to (t ...)."""
    return jnp.stack(select_layers(captured, layers))
