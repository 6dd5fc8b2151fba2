"""How a network is computed follows from the memory of the devices, on every host alike."""

import bisect
from unittest import mock

import jax
import pytest
from jax.sharding import Mesh

from tests import networks, tiny
from vit_jax.base import records
from vit_jax.config import EvalConfig
from vit_jax.experiment.build import build_experiment, resolve_compute_on_mesh
from vit_jax.models import Compute, count_params, variant
from vit_jax.tasks.single_label import SingleLabel
from vit_jax.training.optimizer import OptimizerConfig

MODEL = variant('Ti/16', num_classes=1000)


def choice(memory, optimizer='adamw', *, fsdp=1, teacher=None, **changes):
    """What is chosen for eight GPUs that have so many bytes each."""
    device = mock.Mock(spec=jax.Device, platform='gpu')
    device.memory_stats.return_value = {'bytes_limit': memory}
    mesh = mock.Mock(spec=Mesh, local_devices=[device])
    mesh.shape = {'data': 8 // fsdp, 'fsdp': fsdp, 'tensor': 1}
    values = {'optimizer': OptimizerConfig(kind=optimizer), 'batch_size': 512} | changes
    options = {'planned': False, 'frozen': teacher, 'task': SingleLabel(num_classes=1000)}
    return resolve_compute_on_mesh(tiny.experiment(**values), MODEL, mesh, **options)


def suffices(memory, *arguments, **changes):
    """Is nothing computed twice?"""
    return choice(memory, *arguments, **changes).remat == 'none'


@pytest.mark.gate
def test_a_device_needs_memory_for_all_that_an_optimizer_keeps():
    """AdamW has two moments of each parameter, momentum one; an average and a sum are others."""
    array = 4 * count_params(MODEL)
    least = bisect.bisect_left(range(2**36), True, key=lambda memory: suffices(memory, 'sgd'))
    activations = least - 3 * array  # parameters, gradient, momentum
    for needed, optimizer, changes in [
        (4 * array + activations, 'adamw', {}),
        (3 * array + activations, 'adafactor', {}),
        (4 * array + activations, 'sgd', {'ema_decay': 0.999}),
        (4 * array // 8 + activations, 'adamw', {'fsdp': 8}),
        (4 * array + activations // 2 + 1, 'sgd', {'accumulation_steps': 2}),
    ]:
        assert suffices(needed, optimizer, **changes), changes
        assert not suffices(needed - 2, optimizer, **changes), changes


@pytest.mark.gate
@pytest.mark.parametrize('dtype, size', [('float32', 4), ('bfloat16', 2)])
def test_a_teacher_takes_memory_in_the_type_of_the_training(dtype, size):
    teacher, changes = networks.loaded(tiny.model()), {'compute': Compute(dtype=dtype)}
    least = bisect.bisect_left(range(2**36), True, key=lambda n: suffices(n, **changes))
    changes['teacher'] = teacher
    assert suffices(least + size * count_params(teacher.config), **changes)
    assert not suffices(least + size * count_params(teacher.config) - 2, **changes)


def test_nothing_changes_a_configuration_after_the_experiment_is_built():
    config = tiny.experiment(compute=Compute())
    before = records.to_dict(config)
    experiment = build_experiment(config, dtype='bfloat16')
    assert records.to_dict(config) == records.to_dict(experiment.config) == before
    assert experiment.compute.dtype == 'bfloat16'
    assert experiment.export_config()['compute']['dtype'] == 'bfloat16'
    config.seed, config.model.depth, config.evals['more'] = 7, 1, EvalConfig()
    assert records.to_dict(experiment.config) == before
