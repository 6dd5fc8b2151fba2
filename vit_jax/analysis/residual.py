"""Skip connections: how much of a token goes past a block, and how much through it.

Arrays are tokens (images, tokens, channels) or feature maps (images, height, width, channels):
norms and products are taken over the last axis. A skip connection is output = skip + branch(skip).
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float


def norm_ratio(
    skip: Float[Array | np.ndarray, '*n d'], branch: Float[Array | np.ndarray, '*n d']
) -> Float[Array, '*n']:
    """Computes |skip| / |branch| in float32 (Raghu et al. 2021, section 6 and figure 7).

    It is large if a token is passed on unchanged; inf if the branch adds nothing, NaN if both are
    zero.
    """
    return _norm(skip) / _norm(branch)


def cosine(
    branch: Float[Array | np.ndarray, '*n d'], output: Float[Array | np.ndarray, '*n d']
) -> Float[Array, '*n']:
    """Computes the cosine of a branch and the sum in float32 (Raghu et al. 2021, appendix E.2).

    It is near 1 if the branch decides what the token becomes; NaN if either is zero.
    """
    products = jnp.asarray(branch, jnp.float32) * jnp.asarray(output, jnp.float32)
    return products.sum(axis=-1) / (_norm(branch) * _norm(output))


def _norm(x: Float[Array | np.ndarray, '*n d']) -> Float[Array, '*n']:
    return jnp.linalg.norm(jnp.asarray(x, jnp.float32), axis=-1)
