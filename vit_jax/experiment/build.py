"""Builds an experiment from a configuration: opened data, model, mesh and pure functions.

The functions below `build_experiment` are the steps that it calls.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Array, Batch, Key, Params, UserError, plural, raise_all, records, require
from vit_jax.checkpoints import transfer
from vit_jax.checkpoints.card import Card, package_versions
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.opening import Checkpoint, open_checkpoint
from vit_jax.config import StepKind, TrainConfig
from vit_jax.data import loading
from vit_jax.data.augmentation import augment, example_keys, host_crop
from vit_jax.data.image_preprocessing import Preprocessing, Size, normalize
from vit_jax.data.loading import ImageReader, check_memory
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.opening import Opener, make_opener
from vit_jax.distributed import meshes
from vit_jax.evaluation import evaluator
from vit_jax.evaluation.evaluator import BatchMaker, Evaluator, make_evaluator
from vit_jax.evaluation.probing import Probes, check_init_head, open_probes
from vit_jax.models import Compute, Model, ModelConfig, ViTConfig
from vit_jax.models.compute import has_fast_bfloat16, resolve_compute
from vit_jax.models.model import abstract_params, count_params
from vit_jax.pretrained import LoadedModel, load_teacher
from vit_jax.training import distillation, losses
from vit_jax.training import update as updates
from vit_jax.training.duration import TrainLength, make_train_length
from vit_jax.training.masked_patches import configure_for_patches, make_patch_loss_sums
from vit_jax.training.optimizer import check_optimizer, count_moments, make_optimizer, make_schedule
from vit_jax.training.param_groups import make_param_groups
from vit_jax.training.sharpness import Sam, make_sharpener
from vit_jax.training.update import TrainState

Update = Callable[..., tuple[TrainState, losses.StepMetrics]]  # (state, batch, teacher=None)
LossSumsFn = Callable[..., losses.BatchSums]  # (params, batch, key=None) -> sums


class Experiment(NamedTuple):
    """A checked configuration, its opened data, and pure functions.

    init(params=None) -> initial TrainState, with random parameters or the given ones
    updates[kind](state, batch, teacher=None) -> (state after one step, metrics)
    evaluators[name].evaluate(params, eval_readers[name]) -> metrics of an evaluation
    """

    config: TrainConfig
    start_from: Checkpoint | None  # opened `config.start_from`; its arrays are not read yet
    teacher: Params | None  # frozen parameters, on the devices or abstract; None: no teacher
    mesh: Mesh
    compute: Compute  # options of computation, without `auto`
    model: Model
    preprocessing: Preprocessing
    length: TrainLength
    train_reader: ImageReader
    eval_readers: dict[str, ImageReader]
    probes: Probes | None  # data sets of the few-shot evaluation
    init: Callable[..., TrainState]
    updates: dict[StepKind, Update]  # the one with the longest sequence first
    evaluators: dict[str, Evaluator]  # by name; equal patch sizes have the same evaluator
    batches: BatchMaker
    param_group_report: list[str]  # the parameters that each param group matched, in lines

    @property
    def resolved_choices(self) -> dict[str, Any]:
        """Checkpoints and compute options as JSON values, to compare them between hosts.

        They are resolved on each host, so they could differ although the configuration is equal.
        """
        origin = list(self.start_from.origin) if self.start_from else []
        teacher = self.config.distillation.digest
        return {'origin': origin, 'teacher': teacher, 'compute': records.to_dict(self.compute)}

    def export_config(self) -> dict[str, Any]:
        """Returns the configuration as JSON values for the work directory.

        The dtype is resolved. If `start_from` is a URL, its secrets are removed.
        """
        values = records.to_dict(self.config)
        values['start_from'] = self.start_from and self.start_from.path
        values['compute']['dtype'] = self.compute.dtype
        return values

    def make_card(self, step: int) -> dict[str, Any]:
        """Returns the card of a checkpoint at a step, as JSON values."""
        model, loss = self.model.config, self.config.loss
        kind = loss.kind if isinstance(loss, losses.LossConfig) else records.text_of(loss)
        has_classes = self.config.objective is None
        card = Card(
            step=step,
            model=model,
            grid=model.grid,
            preprocessing=self.preprocessing,
            class_names=self.train_reader.source.class_names if has_classes else (),
            loss=kind if has_classes else None,
            software=package_versions(),
        )
        return records.to_dict(card)

    def transfer_params(self, start: Checkpoint, fresh: Params) -> transfer.Transferred:
        """Reads the parameters of `start` and adapts them to this model.

        `fresh` are the initial parameters of this model. Parameters that `start` lacks are taken
        from them.
        """
        old, new = start.card.model, self.model.config
        classes = start.card.class_names, self.train_reader.source.class_names
        names = classes if self.config.reuse_head else None
        body = {name: leaf for name, leaf in fresh.items() if name != distillation.PROJECTION}
        result = transfer.transfer(start.read(), old=old, new=new, fresh=body, class_names=names)
        return result._replace(params=fresh | result.params)


def build_experiment(
    config: TrainConfig, *, devices: Sequence[jax.Device] | None = None, dtype: Any = 'auto'
) -> Experiment:
    """Builds an experiment from a configuration.

    Args:
      config: The configuration. The experiment has a checked copy, which is never changed.
      devices: Devices to train on, which need not be attached (`vit_jax.plan`); None: all devices.
      dtype: Value for `compute.dtype=auto`, such as the dtype of a resumed run; `auto`: by device.

    Raises:
      UserError: For values that are inconsistent, or do not fit the data or the devices.
    """
    config = records.validated(config, where='config')
    if config.total is None:
        raise UserError('config.total: not set; expected a length, such as --config.total.epochs=7')

    opener = make_opener(config.held_out)
    train, evaluated = _open_data(config, opener)
    length = make_train_length(config.total, batch_size=config.batch_size, num_images=len(train))

    start = open_start(config)
    model_config = resolve_model(config, start, len(train.class_names))
    preprocessing, size = resolve_preprocessing(config, start), model_config.image_size
    if config.init_head is not None:
        check_init_head(model_config, train, has_start=start is not None)
    config.distillation, loaded = load_teacher(config.distillation, train.class_names)

    mesh, planned = make_mesh(config, devices), devices is not None
    compute = resolve_compute_on_mesh(
        config, model_config, mesh, planned=planned, dtype=dtype, teacher=loaded
    )
    if not planned:
        check_memory(config.batch_size, size, 'config.batch_size', config.accumulation_steps)
        check_memory(config.eval_batch_size or 0, size, 'config.eval_batch_size')
    build_model = _make_builder(config, model_config, compute, mesh)
    reader, batches = make_readers(config, preprocessing, size), make_eval_batches(config, mesh)
    teacher = loaded.as_teacher(compute, mesh, config.mesh, abstract=planned) if loaded else None
    sums_of = functools.partial(_select_loss_sums, config, teacher, preprocessing, train)
    evaluator_at = functools.cache(
        lambda patch_size: make_evaluator(sums_of(build_model(patch_size))[1], batches)
    )
    init, by_kind, report = _make_training(config, build_model, sums_of, teacher, length, train)
    return Experiment(
        config=config,
        start_from=start,
        teacher=teacher.params if teacher else None,
        mesh=mesh,
        compute=compute,
        model=build_model(None, regularization=config.regularization),
        preprocessing=preprocessing,
        length=length,
        train_reader=reader(train, crop=host_crop(config.augmentation, preprocessing)),
        eval_readers={name: reader(source) for name, source in evaluated.items()},
        probes=open_probes(few, config.data, opener, reader) if (few := config.fewshot) else None,
        init=meshes.with_mesh(mesh, init),
        updates=by_kind,
        evaluators={n: evaluator_at(one.patch_size) for n, one in config.evaluations.items()},
        batches=batches,
        param_group_report=report,
    )


def _open_data(config: TrainConfig, opener: Opener) -> tuple[Source, dict[str, Source]]:
    """Opens the training images, and the images of each evaluation by name."""
    wrong = 'config.fewshot.linear_probe: not used in training; run vit_jax.fewshot on a checkpoint'
    require(config.fewshot is None or config.fewshot.linear_probe is None, wrong)
    train = opener(config.data, config.train_split, classes=config.classes)
    evaluated = {
        name: opener(one.data or config.data, one.split, one.labels, config.classes)
        for name, one in config.evaluations.items()
    }
    raise_all(check_labels(config, train, evaluated))
    loading.check_balance(train, config.loader)
    return train, evaluated


def check_labels(config: TrainConfig, train: Source, evaluated: dict[str, Source]) -> list[str]:
    """Lists problems of the labels for the configured loss and evaluations, with remedies."""
    if config.objective is not None:  # labels are not used
        return []
    data = records.text_of(config.data)
    others = [name for name, one in evaluated.items() if one.class_names != train.class_names]
    problems = [f'{data}: the class names of train and {name} differ' for name in others]
    kind = config.loss.kind if isinstance(config.loss, losses.LossConfig) else None
    if kind == 'softmax' and train.multi_label:
        text = 'images may have several classes, which the softmax loss does not support'
        problems.append(f'{data}: {text}; pass --config.loss.kind=sigmoid')
    if train.multi_label and config.distillation.teacher and config.distillation.kind != 'features':
        text = f'images may have several classes, which kind={config.distillation.kind} does not'
        problems.append(f'{data}: {text} support; pass --config.distillation.kind=features')
    if kind is not None and len(train.class_names) == 1 and not train.multi_label:
        problems.append(f'{data}: got one class, {train.class_names[0]!r}; expected several')
    return problems


def open_start(config: TrainConfig) -> Checkpoint | None:
    """Opens the checkpoint `config.start_from`, if set, without reading its arrays."""
    if config.start_from is None:
        return None
    try:
        size = config.image_size or (config.model.image_size if config.model else None)
        return open_checkpoint(config.start_from, config.hints, image_size=size)
    except NeedsHint as error:
        raise UserError(f'{error} (in a training run: --config.hints.NAME=VALUE)') from error


def resolve_preprocessing(config: TrainConfig, start: Checkpoint | None) -> Preprocessing:
    """Returns the preprocessing of the configuration, the checkpoint, or the default."""
    return config.preprocessing or (start.card.preprocessing if start else Preprocessing())


def resolve_model(config: TrainConfig, start: Checkpoint | None, classes: int) -> ModelConfig:
    """Resolves the architecture to train: the configuration's or the checkpoint's, with a head.

    Args:
      config: The configuration.
      start: The checkpoint to start from, if any.
      classes: Number of classes of the training images. It is unused for masked patch prediction.

    Raises:
      UserError: If there is no model, or if the model does not fit the task or the classes.
    """
    model, objective = config.model, config.objective
    if model is None:
        if start is None:
            text = 'expected a model, or --config.start_from=CHECKPOINT to use its model'
            raise UserError(f'config.model is not set; {text}')
        stored = start.card.model if objective is None else transfer.remove_head(start.card.model)
        model = transfer.with_linear_head(stored, num_classes=None if objective else classes)
    model = dataclasses.replace(model, image_size=config.image_size or model.image_size)
    if objective is not None:
        return configure_for_patches(model, objective)
    text = f'{records.text_of(config.data)} has {plural(classes, "class")}'
    wrong = f'config.model.num_classes={model.num_classes}: {text}; expected none or {classes}'
    require(model.num_classes in (None, classes), wrong)
    return dataclasses.replace(model, num_classes=classes, head=config.head or model.head)


def make_mesh(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the device mesh. Raises UserError if batches cannot be sharded over it."""
    mesh = meshes.make_mesh(config.mesh, devices)
    meshes.check_batch_size(config.batch_size, mesh, accumulation_steps=config.accumulation_steps)
    meshes.check_batch_size(config.eval_batch_size or config.batch_size, mesh, accumulation_steps=1)
    return mesh


