"""Attention of each head (ViT paper, section 4.5).

The attention of each head and block for one image, from the tokens that the head of the model
reads: the class token, or the mean over all patches. For a model with attention pooling, the last
row is the pooling layer. Some heads attend to one place, some to the edges of objects, some equally
to all patches.
"""

from typing import Any, assert_never

import numpy as np

from vit_jax.base import Array, Float
from vit_jax.figures import style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models import ViTConfig
from vit_jax.models.taps import Reduction

_MOST_LAYERS = 12
_MOST_HEADS = 16


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Returns the first `image` (h w 3) in [0, 1], `maps` (l k rows columns) and `layers` (l)."""
    config = model.vit

    def average_read_tokens(weights: Float[Array, 'b k n n']) -> Float[Array, 'k m']:
        return average_pooled_tokens(config, weights[0])[:, config.num_prefix_tokens :]

    wanted: dict[str, Reduction] = {'attention/weights': average_read_tokens}
    if config.pool == 'map':
        wanted['pool/attention/weights'] = lambda weights: weights[0, :, 0]
    (captured,) = images.capture(model, wanted, most=1)
    maps = [*captured['attention/weights']]
    names = [str(block) for block in range(config.depth)]
    if config.pool == 'map':
        maps.append(captured['pool/attention/weights'])
        names.append('pool')
    return {
        'image': images.first_images(model, 1)[0],
        'maps': np.stack(maps).reshape(len(maps), -1, *config.grid),
        'layers': np.array(names),
    }


def average_pooled_tokens(config: ViTConfig, rows: Float[Array, 'b n m']) -> Float[Array, 'b m']:
    """Averages the rows of the tokens that the head reads."""
    match config.pool:
        case 'cls':
            return rows[:, 0]
        case 'cls_dist':
            return rows[:, :2].mean(axis=1)
        case 'cls_gap':
            return (rows[:, 0] + rows[:, config.num_prefix_tokens :].mean(axis=1)) / 2
        case 'gap' | 'map':
            return rows[:, config.num_prefix_tokens :].mean(axis=1)
        case 'none':
            return rows.mean(axis=1)
        case other:
            assert_never(other)


def draw(numbers: Numbers) -> style.Drawing:
    """Draws the image and a map per head and block."""
    maps = style.divide_by_max(numbers['maps'])
    layers = style.evenly(len(maps), _MOST_LAYERS)
    heads = style.evenly(maps.shape[1], _MOST_HEADS)
    tiles = maps[np.ix_(layers, heads)]
    drawing = style.canvas_for(tiles, 'Attention per head and block', left=1 / 3)
    sides: Any = drawing.subfigures(1, 2, width_ratios=(1, 3))
    left, right = (side.subplots() for side in sides)
    left.imshow(numbers['image'])
    left.set_axis_off()
    rows = numbers['layers'][layers].tolist()
    style.draw_mosaic(right, tiles, rows=rows, columns=heads, **style.UNIT_RANGE)
    right.set(xlabel='head', ylabel='block (0 is next to the image)')
    style.add_colorbar(right, 'attention, relative to\nthe largest in the map')
    return drawing


FIGURE = Figure(__doc__, compute, draw)
