"""Which training step fits the memory of devices that are not here: compiled, not run."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vit_jax.base import UserError, require
from vit_jax.config import TrainConfig
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.opening import make_opener
from vit_jax.models import Remat, ViTConfig
from vit_jax.models.choices import activations
from vit_jax.models.options import POLICIES
from vit_jax.parallel import ahead_of_time, communication, meshes, sharding_rules
from vit_jax.parallel.ahead_of_time import DoesNotFit, Topology
from vit_jax.parallel.communication import Sent
from vit_jax.runs import compilation
from vit_jax.runs.experiment import Experiment, decide, open_start, trained_model
from vit_jax.training.update import TrainState

_TRIALS = 4  # compilations to find the largest batch
# The estimate of activations is within a third of what programs take (tests/models/test_choices.py)
_FAR = 1.5
# What a quickly compiled program needs tells what the other does where it is not so near the limit.
_NEAR = 0.15


class StepMemory(NamedTuple):
    """A step that fits: bytes on one device, and the communication in it."""

    state: int  # and batch
    peak: int  # the most that is needed at once
    sent: dict[str, Sent]  # by a device in one step
    sharding: list[str]  # how the state is split, in lines
    quickly: bool = False  # compiled quickly: a little less than the step of a training needs


# (config, where) -> the memory of its step. DoesNotFit where the devices have less.
CompileStep = Callable[[TrainConfig, Topology], StepMemory]


def without_data(
    config: TrainConfig, *, num_classes: int | None, num_images: int | None
) -> TrainConfig:
    """The same experiment on images that are never read, so many of so many classes.

    Numbers that are not given are those of the data. Raises UserError where it is not there.
    """
    compiled = 'a plan compiles a training step, and needs'
    require(config.total is not None, f'{compiled} its length, such as --config.total.epochs=7')
    known = config.model is not None or config.start_from is not None
    require(known, f'{compiled} config.model, or the network of --config.start_from=CHECKPOINT')
    start = open_start(config) if config.model is None else None
    num_classes = num_classes or (config.model.num_classes if config.model else None)
    if config.objective is not None:  # which has no classes
        num_classes = 1
    if num_classes is None or num_images is None:
        try:
            opened = make_opener(config.held_out)
            source = opened(config.data, config.train_split, classes=config.classes)
        except UserError as error:
            advice = 'without the data: --num_classes=N --num_images=N (ImageNet: 1000, 1281167)'
            raise UserError(f'{error}\n{advice}') from error
        num_classes = num_classes or len(source.class_names)
        num_images = num_images or len(source)

    if start is not None:
        config = dataclasses.replace(config, model=trained_model(config, start, num_classes))

    def unread(_: Any) -> Any:
        raise AssertionError('a plan reads no images')

    names = tuple(map(str, range(num_classes)))
    source = Source(
        count=num_images,
        class_names=names,
        read=unread,
        read_names=unread,
        read_labels=unread,
    )
    config = dataclasses.replace(config, evals={}, eval_split='test', fewshot=None, start_from=None)
    return dataclasses.replace(config, classes=(), data=lambda split: source)


def compile_step(config: TrainConfig, where: Topology) -> StepMemory:
    """The memory of the compiled training step. DoesNotFit, or UserError for sizes that do not.

    What is far too large is not compiled, and what is near the limit is compiled with care.
    """
    experiment = decide(config, devices=where.devices)
    state = compilation.abstract_state(experiment)
    _check_estimate(experiment, state, where)
    with ahead_of_time.assume_cudnn():
        lowered = compilation.lower_update(experiment, state)
    compiled, quickly = _compiled_carefully_near_the_limit(lowered, where)
    memory = compiled.memory_analysis()
    return StepMemory(
        memory.argument_size_in_bytes,
        memory.peak_memory_in_bytes,
        communication.sent(compiled.as_text(), len(where.devices)),
        sharding_rules.sharding_report(state, compilation.shardings_of(state), experiment.mesh),
        quickly,
    )


def _check_estimate(experiment: Experiment, state: TrainState, where: Topology) -> None:
    """Raises DoesNotFit where the estimate says it, even if it is too high."""
    config, model, compute = experiment.config, experiment.model.config, experiment.choice.compute
    if not isinstance(model, ViTConfig):
        return
    batch_parts = experiment.mesh.shape['data'] * experiment.mesh.shape['fsdp']
    images = config.batch_size // batch_parts // config.accumulation_steps
    kept = activations(model, compute)[compute.remat] * images // experiment.mesh.shape['tensor']
    split = sharding_rules.bytes_here(state)
    if split + kept / _FAR > where.memory:
        raise DoesNotFit(split + kept, estimated=True)


def _compiled_carefully_near_the_limit(lowered: Any, where: Topology) -> tuple[Any, bool]:
    """The program, and whether it was compiled quickly, which a TPU's compiler alone can do."""
    if where.devices[0].platform == 'tpu':
        compiled = ahead_of_time.compile_for(where, lowered, quickly=True)
        if compiled.memory_analysis().peak_memory_in_bytes < (1 - _NEAR) * where.memory:
            return compiled, True
    return ahead_of_time.compile_for(where, lowered), False


