"""What is decided of a training before anything is compiled or written, and opened for it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Batch, Params, UserError, counted, records, refuse
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.opening import Checkpoint, open_checkpoint
from vit_jax.checkpoints.transfer import Transferred, for_task, headless, transfer
from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import augment, example_keys, host_crop
from vit_jax.data.image_preprocessing import Preprocessing, Size, normalize
from vit_jax.data.loading import Loader, check_memory, make_loaders
from vit_jax.data.reading import ImageReader, make_warning
from vit_jax.data.sources.base import Source, warn_once
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed import meshes
from vit_jax.evaluation.probing import Probes, open_probes
from vit_jax.experiment.peaks import has_fast_bfloat16, peak_of
from vit_jax.models import Model, ModelConfig, ViTConfig, build, multiply_adds, parameter_count
from vit_jax.models.compute import DeviceBudget, ResolvedCompute, resolve_compute
from vit_jax.training.duration import TrainLength, make_train_length
from vit_jax.training.losses import LossConfig, make_loss, of_any, targets_of
from vit_jax.training.masked_patches import for_patches, make_patch_sums
from vit_jax.training.metrics import BatchSums, StepMetrics, scores
from vit_jax.training.optimizer import make_optimizer, make_schedule
from vit_jax.training.rules import make_rules
from vit_jax.training.update import (
    CORRUPT,
    INITIALISE,
    TrainState,
    key_for,
    make_init,
    make_loss_sums,
    make_update,
    purpose_key,
)

Update = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
EvalStep = Callable[[Params, Batch], BatchSums]
LossSums = Callable[..., BatchSums]  # (params, batch, key=None) -> sums


class Experiment(NamedTuple):
    """A training that is decided: checked values, opened data, pure functions.

    init() -> the first TrainState
    update(state, batch) -> (state after one step, metrics)
    eval_steps[name](params, batch) -> sums over the examples of a batch, for each evaluation
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
    eval_steps: dict[str, EvalStep]
    report: list[str]  # what the rules over parameters matched

    @property
    def readers(self) -> dict[str, ImageReader]:
        """Of all images that are trained on, as `train`, and evaluated."""
        return {'train': self.train} | self.evals

    @property
    def eval_batch_size(self) -> int:
        """Images in one batch of evaluation."""
        return self.config.eval_batch_size or self.config.batch_size

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
    config: TrainConfig, *, devices: Sequence[jax.Device] | None = None
) -> Experiment:
    """The experiment of a configuration on these devices, all by default.

    Raises UserError for values that do not fit each other, the data or the devices.
    """
    config = records.checked(config, where='config')
    if config.model is None and config.start_from is None:
        text = 'give a model, or start_from=CHECKPOINT to take that one'
        raise UserError(f'config.model is none: {text}')
    if config.total is None:
        raise UserError('config.total is none: expected how long to train')
    opened = make_opener(config.held_out)
    train = opened(config.data, config.train_split, classes=config.classes)
    evaluated = {
        name: opened(one.data or config.data, one.split, one.labels, config.classes)
        for name, one in config.evaluations.items()
    }
    refuse(label_problems(config, train, evaluated))
    start = open_start(config)
    classes = len(train.class_names)
    model_config = trained_model(config, start, classes)
    length = make_train_length(config.total, batch_size=config.batch_size, num_images=len(train))
    mesh, pixels = make_mesh(config, devices), model_config.image_size
    resolved = choose_compute(config, model_config, mesh, planned=devices is not None)
    model = build(
        model_config,
        regularization=config.regularization,
        compute=resolved.compute,
        platform=mesh.devices.flat[0].platform,
    )
    preprocessing = preprocessing_of(config, start)
    if devices is None:  # else they may be those of other machines, for which a run is planned
        _check_memory(config, pixels)
    reader = reader_for(config, preprocessing, pixels)
    trained, evaluations = _objective(config, model, preprocessing, train, evaluated)
    few = config.fewshot
    init, update, report = _training_functions(config, model, mesh, trained, length, classes)
    crop = host_crop(config.augmentation, preprocessing)
    return Experiment(
        config=dataclasses.replace(
            config,
            start_from=start and start.path,  # without the secrets of a URL
            compute=dataclasses.replace(config.compute, dtype=resolved.compute.dtype),
        ),
        start=start,
        mesh=mesh,
        resolved=resolved,
        model=model,
        preprocessing=preprocessing,
        length=length,
        train=reader(train, crop=crop),
        evals={name: reader(source) for name, source in evaluated.items()},
        probes=None if few is None else open_probes(few, config.data, opened, reader),
        init=init,
        update=update,
        eval_steps=evaluations,
        report=report,
    )


