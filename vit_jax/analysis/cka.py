"""Centered kernel alignment (CKA), a similarity of the representations of two layers.

This is minibatch CKA with the unbiased estimator of HSIC (Nguyen et al. 2021, equations 3 to 5;
Raghu et al. 2021, section 3). Its terms are summed over minibatches, and the ratio is taken once:

    summands = []
    for layers_x, layers_y in minibatches:  # lists of arrays (images, features...)
        grams = [jnp.stack([centered_gram(z) for z in zs]) for zs in (layers_x, layers_y)]
        summands.append(terms(*grams))
    total = jax.tree.map(lambda *values: sum(values), *summands)
    similarity = ratio(*total)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, require


class Terms(NamedTuple):
    """HSIC terms of t representations x and s representations y, whose ratio is CKA.

    Terms of two minibatches are added with `jax.tree.map(operator.add, a, b)`, and over devices
    with `jax.lax.psum`.
    """

    cross: Float[Array, 't s']  # HSIC(x, y)
    own_x: Float[Array, 't']  # HSIC(x, x)
    own_y: Float[Array, 's']  # HSIC(y, y)


# U-centering subtracts a_i + a_j from the entries i != j of a symmetric G, with the only vector a
# for which every row sums to zero. Centering the features by any c gives entries
#     (x_i - c)(x_j - c) = x_i x_j + b_i + b_j   where   b_i = c c / 2 - x_i c,
# which changes a by b, and not the result. But in float32, products of features far from zero are
# large, and their differences lose precision. Subtracting the mean keeps them small. The first
# image is subtracted before the mean, so that features that are equal for all images become exactly
# zero.
def centered_gram(x: Float[Array | np.ndarray, 'n ...']) -> Float[Array, 'n n']:
    """Computes the U-centered Gram matrix of the features of n images, in float32.

    Its diagonal is zero, and its rows sum to zero. The unbiased estimator HSIC_1 is an inner
    product of two such matrices (Szekely and Rizzo 2014).

    Raises:
      UserError: If there are fewer than 4 images.
    """
    n = x.shape[0]
    require(n >= 4, f'CKA: got a minibatch of {n} images; expected at least 4')
    features = jnp.asarray(x, jnp.float32).reshape(n, -1)
    features = features - features[:1]
    mean = jnp.matmul(jnp.full((1, n), 1 / n), features, precision='highest')  # fast on CPUs
    features = features - mean
    off_diagonal = 1 - jnp.eye(n)
    gram = off_diagonal * jnp.matmul(features, features.T, precision='highest')
    means = gram.sum(axis=0) / (n - 2)
    means = means - means.sum() / (2 * (n - 1))
    return off_diagonal * (gram - means[:, None] - means)


def hsic(
    x: Float[Array | np.ndarray, 't n n'], y: Float[Array | np.ndarray, 's n n']
) -> Float[Array, 't s']:
    """Computes HSIC_1 of all pairs of t and s representations from their centered Gram matrices."""
    n = x.shape[-1]
    return jnp.einsum('tij,sij->ts', x, y, precision='highest') / (n * (n - 3))


def terms(x: Float[Array | np.ndarray, 't n n'], y: Float[Array | np.ndarray, 's n n']) -> Terms:
    """Computes the terms of one minibatch from centered Gram matrices."""
    own_x, own_y = (jax.vmap(hsic)(z[:, None], z[:, None]).reshape(-1) for z in (x, y))
    return Terms(hsic(x, y), own_x, own_y)


def ratio(
    cross: Float[Array | np.ndarray, 't s'],
    own_x: Float[Array | np.ndarray, 't'],
    own_y: Float[Array | np.ndarray, 's'],
) -> Float[Array, 't s']:
    """Computes CKA from terms that are summed over all minibatches.

    CKA is 1 for equal representations. For independent ones it is 0 up to noise, which may be
    negative. It is NaN if `own_x` or `own_y` is not positive, such as for constant features.
    """
    deviations = [jnp.sqrt(jnp.where(own > 0, own, jnp.nan)) for own in (own_x, own_y)]
    return jnp.asarray(cross) / jnp.multiply.outer(*deviations)


def minibatch_cka(
    x: Float[Array | np.ndarray, '...'], y: Float[Array | np.ndarray, '...']
) -> float:
    """Computes CKA of two representations of the same images.

    Args:
      x: Shape (batches, images, features...).
      y: Shape (batches, images, features...).

    Raises:
      UserError: If x and y have different batches, or batches of fewer than 4 images.
    """
    require(
        min(x.ndim, y.ndim) >= 3 and x.shape[:2] == y.shape[:2] and len(x) > 0,
        f'CKA: got x of shape {x.shape} and y of shape {y.shape}; expected (batches, images, '
        'features...), with equal batches and images, and at least one batch',
    )
    # CKA does not depend on the scale, but float32 products of very large features are infinite.
    x, y = (z / (np.abs(z).max() or 1) for z in (np.asarray(x), np.asarray(y)))
    total = jax.tree.map(lambda *terms: sum(terms), *map(_pair, x, y))
    return float(ratio(*total)[0, 0])


@jax.jit
def _pair(x: Float[Array, 'n ...'], y: Float[Array, 'n ...']) -> Terms:
    return terms(centered_gram(x)[None], centered_gram(y)[None])
