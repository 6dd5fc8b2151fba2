"""The projection of patches, for patches of another size and images of other channels."""

import numpy as np

from vit_jax.base.array_types import Float


def resize(
    kernel: Float[np.ndarray, 'p q c d'], new: tuple[int, int]
) -> Float[np.ndarray, 'r s c d']:
    """The kernel for patches of another size: the pseudo-inverse resize of FlexiViT (section 3.4).

    A patch that is enlarged bilinearly, as images are resized, gives the token that it gave.
    """
    rows, columns = (
        np.linalg.pinv(_bilinear(old, size).T)
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


def _bilinear(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """Along one axis, what each new pixel takes from each old one, as images are resized.

    Samples are the middles of pixels; weights of what would be outside are left out.
    """
    middles = (np.arange(new) + 0.5) * old / new
    weights = np.maximum(0, 1 - np.abs(np.arange(old) + 0.5 - middles[:, None]))
    return weights / weights.sum(axis=1, keepdims=True)
