"""Skip connections: how much of a token goes past a block, and how much through it.

Of tokens (images, tokens, channels) or feature maps (images, height, width, channels): the last
axis is what is measured. A skip connection is output = skip + branch(skip).
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float


def norm_ratio(
    skip: Float[Array | np.ndarray, '*n d'], branch: Float[Array | np.ndarray, '*n d']
) -> Float[Array, '*n']:
    """|skip| / |branch| (Raghu et al. 2021, section 6 and figure 7), in float32.

    Large where a token is passed on as it is; inf where the branch adds nothing, NaN where both
    are zero.
    """
    return _norm(skip) / _norm(branch)


def cosine(
    branch: Float[Array | np.ndarray, '*n d'], output: Float[Array | np.ndarray, '*n d']
) -> Float[Array, '*n']:
    """Cosine of what a branch adds and of the sum (Raghu et al. 2021, appendix E.2), in float32.

    Near 1 where the branch decides what the token becomes; NaN where either is zero.
    """
    products = jnp.asarray(branch, jnp.float32) * jnp.asarray(output, jnp.float32)
    return products.sum(axis=-1) / (_norm(branch) * _norm(output))


def _norm(x: Float[Array | np.ndarray, '*n d']) -> Float[Array, '*n']:
    return jnp.linalg.norm(jnp.asarray(x, jnp.float32), axis=-1)
