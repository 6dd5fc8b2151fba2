"""Contributions of skip connections and residual branches: output = skip + branch.

Arrays are tokens (images, tokens, channels) or feature maps (images, height, width, channels).
Norms and products are taken over the last axis.
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float


def norm_ratio(
    skip: Float[Array | np.ndarray, '*n d'], branch: Float[Array | np.ndarray, '*n d']
) -> Float[Array, '*n']:
    """Computes |skip| / |branch| in float32 (Raghu et al. 2021, section 6 and figure 7).

    The ratio is large if a token hardly changes, inf if the branch is zero, and NaN if both are.
    """
    return _norm(skip) / _norm(branch)


def cosine(
    branch: Float[Array | np.ndarray, '*#n d'], output: Float[Array | np.ndarray, '*#n d']
) -> Float[Array, '*#n']:
    """Computes the cosine of branch and output in float32 (Raghu et al. 2021, appendix E.2).

    The cosine is close to 1 if the branch dominates the output, and NaN if either is zero.
    """
    products = jnp.asarray(branch, jnp.float32) * jnp.asarray(output, jnp.float32)
    return products.sum(axis=-1) / (_norm(branch) * _norm(output))


def _norm(x: Float[Array | np.ndarray, '*n d']) -> Float[Array, '*n']:
    return jnp.linalg.norm(jnp.asarray(x, jnp.float32), axis=-1)
