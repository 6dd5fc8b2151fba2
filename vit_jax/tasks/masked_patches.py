"""Self-supervised masked patch prediction (ViT paper, section 4.6 and appendix B.1.2)."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import UserError, records
from vit_jax.base.array_types import Array, Batch, Bool, Float, Int, Key, Num, Params
from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import example_keys
from vit_jax.models import Corruption, Model, ModelConfig, ViTConfig
from vit_jax.models.masked_patches import cut_patches
from vit_jax.tasks.base import LossSums, Normalize, Task, require_no_head
from vit_jax.training import update
from vit_jax.training.losses import BatchSums, sum_examples
from vit_jax.training.metrics import example_metrics
from vit_jax.training.objectives import MaskedPatches, Target

_CELLS: dict[Target, int] = {'mean_color': 1, 'colors_4x4': 4}  # cells per side of a patch
_LEVELS = 8  # levels per color channel (3 bits)
NUM_COLORS = _LEVELS**3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedPatchPrediction(Task):
    """Prediction of corrupted patches from the others, without labels."""

    needs_classes = False

    @property
    def shown(self) -> tuple[str, ...]:
        return 'loss', 'accuracy'

    def configure_model(self, config: TrainConfig, model: ModelConfig) -> ModelConfig:
        assert isinstance(config.objective, MaskedPatches)
        return configure_for_patches(model, config.objective)

    def train_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        assert isinstance(config.objective, MaskedPatches)
        assert isinstance(model.config, ViTConfig)

        def keys_of(batch: Batch) -> Key[Array, 'b']:
            return example_keys(update.make_purpose_key(config.seed, update.CORRUPT), batch)

        return make_patch_loss_sums(
            model.predict_patches, config.objective, normalize, model=model.config, keys_of=keys_of
        )

    def eval_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        return self.train_sums(config, model, normalize)


def configure_for_patches(model: ModelConfig, config: MaskedPatches) -> ViTConfig:
    """Returns the model configuration with outputs per patch instead of a classification head.

    Raises:
      UserError: If the model cannot predict patches, or has parts that would not be trained.
    """
    if not isinstance(model, ViTConfig):
        raise UserError('config.objective: expected a ViT or a hybrid, got a ResNet')
    require_no_head(model)
    patches = math.prod(model.grid)
    records.require(
        config.num_corrupted(patches) > 0,
        f'config.objective.fraction={config.fraction:g}: no patch of {patches} is corrupted; '
        'set a larger fraction',
    )
    outputs = _outputs_per_patch(model, config.target)
    records.require(
        model.patch_outputs in (None, outputs),
        f'config.model.patch_outputs={model.patch_outputs}: expected {outputs}; leave it out',
    )
    return dataclasses.replace(model, patch_outputs=outputs)


def _outputs_per_patch(model: ViTConfig, target: Target) -> int:
    """Returns the number of outputs per patch."""
    height, width = model.patch_size_in_pixels
    rows, columns = model.grid
    image_height, image_width = model.image_size
    size = f'patches of {height}x{width} pixels'
    records.require(
        rows * height <= image_height and columns * width <= image_width,
        f'config.model.image_size={model.image_size}: {size} extend beyond the image',
    )
    if target == 'pixels':
        return height * width * model.channels
    cells = _CELLS[target]
    records.require(
        height % cells == 0 and width % cells == 0,
        f'config.objective.target={target}: {size} are not divisible by {cells}',
    )
    return cells**2 * NUM_COLORS


def make_patch_loss_sums(
    predict_patches: Callable[..., Float[Array, 'b n k']],
    config: MaskedPatches,
    normalize: Normalize,
    *,
    model: ViTConfig,
    keys_of: Callable[[Batch], Key[Array, 'b']],
) -> LossSums:
    """Makes the function that computes loss and metrics, in training and evaluation.

    Args:
      predict_patches: Maps (params, images, corruption, key) to patch outputs; see `Model`.
      config: Corruption and target.
      normalize: Maps images with pixels from 0 to 255 to the input of the model.
      model: Architecture, with outputs per patch.
      keys_of: Returns the key of each example in a batch, which determines its corruption.

    Returns:
      `loss_sums(params, batch, key=None)`, like the result of `make_loss_sums`. Loss and metrics of
      an example are means over its corrupted patches. A key enables dropout.
    """
    patches = math.prod(model.grid)
    cut = functools.partial(cut_patches, grid=model.grid, patch_size=model.patch_size_in_pixels)

    def loss_sums(params: Params, batch: Batch, key: Key[Array, ''] | None = None) -> BatchSums:
        draw = functools.partial(corrupt, config=config, patches=patches)
        corrupted, corruption = jax.vmap(draw)(keys_of(batch))
        images = batch['images']
        inputs = normalize(images)
        outputs = predict_patches(params, inputs, corruption, key)
        if config.target == 'pixels':
            errors = outputs - cut(inputs).reshape(outputs.shape)
            metrics = {'loss': jnp.square(errors).mean(axis=-1)}
        else:
            metrics = color_metrics(outputs, mean_colors(cut(images), _CELLS[config.target]))
        count = config.num_corrupted(patches)
        means = {
            name: jnp.where(corrupted, of_patches, 0).sum(axis=1) / count
            for name, of_patches in metrics.items()
        }
        return sum_examples(means, batch['mask'])

    return loss_sums


def corrupt(
    key: Key[Array, ''], config: MaskedPatches, *, patches: int
) -> tuple[Bool[Array, 'n'], Corruption]:
    """Draws which patches of an image are corrupted, and how.

    Each corrupted patch is masked, replaced or kept independently of the others.
    """
    rank_key, coin_key, source_key = jax.random.split(key, 3)
    ranks = jax.random.permutation(rank_key, patches)
    corrupted = ranks < config.num_corrupted(patches)
    coin = jax.random.uniform(coin_key, (patches,))
    masked = corrupted & (coin < config.masked)
    replaced = corrupted & ~masked & (coin < config.masked + config.replaced)
    index = jnp.arange(patches)
    offset = jax.random.randint(source_key, (patches,), 1, max(2, patches))  # never 0
    source = jnp.where(replaced, (index + offset) % patches, index)
    return corrupted, Corruption(masked, source)


def mean_colors(patches: Num[Array, 'b n p q c'], cells: int) -> Int[Array, 'b n k']:
    """Computes the mean color of each of `cells` x `cells` parts of a patch, as a class number.

    Pixels are from 0 to 255, class numbers from 0 to 511: 3 bits each of red, green and blue.
    """
    batch, n, p, q, channels = patches.shape
    split = patches.reshape(batch, n, cells, p // cells, cells, q // cells, channels)
    means = split.astype(jnp.float32).mean(axis=(3, 5)).reshape(batch, n, cells**2, channels)
    levels = jnp.clip(jnp.floor(means * (_LEVELS / 256)), 0, _LEVELS - 1).astype(jnp.int32)
    return (levels * jnp.array([_LEVELS**2, _LEVELS, 1])).sum(axis=-1)


def color_metrics(
    outputs: Float[Array, 'b n m'], colors: Int[Array, 'b n k']
) -> dict[str, Float[Array, 'b n']]:
    """Computes the loss and `example_metrics` of each patch, as means over its cells."""
    logits = outputs.reshape(*colors.shape, NUM_COLORS)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, colors)
    rows = logits.reshape(-1, NUM_COLORS)
    metrics = example_metrics(rows, jax.nn.one_hot(colors.reshape(-1), NUM_COLORS))
    means = {'loss': losses.mean(axis=-1)}
    for name, of_cells in metrics.items():
        means[name] = of_cells.reshape(colors.shape).mean(axis=-1)
    return means
