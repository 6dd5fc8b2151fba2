"""Localisation: which patch of the image a token is about (Raghu et al. 2021, section 7)."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import cka
from vit_jax.base import Array, Float, require


def patches(
    images: Float[Array | np.ndarray, 'b h w c'], grid: tuple[int, int]
) -> Float[Array, 'm b f']:
    """The pixels of each of rows x columns patches of all images, row after row.

    Raises UserError for images that are no multiple of the grid.
    """
    b, h, w, c = images.shape
    rows, columns = grid
    fits = h % rows == 0 and w % columns == 0
    require(fits, f'images of {h}x{w} pixels cannot be cut into {rows}x{columns} equal patches')
    cut = jnp.asarray(images).reshape(b, rows, h // rows, columns, w // columns, c)
    return cut.transpose(1, 3, 0, 2, 4, 5).reshape(rows * columns, b, -1)


def localisation(
    tokens: Float[Array | np.ndarray, 'b t d'], patches: Float[Array | np.ndarray, 'm b f']
) -> cka.Terms:
    """What one minibatch adds to the CKA of each of t tokens with each of m patches of the image.

    To be summed over minibatches: `cka.ratio` of the sums has the CKA, (t m). A token of a ResNet
    is one location of its feature map. NaN in the row of a token that is the same for all images,
    as the class token before the first block. Raises UserError for fewer than 4 images.
    """
    grams = jax.vmap(cka.centred_gram)
    return cka.terms(grams(jnp.asarray(tokens).swapaxes(0, 1)), grams(jnp.asarray(patches)))
