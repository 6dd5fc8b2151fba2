"""Compiles a training step for devices that are not here, and says whether it fits.

    python -m vit_jax.plan --config=FILE --topology=v5e:4x4

needs no accelerator: `pip install 'vit_jax[tpu]'` brings the compiler of TPUs. What is compiled is
the step that `vit_jax.train` would run on such devices. A topology is KIND:SHAPE (v5e:4x4,
v6e:16x16, v5p:4x4x8), or 2*v5e:16x16 for two slices.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
from absl import flags

from vit_jax.base.errors import UserError
from vit_jax.command_line import app
from vit_jax.config import TrainConfig, checked
from vit_jax.data.sources.opening import make_opener
from vit_jax.models import Remat, parameter_count
from vit_jax.parallel import ahead_of_time, meshes, sharding_rules
from vit_jax.parallel.ahead_of_time import GIB, DoesNotFit, Topology
from vit_jax.runs import setups
from vit_jax.training.duration import make_train_length

POLICIES: tuple[Remat, ...] = (
    'none',
    'dots',
    'block',
)  # of rematerialisation, from the fastest to the smallest
_TRIALS = 4  # compilations to find the largest batch


class Task(NamedTuple):
    """What is trained, as far as its step depends on it."""

    config: TrainConfig
    num_classes: int
    images: int


class Fit(NamedTuple):
    """A step that fits: bytes on one device, and the communication in it."""

    state: int  # and batch
    peak: int  # the most that is needed at once
    collectives: dict[str, int]
    table: list[str]


def step(task: Task, where: Topology, *, remat: Remat, batch_size: int) -> Fit:
    """The compiled training step. DoesNotFit, or UserError for sizes that do not divide."""
    compute = dataclasses.replace(task.config.compute, remat=remat)
    config = dataclasses.replace(task.config, compute=compute, batch_size=batch_size)
    assert config.total is not None
    model = setups.trained_model(config, None, tuple(map(str, range(task.num_classes))))
    length = make_train_length(config.total, batch_size=batch_size, images=task.images)
    setup = setups.prepare(config, None, model, length=length, devices=where.devices)
    functions = setups.make_functions(setup)
    like, shardings = setups.placed(setup, functions)
    lowered = setups.lowered_update(setup, functions, like, shardings)
    compiled = ahead_of_time.compile_for(where, lowered)
    memory = compiled.memory_analysis()
    return Fit(
        memory.argument_size_in_bytes,
        memory.peak_memory_in_bytes,
        ahead_of_time.collectives(compiled),
        sharding_rules.sharding_report(like, shardings, setup.mesh),
    )


def tried(task: Task, where: Topology) -> Iterator[tuple[Remat, Fit | DoesNotFit]]:
    """Every rematerialisation policy from the configuration's own on, until one fits."""
    for policy in POLICIES[POLICIES.index(task.config.compute.remat) :]:
        try:
            fit = step(task, where, remat=policy, batch_size=task.config.batch_size)
        except DoesNotFit as error:
            yield policy, error
        else:
            yield policy, fit
            return


def largest_batch(
    task: Task, where: Topology, remat: Remat, first: Fit | DoesNotFit
) -> tuple[int, Fit] | None:
    """The largest batch that was found to fit, beginning with how the configuration's own fared.

    Memory grows by about the same amount with every image: each trial aims at where the limit
    should be, and a little below it after one that did not fit.
    """
    mesh = meshes.make_mesh(task.config.mesh, where.devices)
    unit = mesh.shape['data'] * mesh.shape['fsdp'] * task.config.accumulation_steps
    batch_size, result, aim = task.config.batch_size, first, 1.0
    best: tuple[int, Fit] | None = None
    too_large = None
    for trial in range(_TRIALS + 1):
        if isinstance(result, Fit):
            best = batch_size, result
        else:
            too_large, aim = batch_size, aim * 0.95
        guess = _next(best, too_large, result, where.memory, aim) // unit * unit
        if trial == _TRIALS or guess <= (best[0] if best else 0):
            break
        batch_size = guess
        try:
            result = step(task, where, remat=remat, batch_size=batch_size)
        except DoesNotFit as error:
            result = error
    return best


