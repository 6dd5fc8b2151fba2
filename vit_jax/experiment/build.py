"""Builds an experiment from a configuration: checks it, opens the data, returns pure functions."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Batch, Params, UserError, counted, records, refuse, require
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.opening import Checkpoint, open_checkpoint
from vit_jax.checkpoints.transfer import Transferred, for_task, headless, transfer
from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import augment, example_keys, host_crop
from vit_jax.data.image_preprocessing import Preprocessing, Size, normalize
from vit_jax.data.loading import ImageReader, Loader, check_memory, make_loaders, make_warning
from vit_jax.data.sources.base import Source, warn_once
from vit_jax.data.sources.opening import Opener, make_opener
from vit_jax.distributed import meshes
from vit_jax.evaluation.evaluator import Batches, Evaluator, make_evaluator
from vit_jax.evaluation.probing import Probes, open_probes
from vit_jax.models import Model, ModelConfig, ViTConfig, build, parameter_count
from vit_jax.models.compute import DeviceBudget, ResolvedCompute, resolve_compute
from vit_jax.training import update as updates
from vit_jax.training.duration import TrainLength, make_train_length
from vit_jax.training.losses import (
    BatchSums,
    LossConfig,
    RowsOf,
    StepMetrics,
    make_loss,
    of_any,
    scores,
    targets_of,
)
from vit_jax.training.masked_patches import for_patches, make_patch_sums
from vit_jax.training.optimizer import make_optimizer, make_schedule
from vit_jax.training.rules import make_rules
from vit_jax.training.update import TrainState

Update = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
LossSums = Callable[..., BatchSums]  # (params, batch, key=None) -> sums


class Experiment(NamedTuple):
    """A checked configuration, its opened data, and pure functions.

    init() -> the first TrainState
    update(state, batch) -> (state after one step, metrics)
    evaluators[name].evaluate(params, evals[name]) -> the numbers of each evaluation
    """

    config: TrainConfig
    start: Checkpoint | None  # start_from; its arrays are not read yet
    mesh: Mesh
    resolved: ResolvedCompute  # how the model is computed
    model: Model
    preprocessing: Preprocessing
    length: TrainLength
    train: ImageReader
    evals: dict[str, ImageReader]
    probes: Probes | None  # of the few-shot evaluation
    init: Callable[[], TrainState]
    update: Update
    eval_batches: Batches
    evaluators: dict[str, Evaluator]
    report: list[str]  # what the rules over parameters matched

    @property
    def readers(self) -> dict[str, ImageReader]:
        """The images to train on, as `train`, and those of the evaluations."""
        return {'train': self.train} | self.evals

    @property
    def decisions(self) -> dict[str, Any]:
        """Choices that depend on the host, as JSON values: the file to start from, memory."""
        origin = list(self.start.origin) if self.start else []
        return {'origin': origin, 'compute': records.to_dict(self.resolved.compute)}

    @property
    def loader_of(self) -> Callable[[ImageReader], Loader]:
        """Returns the loader of a reader; it is made, and kept images are read, once."""
        return self.eval_batches.loader_of

    def recorded_config(self) -> dict[str, Any]:
        """Returns the configuration as JSON values, to keep in the work directory.

        They name the precision, if the configuration leaves it open, and no secret of a URL.
        """
        values = records.to_dict(self.config)
        values['start_from'] = self.start and self.start.path
        values['compute']['dtype'] = self.resolved.compute.dtype
        return values

    def card(self, step: int) -> dict[str, Any]:
        """The card of the checkpoint at a step, as JSON values."""
        model, loss = self.model.config, self.config.loss
        kind = loss.kind if isinstance(loss, LossConfig) else records.text_of(loss)
        has_classes = self.config.objective is None
        card = Card(
            step=step,
            model=model,
            grid=model.grid,
            preprocessing=self.preprocessing,
            class_names=self.train.source.class_names if has_classes else (),
            loss=kind if has_classes else None,
            software={name: metadata.version(name) for name in ('jax', 'flax', 'optax')},
        )
        return records.to_dict(card)

    def transferred(self, start: Checkpoint, fresh: Params) -> Transferred:
        """The parameters of `start`, which are read, in this model, whose own are `fresh`."""
        old, new = start.card, self.model.config
        names = (old.class_names, self.train.source.class_names) if self.config.reuse_head else None
        return transfer(start.read(), old=old.model, new=new, fresh=fresh, class_names=names)


def build_experiment(
    config: TrainConfig, *, devices: Sequence[jax.Device] | None = None, dtype: Any = 'auto'
) -> Experiment:
    """Builds the experiment of a configuration.

    Args:
      config: The configuration. The experiment has a checked copy of it, which nothing changes.
      devices: The devices to train on, which may belong to other machines; None: all.
      dtype: What `compute.dtype=auto` stands for: the recorded dtype of a resumed run.

    Raises:
      UserError: For values that do not fit each other, the data or the devices.
    """
    config = records.checked(config, where='config')
    has_model = config.model is not None or config.start_from is not None
    text = 'give a model, or start_from=CHECKPOINT to take that one'
    require(has_model, f'config.model is none: {text}')
    if config.total is None:
        raise UserError('config.total is none: expected how long to train')
    opened = make_opener(config.held_out)
    train, evaluated = _open_data(config, opened)
    start, classes = open_start(config), len(train.class_names)
    model_config = trained_model(config, start, classes)
    mesh, size = make_mesh(config, devices), model_config.image_size
    planned = devices is not None
    resolved = choose_compute(config, model_config, mesh, planned=planned, dtype=dtype)
    model = build(
        model_config,
        regularization=config.regularization,
        compute=resolved.compute,
        platform=mesh.devices.flat[0].platform,
    )
    preprocessing = preprocessing_of(config, start)
    if not planned:
        check_memory(config.batch_size, size, 'config.batch_size', config.accumulation_steps)
        check_memory(config.eval_batch_size or 0, size, 'config.eval_batch_size')
    reader = reader_for(config, preprocessing, size)
    length = make_train_length(config.total, batch_size=config.batch_size, num_images=len(train))
    objective = functools.partial(make_objective, config, model, preprocessing)
    init, update, report = _training_functions(
        config, model=model, mesh=mesh, loss_sums=objective(), length=length, classes=classes
    )
    batches = make_eval_batches(config, mesh)
    return Experiment(
        config=config,
        start=start,
        mesh=mesh,
        resolved=resolved,
        model=model,
        preprocessing=preprocessing,
        length=length,
        train=reader(train, crop=host_crop(config.augmentation, preprocessing)),
        evals={name: reader(source) for name, source in evaluated.items()},
        probes=open_probes(few, config.data, opened, reader) if (few := config.fewshot) else None,
        init=init,
        update=update,
        eval_batches=batches,
        evaluators=make_evaluators(objective, batches, train=train, evaluated=evaluated),
        report=report,
    )


def _open_data(config: TrainConfig, opened: Opener) -> tuple[Source, dict[str, Source]]:
    """Opens the images to train on, and those of each evaluation."""
    train = opened(config.data, config.train_split, classes=config.classes)
    evaluated = {
        name: opened(one.data or config.data, one.split, one.labels, config.classes)
        for name, one in config.evaluations.items()
    }
    refuse(label_problems(config, train, evaluated))
    return train, evaluated


def label_problems(config: TrainConfig, train: Source, evaluated: dict[str, Source]) -> list[str]:
    """Returns why the classes of these images cannot be learned and measured, with the way out.

    Warns of classes that are measured without being learned, if labels are in memory.
    """
    if config.objective is not None:  # which does not look at them
        return []
    data, loss, problems = records.text_of(config.data), config.loss, list[str]()
    for name, source in evaluated.items():
        if source.class_names != train.class_names:
            problems.append(f'{data}: the classes of train and {name} differ')
        elif train.labels_in_memory and source.labels_in_memory:
            missing = [train.class_names[i] for i in sorted(_classes(source) - _classes(train))]
            count = f'{counted(len(missing), "class")} of {name} without a training image'
            if missing:
                warn_once(f'{data}: {count}: {", ".join(missing[:5])}')
    if isinstance(loss, LossConfig) and loss.kind == 'softmax' and train.multi_label:
        text = 'an image may have several classes, softmax expects one'
        problems.append(f'{data}: {text}: --config.loss.kind=sigmoid')
    if isinstance(loss, LossConfig) and len(train.class_names) == 1 and not train.multi_label:
        text = f'one class alone, {train.class_names[0]!r}, so that every guess is right'
        problems.append(f'{data}: {text}: add images of another class')
    return problems


def _classes(source: Source) -> set[int]:
    """Returns the classes of the images in a source."""
    labels = source.labels
    return {*np.unique(np.nonzero(labels)[1] if source.multi_label else labels).tolist()}


def open_start(config: TrainConfig) -> Checkpoint | None:
    """Opens the checkpoint to start from, if any, without reading its arrays."""
    if config.start_from is None:
        return None
    try:
        size = config.image_size or (config.model.image_size if config.model else None)
        return open_checkpoint(config.start_from, config.hints, image_size=size)
    except NeedsHint as error:
        raise UserError(f'{error} (in a configuration: --config.hints.NAME=VALUE)') from error


def make_mesh(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh. Raises UserError if batches cannot be split over it."""
    mesh = meshes.make_mesh(config.mesh, devices)
    meshes.check_batch_size(config.batch_size, mesh, accumulation_steps=config.accumulation_steps)
    if config.eval_batch_size is not None:
        meshes.check_batch_size(config.eval_batch_size, mesh, accumulation_steps=1)
    return mesh


