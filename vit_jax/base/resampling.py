"""Interpolation matrices along one axis: what each new sample takes from each old one."""

import numpy as np

from vit_jax.base.array_types import Float


def half_pixel(
    old: int, new: int, *, cubic: bool = False, antialias: bool = False
) -> Float[np.ndarray, 'new old']:
    """Samples stand for the middles of pixels; what would lie outside is left out.

    Linear without antialias is what OpenCV and TensorFlow do to images, with it (a kernel as wide
    as the new pixels) is what Pillow and torchvision do.
    """
    scale = max(1.0, old / new) if antialias else 1.0
    middles = (np.arange(new) + 0.5) * old / new
    x = np.abs(np.arange(old) + 0.5 - middles[:, None]) / scale
    if cubic:  # Keys' kernel, a = -1/2
        near = (1.5 * x - 2.5) * x * x + 1
        far = ((-0.5 * x + 2.5) * x - 4) * x + 2
        weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    else:
        weights = np.maximum(0, 1 - x)
    return weights / weights.sum(axis=1, keepdims=True)
