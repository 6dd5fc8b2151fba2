"""Resizes position embeddings and patch projections for other image and patch sizes."""

import numpy as np

from vit_jax.base import Float, Params, require
from vit_jax.models import ViTConfig
from vit_jax.models.config import PositionResize
from vit_jax.models.model import position_table_axes
from vit_jax.models.positions import FIXED_GRID

Grid = tuple[int, int]  # (rows, columns)


def resize_positions(params: Params, old: ViTConfig, new: ViTConfig) -> Params:
    """Resizes position embeddings from the grid of `old` to the grid of `new`.

    Args:
      params: All parameters of `old` by their full names.
      old: The model of `params`.
      new: The model with the target grid.

    Returns:
      The resized tables by name; empty if both grids are equal.

    Raises:
      UserError: If positions are relative and the grids differ.
    """
    if old.grid == new.grid:
        return {}
    text = f'positions={old.positions}: cannot be resized from grid {old.grid} to {new.grid}'
    require(old.positions not in FIXED_GRID, text)
    resized = {}
    for name, (has_rows, has_columns) in position_table_axes(old).items():
        before, after = (
            (rows if has_rows else 1, columns if has_columns else 1)
            for rows, columns in (old.grid, new.grid)
        )
        table = np.asarray(params[name])
        resized[name] = resize_table(table, before, after, how=old.position_resize)
    return resized


def resize_table(
    table: Float[np.ndarray, '... n d'], old: Grid, new: Grid, *, how: PositionResize
) -> Float[np.ndarray, '... m d']:
    """Resizes a table of learned positions to another grid (ViT paper, section 3.2).

    Rows before the grid, such as the class token's, are kept. `how='bilinear'` equals
    `scipy.ndimage.zoom(order=1)` in the paper's code, for any pair of grids. Computes in float64.
    """
    prefix = table.shape[-2] - old[0] * old[1]
    rows, columns = (_weights(size, target, how) for size, target in zip(old, new, strict=True))
    layers, width = table.shape[:-2], table.shape[-1]
    grid = table[..., prefix:, :].reshape(*layers, *old, width)
    grid = np.einsum('ph,qw,...hwd->...pqd', rows, columns, grid)
    resized = grid.reshape(*layers, -1, width).astype(table.dtype)
    return np.concatenate([table[..., :prefix, :], resized], axis=-2)


def _weights(old: int, new: int, how: PositionResize) -> Float[np.ndarray, 'new old']:
    """Returns the matrix that resizes positions along one axis."""
    if how == 'bilinear':
        corners = np.linspace(0, old - 1, new)[:, None]
        return np.maximum(0, 1 - np.abs(corners - np.arange(old)))
    step = old / (new + 0.1) if how == 'bicubic_offset' else old / new
    at = (np.arange(new)[:, None] + 0.5) * step - 0.5
    if how == 'bilinear_edges':
        return np.maximum(0, 1 - np.abs(np.clip(at, 0, old - 1) - np.arange(old)))
    if how == 'bicubic_antialias':  # widens the kernel if the grid shrinks, and cuts it at edges
        wide = max(step, 1.0)
        weights = _cubic((np.arange(old) - at) / wide, a=-0.5)
        return weights / weights.sum(axis=1, keepdims=True)
    # Edge positions are repeated outside the table as far as the kernel reaches.
    beyond = np.arange(-2, old + 2)
    to_table = np.clip(beyond, 0, old - 1)[:, None] == np.arange(old)
    return _cubic(beyond - at, a=-0.75) @ to_table


def _cubic(x: Float[np.ndarray, '*s'], *, a: float) -> Float[np.ndarray, '*s']:
    """Evaluates the cubic convolution kernel of Keys (1981), whose slope at 1 is `a`."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def resize_patches(
    kernel: Float[np.ndarray, 'p q c d'], new: tuple[int, int]
) -> Float[np.ndarray, 'r s c d']:
    """Resizes a patch projection with the pseudo-inverse of FlexiViT (section 3.4).

    If patches are enlarged bilinearly, the resized kernel gives the same tokens as the old one.
    """
    rows, columns = (
        np.linalg.pinv(_weights(old, size, 'bilinear_edges').T)
        for old, size in zip(kernel.shape[:2], new, strict=True)
    )
    return np.einsum('rp,sq,pqcd->rscd', rows, columns, kernel).astype(kernel.dtype)


def rechannel(kernel: Float[np.ndarray, 'p q c d'], new: int) -> Float[np.ndarray, 'p q e d']:
    """Adapts a kernel to another number of channels.

    A single channel is the sum of all old ones. More channels repeat the old ones in turn, each
    divided by its number of repetitions, so that images with equal channels give the same tokens as
    before. For fewer channels, but at least two, the first ones are kept and scaled by old / new.
    """
    old = kernel.shape[2]
    if new == 1:
        return kernel.sum(axis=2, keepdims=True)
    source = np.arange(new) % old
    share = max(1.0, old / new) / np.bincount(source, minlength=old)[source]
    return kernel[:, :, source] * share.astype(kernel.dtype)[:, None]
