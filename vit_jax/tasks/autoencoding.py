"""Self-supervised pre-training as a masked autoencoder (He et al. 2021)."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.base import Array, Batch, Float, Key, Params, UserError, require
from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import example_keys
from vit_jax.models import (
    Compute,
    Model,
    ModelConfig,
    Regularization,
    ViTConfig,
    abstract_params,
    build,
)
from vit_jax.models.autoencoder import Decoder, build_decoder
from vit_jax.models.compute import PORTABLE, resolve_compute
from vit_jax.models.masked_patches import cut_patches
from vit_jax.models.model import count_products
from vit_jax.models.positions import select_kept
from vit_jax.tasks.base import LossSums, Normalize, Task, require_no_head
from vit_jax.training import update
from vit_jax.training.losses import BatchSums, sum_examples
from vit_jax.training.objectives import TASK_PARAMS, MaskedAutoencoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Autoencoding(Task):
    """Prediction of the pixels of removed patches, without labels."""

    needs_classes = False

    @property
    def shown(self) -> tuple[str, ...]:
        return ('loss',)

    def configure_model(self, config: TrainConfig, model: ModelConfig) -> ModelConfig:
        assert isinstance(config.objective, MaskedAutoencoder)
        check_autoencoder(model, config.objective)
        return model

    def init_params(self, config: TrainConfig, model: ModelConfig, key: Key[Array, '']) -> Params:
        return _build_decoder(config, model, PORTABLE).init(key)

    def count_multiply_adds(
        self, config: TrainConfig, model: ModelConfig, regularization: Regularization | None = None
    ) -> int:
        assert isinstance(config.objective, MaskedAutoencoder)
        assert isinstance(model, ViTConfig)
        encoder = build(model, compute=PORTABLE)
        decoder = _build_decoder(config, model, PORTABLE)
        visible = config.objective.num_visible(math.prod(model.grid))

        def forward(params: Params, own: Params, images: Float[Array, 'b h w c']) -> Array:
            kept = jnp.arange(visible)[None]
            return decoder.apply(own, encoder.encode(params, images, kept), kept)

        own = jax.eval_shape(decoder.init, jax.random.key(0))
        image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.float32)
        return count_products(forward, abstract_params(model), own, image)

    def train_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        assert isinstance(config.objective, MaskedAutoencoder)
        assert isinstance(model.config, ViTConfig)
        patches = math.prod(model.config.grid)

        def draw_noise(batch: Batch) -> Float[Array, 'b n']:
            keys = example_keys(update.make_purpose_key(config.seed, update.CORRUPT), batch)
            return jax.vmap(lambda key: jax.random.uniform(key, (patches,)))(keys)

        # The decoder's heads differ in size from the encoder's: another kernel may be the fastest.
        attention = config.compute.attention
        compute = dataclasses.replace(model.compute, attention=attention, last_block='whole')
        decoder = _build_decoder(config, model.config, compute, platform=model.platform)
        return make_autoencoder_sums(model, decoder, config.objective, normalize, draw_noise)

    def eval_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        return self.train_sums(config, model, normalize)


def check_autoencoder(model: ModelConfig, config: MaskedAutoencoder) -> None:
    """Raises UserError if the model cannot encode some of its patches, or has untrained parts."""
    if not isinstance(model, ViTConfig) or model.backbone is not None:
        raise UserError('config.objective: expected a ViT; convolutions would see removed patches')
    require_no_head(model)
    require(
        model.patch_outputs is None,
        f'config.model.patch_outputs={model.patch_outputs}: not used by config.objective; '
        'leave it out',
    )
    if model.final_norm == 'after_pool' and model.pool in ('cls_gap', 'cls_dist'):
        raise UserError(
            f'config.model.pool={model.pool}: its final norm has another width than the tokens; '
            'set final_norm=before_pool'
        )
    if model.positions == 'relative':
        raise UserError('config.model.positions=relative: not supported with config.objective')
    patches = math.prod(model.grid)
    visible = config.num_visible(patches)
    if not 0 < visible < patches:
        raise UserError(
            f'config.objective.fraction={config.fraction:g}: {visible} of {patches} patches are '
            f'visible; expected at least one, and fewer than {patches}'
        )


def _build_decoder(
    config: TrainConfig, encoder: ModelConfig, compute: Compute, *, platform: str = 'cpu'
) -> Decoder:
    """Builds the decoder for the patches of an encoder, with fixed positions."""
    objective = config.objective
    assert isinstance(objective, MaskedAutoencoder)
    assert isinstance(encoder, ViTConfig)
    blocks = ViTConfig(
        image_size=encoder.image_size,
        channels=encoder.channels,
        patch_size=encoder.patch_size,
        width=objective.decoder_width,
        depth=objective.decoder_depth,
        mlp_dim=4 * objective.decoder_width,
        num_heads=objective.decoder_heads,
        class_tokens=encoder.num_class_tokens,
        registers=encoder.registers,
        positions='sincos2d',
        gelu=encoder.gelu,
        layer_norm_epsilon=encoder.layer_norm_epsilon,
        pool='none',
    )
    outputs = math.prod(encoder.patch_size) * encoder.channels
    compute = resolve_compute(compute, blocks, platform=platform)
    return build_decoder(blocks, width=encoder.width, outputs=outputs, compute=compute)


def make_autoencoder_sums(
    model: Model,
    decoder: Decoder,
    config: MaskedAutoencoder,
    normalize: Normalize,
    draw_noise: Callable[[Batch], Float[Array, 'b n']],
) -> LossSums:
    """Makes the function that computes the loss, in training and evaluation.

    Args:
      model: The encoder.
      decoder: Predicts the pixels of all patches.
      config: How many patches are removed, and the targets.
      normalize: Maps images with pixels from 0 to 255 to the input of the model.
      draw_noise: Returns a number per patch. The patches with the lowest numbers are visible.

    Returns:
      `loss_sums(params, batch, key=None)`, like the result of `make_loss_sums`. The loss of an
      example is the mean over its removed patches. A key enables dropout.
    """
    architecture = model.config
    assert isinstance(architecture, ViTConfig)
    grid = architecture.grid
    patch_size = architecture.patch_size
    visible = config.num_visible(math.prod(grid))

    def loss_sums(params: Params, batch: Batch, key: Key[Array, ''] | None = None) -> BatchSums:
        images = normalize(batch['images'])
        kept = select_kept(draw_noise(batch), visible)
        outputs = decoder.apply(params[TASK_PARAMS], model.encode(params, images, kept, key), kept)
        targets = cut_patches(images, grid, patch_size).reshape(outputs.shape)
        if config.normalize_targets:
            targets = normalize_patches(targets)
        errors = jnp.square(outputs - targets).mean(axis=-1)
        is_visible = (kept[:, :, None] == jnp.arange(errors.shape[1])).any(axis=1)
        loss = jnp.where(is_visible, 0, errors).sum(axis=1) / (errors.shape[1] - visible)
        return sum_examples({'loss': loss}, batch['mask'])

    return loss_sums


def normalize_patches(patches: Float[Array, 'b n k']) -> Float[Array, 'b n k']:
    """Scales the values of each patch to mean 0 and sample deviation 1."""
    mean = patches.mean(axis=-1, keepdims=True)
    variance = patches.var(axis=-1, keepdims=True, ddof=1)
    return (patches - mean) / jnp.sqrt(variance + 1e-6)
