"""Builds an experiment from a configuration: opened data, model, mesh and pure functions.

The functions below `build_experiment` are the steps that it calls.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Params, UserError, raise_all, records
from vit_jax.checkpoints import transfer
from vit_jax.checkpoints.card import Card, package_versions
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.opening import Checkpoint, open_checkpoint
from vit_jax.config import TrainConfig
from vit_jax.data import loading
from vit_jax.data.augmentation import host_crop
from vit_jax.data.image_preprocessing import Preprocessing, Size
from vit_jax.data.loading import BatchSource, ImageReader, check_memory
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.opening import Opener, make_opener
from vit_jax.distributed import meshes
from vit_jax.evaluation.evaluator import Evaluator, make_step_evaluator
from vit_jax.evaluation.probing import Probes, check_init_head, open_probes
from vit_jax.experiment.functions import (
    Functions,
    Structure,
    abstract_trained_params,
    make_functions,
)
from vit_jax.experiment.values import Values, make_values, remove_values
from vit_jax.models import Compute, Model, ModelConfig
from vit_jax.models.compute import has_fast_bfloat16, resolve_compute
from vit_jax.models.model import count_params
from vit_jax.pretrained import LoadedModel
from vit_jax.tasks.base import Task
from vit_jax.tasks.making import make_task, needs_classes
from vit_jax.training.duration import TrainLength, make_train_length
from vit_jax.training.metrics import Metric
from vit_jax.training.objectives import TASK_PARAMS
from vit_jax.training.optimizer import check_optimizer, count_moments, look_up, make_optimizer
from vit_jax.training.param_groups import make_param_groups


class Experiment(NamedTuple):
    """A checked configuration, its opened data, and pure functions.

    functions.init(values, params=None) -> initial TrainState, with random or the given parameters
    functions.update(variant)(state, batch, values, frozen=None) -> (state after one step, metrics)
    evaluators[name].evaluate(params, eval_readers[name]) -> results of an evaluation
    """

    config: TrainConfig
    start_from: Checkpoint | None  # opened `config.start_from`; its arrays are not read yet
    task: Task
    frozen: Params | None  # parameters that the task does not train, on the devices or abstract
    values: Values  # numbers that the functions take as an argument, on the devices or the host
    functions: Functions
    mesh: Mesh
    compute: Compute  # options of computation, without `auto`
    model: Model
    preprocessing: Preprocessing
    length: TrainLength
    train_reader: ImageReader
    eval_readers: dict[str, ImageReader]
    probes: Probes | None  # data sets of the few-shot evaluation
    evaluators: dict[str, Evaluator]  # by name; equal patch sizes have the same step
    shown: list[Metric]  # metrics that are printed during training
    batches: BatchSource
    param_group_report: list[str]  # the parameters that each param group matched, in lines

    @property
    def resolved_choices(self) -> dict[str, Any]:
        """Checkpoints, configuration, values and compute options as JSON, to compare hosts.

        They are resolved on each host, so they could differ although the given configuration is
        equal.
        """
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self.values):  # hosts could round differently
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
        return {
            'origin': list(self.start_from.origin) if self.start_from else [],
            'config': self.export_config(),
            'values': digest.hexdigest(),
            'compute': records.to_dict(self.compute),
        }

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
        class_names = self.train_reader.source.class_names
        card = Card(
            step=step,
            model=self.model.config,
            grid=self.model.config.grid,
            preprocessing=self.preprocessing,
            software=package_versions(),
            **self.task.card_fields(self.config, class_names),
        )
        return records.to_dict(card)

    def transfer_params(self, start: Checkpoint, fresh: Params) -> transfer.Transferred:
        """Reads the parameters of `start` and adapts them to this model.

        `fresh` are the initial parameters of this model. Parameters that `start` lacks are taken
        from them.
        """
        class_names = start.card.class_names, self.train_reader.source.class_names
        result = transfer.transfer(
            start.read(),
            old=start.card.model,
            new=self.model.config,
            fresh={name: leaf for name, leaf in fresh.items() if name != TASK_PARAMS},
            class_names=class_names if self.config.reuse_head else None,
        )
        report = [*result.report]
        if TASK_PARAMS in fresh:
            report.append('parameters of the objective: initialized')
        return result._replace(params=fresh | result.params, report=report)


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
    config = records.validate_copy(config, where='config')
    if config.total is None:
        raise UserError('config.total: not set; expected a length, such as --config.total.epochs=7')

    opener = make_opener(config.held_out, needs_classes=needs_classes(config))
    train, evaluated = _open_data(config, opener)
    length = make_train_length(config.total, batch_size=config.batch_size, num_images=len(train))

    task = make_task(config, num_classes=len(train.class_names), multi_label=train.multi_label)
    raise_all(task.check_data(config, train, evaluated))
    start = open_start(config)
    model_config = resolve_model(config, start, task)
    preprocessing = resolve_preprocessing(config, start)
    size = model_config.image_size
    if config.init_head is not None:
        check_init_head(model_config, train, has_start=start is not None)
    task, config, frozen_model = task.load(config, train.class_names)

    planned = devices is not None
    mesh = make_mesh(config, devices)
    compute = resolve_compute_on_mesh(
        config, model_config, mesh, task=task, planned=planned, dtype=dtype, frozen=frozen_model
    )
    if not planned:
        threads = config.loader.threads
        check_memory(
            config.batch_size,
            size,
            'config.batch_size',
            accumulation_steps=config.accumulation_steps,
            threads=threads,
        )
        if train.places is not None:
            sharding = meshes.batch_sharding(mesh)
            loading.check_window_memory(train, config.loader, config.batch_size, sharding)
        check_memory(config.eval_batch_size or 0, size, 'config.eval_batch_size', threads=threads)
    frozen = None
    if frozen_model is not None:
        frozen = frozen_model.place_frozen(compute, mesh, config.mesh, abstract=planned)

    structure = Structure(
        config=remove_values(config),
        model=model_config,
        compute=dataclasses.replace(compute, attention=config.compute.attention),
        mesh=mesh,
        preprocessing=Preprocessing(mean=preprocessing.mean, std=preprocessing.std),
        task=task,
    )
    params = abstract_trained_params(task, config, model_config)
    groups = make_param_groups(config.optimizer, params)
    values = make_values(config, length, groups)
    optimizer = make_optimizer(config.optimizer, look_up(values.learning_rates), groups)
    check_optimizer(optimizer, groups, params, with_ema=config.ema_decay is not None)
    _check_variants(config, structure, length)
    functions = make_functions(structure, groups)
    if not planned:
        values = meshes.put(values, jax.tree.map(lambda _: meshes.replicated(mesh), values))

    make_reader = make_readers(config, preprocessing, size)
    batches = make_batch_source(config, mesh)
    probes = None
    if config.fewshot is not None:
        probes = open_probes(config.fewshot, config.data, opener, make_reader)
    evaluators = {
        name: make_step_evaluator(
            functions.evaluate(config.evaluations[name].patch_size),
            batches,
            values,
            metrics=task.metrics_of(config, source),
        )
        for name, source in evaluated.items()
    }
    return Experiment(
        config=config,
        start_from=start,
        task=task,
        frozen=frozen,
        values=values,
        functions=functions,
        mesh=mesh,
        compute=compute,
        model=structure.build_model(None, config.regularization),
        preprocessing=preprocessing,
        length=length,
        train_reader=make_reader(train, crop=host_crop(config.augmentation, preprocessing)),
        eval_readers={name: make_reader(source) for name, source in evaluated.items()},
        probes=probes,
        evaluators=evaluators,
        shown=task.shown_metrics(config),
        batches=batches,
        param_group_report=groups.report,
    )


def _open_data(config: TrainConfig, opener: Opener) -> tuple[Source, dict[str, Source]]:
    """Opens the training images, and the images of each evaluation by name."""
    if config.fewshot is not None and config.fewshot.linear_probe is not None:
        raise UserError(
            'config.fewshot.linear_probe: not used in training; run vit_jax.fewshot on a checkpoint'
        )
    train = opener(config.data, config.train_split, classes=config.classes)
    evaluated = {
        name: opener(one.data or config.data, one.split, one.labels, config.classes)
        for name, one in config.evaluations.items()
    }
    loading.check_balance(train, config.loader)
    return train, evaluated


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


def resolve_model(config: TrainConfig, start: Checkpoint | None, task: Task) -> ModelConfig:
    """Resolves the architecture to train: the configuration's or the checkpoint's, for the task.

    Raises UserError if there is no model, or if it does not fit the task or the classes.
    """
    model = config.model
    if model is None:
        if start is None:
            raise UserError(
                'config.model: not set; expected a model, or --config.start_from=CHECKPOINT to use '
                'its model'
            )
        model = task.adapt_stored_model(start.card.model)
    model = dataclasses.replace(model, image_size=config.image_size or model.image_size)
    return task.configure_model(config, model)


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
    task: Task,
    planned: bool,
    dtype: Any = 'auto',
    frozen: LoadedModel | None = None,
) -> Compute:
    """Resolves the compute options of a model for the devices of a mesh.

    Args:
      config: The configuration.
      model: The architecture.
      mesh: The devices.
      task: The task, which may train parameters of its own.
      planned: Whether the devices are not attached. Their memory is then taken as unlimited.
      dtype: Value for `compute.dtype=auto`; `auto`: bfloat16 on devices with fast bfloat16.
      frozen: The loaded model of the task, if any.
    """
    device = mesh.devices.flat[0] if planned else mesh.local_devices[0]
    dtype = dtype if config.compute.dtype == 'auto' else config.compute.dtype
    if dtype == 'auto':
        dtype = 'bfloat16' if has_fast_bfloat16(device) else 'float32'
    parts = mesh.shape['data'] * mesh.shape['fsdp'] * config.accumulation_steps
    longest = config.step_variants[0]  # needs the most memory
    memory = math.inf
    if not planned:
        params = abstract_trained_params(task, config, model)
        memory = _memory_without_state(config, params, mesh)
    if frozen is not None:
        size = count_params(frozen.config) * np.dtype(dtype).itemsize
        memory -= size // (mesh.shape['fsdp'] * mesh.shape['tensor'])
    return resolve_compute(
        dataclasses.replace(config.compute, dtype=dtype),
        transfer.with_patch_size(model, longest.patch_size),
        platform=device.platform,
        regularization=longest.regularize(config.regularization),
        memory=memory / (config.batch_size // parts),
    )


def _memory_without_state(config: TrainConfig, params: Params, mesh: Mesh) -> float:
    """Returns the bytes per device left by train state and gradients; inf if unknown (CPUs)."""
    limit = (mesh.local_devices[0].memory_stats() or {}).get('bytes_limit', math.inf)
    copies = 2 + count_moments(config.optimizer, params)  # parameters and gradients
    if config.ema_decay is not None:
        copies += 1
    if config.accumulation_steps > 1:  # the sum of gradients
        copies += 1
    sam = config.optimizer.sharpness
    if sam is not None and sam.rho > 0:  # the perturbed parameters
        copies += 1
    if sam is not None and sam.alpha > 0:  # a second gradient
        copies += 1
    split = mesh.shape['fsdp'] * mesh.shape['tensor']
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return float(limit) - 4 * copies * size // split  # float32


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


def make_batch_source(config: TrainConfig, mesh: Mesh) -> BatchSource:
    """Returns the source of evaluation batches. Training uses the same loaders."""
    loader_of = loading.make_loaders(config.loader, meshes.batch_sharding(mesh))
    return BatchSource(mesh, loader_of, config.eval_batch_size or config.batch_size)


def _check_variants(config: TrainConfig, structure: Structure, length: TrainLength) -> None:
    """Raises UserError if a variant of the step does not fit the model or the length."""
    until = config.patch_dropout_until
    if until is not None and not 0 < length.to_steps(until) < length.total_steps:
        raise UserError(
            f'config.patch_dropout_until.{until}: got step {length.to_steps(until)}; '
            f'expected more than 0 and less than {length.total_steps}'
        )
    for variant in config.step_variants:
        regularization = variant.regularize(config.regularization)
        model = structure.build_model(variant.patch_size, regularization)
        structure.task.train_sums(config, model, structure.normalize)
