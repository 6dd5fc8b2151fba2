"""Localization: the similarity of tokens and image patches (Raghu et al. 2021, section 7)."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import cka
from vit_jax.base import Array, Float, require


def split_into_patches(
    images: Float[Array | np.ndarray, 'b h w c'], grid: tuple[int, int]
) -> Float[Array, 'm b f']:
    """Splits images into a grid of patches, in row-major order.

    Returns:
      Pixels of shape (patches, images, values).

    Raises:
      UserError: If the image size is not a multiple of the grid.
    """
    b, h, w, c = images.shape
    rows, columns = grid
    fits = h % rows == 0 and w % columns == 0
    require(fits, f'images: got {h}x{w} pixels; expected a multiple of the grid {rows}x{columns}')
    cut = jnp.asarray(images).reshape(b, rows, h // rows, columns, w // columns, c)
    return cut.transpose(1, 3, 0, 2, 4, 5).reshape(rows * columns, b, -1)


def localization(
    tokens: Float[Array | np.ndarray, 'b t d'], patches: Float[Array | np.ndarray, 'm b f']
) -> cka.Terms:
    """Computes the CKA terms of each token with each patch, for one minibatch.

    `cka.ratio` of the terms, summed over minibatches, is the CKA (t m). It is NaN for tokens that
    are equal for all images, such as the class token before the first block.

    Args:
      tokens: Tokens, or the locations of a ResNet's feature map.
      patches: Pixels of patches from `split_into_patches`.

    Raises:
      UserError: If there are fewer than 4 images.
    """
    grams = jax.vmap(cka.centered_gram)
    return cka.terms(grams(jnp.asarray(tokens).swapaxes(0, 1)), grams(jnp.asarray(patches)))