def choose_compute(
    config: TrainConfig, model: ModelConfig, mesh: Mesh, *, planned: bool, dtype: Any = 'auto'
) -> ResolvedCompute:
    """Chooses how to compute the model on a mesh, by the memory of its devices unless `planned`.

    `dtype` is what `auto` stands for.
    """
    device = mesh.devices.flat[0] if planned else mesh.local_devices[0]
    memory = None if planned else _memory(device)
    if memory is not None:
        copies = config.polyak_decay is not None, config.accumulation_steps > 1
        numbers = 3 + (config.optimizer.kind == 'adamw') + sum(copies)  # float32, per parameter
        split = mesh.shape['fsdp'] * mesh.shape['tensor']
        memory -= 4 * numbers * parameter_count(model) // split
    parts = mesh.shape['data'] * mesh.shape['fsdp'] * config.accumulation_steps
    compute = config.compute
    if compute.dtype == 'auto':
        compute = dataclasses.replace(compute, dtype=dtype)
    return resolve_compute(
        compute,
        model,
        platform=device.platform,
        budget=DeviceBudget(config.batch_size // parts, memory, has_fast_bfloat16(device)),
        regularization=config.regularization,
    )


def _memory(device: jax.Device) -> int | None:
    """Returns the bytes that jax may use on a device; None if unknown, as on CPUs."""
    try:
        return (device.memory_stats() or {}).get('bytes_limit')
    except (RuntimeError, NotImplementedError):  # not every platform has such numbers
        return None


def has_fast_bfloat16(device: Any) -> bool:
    """Returns whether the device multiplies bfloat16 faster than float32.

    TPUs do, and NVIDIA GPUs of compute capability 8.0 (Ampere) or newer. AMD GPUs were not tested.
    """
    major = str(getattr(device, 'compute_capability', '')).partition('.')[0]
    return device.platform == 'tpu' or (major.isdecimal() and int(major) >= 8)


def preprocessing_of(config: TrainConfig, start: Checkpoint | None) -> Preprocessing:
    """Returns the configuration's preprocessing, or the checkpoint's, or the usual one."""
    return config.preprocessing or (start.card.preprocessing if start else Preprocessing())


def trained_model(config: TrainConfig, start: Checkpoint | None, classes: int) -> ModelConfig:
    """Returns the model to train, the configuration's or the checkpoint's, for this many classes.

    To predict patches it has no classes.
    """
    model, size = config.model, config.image_size
    if config.objective is not None:
        if model is None:
            assert start is not None  # `build_experiment` asks for one of them
            model = headless(start.card.model)
            if isinstance(model, ViTConfig):
                model.representation_size = None
        model = dataclasses.replace(model, image_size=size or model.image_size)
        return for_patches(model, config.objective)
    if model is None:
        assert start is not None
        model = for_task(start.card.model, num_classes=classes, image_size=size)
        return dataclasses.replace(model, head=config.head or model.head)
    text = f'{records.text_of(config.data)} has {counted(classes, "class")}; leave it out'
    wrong = f'config.model.num_classes={model.num_classes}, but {text} to take their number'
    require(model.num_classes in (None, classes), wrong)
    if isinstance(model, ViTConfig):
        wrong = f'config.model.patch_outputs={model.patch_outputs}: only config.objective'
        require(model.patch_outputs is None, f'{wrong}=MaskedPatches trains them; leave it out')
    size, head = size or model.image_size, config.head or model.head
    return dataclasses.replace(model, num_classes=classes, image_size=size, head=head)


def reader_for(
    config: TrainConfig, preprocessing: Preprocessing, size: Size
) -> Callable[..., ImageReader]:
    """Makes readers of sources, to images of this size: `crop` may differ."""
    return functools.partial(
        ImageReader,
        crop=preprocessing.crop,
        size=size,
        exif_rotation=preprocessing.exif_rotation,
        seed=config.seed,
        on_unreadable=config.loader.on_unreadable,
        max_pixels=config.loader.max_pixels,
        on_skipped=make_warning(),
    )


def _training_functions(
    config: TrainConfig,
    *,
    model: Model,
    mesh: Mesh,
    loss_sums: LossSums,
    length: TrainLength,
    classes: int,
) -> tuple[Callable[[], TrainState], Update, list[str]]:
    """Returns `init`, `update`, and what the rules matched. Raises UserError if they do not fit."""
    schedule = make_schedule(config.schedule, length)
    first = jax.jit(model.init)  # traced once: always on this mesh, with the same key

    def first_params() -> Params:
        return first(updates.key_for(config.seed, updates.INITIALISE, 0))

    params = jax.eval_shape(meshes.traced_on(mesh, first_params))
    rules = make_rules(config.optimizer, params)
    optimizer = make_optimizer(config.optimizer, schedule, rules)
    averaged = config.polyak_decay is not None
    init = updates.make_init(first, optimizer, seed=config.seed, averaged=averaged)
    targets = functools.partial(targets_of, num_classes=classes)
    update = updates.make_update(
        loss_sums,
        optimizer,
        schedule,
        augment=functools.partial(augment, config=config.augmentation, targets_of=targets),
        stop_frozen_gradients=rules.stop_frozen_gradients,
        seed=config.seed,
        accumulation_steps=config.accumulation_steps,
        polyak_decay=config.polyak_decay,
    )
    return meshes.traced_on(mesh, init), update, rules.report


def make_objective(
    config: TrainConfig,
    model: Model,
    preprocessing: Preprocessing,
    *,
    any_right: bool = False,
    rows_of: RowsOf | None = None,
) -> LossSums:
    """Makes the function that sums the loss and the metrics over the examples of a batch.

    With `any_right`, any class of a multi-label image is right. `rows_of` see `make_loss_sums`.
    """
    scale = functools.partial(normalize, preprocessing=preprocessing)
    if config.objective is None:
        loss = make_loss(config.loss)
        loss = of_any(loss) if any_right else loss
        return updates.make_loss_sums(model.apply, loss, scale, rows_of=rows_of)
    assert isinstance(model.config, ViTConfig)  # `trained_model` rejects others
    return make_patch_sums(
        model.predict_patches,
        config.objective,
        scale,
        model=model.config,
        keys_of=lambda batch: example_keys(
            updates.purpose_key(config.seed, updates.CORRUPT), batch
        ),
    )


def make_evaluators(
    objective: Callable[..., LossSums],
    batches: Batches,
    *,
    train: Source,
    evaluated: dict[str, Source],
) -> dict[str, Evaluator]:
    """Makes the evaluator of each evaluation; evaluations with equal options share one.

    Any class of a multi-label image is right if training images have one class each. Otherwise
    the mean average precision of multi-label images is measured.
    """
    rows_of = scores if train.multi_label else None

    @functools.cache
    def evaluator(any_right: bool) -> Evaluator:
        return make_evaluator(objective(any_right=any_right, rows_of=rows_of), batches)

    return {
        name: evaluator(source.multi_label and not train.multi_label)
        for name, source in evaluated.items()
    }


def make_eval_batches(config: TrainConfig, mesh: Mesh) -> Batches:
    """Makes the batches of evaluations; their loaders also serve training."""
    loader_of = make_loaders(config.loader, meshes.batch_sharding(mesh))
    return Batches(mesh, loader_of, config.eval_batch_size or config.batch_size)


def eval_loaders(experiment: Experiment) -> list[Loader]:
    """Makes the loaders, and returns those of test images that must all be readable.

    Reads the images that are kept on the devices. Raises UserError if one cannot be read.
    """
    experiment.loader_of(experiment.train)
    tested = [(reader, experiment.loader_of(reader)) for reader in experiment.evals.values()]
    return [loader for reader, loader in tested if reader.on_unreadable != 'skip']
