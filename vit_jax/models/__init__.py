"""What a network computes. The only place that imports flax."""

from vit_jax.models.cost import multiply_adds, parameter_count
from vit_jax.models.model import Model, ModelConfig, build, for_task
from vit_jax.models.options import Compute, Regularization
from vit_jax.models.resnet import Backbone, ResNetConfig
from vit_jax.models.variants import SIZES, variant
from vit_jax.models.vit import ViTConfig

__all__ = [
    'SIZES',
    'Backbone',
    'Compute',
    'Model',
    'ModelConfig',
    'Regularization',
    'ResNetConfig',
    'ViTConfig',
    'build',
    'for_task',
    'multiply_adds',
    'parameter_count',
    'variant',
]