def _next(
    best: tuple[int, Fit] | None,
    too_large: int | None,
    last: Fit | DoesNotFit,
    memory: int,
    aim: float,
) -> int:
    """The next batch to try."""
    if best is not None:
        batch_size, fit = best
        guess = int(aim * batch_size * (memory - fit.state) / max(1, fit.peak - fit.state))
        return guess if too_large is None else min(guess, (batch_size + too_large) // 2)
    assert too_large is not None and isinstance(last, DoesNotFit)
    return int(too_large * (aim * memory / last.needed if last.needed else 0.5))


def what_is_trained(config: TrainConfig, num_classes: int | None, images: int | None) -> Task:
    """The task of a configuration; its data is asked where the numbers are not given.

    Raises UserError where neither is there.
    """
    if config.total is None or config.model is None:
        raise UserError('a plan needs config.model and config.total: it compiles a training step')
    num_classes = num_classes or config.model.num_classes
    if num_classes is None or images is None:
        try:
            source = make_opener(config.held_out)(config.data, config.train_split)
        except (ValueError, FileNotFoundError) as error:
            raise UserError(
                f'{error}\nwithout the data: --num_classes=1000 --num_images=1281167'
            ) from error
        num_classes, images = num_classes or len(source.class_names), images or len(source)
    return Task(config, num_classes, images)


def run(task: Task, where: Topology, *, largest: bool) -> int:
    """Says what fits; the number of the process' exit: 1 where the batch does not."""
    config = task.config
    began, batch_size = time.monotonic(), config.batch_size
    kind, count = where.devices[0].device_kind, len(where.devices)
    model = setups.trained_model(config, None, ('',) * task.num_classes)
    mesh = meshes.make_mesh(config.mesh, where.devices)
    print(f'topology    {where.name}: {count} x {kind}, {_gib(where.memory)} each')
    print(f'mesh        {meshes.describe(mesh)}')
    print(
        f'model       {parameter_count(model):,} parameters, {config.compute.dtype}, '
        f'attention {config.compute.attention}'
    )
    print(f'batch       {batch_size:,} images, {batch_size // (mesh.size)} a device', flush=True)
    for policy, result in tried(task, where):
        print(f'remat       {policy:<6}{_verdict(result)}', flush=True)
    own = (task.config.batch_size, result) if isinstance(result, Fit) else None
    best = largest_batch(task, where, policy, result) if largest else own
    if best is None:
        print('no batch was found that fits: it takes more devices, or config.mesh.fsdp')
        return 1
    fit = best[1]
    said = ', '.join(f'{n} {kind}' for kind, n in fit.collectives.items()) or 'none'
    if largest:
        print(f'largest     {best[0]:,} images with remat={policy}: {_gib(fit.peak)}')
    print(f'collectives {said} (those in the loop over blocks count once)')
    print(f'compiled in {time.monotonic() - began:.0f} s')
    print('\n'.join(fit.table))
    return 0 if isinstance(result, Fit) else 1


def _verdict(result: Fit | DoesNotFit) -> str:
    if isinstance(result, Fit):
        return f'fits: {_gib(result.peak)} at once, {_gib(result.state)} of it state and batch'
    return f'does not fit: {_gib(result.needed) if result.needed else "more"} needed'


def _gib(count: int) -> str:
    return f'{count / GIB:.2f} GiB'


if __name__ == '__main__':
    jax.config.update('jax_platforms', 'cpu')  # the compiler is enough; no device is looked for
    _topology = flags.DEFINE_string('topology', None, 'KIND:SHAPE, such as v5e:4x4.')
    _classes = flags.DEFINE_integer('num_classes', None, 'In place of those of the data.')
    _images = flags.DEFINE_integer('num_images', None, 'To train on, in place of those there.')
    _largest = flags.DEFINE_bool('largest', True, 'Look for the largest batch too: minutes more.')
    flags.mark_flag_as_required('topology')
    app.start(
        lambda config: sys.exit(
            run(
                what_is_trained(checked(config), _classes.value, _images.value),
                ahead_of_time.find(_topology.value),
                largest=_largest.value,
            )
        ),
        __doc__ or '',
    )