def resolve_compute_on_mesh(
    config: TrainConfig,
    model: ModelConfig,
    mesh: Mesh,
    *,
    planned: bool,
    dtype: Any = 'auto',
    teacher: LoadedModel | None = None,
) -> Compute:
    """Resolves the compute options of a model for the devices of a mesh.

    Args:
      config: The configuration.
      model: The architecture.
      mesh: The devices.
      planned: Whether the devices are not attached. Their memory is then taken as unlimited.
      dtype: Value for `compute.dtype=auto`; `auto`: bfloat16 on devices with fast bfloat16.
      teacher: The teacher, if any.
    """
    device = mesh.devices.flat[0] if planned else mesh.local_devices[0]
    dtype = dtype if config.compute.dtype == 'auto' else config.compute.dtype
    if dtype == 'auto':
        dtype = 'bfloat16' if has_fast_bfloat16(device) else 'float32'
    parts = mesh.shape['data'] * mesh.shape['fsdp'] * config.accumulation_steps
    longest = config.step_kinds[0]  # needs the most memory
    memory = math.inf if planned else _memory_without_state(config, model, mesh)
    if teacher is not None:
        size = count_params(teacher.config) * np.dtype(dtype).itemsize
        memory -= size // (mesh.shape['fsdp'] * mesh.shape['tensor'])
    return resolve_compute(
        dataclasses.replace(config.compute, dtype=dtype),
        transfer.with_patch_size(model, longest.patch_size),
        platform=device.platform,
        regularization=longest.regularize(config.regularization),
        memory=memory / (config.batch_size // parts),
    )


def _make_builder(
    config: TrainConfig, model: ModelConfig, compute: Compute, mesh: Mesh
) -> Callable[..., Model]:
    """Returns a function from a patch size, and optionally a regularization, to a model."""
    # Each patch size has the fastest attention for its number of tokens.
    compute = dataclasses.replace(compute, attention=config.compute.attention)
    options = {'compute': compute, 'platform': mesh.devices.flat[0].platform}
    return functools.partial(transfer.build_at_patch_size, model, **options)


def _memory_without_state(config: TrainConfig, model: ModelConfig, mesh: Mesh) -> float:
    """Returns the bytes per device left by train state and gradients; inf if unknown (CPUs)."""
    limit = (mesh.local_devices[0].memory_stats() or {}).get('bytes_limit', math.inf)
    sam = config.optimizer.sharpness or Sam(rho=0.0)  # a copy of parameters; GSAM: one gradient
    extra = config.ema_decay is not None, config.accumulation_steps > 1, sam.rho > 0, sam.alpha > 0
    moments = count_moments(config.optimizer, abstract_params(model))
    numbers = 2 + moments + sum(extra)  # float32 values per parameter
    split = mesh.shape['fsdp'] * mesh.shape['tensor']
    return float(limit) - 4 * numbers * count_params(model) // split


def make_readers(
    config: TrainConfig, preprocessing: Preprocessing, size: Size
) -> Callable[..., ImageReader]:
    """Returns a function from a source to its reader; `crop` can be overridden."""
    return functools.partial(
        ImageReader,
        crop=preprocessing.crop,
        size=size,
        exif_rotation=preprocessing.exif_rotation,
        seed=config.seed,
        on_unreadable=config.loader.on_unreadable,
        max_pixels=config.loader.max_pixels,
        on_skipped=loading.make_warning(),
    )


def make_eval_batches(config: TrainConfig, mesh: Mesh) -> BatchMaker:
    """Makes loaders and batch size of evaluations. Training uses the same loaders."""
    loader_of = loading.make_loaders(config.loader, meshes.batch_sharding(mesh))
    return BatchMaker(mesh, loader_of, config.eval_batch_size or config.batch_size)


def _select_loss_sums(
    config: TrainConfig,
    teacher: distillation.Teacher | None,
    preprocessing: Preprocessing,
    train: Source,
    model: Model,
) -> tuple[LossSumsFn, LossSumsFn]:
    """Makes functions that sum loss and metrics over a batch, for training and for evaluation.

    If training images are multi-label, evaluations measure the mean average precision. Otherwise
    the targets of an evaluated image with several classes are scaled to sum to one
    (see `with_scaled_targets`).
    """
    normalize_images = functools.partial(normalize, preprocessing=preprocessing)
    if config.objective is not None:
        assert isinstance(model.config, ViTConfig)  # `resolve_model` rejects others

        def keys_of(batch: Batch) -> Key[Array, 'b']:
            return example_keys(updates.make_purpose_key(config.seed, updates.CORRUPT), batch)

        make_sums = functools.partial(make_patch_loss_sums, model=model.config, keys_of=keys_of)
        sums = make_sums(model.predict_patches, config.objective, normalize_images)
        return sums, sums
    loss = losses.make_loss(config.loss)
    make_sums = functools.partial(updates.make_loss_sums, model.apply, normalize=normalize_images)
    train_sums = make_sums(loss)
    if teacher is not None:
        options = config.distillation, model, teacher, loss, normalize_images
        train_sums = distillation.make_distillation_sums(*options)
    if train.multi_label:
        return train_sums, make_sums(loss, outputs=evaluator.logits_and_targets)
    return train_sums, make_sums(evaluator.with_scaled_targets(loss))


def _make_training(
    config: TrainConfig,
    build_model: Callable[..., Model],
    sums_of: Callable[[Model], tuple[LossSumsFn, LossSumsFn]],
    teacher: distillation.Teacher | None,
    length: TrainLength,
    train: Source,
) -> tuple[Callable[..., TrainState], dict[StepKind, Update], list[str]]:
    """Returns `init`, the updates by kind of step, and the param group report.

    Raises UserError if options do not fit the model or the length.
    """
    model = build_model(None)
    if teacher is not None and config.distillation.kind == 'features':
        model = distillation.with_projection(model, teacher.model)
    if (until := config.patch_dropout_until) is not None:
        step, end = length.to_steps(until), length.total_steps
        wrong = f'config.patch_dropout_until.{until}: got step {step}; expected more than 0 and '
        require(0 < step < end, f'{wrong}less than {end}')
    schedule = make_schedule(config.schedule, length)
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    groups = make_param_groups(config.optimizer, abstract)
    optimizer = make_optimizer(config.optimizer, schedule, groups)
    with_ema = config.ema_decay is not None
    peak, sam = config.schedule.learning_rate, config.optimizer.sharpness
    check_optimizer(optimizer, groups, abstract, with_ema=with_ema)

    def init(params: Params | None = None) -> TrainState:
        if params is None:
            params = model.init(updates.key_for(config.seed, updates.INITIALIZE, 0))
        return TrainState.initial(params, optimizer, with_ema=with_ema)

    targets = functools.partial(losses.make_targets, num_classes=len(train.class_names))
    make_update = functools.partial(
        updates.make_update,
        optimizer=optimizer,
        schedule=schedule,
        augment=functools.partial(augment, config=config.augmentation, targets_of=targets),
        stop_frozen_gradients=groups.stop_frozen_gradients,
        seed=config.seed,
        accumulation_steps=config.accumulation_steps,
        ema_decay=config.ema_decay,
        sharpen=make_sharpener(sam, schedule, peak=peak, total_steps=length.total_steps),
    )
    by_kind = {}
    for kind in config.step_kinds:
        regularization = kind.regularize(config.regularization)
        trained = build_model(kind.patch_size, regularization=regularization)
        by_kind[kind] = make_update(sums_of(trained)[0])
    return init, by_kind, groups.report
