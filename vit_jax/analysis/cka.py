"""Centred kernel alignment: how alike two layers, or two networks, see the same images.

Minibatch CKA with the unbiased estimator of HSIC (Nguyen et al. 2021, equations 3 to 5; Raghu et
al. 2021, section 3). Its terms are summed over minibatches, and the ratio is taken once:

    for ours, theirs in minibatches:  # lists of layers, each (images, features...)
        grams = [jnp.stack([centred_gram(x) for x in layers]) for layers in (ours, theirs)]
        total = jax.tree.map(operator.add, total, terms(*grams))
    similarity = ratio(*total)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, require


class Terms(NamedTuple):
    """HSIC of t representations with s others, and of each with itself: what CKA is a ratio of.

    A pytree of sums over minibatches: `jax.tree.map(operator.add, a, b)` is that of the images of
    both, and `jax.lax.psum` that of the minibatches of all devices.
    """

    cross: Float[Array, 't s']
    own_x: Float[Array, 't']
    own_y: Float[Array, 's']


# U-centring takes a_i + a_j off the entries i != j of a symmetric G, with the one vector a for
# which every row sums to zero. Features centred by any c have the entries
#     (x_i - c)(x_j - c) = x_i x_j + b_i + b_j   where   b_i = c c / 2 - x_i c,
# so c only moves a by b, and the result is the same. In float32 it is not: products of features
# far from zero are large, and their differences are lost. The mean keeps them small. The first
# image is taken off before it: features that are the same for all images are zero to the bit then.
def centred_gram(x: Float[Array | np.ndarray, 'n ...']) -> Float[Array, 'n n']:
    """The U-centred Gram matrix of n images' features: zero diagonal, rows that sum to zero.

    HSIC_1, the unbiased estimator, is an inner product of two of these (Szekely and Rizzo 2014).
    In float32. Raises UserError for fewer than 4 images, for which there is none.
    """
    n = x.shape[0]
    require(n >= 4, f'CKA of {n} images in a minibatch: the unbiased estimator needs 4 or more')
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
    """HSIC_1 of each of t representations of n images with each of s others, of centred Grams."""
    n = x.shape[-1]
    return jnp.einsum('tij,sij->ts', x, y, precision='highest') / (n * (n - 3))


def terms(x: Float[Array | np.ndarray, 't n n'], y: Float[Array | np.ndarray, 's n n']) -> Terms:
    """What one minibatch adds to the CKA of t representations with s others, of centred Grams."""
    own_x, own_y = (jax.vmap(hsic)(z[:, None], z[:, None]).reshape(-1) for z in (x, y))
    return Terms(hsic(x, y), own_x, own_y)


def ratio(
    cross: Float[Array | np.ndarray, 't s'],
    own_x: Float[Array | np.ndarray, 't'],
    own_y: Float[Array | np.ndarray, 's'],
) -> Float[Array, 't s']:
    """CKA of terms that are summed over all minibatches: 1 for equal representations, 0 for
    independent ones, up to noise of either sign.

    NaN where a representation's term with itself is not positive, as where it does not depend on
    the image.
    """
    deviations = [jnp.sqrt(jnp.where(own > 0, own, jnp.nan)) for own in (own_x, own_y)]
    return jnp.asarray(cross) / jnp.multiply.outer(*deviations)


def minibatch_cka(
    x: Float[Array | np.ndarray, '...'], y: Float[Array | np.ndarray, '...']
) -> float:
    """CKA of two representations of the same images, each (batches, images, features...).

    Raises UserError for other images in x than in y, and for less than one minibatch of 4.
    """
    for z in (x, y):
        wrong = f'an array of the shape {z.shape}: expected (batches, images, features...)'
        require(z.ndim >= 3, wrong)
    require(
        x.shape[:2] == y.shape[:2] and len(x) > 0,
        f'x has {x.shape[0]} minibatches of {x.shape[1]} images, y {y.shape[0]} of {y.shape[1]}: '
        'expected one or more, the same in both',
    )
    # CKA does not depend on scale, float32 does: products of very large features are infinite.
    x, y = (z / (np.abs(z).max() or 1) for z in (np.asarray(x), np.asarray(y)))
    total = jax.tree.map(lambda *terms: sum(terms), *map(_pair, x, y))
    return float(ratio(*total)[0, 0])


@jax.jit
def _pair(x: Float[Array, 'n ...'], y: Float[Array, 'n ...']) -> Terms:
    return terms(centred_gram(x)[None], centred_gram(y)[None])
