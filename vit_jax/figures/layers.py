"""The layers of a network in the order of the computation, as the figures name and count them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Batch, Bool
from vit_jax.figures.networks import Network, Study
from vit_jax.models import Backbone, ModelConfig, ResNetConfig, ViTConfig
from vit_jax.models.taps import Reduction


class Layer(NamedTuple):
    """One array of a network: a tap, and of which block where it has one for each."""

    tap: str
    block: int | None = None

    def __str__(self) -> str:
        if self.block is None:
            return self.tap
        return f'block{self.block}/{self.tap.replace("/", " ")}'


_BLOCK = 'norm1', 'attention/out', 'norm2', 'mlp/hidden', 'mlp/out', 'tokens'
_UNIT = 'conv1', 'norm1', 'conv2', 'norm2', 'conv3', 'norm3', 'out'


def every(config: ModelConfig) -> list[Layer]:
    """Norms, branches, hidden layers and sums, as Raghu et al. compare them: 74 of ViT-B/16."""
    backbone = [] if config.backbone is None else _backbone(config.backbone, _UNIT)
    if isinstance(config, ResNetConfig):
        return backbone
    found = [*backbone, Layer('embedding')]
    taps = [tap for tap in _BLOCK if not (config.parallel and tap == 'norm2')]  # one norm of both
    found += [Layer(tap, block) for block in range(config.depth) for tap in taps]
    return found + ([Layer('norm')] if config.final_norm == 'before_pool' else [])


def sums(config: ModelConfig) -> list[Layer]:
    """The outputs alone: the embedding and each block, or the root and each unit."""
    if isinstance(config, ResNetConfig):
        return [layer for layer in _backbone(config.backbone, ('out',)) if '_' not in layer.tap]
    return [Layer('embedding'), *(Layer('tokens', block) for block in range(config.depth))]


def units(backbone: Backbone) -> list[str]:
    """The names of all units of a ResNet."""
    counts = enumerate(backbone.blocks, start=1)
    return [f'stage{s}/unit{unit}' for s, count in counts for unit in range(1, count + 1)]


def _backbone(backbone: Backbone, parts: Sequence[str]) -> list[Layer]:
    root = [Layer(tap) for tap in ('conv_root', 'norm_root', 'root')]
    return root + [Layer(f'{unit}/{part}') for unit in units(backbone) for part in parts]


def wanted(layers: Sequence[Layer], reduction: Reduction) -> dict[str, Reduction]:
    """What to ask of `Model.capture` for the same reduction of all these layers."""
    return dict.fromkeys((layer.tap for layer in layers), reduction)


def stacked(seen: dict[str, Any], layers: Sequence[Layer]) -> Array:
    """(t ...), the reductions of t layers, which are arrays of one shape."""
    return jnp.stack([seen[tap] if block is None else seen[tap][block] for tap, block in layers])


def first_not_finite(study: Study, network: Network) -> Layer | None:
    """Where NaN or infinity first appears in the first batch that has some, if one has.

    One that has some has it in its last layer too, as sums pass it on: that, and what is behind
    it, are looked at in all batches.
    """
    config = network.loaded.config
    is_pooled = isinstance(config, ViTConfig) and config.pool == 'map'
    behind = [Layer(tap) for tap in ('pool/attention/heads', 'pool/mlp/hidden') if is_pooled]
    layers = [*every(config), *behind]

    def finite(looked_at: Sequence[Layer]) -> Callable[[Batch], Bool[np.ndarray, 't']]:
        seen = network.seen(wanted(looked_at, lambda x: jnp.isfinite(x).all()))
        return lambda batch: np.asarray(stacked(seen(batch), looked_at))

    last, each = finite(layers[-1 - len(behind) :]), finite(layers)
    wrong = next((batch for batch in study.batches(network) if not last(batch).all()), None)
    return None if wrong is None else layers[int(each(wrong).argmin())]
