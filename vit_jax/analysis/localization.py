"""Localization: which patch of the image a token represents (Raghu et al. 2021, section 7)."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import cka
from vit_jax.base import Array, Float, require


def patches(
    images: Float[Array | np.ndarray, 'b h w c'], grid: tuple[int, int]
) -> Float[Array, 'm b f']:
    """Returns the pixels of each of rows x columns patches of all images, row after row.

    Raises UserError if the image size is not a multiple of the grid.
    """
    b, h, w, c = images.shape
    rows, columns = grid
    fits = h % rows == 0 and w % columns == 0
    require(fits, f'images of {h}x{w} pixels: expected a multiple of {rows}x{columns} patches')
    cut = jnp.asarray(images).reshape(b, rows, h // rows, columns, w // columns, c)
    return cut.transpose(1, 3, 0, 2, 4, 5).reshape(rows * columns, b, -1)


def localization(
    tokens: Float[Array | np.ndarray, 'b t d'], patches: Float[Array | np.ndarray, 'm b f']
) -> cka.Terms:
    """Returns what one minibatch adds to the CKA of each of t tokens with each of m patches.

    `cka.ratio` of the terms, summed over minibatches, is the CKA (t m). A token of a ResNet is one
    location of its feature map. The row of a token that is the same for all images, such as the
    class token before the first block, is NaN. Raises UserError for fewer than 4 images.
    """
    grams = jax.vmap(cka.centered_gram)
    return cka.terms(grams(jnp.asarray(tokens).swapaxes(0, 1)), grams(jnp.asarray(patches)))