def _check_memory(config: TrainConfig, size: Size) -> None:
    check_memory(config.batch_size, size, 'config.batch_size', config.accumulation_steps)
    check_memory(config.eval_batch_size or 0, size, 'config.eval_batch_size')


def label_problems(config: TrainConfig, train: Source, evaluated: dict[str, Source]) -> list[str]:
    """Why the classes of these images cannot be learned and measured, with the way out.

    Warns of classes that are measured without being learned, if labels are in memory.
    """
    if config.objective is not None:  # which does not look at them
        return []
    data, loss = records.text_of(config.data), config.loss
    for name, source in evaluated.items():
        if source.class_names == train.class_names:
            missing = [train.class_names[i] for i in sorted(_classes(source) - _classes(train))]
            if missing and train.labels_in_memory:
                count = f'{counted(len(missing), "class")} of {name} without a training image'
                warn_once(f'{data}: {count}: {", ".join(missing[:5])}')
    found = [
        f'{data}: the classes of train and {name} differ'
        for name, source in evaluated.items()
        if source.class_names != train.class_names
    ]
    if not isinstance(loss, LossConfig):
        return found
    if train.multi_label and loss.kind == 'softmax':
        text = 'an image may have several classes, softmax expects one'
        found.append(f'{data}: {text}: --config.loss.kind=sigmoid')
    if not train.multi_label and len(train.class_names) == 1:
        text = f'one class alone, {train.class_names[0]!r}, so that every guess is right'
        found.append(f'{data}: {text}: add images of another class')
    return found


def _classes(source: Source) -> set[int]:
    """The classes of its images; none if they would have to be read for that."""
    if not source.labels_in_memory:
        return set()
    labels = source.labels
    return {*np.unique(np.nonzero(labels)[1] if source.multi_label else labels).tolist()}


def open_start(config: TrainConfig) -> Checkpoint | None:
    """The checkpoint to start from, if any; its arrays are not read yet."""
    if config.start_from is None:
        return None
    try:
        size = config.image_size or (config.model.image_size if config.model else None)
        return open_checkpoint(config.start_from, config.hints, image_size=size)
    except NeedsHint as error:
        raise UserError(f'{error} (in a configuration: --config.hints.NAME=VALUE)') from error


