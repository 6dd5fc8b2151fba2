"""Model architectures. This is the only folder that imports flax."""

from vit_jax.models.compute import Compute, Regularization, Remat, with_exact_products
from vit_jax.models.config import Backbone, Gelu, ModelConfig, Pool, ResNetConfig, ViTConfig
from vit_jax.models.masked_patches import Corruption
from vit_jax.models.model import Model, abstract_params, build, multiply_adds, parameter_count
from vit_jax.models.variants import SIZES, variant

__all__ = ['Corruption', 'Model', 'ModelConfig', 'SIZES', 'build', 'variant']
__all__ += ['Backbone', 'Gelu', 'Pool', 'ResNetConfig', 'ViTConfig']  # architecture
__all__ += ['Compute', 'Regularization', 'Remat', 'with_exact_products']  # computation
__all__ += ['abstract_params', 'multiply_adds', 'parameter_count']
