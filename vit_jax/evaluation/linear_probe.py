"""The linear probe of DINOv2 and DINOv3: linear heads on frozen features, trained with SGD.

There is a head for each kind of features and each learning rate. All heads are trained at once, on
the same augmented images, and their logits are one einsum.
"""

import dataclasses
import functools
import itertools
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
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import select
from vit_jax.distributed import meshes
from vit_jax.evaluation.evaluator import BatchMaker, Watch, make_evaluator
from vit_jax.models import Model, ViTConfig
from vit_jax.models.model import apply_final_norm
from vit_jax.training.losses import BatchSums, make_targets, sum_examples

RATES = *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3), *(1e-2, 2e-2, 5e-2, 0.1)
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
        lists = self.rates, self.blocks, self.mean_of_patches
        require(all(lists), 'rates, blocks, mean_of_patches: expected one or more values each')
        records.require_between(self, 'rates', above=0)
        records.require_between(self, 'blocks', 'steps', 'batch_size', low=1)
        records.require_between(self, 'validation_fraction', above=0, high=0.5)


class Heads(NamedTuple):
    """Linear heads. The weights of a head are zero for vectors that it does not use."""

    weights: Float[Array, 'h m d k']
    bias: Float[Array, 'h k']


def list_heads(config: LinearProbeConfig) -> list[tuple[int, bool, float]]:
    """Lists the values of `blocks`, `mean_of_patches` and `rates` of each head."""
    return [*itertools.product(config.blocks, config.mean_of_patches, config.rates)]


def make_mask(config: LinearProbeConfig) -> Float[np.ndarray, 'h m 1 1']:
    """Makes an array that is 1 for each vector that a head uses, and 0 elsewhere."""
    last = np.arange(max(config.blocks))
    used = [[*(last >= len(last) - blocks), mean] for blocks, mean, _ in list_heads(config)]
    return np.array(used, np.float32)[:, :, None, None]


def compute_logits(heads: Heads, vectors: Vectors) -> Float[Array, 'h b k']:
    """Computes the logits of all heads."""
    products = jnp.einsum('bmd,hmdk->hbk', vectors, heads.weights, precision='highest')
    return products + heads.bias[:, None]


def make_optimizer(config: LinearProbeConfig) -> optax.GradientTransformation:
    """Makes the optimizer of all heads: SGD for losses that are multiplied by learning rates."""
    return optax.sgd(optax.cosine_decay_schedule(1.0, config.steps), momentum=0.9)


def init_state(
    config: LinearProbeConfig, key: Key[Array, ''], width: int, num_classes: int
) -> tuple[Heads, Any]:
    """Initializes heads for vectors of this width, and the state of their optimizer."""
    mask = jnp.array(make_mask(config))
    weights = 0.01 * mask * jax.random.normal(key, (*mask.shape[:2], width, num_classes))
    heads = Heads(weights, jnp.zeros((len(mask), num_classes)))
    return heads, make_optimizer(config).init(heads)