def with_policy(config: TrainConfig, remat: Remat) -> TrainConfig:
    """The experiment with another rematerialisation."""
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, remat=remat))


def tried_policies(
    config: TrainConfig, where: Topology, *, compile_step: CompileStep = compile_step
) -> Iterator[tuple[Remat, StepMemory | DoesNotFit]]:
    """Every rematerialisation policy from the configuration's own on, until one fits."""
    remat = config.compute.remat
    for policy in POLICIES[0 if remat == 'auto' else POLICIES.index(remat) :]:
        try:
            yield policy, compile_step(with_policy(config, policy), where)
            return
        except DoesNotFit as error:
            yield policy, error


def largest_batch(
    config: TrainConfig,
    where: Topology,
    first: StepMemory | DoesNotFit,
    *,
    compile_step: CompileStep = compile_step,
) -> tuple[int, StepMemory] | None:
    """The largest batch that was found to fit; `first` is what came of the configuration's own.

    Memory grows by about the same amount with every image: each trial aims at where the limit
    should be, and a little below it after one that did not fit.
    """
    mesh = meshes.make_mesh(config.mesh, where.devices)
    unit = mesh.shape['data'] * mesh.shape['fsdp'] * config.accumulation_steps
    batch_size, result, aim = config.batch_size, first, 1.0
    fits: list[tuple[int, StepMemory]] = []  # growing
    too_large = None
    for trial in range(_TRIALS + 1):
        if isinstance(result, StepMemory):
            fits.append((batch_size, result))
            guess = _by_growth(fits, aim * where.memory)
        else:
            too_large, aim = batch_size, aim * 0.95
            guess = int(batch_size * (aim * where.memory / result.needed if result.needed else 0.5))
        largest = fits[-1][0] if fits else 0
        if fits and too_large is not None:
            guess = min(_by_growth(fits, aim * where.memory), (largest + too_large) // 2)
        guess = guess // unit * unit
        if trial == _TRIALS or guess <= largest:
            break
        batch_size = guess
        try:
            result = compile_step(dataclasses.replace(config, batch_size=batch_size), where)
        except DoesNotFit as error:
            result = error
    return fits[-1] if fits else None


def _by_growth(fits: list[tuple[int, StepMemory]], memory: float) -> int:
    """The batch that would need `memory`: on the line through the two largest that were found.

    Of one alone, all but the state grows with the batch.
    """
    batch_size, found = fits[-1]
    before, least = (fits[-2][0], fits[-2][1].peak) if len(fits) > 1 else (0, found.state)
    per_image = (found.peak - least) / (batch_size - before)
    return int(batch_size + (memory - found.peak) / max(per_image, 1.0))
