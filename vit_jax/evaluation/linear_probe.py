"""The linear probe of DINOv2 and DINOv3: linear heads on frozen features, trained with SGD.

There is a head for each kind of features and each learning rate. All heads are trained at once, on
the same augmented images, and their logits are one einsum.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import Array, Batch, Float, Key, Num, Params, records, require
from vit_jax.data import loading
from vit_jax.data.augmentation import Augmentation, augment
from vit_jax.data.image_preprocessing import InceptionCrop, Preprocessing, normalize
from vit_jax.data.loading import BatchSource, ImageReader
from vit_jax.data.sources.base import select
from vit_jax.distributed import meshes
from vit_jax.evaluation.evaluator import WrapBatches, make_evaluator
from vit_jax.models import Model, ViTConfig
from vit_jax.models.model import apply_final_norm
from vit_jax.training.losses import BatchSums, make_targets, sum_examples

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
CROPS = Augmentation(crop=InceptionCrop(area=(0.08, 1.0)), flip=True)  # DINOv2's

# Vectors of images: class tokens of the last blocks, then the mean of the last block's patches.
Vectors = Float[Array, 'b m d']


@dataclasses.dataclass(kw_only=True)
class LinearProbeConfig(records.Record):
    """Linear probe of DINOv2: heads on frozen features, trained with SGD on augmented images.

    There is a head for each combination of `rates`, `blocks` and `mean_of_patches`. The learning
    rate of a head starts at rate x `batch_size` / 256 and follows a cosine to 0. Only the head with
    the best accuracy on a validation part of the training images is tested. `config.seed` is the
    seed of all random numbers.
    """

    rates: tuple[float, ...] = RATES  # learning rates for batches of 256 images
    blocks: tuple[int, ...] = (1, 4)  # numbers of last blocks whose class tokens are features
    mean_of_patches: tuple[bool, ...] = (False, True)  # true: also the mean of the last patches
    steps: int = 12_500  # training steps; DINOv2: 10 epochs of 1,250 steps
    batch_size: int = 1024  # images per step, on all devices together
    validation_fraction: float = 0.1  # fraction of the training images that selects the head
    augmentation: Augmentation = dataclasses.field(default_factory=lambda: CROPS)  # in training

    def check(self) -> None:
        require(
            all((self.rates, self.blocks, self.mean_of_patches)),
            'rates, blocks, mean_of_patches: expected one or more values each',
        )
        records.require_between(self, 'rates', above=0)
        records.require_between(self, 'blocks', 'steps', 'batch_size', low=1)
        records.require_between(self, 'validation_fraction', above=0, high=0.5)


class Heads(NamedTuple):
    """Linear heads. The weights of a head are zero for vectors that it does not use."""

    weights: Float[Array, 'h m d k']
    bias: Float[Array, 'h k']


class ProbeState(NamedTuple):
    """State of the training of all heads."""

    heads: Heads
    opt_state: Any


class HeadSettings(NamedTuple):
    """The features of a head, and its learning rate."""

    blocks: int  # number of last blocks whose class tokens are features
    mean_of_patches: bool  # whether the mean of the last patches is a feature
    rate: float  # learning rate for batches of 256 images

    def __str__(self) -> str:
        mean_of_patches = str(self.mean_of_patches).lower()
        return f'blocks={self.blocks}, mean_of_patches={mean_of_patches}, rate={self.rate:g}'


def list_heads(config: LinearProbeConfig) -> list[HeadSettings]:
    """Lists the settings of each head."""
    combinations = itertools.product(config.blocks, config.mean_of_patches, config.rates)
    return list(itertools.starmap(HeadSettings, combinations))


def make_mask(config: LinearProbeConfig) -> Float[np.ndarray, 'h m 1 1']:
    """Makes an array that is 1 for each vector that a head uses, and 0 for the others."""
    num_blocks = max(config.blocks)
    rows = []
    for head in list_heads(config):
        uses_block = np.arange(num_blocks) >= num_blocks - head.blocks
        rows.append([*uses_block, head.mean_of_patches])
    return np.array(rows, np.float32)[:, :, None, None]


def compute_logits(heads: Heads, vectors: Vectors) -> Float[Array, 'h b k']:
    """Computes the logits of all heads."""
    products = jnp.einsum('bmd,hmdk->hbk', vectors, heads.weights, precision='highest')
    return products + heads.bias[:, None]


def make_optimizer(config: LinearProbeConfig) -> optax.GradientTransformation:
    """Makes the optimizer of all heads: SGD for losses that are multiplied by learning rates."""
    return optax.sgd(optax.cosine_decay_schedule(1.0, config.steps), momentum=0.9)


def init_state(
    config: LinearProbeConfig, key: Key[Array, ''], width: int, num_classes: int
) -> ProbeState:
    """Initializes heads for vectors of this width, and the state of their optimizer."""
    mask = jnp.array(make_mask(config))
    weights = 0.01 * mask * jax.random.normal(key, (*mask.shape[:2], width, num_classes))
    heads = Heads(weights, jnp.zeros((len(mask), num_classes)))
    return ProbeState(heads, make_optimizer(config).init(heads))


def update(
    config: LinearProbeConfig, state: ProbeState, vectors: Vectors, targets: Float[Array, 'b k']
) -> tuple[ProbeState, Float[Array, '']]:
    """Trains all heads for one step, without images whose targets are all zero.

    Returns the new state and the lowest loss of any head.
    """
    rates = jnp.array([head.rate for head in list_heads(config)]) * (config.batch_size / 256)

    def total(heads: Heads) -> tuple[Array, Array]:
        losses = optax.softmax_cross_entropy(compute_logits(heads, vectors), targets)
        means = losses.sum(axis=-1) / jnp.maximum(1, targets.sum())
        return (rates * means).sum(), jnp.nanmin(means)

    gradients, lowest_loss = jax.grad(total, has_aux=True)(state.heads)
    gradients = gradients._replace(weights=make_mask(config) * gradients.weights)
    updates, opt_state = make_optimizer(config).update(gradients, state.opt_state)
    return ProbeState(optax.apply_updates(state.heads, updates), opt_state), lowest_loss


@dataclasses.dataclass(frozen=True)
class LinearProbe:
    """The linear probe of a frozen model.

    If the model pools no class token, the mean of the patches is used in its place.

    Raises:
      UserError: If the model has too few blocks.
    """

    config: LinearProbeConfig
    model: Model
    preprocessing: Preprocessing
    batches: BatchSource
    report: Callable[[str], Any]  # gets progress lines
    wrap: WrapBatches = iter  # wraps iterators of batches

    def __post_init__(self) -> None:
        depth = getattr(self.model.config, 'depth', 0)  # a ResNet has no blocks
        require(
            max(self.config.blocks) <= depth,
            f'config.fewshot.linear_probe.blocks={self.config.blocks}: '
            f'the model has {depth} ViT blocks',
        )
        batch_size = self.config.batch_size
        meshes.check_batch_size(batch_size, self.batches.mesh, accumulation_steps=1)
        loading.check_memory(
            batch_size, self.model.config.image_size, 'config.fewshot.linear_probe.batch_size'
        )

    def compute_vectors(self, params: Params, images: Num[Array, 'b h w c']) -> Vectors:
        """Computes the vectors of images of 0 to 255. Each block keeps two vectors per image."""
        vit = self.model.config
        assert isinstance(vit, ViTConfig)

        def reduce(tokens: Float[Array, 'b n d']) -> Float[Array, '2 b d']:
            tokens = apply_final_norm(vit, params, tokens.astype(jnp.float32))
            mean = tokens[:, vit.num_prefix_tokens :].mean(axis=1)
            return jnp.stack([tokens[:, 0] if vit.pool.startswith('cls') else mean, mean])

        images = normalize(images, self.preprocessing)
        _, captured = self.model.capture(params, images, {'tokens': reduce})
        last_blocks = captured['tokens'][-max(self.config.blocks) :]
        class_tokens = last_blocks[:, 0]
        mean_of_patches = last_blocks[-1, 1]
        return jnp.stack([*class_tokens, mean_of_patches], axis=1)

    def evaluate(self, params: Params, train: ImageReader, test: ImageReader) -> dict[str, Any]:
        """Trains all heads, chooses one on validation images, and tests it.

        Args:
          params: Parameters of the model, on the devices of the mesh.
          train: Training images; a part of them is used for validation only.
          test: Test images.

        Returns:
          Accuracies and protocol, as JSON.
        """
        require(len(train.source) > 1, 'a linear probe needs 2 or more training images')
        order = np.random.default_rng(train.seed).permutation(len(train.source))
        num_valid = max(1, round(self.config.validation_fraction * len(order)))
        valid = dataclasses.replace(train, source=select(train.source, order[:num_valid]))
        used = dataclasses.replace(train, source=select(train.source, order[num_valid:]))
        heads = self.train(params, used)
        names = [str(head) for head in list_heads(self.config)]

        def hits(params: Params, batch: Batch) -> BatchSums:
            vectors = self.compute_vectors(params['model'], batch['images'])
            predicted = compute_logits(params['heads'], vectors).argmax(axis=-1)
            is_correct = 1.0 * (predicted == batch['labels'])
            return sum_examples(dict(zip(names, is_correct, strict=True)), batch['mask'])

        evaluator = make_evaluator(hits, self.batches)
        params = {'model': params, 'heads': heads}
        validated = evaluator.evaluate(params, valid, wrap=self.wrap)
        tested = evaluator.evaluate(params, test, wrap=self.wrap)
        chosen = max(names, key=validated.metrics.__getitem__)  # the first of equal ones
        return {
            'accuracy': tested.metrics[chosen],
            'chosen': chosen,
            'validation_accuracy': validated.metrics,
            'validation_images': validated.num_images,
            'protocol': records.to_dict(self.config),
        }

    def train(self, params: Params, reader: ImageReader) -> Heads:
        """Trains all heads on augmented images."""
        config = self.config
        mesh = self.batches.mesh
        num_classes = len(reader.source.class_names)
        targets_of = functools.partial(make_targets, num_classes=num_classes)
        init_key, augment_key = jax.random.split(jax.random.key(reader.seed))

        def step(state: ProbeState, params: Params, batch: Batch) -> Any:
            batch = augment(augment_key, batch, config.augmentation, targets_of=targets_of)
            targets = targets_of(batch['labels']) * batch['mask'][:, None]
            return update(config, state, self.compute_vectors(params, batch['images']), targets)

        jit = functools.partial(meshes.jit_on, mesh=mesh, out_shardings=meshes.replicated(mesh))
        crop = config.augmentation.crop or reader.crop
        loader = self.batches.make_loader(dataclasses.replace(reader, crop=crop))
        batches = loading.training_batches(
            loader, steps=range(config.steps), batch_size=config.batch_size, seed=reader.seed
        )
        images = self.batches.abstract(reader)['images']
        width = jax.eval_shape(self.compute_vectors, params, images).shape[-1]
        state = jit(functools.partial(init_state, config, init_key, width, num_classes))()
        jitted_step = jit(step, donate_argnums=0)
        report_interval = math.ceil(config.steps / 10)
        previous_loss = None
        for count, batch in enumerate(self.wrap(batches), 1):
            state, loss = jitted_step(state, params, batch)
            jax.block_until_ready(previous_loss)  # so that few batches are on the devices
            previous_loss = loss
            if count % report_interval == 0:
                self.report(f'linear probe: step {count} of {config.steps}, loss {loss:.4f}')
        return state.heads
