"""Where a patch stands: tables of position embeddings on a grid of patches."""

import numpy as np

from vit_jax.base.array_types import Float
from vit_jax.base.errors import UserError
from vit_jax.base.resampling import corner_aligned


def sincos2d(grid: tuple[int, int], width: int) -> Float[np.ndarray, 'n d']:
    """Fixed sine and cosine positions, rows of the grid one after the other.

    Each quarter of the width holds one of sin x, cos x, sin y, cos y at width/4 frequencies from 1
    down to 1/10,000 (MoCo v3; "Better plain ViT baselines for ImageNet-1k").
    """
    if width % 4:
        raise UserError(f'width={width} is not a multiple of 4, as sincos2d positions need')
    y, x = np.mgrid[: grid[0], : grid[1]]
    frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
    x, y = x.reshape(-1, 1) * frequencies, y.reshape(-1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def resize(
    table: Float[np.ndarray, '1 n d'], old: tuple[int, int], new: tuple[int, int]
) -> Float[np.ndarray, '1 m d']:
    """The position embeddings of another grid: bilinear, corners kept on corners.

    What stands before the grid (the class token's row) is kept as it is. Equal to
    `scipy.ndimage.zoom(order=1)` on the grid, which the paper's code uses, and defined for any
    pair of grids, square or not (section 3.2: "2D interpolation of the pre-trained position
    embeddings").
    """
    prefix = table.shape[1] - old[0] * old[1]
    if prefix < 0:
        raise UserError(f'{table.shape[1]} position embeddings are too few for the grid {old}')
    if old == new:
        return table
    grid = table[0, prefix:].reshape(*old, -1)
    grid = np.einsum(
        'ph,qw,hwd->pqd', corner_aligned(old[0], new[0]), corner_aligned(old[1], new[1]), grid
    )
    resized = grid.reshape(1, -1, grid.shape[-1]).astype(table.dtype)
    return np.concatenate([table[:, :prefix], resized], axis=1)
