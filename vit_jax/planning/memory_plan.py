"""Finds training steps that fit the memory of devices that are not attached, by compiling them."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.sharding import Mesh

from vit_jax.base import Params, UserError, require
from vit_jax.config import TrainConfig
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed import sharding_rules
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment, open_start, resolve_model
from vit_jax.models import Remat
from vit_jax.models.compute import POLICIES
from vit_jax.planning import ahead_of_time
from vit_jax.planning.ahead_of_time import DoesNotFitError, Topology
from vit_jax.tasks.making import make_task, needs_classes
from vit_jax.training import muon
from vit_jax.training.optimizer import OptimizerConfig
from vit_jax.training.param_groups import make_param_groups

_NEAR = 0.85  # fraction of the memory above which a quick compilation is not accurate enough


class StepMemory(NamedTuple):
    """Memory of a training step that fits, in bytes on one device."""

    state: int  # train state, batch and learning rates
    peak: int
    sharding: list[str]  # lines of `sharding_rules.sharding_report`


def with_dummy_data(
    config: TrainConfig, *, num_classes: int | None, num_images: int | None
) -> TrainConfig:
    """Replaces the data by a dummy source of `num_images` images and `num_classes` classes.

    Numbers that are None come from the model and the data.

    Raises:
      UserError: If the data is needed for the numbers and cannot be opened, or if the configuration
        has no training length or no model.
    """
    require(
        config.total is not None,
        'config.total: not set; expected a training length, such as --config.total.epochs=7',
    )
    require(
        config.model is not None or config.start_from is not None,
        'config.model: not set; expected a model or --config.start_from=CHECKPOINT',
    )
    if not needs_classes(config):
        num_classes = 1
    elif config.model is not None:
        num_classes = num_classes or config.model.num_classes
    if num_classes is None or num_images is None:
        try:
            opener = make_opener(config.held_out, needs_classes=needs_classes(config))
            data = opener(config.data, config.train_split, classes=config.classes)
        except UserError as error:
            hint = 'to plan without data, set --num_classes=1000 --num_images=1281167 (ImageNet)'
            raise UserError(f'{error}\n{hint}') from error
        num_classes = num_classes or len(data.class_names)
        num_images = num_images or len(data)
    if config.model is None:
        task = make_task(config, num_classes=num_classes)
        model = resolve_model(config, open_start(config), task)
        config = dataclasses.replace(config, model=model)

    def raise_error(_: Any) -> Any:
        raise AssertionError('planning never reads images')

    source = Source(
        count=num_images,
        class_names=tuple(map(str, range(num_classes))),
        read=raise_error,
        name_of=raise_error,
        label_of=raise_error,
    )
    config = dataclasses.replace(config, evals={}, eval_split='test', fewshot=None, start_from=None)
    return dataclasses.replace(config, classes=(), data=lambda split: source)


def compile_step(config: TrainConfig, topology: Topology) -> StepMemory:
    """Compiles the training step for devices that are not attached.

    For TPUs, a quick compilation comes first. Its program needs up to a tenth less memory than the
    program of a real run, which is compiled too if the memory comes near the limit.

    Raises:
      DoesNotFitError: If the step needs more memory than a device has.
      UserError: If the sizes of batch, model and mesh do not fit each other.
    """
    experiment = build_experiment(config, devices=topology.devices)
    state = training_run.abstract_state(experiment)
    with ahead_of_time.assume_cudnn():
        lowered = training_run.lower_update(experiment, state)
    quickly = topology.devices[0].platform == 'tpu'
    memory = ahead_of_time.compile_for(topology, lowered, quickly=quickly).memory_analysis()
    if quickly and memory.peak_memory_in_bytes > _NEAR * topology.memory:
        memory = ahead_of_time.compile_for(topology, lowered).memory_analysis()
    shardings = sharding_rules.get_shardings(state)
    report = sharding_rules.sharding_report(state, shardings, experiment.mesh)
    return StepMemory(
        state=memory.argument_size_in_bytes, peak=memory.peak_memory_in_bytes, sharding=report
    )


def count_update_operations(config: OptimizerConfig, params: Params, mesh: Mesh) -> int:
    """Counts the floating-point operations of Muon's iterations per step, on each device.

    Returns 0 for other kinds, whose updates have no matrix products. `params` may be abstract.
    """
    if config.kind != 'muon':
        return 0
    return muon.count_flops(params, make_param_groups(config, params).trainable, mesh)


def try_remat_policies(
    config: TrainConfig, first: Remat, topology: Topology
) -> Iterator[tuple[Remat, StepMemory | DoesNotFitError]]:
    """Compiles the step with each rematerialization policy, starting at `first`, until one fits."""
    for policy in POLICIES[POLICIES.index(first) :]:
        compute = dataclasses.replace(config.compute, remat=policy)
        result: StepMemory | DoesNotFitError
        try:
            result = compile_step(dataclasses.replace(config, compute=compute), topology)
        except DoesNotFitError as error:
            result = error
        yield policy, result
        if isinstance(result, StepMemory):
            return
