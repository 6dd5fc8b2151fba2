"""The card of a checkpoint: what belongs to its parameters, as JSON next to them.

A file of another system has no card. `Hints` are what such a file may not say of its model.
"""

import dataclasses

import jax

from vit_jax.base import Array, Float, Record, require, require_between
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.models import Gelu, ResNetConfig, ViTConfig


@dataclasses.dataclass(kw_only=True)
class Card(Record):
    """Everything that is needed to use the parameters without their experiment."""

    step: int = 0
    model: ViTConfig | ResNetConfig
    grid: tuple[int, int]  # (height, width) in patches, or of a ResNet's last feature map
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    # The loss of the training: softmax, sigmoid, contrastive, regression (transformers) or
    # MODULE:FUNCTION; None: not known.
    loss: str | None = None
    software: dict[str, str] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Checks the grid, which is stated for readers that do not know the model, and classes."""
        require(self.grid == self.model.grid, f'grid={self.grid}: the model has {self.model.grid}')
        count, outputs = len(self.class_names), self.model.num_classes or 0
        right = f'expected one for each of the {outputs:,} outputs, or none'
        require(count in (0, outputs), f'class_names: got {count:,}; {right}')

    @property
    def projects(self) -> bool:
        """Whether the head is CLIP's projection, whose outputs are compared with text outputs."""
        return self.loss == 'contrastive' and self.model.num_classes is not None

    @property
    def is_regression(self) -> bool:
        """Whether the head is a regression: stated, or one output without a stated loss."""
        return self.loss == 'regression' or self.loss is None and self.model.num_classes == 1

    def probabilities(self, logits: Float[Array, '... k']) -> Float[Array, '... k']:
        """Returns the sigmoid of the logits if the training used it, else their softmax."""
        return jax.nn.sigmoid(logits) if self.loss == 'sigmoid' else jax.nn.softmax(logits)


@dataclasses.dataclass(kw_only=True)
class Hints(Record):
    """What a file of another system may not say of its model. None: it does, or a rule does."""

    grid: tuple[int, int] | None = None  # of the position embeddings, in patches (height, width)
    num_heads: int | None = None  # of attention
    gelu: Gelu | None = None  # tanh, its approximation; exact; quick: x sigmoid(1.702 x)
    layer_norm_epsilon: float | None = None  # added to the variance

    def check(self) -> None:
        require_between(self, 'grid', 'num_heads', low=1)
        require_between(self, 'layer_norm_epsilon', above=0, below=1)
