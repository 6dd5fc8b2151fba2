"""What a network computes. The only place that imports flax."""

from vit_jax.models.cost import multiply_adds, parameter_count
from vit_jax.models.variants import SIZES, variant
from vit_jax.models.vit import Compute, Model, Regularization, ViTConfig, build

__all__ = [
    'SIZES',
    'Compute',
    'Model',
    'Regularization',
    'ViTConfig',
    'build',
    'multiply_adds',
    'parameter_count',
    'variant',
]
