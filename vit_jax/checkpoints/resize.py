"""Resizes position embeddings and patch projections for other image and patch sizes.

Numpy arrays are resized in float64 and jax arrays in float32, also inside a traced function. Both
keep their dtype.
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Params, require
from vit_jax.models import ViTConfig
from vit_jax.models.config import PositionResize
from vit_jax.models.model import position_table_axes
from vit_jax.models.positions import FIXED_GRID

Grid = tuple[int, int]  # (rows, columns)
Arrays = Array | np.ndarray


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
    require(
        old.positions not in FIXED_GRID,
        f'positions={old.positions}: cannot be resized from grid {old.grid} to {new.grid}',
    )
    resized = {}
    for name, axes in position_table_axes(old).items():
        old_grid = _table_grid(old.grid, axes)
        new_grid = _table_grid(new.grid, axes)
        resized[name] = resize_table(params[name], old_grid, new_grid, how=old.position_resize)
    return resized


def _table_grid(grid: Grid, axes: tuple[bool, bool]) -> Grid:
    """Returns the grid of a table that has the rows or the columns of the patches, or both."""
    rows, columns = grid
    has_rows, has_columns = axes
    return rows if has_rows else 1, columns if has_columns else 1


def resize_table(
    table: Float[Arrays, '... n d'], old: Grid, new: Grid, *, how: PositionResize
) -> Float[Arrays, '... m d']:
    """Resizes a table of learned positions to another grid (ViT paper, section 3.2).

    Rows before the grid, such as the class token's, are kept. `how='bilinear'` equals
    `scipy.ndimage.zoom(order=1)` in the paper's code, for any pair of grids.
    """
    prefix = table.shape[-2] - old[0] * old[1]
    row_weights = _weights(old[0], new[0], how)
    column_weights = _weights(old[1], new[1], how)
    *layers, _, width = table.shape
    grid = table[..., prefix:, :].reshape(*layers, *old, width)
    resized = _resize_axes(grid, row_weights, column_weights).reshape(*layers, -1, width)
    concatenate = jnp.concatenate if isinstance(table, jax.Array) else np.concatenate
    return concatenate([table[..., :prefix, :], resized], axis=-2)


def _resize_axes(
    grid: Float[Arrays, '... h w d'],
    rows: Float[np.ndarray, 'p h'],
    columns: Float[np.ndarray, 'q w'],
) -> Float[Arrays, '... p q d']:
    """Multiplies the axes of a grid by the matrices that resize them."""
    equation = 'ph,qw,...hwd->...pqd'
    if isinstance(grid, jax.Array):
        return jnp.einsum(equation, rows, columns, grid, precision='highest').astype(grid.dtype)
    return np.einsum(equation, rows, columns, grid).astype(grid.dtype)


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
    kernel: Float[Arrays, 'p q c d'], new: tuple[int, int]
) -> Float[Arrays, 'r s c d']:
    """Resizes a patch projection with the pseudo-inverse of FlexiViT (section 3.4).

    If patches are enlarged bilinearly, the resized kernel gives the same tokens as the old one.
    """

    def weights(old_size: int, new_size: int) -> np.ndarray:
        return np.linalg.pinv(_weights(old_size, new_size, 'bilinear_edges').T)

    row_weights = weights(kernel.shape[0], new[0])
    column_weights = weights(kernel.shape[1], new[1])
    by_channel = kernel.transpose(2, 0, 1, 3)
    return _resize_axes(by_channel, row_weights, column_weights).transpose(1, 2, 0, 3)


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
