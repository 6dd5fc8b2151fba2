"""Masked patch prediction: what corrupted patches show, learned from images without their labels.

"An Image is Worth 16x16 Words", section 4.6 and appendix B.1.2.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import UserError, counted, records
from vit_jax.base.array_types import Array, Batch, Bool, Float, Int, Key, Num, Params
from vit_jax.models import Corruption, ModelConfig, ViTConfig
from vit_jax.training.losses import BatchSums, example_metrics, summed

Target = Literal['mean_colour', 'colours_4x4', 'pixels']
_CELLS: dict[Target, int] = {'mean_colour': 1, 'colours_4x4': 4}  # along a side of a patch
_LEVELS = 8  # of each channel: 3 bits
COLOURS = _LEVELS**3


@dataclasses.dataclass(kw_only=True)
class MaskedPatches(records.Record):
    """The embeddings of some patches are corrupted, and what these patches show is predicted.

    The target is the mean colour of a patch, 3 bits a channel and so one of 512; the colours of its
    4x4 cells; or all its pixels as the network sees them, by their mean squared error.
    """

    fraction: float = 0.5  # of the patches of an image, which are corrupted
    masked: float = 0.8  # the probability that one of these becomes the mask token
    replaced: float = 0.1  # that it becomes another patch of the image; the rest stay as they are
    target: Target = 'mean_colour'  # one of 512; colours_4x4: of 16 cells; pixels: their values

    def check(self) -> None:
        records.require_between(self, 'fraction', above=0, high=1)
        records.require_between(self, 'masked', 'replaced', low=0, high=1)
        together = f'replaced={self.replaced:g} and masked={self.masked:g} are more than 1 together'
        records.require(self.masked + self.replaced <= 1 + 1e-6, together)

    def corrupted_of(self, patches: int) -> int:
        """How many of so many patches are corrupted."""
        return round(self.fraction * patches)


def for_patches(model: ModelConfig, config: MaskedPatches) -> ViTConfig:
    """The network that predicts patches and has no classes.

    Raises UserError for one that cannot, and for parts of it that nothing would train.
    """
    if not isinstance(model, ViTConfig):
        raise UserError('config.objective: masked patches need a ViT: a ResNet has no patches')
    for name in ('num_classes', 'representation_size', 'head', 'head_bias'):
        wrong = f'config.model.{name}={getattr(model, name)}: config.objective has no classes'
        is_default = getattr(model, name) == getattr(ViTConfig(), name)
        records.require(is_default, f'{wrong}; leave it out')
    wrong = 'config.model.pool=map: its attention would learn nothing from masked patches'
    records.require(model.pool != 'map', f'{wrong}; take cls or gap')
    patches = math.prod(model.grid)
    wrong = f'config.objective.fraction={config.fraction:g} of {counted(patches, "patch")} is none'
    records.require(config.corrupted_of(patches) > 0, wrong)
    outputs = _outputs(model, config.target)
    wrong = f'config.model.patch_outputs={model.patch_outputs}, but {config.target} takes {outputs}'
    records.require(model.patch_outputs in (None, outputs), f'{wrong}; leave it out')
    return dataclasses.replace(model, patch_outputs=outputs)


def _outputs(model: ViTConfig, target: Target) -> int:
    """Numbers to predict for each patch."""
    (height, width), (rows, columns) = patch_sides(model), model.grid
    shown = f'patches show {height}x{width} pixels'
    whole = rows * height <= model.image_size[0] and columns * width <= model.image_size[1]
    wrong = f'config.model.image_size={model.image_size}: {shown}, the last ones beyond the image'
    records.require(whole, wrong)
    if target == 'pixels':
        return height * width * model.channels
    cells = _CELLS[target]
    fits = height % cells == 0 == width % cells
    records.require(fits, f'config.objective.target={target}: {shown}, no multiple of {cells}')
    return cells**2 * COLOURS


def patch_sides(model: ViTConfig) -> tuple[int, int]:
    """(height, width) in pixels of the part of the image that a patch stands for, in a hybrid too.

    A hybrid's patch sees beyond it, as far as its convolutions reach.
    """
    stride = 1 if model.backbone is None else model.backbone.stride
    return stride * model.patch_size[0], stride * model.patch_size[1]


def make_patch_sums(
    predict_patches: Callable[..., Float[Array, 'b n k']],
    config: MaskedPatches,
    normalize: Callable[[Array], Float[Array, 'b h w c']],
    *,
    model: ViTConfig,
    keys_of: Callable[[Batch], Key[Array, 'b']],
) -> Callable[..., BatchSums]:
    """Sums over the unmasked examples of a batch, for training and evaluation alike.

    `loss_sums(params, batch, key=None)`, as of `make_loss_sums`: the loss and the metrics of an
    example are means over its corrupted patches. Which these are depends on its key alone, of
    `keys_of(batch)`; `key` switches dropout on.
    """
    patches = math.prod(model.grid)
    cut = functools.partial(cut_patches, grid=model.grid, sides=patch_sides(model))

    def loss_sums(params: Params, batch: Batch, key: Key[Array, ''] | None = None) -> BatchSums:
        draw = functools.partial(corrupt, config=config, patches=patches)
        corrupted, corruption = jax.vmap(draw)(keys_of(batch))
        images = batch['images']
        inputs = normalize(images)
        outputs = predict_patches(params, inputs, corruption, key)
        if config.target == 'pixels':
            errors = outputs - cut(inputs).reshape(outputs.shape)
            of_patches = {'loss': jnp.square(errors).mean(axis=-1)}
        else:
            of_patches = colour_metrics(outputs, mean_colours(cut(images), _CELLS[config.target]))
        count = config.corrupted_of(patches)
        values = {
            name: jnp.where(corrupted, value, 0).sum(axis=1) / count
            for name, value in of_patches.items()
        }
        return summed(values, batch['mask'])

    return loss_sums


def corrupt(
    key: Key[Array, ''], config: MaskedPatches, *, patches: int
) -> tuple[Bool[Array, 'n'], Corruption]:
    """Which patches of an image are corrupted, and how: independently of each other."""
    place_key, coin_key, other_key = jax.random.split(key, 3)
    places = jax.random.permutation(place_key, patches)
    corrupted = places < config.corrupted_of(patches)
    coin = jax.random.uniform(coin_key, (patches,))
    masked = corrupted & (coin < config.masked)
    replaced = corrupted & ~masked & (coin < config.masked + config.replaced)
    own = jnp.arange(patches)
    away = jax.random.randint(other_key, (patches,), 1, max(2, patches))  # never back to itself
    source = jnp.where(replaced, (own + away) % patches, own)
    return corrupted, Corruption(masked, source)


def cut_patches(
    images: Num[Array, 'b h w c'], grid: tuple[int, int], sides: tuple[int, int]
) -> Num[Array, 'b n p q c']:
    """The patches of images, rows of the grid one after the other."""
    (rows, columns), (p, q) = grid, sides
    batch, _, _, channels = images.shape
    images = images[:, : rows * p, : columns * q]
    patches = images.reshape(batch, rows, p, columns, q, channels).swapaxes(2, 3)
    return patches.reshape(batch, rows * columns, p, q, channels)


def mean_colours(patches: Num[Array, 'b n p q c'], cells: int) -> Int[Array, 'b n k']:
    """The mean colour of each of cells x cells parts of a patch, from pixels of 0 to 255.

    A colour is a number from 0 to 511: 3 bits of red, then of green, then of blue.
    """
    batch, n, p, q, channels = patches.shape
    parts = patches.reshape(batch, n, cells, p // cells, cells, q // cells, channels)
    means = parts.astype(jnp.float32).mean(axis=(3, 5)).reshape(batch, n, cells**2, channels)
    levels = jnp.clip(jnp.floor(means * (_LEVELS / 256)), 0, _LEVELS - 1).astype(jnp.int32)
    return (levels * jnp.array([_LEVELS**2, _LEVELS, 1])).sum(axis=-1)


def colour_metrics(
    outputs: Float[Array, 'b n m'], colours: Int[Array, 'b n k']
) -> dict[str, Float[Array, 'b n']]:
    """The loss and `example_metrics` of each patch, means over its cells."""
    logits = outputs.reshape(*colours.shape, COLOURS)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, colours)
    rows = logits.reshape(-1, COLOURS)
    metrics = example_metrics(rows, jax.nn.one_hot(colours.reshape(-1), COLOURS))
    cells = {name: value.reshape(colours.shape) for name, value in metrics.items()}
    return {name: value.mean(axis=-1) for name, value in ({'loss': losses} | cells).items()}