def make_mesh(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the configuration. Raises UserError where batches cannot be split over it."""
    mesh = meshes.make_mesh(config.mesh, devices)
    meshes.check_batch_size(config.batch_size, mesh, accumulation_steps=config.accumulation_steps)
    if config.eval_batch_size is not None:
        meshes.check_batch_size(config.eval_batch_size, mesh, accumulation_steps=1)
    return mesh


def choose_compute(
    config: TrainConfig, model: ModelConfig, mesh: Mesh, *, planned: bool
) -> ResolvedCompute:
    """How to compute the model on a mesh. The memory of devices of a plan is not asked for."""
    device = mesh.devices.flat[0] if planned else mesh.local_devices[0]
    memory = None if planned else _memory(device)
    if memory is not None:
        optimizer, copies = config.optimizer, [config.polyak_decay, config.accumulation_steps > 1]
        numbers = 3 + (optimizer.kind == 'adamw') + sum(map(bool, copies))  # float32, a parameter
        split = mesh.shape['fsdp'] * mesh.shape['tensor']
        memory -= 4 * numbers * parameter_count(model) // split
    parts = mesh.shape['data'] * mesh.shape['fsdp'] * config.accumulation_steps
    return resolve_compute(
        config.compute,
        model,
        platform=device.platform,
        budget=DeviceBudget(config.batch_size // parts, memory, has_fast_bfloat16(device)),
        regularization=config.regularization,
    )


def _memory(device: jax.Device) -> int | None:
    """Bytes that jax may use on a device; None where that is not known, as on CPUs."""
    try:
        return (device.memory_stats() or {}).get('bytes_limit')
    except (RuntimeError, NotImplementedError):  # not every platform has such numbers
        return None


def preprocessing_of(config: TrainConfig, start: Checkpoint | None) -> Preprocessing:
    """The configuration's preprocessing, or the checkpoint's, or the usual one."""
    return config.preprocessing or (start.card.preprocessing if start else Preprocessing())


def trained_model(config: TrainConfig, start: Checkpoint | None, classes: int) -> ModelConfig:
    """The model to train, the configuration's or the checkpoint's, for so many classes.

    To predict patches it has no classes.
    """
    size, model = config.image_size, config.model
    if config.objective is not None:
        if model is None:
            assert start is not None
            model = headless(start.card.model)
            if isinstance(model, ViTConfig):
                model.representation_size = None
        model = dataclasses.replace(model, image_size=size or model.image_size)
        return for_patches(model, config.objective)
    if model is None:
        assert start is not None  # `build_experiment` asks for one of them
        model = for_task(start.card.model, num_classes=classes, image_size=size)
        return dataclasses.replace(model, head=config.head or model.head)
    if model.num_classes not in (None, classes):
        text = f'{records.text_of(config.data)} has {counted(classes, "class")}'
        text += '; leave it out to take their number'
        raise UserError(f'config.model.num_classes={model.num_classes}, but {text}')
    if isinstance(model, ViTConfig) and model.patch_outputs is not None:
        text = 'only config.objective=MaskedPatches trains them; leave it out'
        raise UserError(f'config.model.patch_outputs={model.patch_outputs}: {text}')
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
    model: Model,
    mesh: Mesh,
    loss_sums: LossSums,
    length: TrainLength,
    classes: int,
) -> tuple[Callable[[], TrainState], Update, list[str]]:
    """`init`, `update`, and what the rules matched. Raises UserError where they do not fit."""
    schedule = make_schedule(config.schedule, length)
    first = jax.jit(model.init)  # traced once: always on this mesh, with the same key
    shapes = meshes.traced_on(mesh, lambda: first(key_for(config.seed, INITIALISE, 0)))
    rules = make_rules(config.optimizer, jax.eval_shape(shapes))
    optimizer = make_optimizer(config.optimizer, schedule, rules)
    averaged = config.polyak_decay is not None
    init = make_init(first, optimizer, seed=config.seed, averaged=averaged)
    init = meshes.traced_on(mesh, init)
    targets = functools.partial(targets_of, num_classes=classes)
    update = make_update(
        loss_sums,
        optimizer,
        schedule,
        augment=functools.partial(augment, config=config.augmentation, targets_of=targets),
        stop_frozen_gradients=rules.stop_frozen_gradients,
        seed=config.seed,
        accumulation_steps=config.accumulation_steps,
        polyak_decay=config.polyak_decay,
    )
    return init, update, rules.report


def _objective(
    config: TrainConfig,
    model: Model,
    preprocessing: Preprocessing,
    train: Source,
    evaluated: dict[str, Source],
) -> tuple[LossSums, dict[str, EvalStep]]:
    """What is summed over the examples of a batch: to train by, and of each evaluation."""
    as_input = functools.partial(normalize, preprocessing=preprocessing)
    if config.objective is not None:
        assert isinstance(model.config, ViTConfig)  # `trained_model` refuses others
        loss_sums = make_patch_sums(
            model.predict_patches,
            config.objective,
            as_input,
            model=model.config,
            keys_of=lambda batch: example_keys(purpose_key(config.seed, CORRUPT), batch),
        )
        return loss_sums, dict.fromkeys(evaluated, loss_sums)
    sums_of = functools.partial(make_loss_sums, model.apply, normalize=as_input)
    loss = make_loss(config.loss)

    def eval_step(source: Source) -> EvalStep:
        # A network that was trained for one class an image, on images of which several are right.
        relabelled = source.multi_label and not train.multi_label
        rows_of = scores if train.multi_label else None
        return sums_of(of_any(loss) if relabelled else loss, rows_of=rows_of)

    return sums_of(loss), {name: eval_step(source) for name, source in evaluated.items()}


def loaders(
    experiment: Experiment,
) -> tuple[Callable[[ImageReader], Loader], list[Loader]]:
    """What makes loaders, and those of test images that must all be readable.

    What is kept on the devices is read: raises UserError for an image that cannot be.
    """
    sharding = meshes.batch_sharding(experiment.mesh)
    loader_of = make_loaders(experiment.config.loader, sharding)
    loader_of(experiment.train)
    tested = [(reader, loader_of(reader)) for reader in experiment.evals.values()]
    return loader_of, [loader for reader, loader in tested if reader.on_unreadable != 'skip']


def images_at_peak(experiment: Experiment) -> float | None:
    """Images a second that the devices would train, did they nothing but multiply, at their peak.

    The backward pass costs two forward ones, a multiply-add is two operations (table 6). None: the
    peak is not known, as of CPUs.
    """
    mesh = experiment.mesh
    peak = peak_of(mesh.devices.flat[0].device_kind)
    if peak is None:
        return None
    last_block = experiment.resolved.compute.last_block
    assert last_block != 'auto'  # `choose` chose
    return mesh.size * peak / (6 * multiply_adds(experiment.model.config, last_block=last_block))
