"""Compiles a training step for devices that are not here, and says whether it fits.

    python -m vit_jax.plan --config=FILE --topology=v5e:4x4

needs no accelerator: `pip install 'vit_jax[tpu]'` brings the compiler of TPUs. What is compiled is
the step that `vit_jax.train` would run on such devices. A topology is KIND:SHAPE (v5e:4x4,
v6e:16x16, v5p:4x4x8), or 2*v5e:16x16 for two slices; of GPUs it is KIND:HOSTSxGPUS (h100:1x8). With
--largest it also looks for the largest batch that fits, which takes minutes. Where the limit is
far, the program is compiled quickly: its memory is then `about` that of the program that trains, up
to a tenth less.
"""

import argparse
import dataclasses
import sys
import time

import jax

from vit_jax.command_line import app
from vit_jax.models import parameter_count
from vit_jax.parallel import ahead_of_time, meshes
from vit_jax.parallel.ahead_of_time import GIB, DoesNotFit
from vit_jax.runs import memory_plan
from vit_jax.runs.experiment import decide
from vit_jax.runs.memory_plan import StepMemory
from vit_jax.training.duration import Duration


def main(arguments: argparse.Namespace) -> int:
    """Prints what fits on the topology; the exit code: 1 where the batch does not."""
    jax.config.update('jax_platforms', 'cpu')  # the compiler is enough; no device is looked for
    classes, images = arguments.num_classes, arguments.num_images
    config = memory_plan.without_data(arguments.config, num_classes=classes, num_images=images)
    where = ahead_of_time.find_topology(arguments.topology)
    began, batch_size = time.monotonic(), config.batch_size
    kind, count = where.devices[0].device_kind, len(where.devices)
    experiment = decide(config, devices=where.devices)
    mesh, model = experiment.mesh, experiment.model.config
    parts = mesh.shape['data'] * mesh.shape['fsdp']
    print(f'topology    {where.name}: {count} x {kind}, {_gib(where.memory)} each')
    print(f'mesh        {meshes.describe(mesh)}')
    chosen = experiment.choice.compute
    compute = f'{chosen.dtype}, attention {chosen.attention}'
    print(f'model       {parameter_count(model):,} parameters, {compute}')
    print(f'batch       {batch_size:,} images, {batch_size // parts} a device', flush=True)
    assert chosen.remat != 'auto'
    config = memory_plan.with_policy(config, chosen.remat)  # the first that a training would take
    for policy, result in memory_plan.tried_policies(config, where):
        print(f'remat       {policy:<6}{_verdict(result)}', flush=True)
    best = (batch_size, result) if isinstance(result, StepMemory) else None
    if arguments.largest:
        print('looking for the largest batch, which takes minutes', file=sys.stderr, flush=True)
        # As many steps: of fewer, in as many epochs, the warm-up could be more than all.
        steps = Duration(steps=experiment.length.total_steps)
        growing = dataclasses.replace(memory_plan.with_policy(config, policy), total=steps)
        best = memory_plan.largest_batch(growing, where, result)
    if best is None:
        smaller = 'smaller batches' if arguments.largest else 'a smaller batch (--largest)'
        others = 'config.accumulation_steps' + (', config.mesh.fsdp' if count > 1 else '')
        print(f'nothing fits: it takes {others}, {smaller} or more devices')
        return 1
    memory = best[1]
    if arguments.largest:
        print(f'largest     {best[0]:,} images with remat={policy}: {_peak(memory)}')
    print(f'sent        by each device in a step: {_sent(memory)}')
    print(f'compiled in {time.monotonic() - began:.0f} s')
    print('\n'.join(memory.sharding))
    return 0 if isinstance(result, StepMemory) else 1


def _verdict(result: StepMemory | DoesNotFit) -> str:
    if isinstance(result, StepMemory):
        return f'fits: {_peak(result)} at once, {_gib(result.state)} of it state and batch'
    if result.estimated:
        return f'does not fit: about {_gib(result.needed or 0)} needed, by estimate'
    return f'does not fit: {_gib(result.needed) if result.needed else "more"} needed'


def _peak(memory: StepMemory) -> str:
    return f'about {_gib(memory.peak)}' if memory.quickly else _gib(memory.peak)


def _sent(memory: StepMemory) -> str:
    kinds = [f'{kind} {_mb(one.size)} ({one.times})' for kind, one in memory.sent.items()]
    return f'{_mb(sum(one.size for one in memory.sent.values()))}: {", ".join(kinds) or "nothing"}'


def _mb(count: int) -> str:
    return f'{count / 1e6:,.2f} MB'


def _gib(count: int) -> str:
    return f'{count / GIB:.2f} GiB'


if __name__ == '__main__':
    parser = app.new_parser('plan', __doc__)
    app.add_config(parser, workdir=False)
    parser.add_argument('--topology', required=True, metavar='KIND:SHAPE', help='such as v5e:4x4')
    for name, text in ('num_classes', 'classes'), ('num_images', 'images to train on'):
        text = f'{text}, in place of those of the data'
        parser.add_argument(f'--{name}', type=app.positive, metavar='N', help=text)
    app.add_boolean(parser, 'largest', 'look for the largest batch too: minutes more')
    app.run(main, parser, only_prints=True)
