"""The projection of patches, for patches of another size and images of other channels."""

import numpy as np

from vit_jax.base.array_types import Float
from vit_jax.base.resampling import half_pixel


def resize(
    kernel: Float[np.ndarray, 'p q c d'], new: tuple[int, int]
) -> Float[np.ndarray, 'r s c d']:
    """The kernel for patches of another size: the pseudo-inverse resize of FlexiViT (section 3.4).

    A patch that is enlarged bilinearly, as images are resized, gives the token that it gave.
    """
    rows, columns = (
        np.linalg.pinv(half_pixel(old, size).T)
        for old, size in zip(kernel.shape[:2], new, strict=True)
    )
    return np.einsum('rp,sq,pqcd->rscd', rows, columns, kernel).astype(kernel.dtype)


def rechannel(kernel: Float[np.ndarray, 'p q c d'], new: int) -> Float[np.ndarray, 'p q e d']:
    """The kernel for images of another number of channels.

    For one, the sum. For more, the channels are repeated in turn, each divided by how often it
    stands there. Images whose channels are all equal then give the tokens that they gave. For
    fewer, the first ones, scaled up.
    """
    old = kernel.shape[2]
    if new == 1:
        return kernel.sum(axis=2, keepdims=True)
    source = np.arange(new) % old
    share = max(1.0, old / new) / np.bincount(source, minlength=old)[source]
    return kernel[:, :, source] * share.astype(kernel.dtype)[:, None]