def update(
    config: LinearProbeConfig, state: tuple, vectors: Vectors, targets: Float[Array, 'b k']
) -> tuple[tuple[Heads, Any], Float[Array, '']]:
    """Trains all heads for one step, without images whose targets are all zero.

    Returns ((the new heads, the new state of the optimizer), the lowest loss of any head).
    """
    rates = jnp.array([rate for *_, rate in list_heads(config)]) * (config.batch_size / 256)

    def total(heads: Heads) -> tuple[Array, Array]:
        losses = optax.softmax_cross_entropy(compute_logits(heads, vectors), targets)
        means = losses.sum(axis=-1) / jnp.maximum(1, targets.sum())
        return (rates * means).sum(), jnp.nanmin(means)

    gradients, lowest = jax.grad(total, has_aux=True)(state[0])
    gradients = gradients._replace(weights=make_mask(config) * gradients.weights)
    updates, opt_state = make_optimizer(config).update(gradients, state[1])
    return (optax.apply_updates(state[0], updates), opt_state), lowest


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
    batches: BatchMaker
    report: Callable[[str], Any]  # gets progress lines
    watch: Watch = iter  # wraps iterators of batches

    def __post_init__(self) -> None:
        wrong = f'config.fewshot.linear_probe.blocks={self.config.blocks}'
        depth = getattr(self.model.config, 'depth', 0)  # a ResNet has no blocks
        require(max(self.config.blocks) <= depth, f'{wrong}: the model has {depth} ViT blocks')
        size, where = self.config.batch_size, 'config.fewshot.linear_probe.batch_size'
        meshes.check_batch_size(size, self.batches.mesh, accumulation_steps=1)
        loading.check_memory(size, self.model.config.image_size, where)

    def compute_vectors(self, params: Params, images: Num[Array, 'b h w c']) -> Vectors:
        """Computes the vectors of images of 0 to 255. Each block keeps two vectors per image."""
        vit, count = self.model.config, max(self.config.blocks)
        assert isinstance(vit, ViTConfig)

        def reduce(tokens: Float[Array, 'b n d']) -> Float[Array, '2 b d']:
            tokens = apply_final_norm(vit, params, tokens.astype(jnp.float32))
            mean = tokens[:, vit.num_prefix_tokens :].mean(axis=1)
            return jnp.stack([tokens[:, 0] if vit.pool.startswith('cls') else mean, mean])

        images = normalize(images, self.preprocessing)
        blocks = self.model.capture(params, images, {'tokens': reduce})[1]['tokens'][-count:]
        return jnp.stack([*blocks[:, 0], blocks[-1, 1]], axis=1)

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
        first = max(1, round(self.config.validation_fraction * len(order)))
        sources = (select(train.source, part) for part in np.split(order, [first]))
        valid, used = (dataclasses.replace(train, source=source) for source in sources)
        heads = self.train(params, used)
        names = [
            f'blocks={blocks}, mean_of_patches={str(with_mean).lower()}, rate={rate:g}'
            for blocks, with_mean, rate in list_heads(self.config)
        ]

        def hits(params: Params, batch: Batch) -> BatchSums:
            vectors = self.compute_vectors(params['model'], batch['images'])
            right = compute_logits(params['heads'], vectors).argmax(axis=-1) == batch['labels']
            return sum_examples(dict(zip(names, 1.0 * right, strict=True)), batch['mask'])

        evaluator = make_evaluator(hits, self.batches)
        params = {'model': params, 'heads': heads}
        run = functools.partial(evaluator.evaluate, params, watch=self.watch)
        validated, tested = run(valid), run(test)
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
        config, mesh = self.config, self.batches.mesh
        num_classes = len(reader.source.class_names)
        targets_of = functools.partial(make_targets, num_classes=num_classes)
        init_key, augment_key = jax.random.split(jax.random.key(reader.seed))

        def step(state: tuple[Heads, Any], params: Params, batch: Batch) -> Any:
            batch = augment(augment_key, batch, config.augmentation, targets_of=targets_of)
            targets = targets_of(batch['labels']) * batch['mask'][:, None]
            return update(config, state, self.compute_vectors(params, batch['images']), targets)

        jit = functools.partial(meshes.jit_on, mesh=mesh, out_shardings=meshes.replicated(mesh))
        crop = config.augmentation.crop or reader.crop
        loader = self.batches.make_loader(dataclasses.replace(reader, crop=crop))
        steps, size = range(config.steps), config.batch_size
        augmented = loading.training_batches(loader, steps=steps, batch_size=size, seed=reader.seed)
        images = self.batches.abstract(reader)['images']
        width = jax.eval_shape(self.compute_vectors, params, images).shape[-1]
        state = jit(functools.partial(init_state, config, init_key, width, num_classes))()
        run, previous = jit(step, donate_argnums=0), None
        for count, batch in enumerate(self.watch(augmented), 1):
            state, lowest = run(state, params, batch)
            jax.block_until_ready(previous)  # so that few batches are on the devices
            previous = lowest
            if count % -(-config.steps // 10) == 0:
                self.report(f'linear probe: step {count} of {config.steps}, loss {lowest:.4f}')
        return state[0]
