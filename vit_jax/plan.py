"""Tests whether a training step fits in the memory of devices that are not attached.

    python -m vit_jax.plan --config=FILE --topology=v5e:4x4

It compiles the step that vit_jax.train would run, and needs no accelerator. For TPUs it needs their
compiler: pip install 'vit_jax[tpu]'. A TPU topology is KIND:SHAPE (v5e:4x4, v6e:16x16, v5p:4x4x8),
or 2*v5e:16x16 for two slices. A GPU topology is KIND:HOSTSxGPUS (h100:1x8).

On TPUs the printed memory can be up to 10 % too low, except near the limit.
"""

import argparse
import time

import jax

from vit_jax.checkpoints.transfer import with_patch_size
from vit_jax.cli import app
from vit_jax.distributed import meshes
from vit_jax.experiment.build import build_experiment
from vit_jax.models import count_params
from vit_jax.planning import ahead_of_time, memory_plan
from vit_jax.planning.ahead_of_time import GIB, DoesNotFitError
from vit_jax.planning.memory_plan import StepMemory
from vit_jax.training.sharpness import Sam


def main(arguments: argparse.Namespace) -> int:
    """Prints memory and compile time. Returns 1 if the configured batch does not fit, else 0."""
    jax.config.update('jax_platforms', 'cpu')  # compilation needs no device
    jax.config.update('jax_enable_compilation_cache', False)  # the cache needs a device
    config = memory_plan.with_dummy_data(
        arguments.config, num_classes=arguments.num_classes, num_images=arguments.num_images
    )
    where = ahead_of_time.find_topology(arguments.topology)
    start = time.monotonic()
    experiment = build_experiment(config, devices=where.devices)
    compute = experiment.compute
    mesh = experiment.mesh
    batch_size = config.batch_size
    variant = config.step_variants[0]
    model = with_patch_size(experiment.model.config, variant.patch_size)
    count = len(where.devices)
    device = where.devices[0].device_kind
    print(f'topology    {where.name}: {count} x {device}, {_gib(where.memory)} each')
    print(f'mesh        {meshes.format_mesh(mesh)}')
    print(f'model       {count_params(model):,} parameters, ', end='')
    print(f'{compute.dtype}, attention {compute.attention}')
    if variant.patch_size:
        print(f'patches     {variant}, the smallest of config.patch_sizes')
    params = jax.eval_shape(experiment.functions.init, experiment.values).params
    if update := memory_plan.count_update_operations(config.optimizer, params, mesh):
        passes = 2 if (config.optimizer.sharpness or Sam(rho=0)).rho else 1
        regularization = variant.regularize(config.regularization)
        forward = experiment.task.count_multiply_adds(config, model, regularization)
        share = update / (6 * passes * forward * batch_size / count)
        print(f'optimizer   muon: {update / 1e12:.3g} TFLOP per step on each device, ', end='')
        print(f"{share:.1%} of the model's")
    parts = mesh.shape['data'] * mesh.shape['fsdp']
    print(f'batch       {batch_size:,} images, {batch_size // parts} per device', flush=True)
    assert compute.remat != 'auto'
    for policy, result in memory_plan.try_remat_policies(config, compute.remat, where):
        print(f'remat       {policy:<6}{_verdict(result)}', flush=True)
    if not isinstance(result, StepMemory):
        print('does not fit: reduce --config.batch_size, or use --config.mesh.fsdp or more devices')
        return 1
    print(f'compiled in {time.monotonic() - start:.0f} s')
    print('\n'.join(result.sharding))
    return 0


def _verdict(result: StepMemory | DoesNotFitError) -> str:
    if isinstance(result, DoesNotFitError):
        return f'does not fit: {_gib(result.needed) if result.needed else "more"} needed'
    return f'fits: {_gib(result.peak)} peak, including {_gib(result.state)} of state and batch'


def _gib(count: int) -> str:
    return f'{count / GIB:.2f} GiB'


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('plan', __doc__)
    app.add_config_flags(parser, workdir=False)
    add = parser.add_argument
    add(
        '--topology',
        required=True,
        metavar='KIND:SHAPE',
        help='devices to compile for, such as v5e:4x4',
    )
    add(
        '--num_classes',
        type=app.positive_int,
        metavar='N',
        help='number of classes; default: as in the data',
    )
    add(
        '--num_images',
        type=app.positive_int,
        metavar='N',
        help='number of training images; default: as in the data',
    )
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True, on_devices=False)
