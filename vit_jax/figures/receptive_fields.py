"""Effective receptive fields (Raghu et al., section 5, figure 6, appendix C.4).

The influence of each pixel on the center of a layer: the absolute gradient, averaged over images,
colors and some channels. Top: the branch before the skip connection is added (attention of a ViT,
last norm of a ResNet unit). Bottom: the output of the block or unit. The first layers of a ViT see
much of the image; the skip connection emphasizes their own position.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Int, Params, UserError
from vit_jax.figures import layers, style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.figures.layers import Layer
from vit_jax.models import ResNetConfig, build

_LAYERS = 6  # drawn layers
_IMAGES = 32  # averaged images
_CHANNELS = 2  # averaged channels of each image


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Returns the fields (l h w) `before` and `after` the skip connection of `layers` (l)."""
    config = model.loaded.config
    if isinstance(config, ResNetConfig):
        names = layers.units(config.backbone)
        if not names:
            raise UserError('the ResNet has no residual units, only the root')
        names = [names[i] for i in style.evenly(len(names), _LAYERS)]
        taps = [[Layer(f'{unit}/{part}') for unit in names] for part in ('norm3', 'out')]
        # Units differ in their number of channels, so each needs its own pass.
        fields = np.array([[_fields(images, model, [one])[0] for one in part] for part in taps])
    else:
        blocks = style.evenly(config.depth, _LAYERS)
        taps = [[Layer(tap, block) for block in blocks] for tap in ('attention/out', 'tokens')]
        fields = np.stack([_fields(images, model, part) for part in taps])
        names = [f'block{block}' for block in blocks]
    return {'before': fields[0], 'after': fields[1], 'layers': np.array(names)}


def _fields(
    images: Images, model: PlacedModel, chosen: Sequence[Layer]
) -> Float[np.ndarray, 'l h w']:
    """Computes the fields of layers with equal numbers of channels."""
    config = model.loaded.config
    rows, columns = config.grid

    def center(x: Array) -> Float[Array, 'b d']:
        if isinstance(config, ResNetConfig):
            return x[:, x.shape[1] // 2, x.shape[2] // 2]
        return x[:, config.num_prefix_tokens + rows // 2 * columns + columns // 2]

    taps = layers.same_reduction(chosen, center)
    # The backward pass recomputes blocks: activations of all of them would not fit in memory.
    rematerialized = build(config, compute=dataclasses.replace(model.loaded.compute, remat='block'))

    def centers(params: Params, pixels: Float[Array, 'b h w c']) -> Float[Array, 'l b d']:
        return layers.stack_layers(rematerialized.capture(params, pixels, taps)[1], chosen)

    image = jax.ShapeDtypeStruct((1, *config.image_size, config.channels), np.float32)
    width = jax.eval_shape(centers, model.params, image).shape[-1]

    def of_batch(params: Params, pixels: Float[Array, 'b h w c']) -> Float[Array, 'l h w']:
        pixels = pixels[:_IMAGES]
        channels = jax.random.randint(jax.random.key(0), (len(pixels), _CHANNELS), 0, width)
        return receptive_fields(lambda x: centers(params, x), pixels, channels)

    fields = [*map(model.compile(of_batch), images.batches(model, _IMAGES))]
    return np.mean(fields, axis=0)


def receptive_fields(
    centers: Callable[[Float[Array, 'b h w c']], Float[Array, 'l b d']],
    images: Float[Array | np.ndarray, 'b h w c'],
    channels: Int[Array | np.ndarray, 'b s'],
) -> Float[Array, 'l h w']:
    """Computes the mean absolute gradient of each layer's center feature with respect to pixels.

    The results are effective receptive fields (Luo et al. 2016). Costs one backward pass per layer
    and channel.

    Args:
      centers: Maps images to the d features at the center of each of l layers. The features of an
        image must not depend on other images.
      images: Images.
      channels: The s feature channels to differentiate for each image, from 0 to d - 1.

    Returns:
      Gradients, averaged over images, feature channels and colors.
    """
    features, pullback = jax.vjp(centers, jnp.asarray(images))
    each = jnp.arange(len(images))

    def field_of_channel(layer: Int[Array, ''], channel: Int[Array, 'b']) -> Float[Array, 'h w']:
        (gradients,) = pullback(jnp.zeros_like(features).at[layer, each, channel].set(1))
        return jnp.abs(gradients).mean(axis=(0, 3), dtype=jnp.float32)

    def field(layer: Int[Array, '']) -> Float[Array, 'h w']:
        drawn = jnp.asarray(channels).T
        return jax.lax.map(lambda channel: field_of_channel(layer, channel), drawn).mean(axis=0)

    return jax.lax.map(field, jnp.arange(len(features)))


def draw(numbers: Numbers) -> style.Drawing:
    """Draws two rows of fields: before and after the skip connection."""
    tiles = style.divide_by_max(np.stack([numbers['before'], numbers['after']]))
    drawing = style.canvas_for(tiles, 'Receptive field of the center of each layer')
    axes = drawing.subplots()
    names = [str(name).replace('/', '\n') for name in numbers['layers']]
    rows = ('branch', 'after the\nskip\nconnection')
    style.draw_mosaic(axes, tiles, rows=rows, columns=names, **style.UNIT_RANGE)
    style.add_colorbar(axes, 'gradient, relative to\nthe largest in the tile')
    return drawing


def finding(numbers: Numbers) -> str:
    """Returns the smallest share of pixels that contains half of a field."""

    def spread(field: Float[np.ndarray, 'h w']) -> float:
        total = np.sort(field.ravel())[::-1].cumsum()
        return float((np.searchsorted(total, total[-1] / 2) + 1) / total.size)

    shares = [[spread(field) for field in numbers[stage]] for stage in ('before', 'after')]
    before, after = np.mean(shares, axis=1)
    return (
        f'In the first layer, half of the field is in {shares[1][0]:.0%} of the pixels. The '
        f'mean over layers is {before:.0%} before the skip connection and {after:.0%} after it.'
    )


FIGURE = Figure(__doc__, compute, draw, finding)
