"""From a configuration to the parts of a run: mesh, model, feeds, programs, first state."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.base import records
from vit_jax.base.array_types import Array, Batch, Float, Params
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.opening import Checkpoint, open_checkpoint
from vit_jax.checkpoints.transfer import transfer
from vit_jax.config import TrainConfig
from vit_jax.data import loading
from vit_jax.data.augmentation import augment, normalize
from vit_jax.data.image_preprocessing import Crop, Preprocessing
from vit_jax.data.sources.base import Source
from vit_jax.models import Model, ModelConfig, ViTConfig, build, for_task
from vit_jax.parallel import meshes, sharding_rules
from vit_jax.training.duration import TrainLength
from vit_jax.training.losses import make_loss, targets_of
from vit_jax.training.optimizer import make_optimizer, make_schedule
from vit_jax.training.rules import make_rules
from vit_jax.training.update import Metrics, TrainState, make_init, make_loss_sums, make_update


class Setup(NamedTuple):
    """What is decided before anything is compiled."""

    config: TrainConfig
    mesh: Mesh
    origin: Checkpoint | None  # start_from
    model: Model
    preprocessing: Preprocessing
    length: TrainLength | None = None  # of the training, where there is any
    label_shape: tuple[int, ...] = ()  # of one image: () a class, (k,) a row over the classes

    @property
    def eval_batch_size(self) -> int:
        """Images in one batch of evaluation."""
        return self.config.eval_batch_size or self.config.batch_size


def read_origin(config: TrainConfig) -> Checkpoint | None:
    """The checkpoint to start from, if any; its arrays are not read yet."""
    if config.start_from is None:
        return None
    try:
        return open_checkpoint(config.start_from, config.hints, image_size=config.image_size)
    except NeedsHint as error:
        raise UserError(f'{error} (in a configuration: --config.hints.NAME=VALUE)') from error


def prepare(
    config: TrainConfig,
    origin: Checkpoint | None,
    model_config: ModelConfig,
    *,
    length: TrainLength | None = None,
    label_shape: tuple[int, ...] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Setup:
    """The parts of a run with this model; where it trains, of this length; on all devices.

    Raises UserError where sizes do not fit the devices, or the loss does not fit the labels.
    """
    mesh = meshes.make_mesh(config.mesh, devices)
    meshes.check_batch_size(config.batch_size, mesh, accumulation_steps=config.accumulation_steps)
    if config.eval_batch_size is not None:
        meshes.check_batch_size(config.eval_batch_size, mesh, accumulation_steps=1)
    model = build(
        model_config,
        regularization=config.regularization,
        compute=config.compute,
        shard_activations=functools.partial(meshes.shard_activations, mesh),
    )
    preprocessing = preprocessing_of(config, origin)
    if length is not None and label_shape and config.loss.kind == 'softmax':
        raise UserError(
            f'{config.data}: an image may have several classes, softmax expects one: '
            f'--config.loss.kind=sigmoid'
        )
    return Setup(config, mesh, origin, model, preprocessing, length, label_shape)


def preprocessing_of(config: TrainConfig, origin: Checkpoint | None) -> Preprocessing:
    """The configuration's preprocessing, or the checkpoint's, or the usual one."""
    return config.preprocessing or (origin.card.preprocessing if origin else Preprocessing())


def trained_model(
    config: TrainConfig, origin: Checkpoint | None, class_names: tuple[str, ...]
) -> ModelConfig:
    """The model to train, the configuration's or the checkpoint's, for these classes."""
    if config.model is None:
        assert origin is not None  # `checked` requires a model or a checkpoint
        return for_task(
            origin.card.model, num_classes=len(class_names), image_size=config.image_size
        )
    if config.model.num_classes not in (None, len(class_names)):
        raise UserError(
            f'config.model.num_classes={config.model.num_classes}, but {config.data} has '
            f'{len(class_names)} classes; leave it out to take their number'
        )
    image_size = config.image_size or config.model.image_size
    return dataclasses.replace(config.model, num_classes=len(class_names), image_size=image_size)


def frozen_model(config: TrainConfig, origin: Checkpoint) -> ModelConfig:
    """The model of a checkpoint without its head: what gives features."""
    model = origin.card.model
    image_size = config.image_size or model.image_size
    return dataclasses.replace(model, num_classes=None, image_size=image_size)


class Feeds:
    """The feeds of a run by what they read, each made once: a data set lies on the device once."""

    def __init__(self, setup: Setup, opened: Callable[[str, str], Source]):
        self._setup, self._opened = setup, opened
        self._made: dict[tuple[Any, ...], loading.Loader] = {}

    def evaluation(self, data: str, split: str, crop: Crop | None = None) -> loading.Loader:
        """Images as the preprocessing or another crop leaves them; none is skipped."""
        return self._feed(data, split, crop, skip_unreadable=False)

    def training(self) -> loading.Loader:
        """The training images, cut as the augmentation says."""
        config = self._setup.config
        skip = config.loader.on_unreadable == 'skip'
        return self._feed(
            config.data, config.train_split, config.augmentation.crop, skip_unreadable=skip
        )

    def _feed(
        self, data: str, split: str, crop: Crop | None, *, skip_unreadable: bool
    ) -> loading.Loader:
        name = data, split, repr(crop), skip_unreadable
        if name not in self._made:
            config, preprocessing = self._setup.config, self._setup.preprocessing
            reader = loading.ImageReader(
                source=self._opened(data, split),
                crop=crop or preprocessing.crop,
                size=self._setup.model.config.image_size,
                exif_rotation=preprocessing.exif_rotation,
                seed=config.seed,
                skip_unreadable=skip_unreadable,
            )
            sharding = meshes.batch_sharding(self._setup.mesh)
            self._made[name] = loading.make_loader(reader, config.loader, sharding)
        return self._made[name]


class Functions(NamedTuple):
    """A training run as pure functions; nothing is computed yet."""

    init: Callable[[], TrainState]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    scores: Callable[[Params, Batch], Metrics]
    report: list[str]  # what the rules over parameters matched


class Programs(NamedTuple):
    """What runs on the devices, compiled once each: a batch of another shape is an error."""

    init: Callable[[], TrainState]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    scores: Callable[[Params, Batch], Metrics]
    like: TrainState  # shapes and types of the state
    shardings: TrainState  # where its arrays lie
    report: list[str]


def make_functions(setup: Setup) -> Functions:
    """The functions of a training run. UserError where rules or schedule do not fit."""
    config, model = setup.config, setup.model
    assert setup.length is not None and model.config.num_classes is not None
    schedule = make_schedule(config.schedule, setup.length)
    rules = make_rules(config.optimizer, jax.eval_shape(model.init, jax.random.key(0)))
    optimizer = make_optimizer(config.optimizer, schedule, rules)
    averaged = config.polyak_decay is not None
    init = make_init(model.init, optimizer, seed=config.seed, averaged=averaged)
    scoring = functools.partial(
        make_loss_sums,
        model.apply,
        make_loss(config.loss),
        functools.partial(normalize, preprocessing=setup.preprocessing),
    )
    update = make_update(
        scoring(),
        optimizer,
        schedule,
        augment=functools.partial(
            augment,
            config=config.augmentation,
            targets_of=functools.partial(targets_of, num_classes=model.config.num_classes),
        ),
        stop_frozen_gradients=rules.stop_frozen_gradients,
        seed=config.seed,
        accumulation_steps=config.accumulation_steps,
        polyak_decay=config.polyak_decay,
    )
    return Functions(init, update, scoring(keep_rows=bool(setup.label_shape)), rules.report)


def placed(setup: Setup, functions: Functions) -> tuple[TrainState, TrainState]:
    """Shapes and types of the state, and where its arrays lie.

    Raises UserError where less of it can be split than the configuration demands.
    """
    like, config = jax.eval_shape(functions.init), setup.config.mesh
    shardings = sharding_rules.shardings_for(like, setup.mesh, config)
    sharding_rules.check_split(like, shardings, setup.mesh, config)
    return like, shardings


def lowered_update(
    setup: Setup, functions: Functions, like: TrainState, shardings: TrainState
) -> Any:
    """The update step, not compiled yet, of such a state."""
    state = sharding_rules.abstract(like, shardings)
    update = jax.jit(
        functions.update,
        donate_argnums=0,
        out_shardings=(shardings, meshes.replicated(setup.mesh)),
    )
    return update.lower(state, described_batch(setup, setup.config.batch_size))


def compile_training(setup: Setup) -> Programs:
    """The compiled programs of a training run."""
    functions, mesh = make_functions(setup), setup.mesh
    like, shardings = placed(setup, functions)
    everywhere = meshes.replicated(mesh)
    eval_params = sharding_rules.abstract(like.eval_params, shardings.eval_params)
    update = lowered_update(setup, functions, like, shardings).compile()
    scores = (
        jax.jit(functions.scores, out_shardings=everywhere)
        .lower(eval_params, described_batch(setup, setup.eval_batch_size))
        .compile()
    )
    init = jax.jit(functions.init, out_shardings=shardings)
    report = [*functions.report, *sharding_rules.sharding_report(like, shardings, mesh)]
    return Programs(init, update, scores, like, shardings, report)


def compile_features(
    setup: Setup, params: Params, shardings: Params
) -> Callable[[Params, Batch], Float[Array, 'b d']]:
    """The compiled features of a batch, whole on every device; params are shapes or arrays."""
    if isinstance(setup.model.config, ViTConfig) and setup.model.config.pool == 'none':
        raise UserError('fewshot: pool=none gives features of every token, not of the image')

    def features(params: Params, batch: Batch) -> Float[Array, 'b d']:
        images = normalize(batch['images'], setup.preprocessing)
        return setup.model.features(params, images)

    compiled: Callable[[Params, Batch], Float[Array, 'b d']] = (
        jax.jit(features, out_shardings=meshes.replicated(setup.mesh))
        .lower(
            sharding_rules.abstract(params, shardings),
            described_batch(setup, setup.eval_batch_size),
        )
        .compile()
    )
    return compiled


def start_state(setup: Setup, programs: Programs) -> tuple[TrainState, list[str]]:
    """The state before the first step, and what was said of the checkpoint that it starts from."""
    state = programs.init()
    if setup.origin is None:
        return state, []
    params, report = transferred(setup, state.params)
    params = meshes.put(params, programs.shardings.params)
    average = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
    return state._replace(params=params, ema_params=average), report


def transferred(setup: Setup, fresh: Params) -> tuple[Params, list[str]]:
    """The parameters of start_from in this run's model, and lines that say what became of them."""
    origin = setup.origin
    assert origin is not None
    moved = transfer(origin.read(), old=origin.card.model, new=setup.model.config, fresh=fresh)
    return moved.params, [f'start_from {origin.path}', *origin.report, *moved.report]


def card(setup: Setup, step: int, class_names: tuple[str, ...]) -> dict[str, Any]:
    """The card of this run's checkpoint at a step, as JSON values."""
    model = setup.model.config
    software = {name: metadata.version(name) for name in ('jax', 'flax', 'optax')}
    return records.to_dict(
        Card(
            step=step,
            model=model,
            grid=model.grid,
            preprocessing=setup.preprocessing,
            class_names=class_names,
            loss=setup.config.loss.kind,
            software=software,
        )
    )


def described_batch(setup: Setup, size: int) -> Batch:
    """Shapes, types and places of a batch of so many images."""
    shape = size, *setup.model.config.image_size, 3
    batch = {
        'images': jax.ShapeDtypeStruct(shape, jnp.uint8),
        'labels': jax.ShapeDtypeStruct((size, *setup.label_shape), jnp.int32),
        'mask': jax.ShapeDtypeStruct((size,), jnp.bool_),
        'epoch': jax.ShapeDtypeStruct((size,), jnp.int32),
        'example': jax.ShapeDtypeStruct((size,), jnp.int32),
    }
    return sharding_rules.abstract(batch, dict.fromkeys(batch, meshes.batch_sharding(setup.mesh)))
