"""Which training step fits the memory of devices that are not attached: compiled, not run."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.base import UserError, require
from vit_jax.config import TrainConfig
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment, open_start, trained_model
from vit_jax.models import Remat
from vit_jax.models.compute import POLICIES
from vit_jax.planning import ahead_of_time
from vit_jax.planning.ahead_of_time import DoesNotFit, Topology

_TRIALS = 4  # compilations to find the largest batch
_NEAR = 0.85  # share of the memory above which a quick compilation is not exact enough


class StepMemory(NamedTuple):
    """A training step that fits: bytes on one device."""

    state: int  # and batch
    peak: int
    sharding: list[str]  # a report in lines: which arrays are split, and how


def without_data(
    config: TrainConfig, *, num_classes: int | None, num_images: int | None
) -> TrainConfig:
    """Replaces the data by `num_images` images of `num_classes` classes that are never read.

    Missing numbers are taken from the model and the data.

    Raises:
      UserError: If they are needed and the data cannot be opened, or if a step has no length or
        no model.
    """
    needs = 'a plan compiles a training step, and needs'
    require(config.total is not None, f'{needs} its length, such as --config.total.epochs=7')
    known = config.model is not None or config.start_from is not None
    require(known, f'{needs} config.model, or the model of --config.start_from=CHECKPOINT')
    if config.objective is not None:  # which has no classes
        num_classes = 1
    elif config.model is not None:
        num_classes = num_classes or config.model.num_classes
    if num_classes is None or num_images is None:
        try:
            opened = make_opener(config.held_out)
            data = opened(config.data, config.train_split, classes=config.classes)
        except UserError as error:
            advice = 'without the data: --num_classes=N --num_images=N (ImageNet: 1000, 1281167)'
            raise UserError(f'{error}\n{advice}') from error
        num_classes = num_classes or len(data.class_names)
        num_images = num_images or len(data)
    if config.model is None:
        model = trained_model(config, open_start(config), num_classes)
        config = dataclasses.replace(config, model=model)

    def unread(_: Any) -> Any:
        raise AssertionError('a plan reads no images')

    source = Source(
        count=num_images,
        class_names=tuple(map(str, range(num_classes))),
        read=unread,
        name_of=unread,
        label_of=unread,
    )
    config = dataclasses.replace(config, evals={}, eval_split='test', fewshot=None, start_from=None)
    return dataclasses.replace(config, classes=(), data=lambda split: source)


def compile_step(config: TrainConfig, where: Topology) -> StepMemory:
    """Compiles the training step for devices that are not attached.

    A TPU's compiler first works quickly. The memory of such a program is up to a tenth less than
    that of the program that trains, which is compiled where it comes near the limit.

    Raises:
      DoesNotFit: If the step needs more memory than a device has.
      UserError: If the sizes of batch, model and mesh contradict each other.
    """
    experiment = build_experiment(config, devices=where.devices)
    state = training_run.abstract_state(experiment)
    with ahead_of_time.assume_cudnn():
        lowered = training_run.lower_update(experiment, state)
    quickly = where.devices[0].platform == 'tpu'
    memory = ahead_of_time.compile_for(where, lowered, quickly=quickly).memory_analysis()
    if quickly and memory.peak_memory_in_bytes > _NEAR * where.memory:
        memory = ahead_of_time.compile_for(where, lowered).memory_analysis()
    shardings = training_run.shardings_of(state)
    report = sharding_rules.sharding_report(state, shardings, experiment.mesh)
    return StepMemory(memory.argument_size_in_bytes, memory.peak_memory_in_bytes, report)


def with_policy(config: TrainConfig, remat: Remat) -> TrainConfig:
    """The experiment with another rematerialization policy."""
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, remat=remat))


def try_policies(
    config: TrainConfig, first: Remat, where: Topology
) -> Iterator[tuple[Remat, StepMemory | DoesNotFit]]:
    """Compiles the step with the rematerialization policies from `first` on, until one fits."""
    for policy in POLICIES[POLICIES.index(first) :]:
        result = _compile_or_error(with_policy(config, policy), where)
        yield policy, result
        if isinstance(result, StepMemory):
            return


def find_largest_batch(
    config: TrainConfig, where: Topology, first: StepMemory | DoesNotFit
) -> tuple[int, StepMemory] | None:
    """Looks for the largest batch that fits; `first` is the result for the config's own batch."""
    mesh = meshes.make_mesh(config.mesh, where.devices)
    unit = mesh.shape['data'] * mesh.shape['fsdp'] * config.accumulation_steps
    tried = {config.batch_size: first}
    for _ in range(_TRIALS):
        batch_size = _next_batch_size(tried, where.memory) // unit * unit
        if batch_size == 0 or batch_size in tried:
            break
        larger = dataclasses.replace(config, batch_size=batch_size)
        tried[batch_size] = _compile_or_error(larger, where)
    fits = [(size, result) for size, result in tried.items() if isinstance(result, StepMemory)]
    return max(fits, default=None)


def _next_batch_size(tried: Mapping[int, StepMemory | DoesNotFit], memory: int) -> int:
    """The batch that would need all the memory, which grows linearly with the batch."""
    fits = {size: result for size, result in tried.items() if isinstance(result, StepMemory)}
    too_large = min(tried.keys() - fits.keys(), default=None)
    if not fits:
        assert too_large is not None
        error = tried[too_large]
        assert isinstance(error, DoesNotFit)
        return int(0.95 * too_large * memory / error.needed) if error.needed else too_large // 2
    points = [(0, fits[min(fits)].state), *sorted((size, fits[size].peak) for size in fits)]
    (smaller, below), (largest, peak) = points[-2:]
    guess = largest + int((memory - peak) / max((peak - below) / (largest - smaller), 1.0))
    return guess if too_large is None else min(guess, (largest + too_large) // 2)


def _compile_or_error(config: TrainConfig, where: Topology) -> StepMemory | DoesNotFit:
    try:
        return compile_step(config, where)
    except DoesNotFit as error:
        return error
