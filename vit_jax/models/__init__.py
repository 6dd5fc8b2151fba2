"""Model architectures. This is the only folder that imports flax.

Sections, appendices, equations and tables without a title are the ViT paper's (arXiv:2010.11929).
"""

from vit_jax.models.compute import Compute, Regularization, Remat, with_highest_precision
from vit_jax.models.config import Backbone, Gelu, ModelConfig, Pool, ResNetConfig, ViTConfig
from vit_jax.models.heads import apply_heads
from vit_jax.models.masked_patches import Corruption
from vit_jax.models.model import Model, abstract_params, build, count_multiply_adds, count_params
from vit_jax.models.variants import SIZES, variant

__all__ = ['Corruption', 'Model', 'ModelConfig', 'SIZES', 'apply_heads', 'build', 'variant']
__all__ += ['Backbone', 'Gelu', 'Pool', 'ResNetConfig', 'ViTConfig']  # architecture
__all__ += ['Compute', 'Regularization', 'Remat', 'with_highest_precision']  # computation
__all__ += ['abstract_params', 'count_multiply_adds', 'count_params']
