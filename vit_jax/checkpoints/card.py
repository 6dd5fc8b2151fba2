"""The card of a checkpoint: its metadata, stored as JSON next to the parameters.

Files of other libraries have no card. `Hints` supplies values that such a file may leave open.
"""

import dataclasses
import platform
from importlib import metadata

import jax

from vit_jax.base import Array, Float, Record, require, require_between
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.models import Gelu, ResNetConfig, ViTConfig

_PACKAGES = 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy'


@dataclasses.dataclass(kw_only=True)
class Card(Record):
    """Metadata that is needed to use the parameters without their experiment."""

    step: int = 0
    model: ViTConfig | ResNetConfig
    grid: tuple[int, int]  # (height, width) in patches; size of a ResNet's last feature map
    preprocessing: Preprocessing
    class_names: tuple[str, ...] = ()
    # The training loss: softmax, sigmoid, contrastive, regression (transformers) or
    # MODULE:FUNCTION; None: unknown.
    loss: str | None = None
    # Versions of the packages that trained the model, by name.
    software: dict[str, str] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Checks the class names and the grid, which serves readers that cannot build the model."""
        require(self.grid == self.model.grid, f'grid={self.grid}: expected {self.model.grid}')
        num_names = len(self.class_names)
        num_outputs = self.model.num_classes or 0
        require(
            num_names in (0, num_outputs),
            f'class_names: got {num_names:,} names; '
            f'expected one for each of the {num_outputs:,} outputs, or none',
        )

    @property
    def is_projection(self) -> bool:
        """Whether the head is CLIP's projection into the space of text embeddings."""
        return self.loss == 'contrastive' and self.model.num_classes is not None

    @property
    def is_regression(self) -> bool:
        """Whether the loss is regression, or is unknown and the head has one output."""
        return self.loss == 'regression' or self.loss is None and self.model.num_classes == 1

    def probabilities(self, logits: Float[Array, '... k']) -> Float[Array, '... k']:
        """Returns the sigmoid of the logits if the loss was sigmoid, else their softmax."""
        return jax.nn.sigmoid(logits) if self.loss == 'sigmoid' else jax.nn.softmax(logits)


@dataclasses.dataclass(kw_only=True)
class Hints(Record):
    """Values that a checkpoint of another library may leave open; None: taken from the file."""

    grid: tuple[int, int] | None = None  # (height, width) of the position embeddings, in patches
    num_heads: int | None = None  # number of attention heads
    gelu: Gelu | None = None  # exact, tanh (its approximation) or quick: x sigmoid(1.702 x)
    layer_norm_epsilon: float | None = None  # added to the variance in layer norms

    def check(self) -> None:
        require_between(self, 'grid', 'num_heads', low=1)
        require_between(self, 'layer_norm_epsilon', above=0, below=1)


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect results."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {'python': platform.python_version()} | versions
