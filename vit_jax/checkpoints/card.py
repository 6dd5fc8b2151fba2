"""The card of a checkpoint: what belongs to its parameters, kept as JSON beside them.

A file of another system has no card. `Hints` are what it may not say of its network.
"""

import dataclasses
from typing import Any

import jax

from vit_jax.base import Array, Float, Record, records, require, require_between
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.models import Gelu, ResNetConfig, ViTConfig


@dataclasses.dataclass(kw_only=True)
class Card(Record):
    """What belongs to parameters: enough to use them without the experiment that made them."""

    step: int = 0
    model: ViTConfig | ResNetConfig
    grid: tuple[int, int]  # (height, width) in patches, or of a ResNet's last feature map
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    # Of the training: softmax, sigmoid, contrastive, regression (transformers'), MODULE:FUNCTION;
    # None: not known.
    loss: str | None = None
    software: dict[str, str] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """The grid is the model's, for readers that do not know the model; so are the classes."""
        require(self.grid == self.model.grid, f'grid={self.grid}: the model has {self.model.grid}')
        count, outputs = len(self.class_names), self.model.num_classes or 0
        right = f'expected one for each of the {outputs:,} outputs, or none'
        require(count in (0, outputs), f'class_names: got {count:,}; {right}')

    @property
    def projects(self) -> bool:
        """Is the head CLIP's projection, whose outputs are compared with those for texts?"""
        return self.loss == 'contrastive' and self.model.num_classes is not None

    @property
    def regresses(self) -> bool:
        """Whether the head is a regression: stated, or one output without a stated loss."""
        return self.loss == 'regression' or self.loss is None and self.model.num_classes == 1

    def probabilities(self, logits: Float[Array, '... k']) -> Float[Array, '... k']:
        """Of each class: the sigmoid where the network was trained so, else the softmax."""
        return jax.nn.sigmoid(logits) if self.loss == 'sigmoid' else jax.nn.softmax(logits)

    @staticmethod
    def read(values: dict[str, Any], *, where: str) -> 'Card':
        """The card of JSON values. Raises UserError that names what is wrong in it."""
        return records.from_dict(Card, values, where=where)


@dataclasses.dataclass(kw_only=True)
class Hints(Record):
    """What a file of another system may not say of itself. None: it does, or there is a rule."""

    grid: tuple[int, int] | None = None  # of the position embeddings, in patches (height, width)
    num_heads: int | None = None  # of attention
    gelu: Gelu | None = None  # tanh, its approximation; exact; quick: x sigmoid(1.702 x)
    layer_norm_epsilon: float | None = None  # added to the variance

    def check(self) -> None:
        require_between(self, 'grid', 'num_heads', low=1)
        require_between(self, 'layer_norm_epsilon', above=0, below=1)
