"""What a network computes. The only place that imports flax."""

from vit_jax.models.flops import multiply_adds, parameter_count
from vit_jax.models.layers import Gelu, has_trained_head, head_params
from vit_jax.models.masked_patches import Corruption
from vit_jax.models.model import Model, ModelConfig, build, for_task, headless, with_exact_products
from vit_jax.models.options import Compute, Regularization, Remat
from vit_jax.models.resnet import Backbone, ResNetConfig
from vit_jax.models.variants import SIZES, variant
from vit_jax.models.vit_config import Pool, ViTConfig

__all__ = ['Corruption', 'Model', 'ModelConfig', 'SIZES', 'build', 'variant']
__all__ += ['for_task', 'headless']  # the same network, with another head
__all__ += ['Backbone', 'Gelu', 'Pool', 'ResNetConfig', 'ViTConfig']  # which network it is
__all__ += ['Compute', 'Regularization', 'Remat', 'with_exact_products']  # how it is computed
__all__ += ['has_trained_head', 'head_params', 'multiply_adds', 'parameter_count']
