"""Compiling for devices that are not here. What needs a compiler is skipped where there is none."""

import importlib.util
import re
import subprocess
import sys

import jax
import pytest

from tests import tiny
from tests.hosts import ROOT, environment
from vit_jax.base import UserError
from vit_jax.distributed.meshes import MeshConfig, make_mesh
from vit_jax.models import Compute
from vit_jax.planning import ahead_of_time, memory_plan
from vit_jax.planning.ahead_of_time import DoesNotFitError, Topology

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None, reason="no TPU compiler: pip install -e '.[tpu]'"
)


@pytest.fixture(scope='module')
def slice_of_eight():
    return ahead_of_time.find_topology('v5e:2x4')


@pytest.fixture(scope='module')
def whole(slice_of_eight):
    """A step whose state is whole on every chip."""
    return memory_plan.compile_step(task(), slice_of_eight)


def task(batch_size=1024, **changes):
    model = tiny.model(image_size=(32, 32), width=256, mlp_dim=1024, depth=4, num_heads=4)
    config = tiny.experiment(model=model, batch_size=batch_size, **changes)
    return memory_plan.with_dummy_data(config, num_classes=tiny.CLASSES, num_images=1438)


@pytest.mark.parametrize(
    'name', ['v5e', 'a100:8', 'v5e:4', '0*v5e:2x2', 'v5e:2x2x2', 'v9:2x2', 'h100:0x8', 'v5e:16x32']
)
def test_an_unknown_topology_is_rejected_by_name(name):
    """libtpu would abort for v5e:16x32."""
    with pytest.raises(UserError, match=re.escape(f'--topology={name}')):
        ahead_of_time.find_topology(name)


@needs_compiler
@pytest.mark.parametrize('name, count', [('v5e:1x1', 1), ('v6e:1x2', 2), ('v5p:1x1x1', 1)])
def test_a_host_may_have_few_chips(name, count):
    assert len(ahead_of_time.find_topology(name).devices) == count


@needs_compiler
def test_a_slice_that_is_not_built_is_rejected_by_name():
    with pytest.raises(UserError, match='--topology=v5e:3x5'):
        ahead_of_time.find_topology('v5e:3x5')


@needs_compiler
@pytest.mark.parametrize(
    'name, data, fsdp', [('v5p:4x4x4', 2, 32), ('v6e:8x8', 4, 16), ('v4:2x2x2', 2, 4)]
)
def test_axes_may_share_a_side_of_the_torus(name, data, fsdp):
    devices = ahead_of_time.find_topology(name).devices
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp), devices)
    assert mesh.axis_sizes == (data, fsdp, 1)
    assert {*mesh.devices.flat} == {*devices}


@needs_compiler
@pytest.mark.gate
def test_a_step_that_needs_more_than_the_chip_has_does_not_fit(slice_of_eight):
    """The one deliberate failure: 16 M images in one step, of which the compiler says the size."""
    with pytest.raises(DoesNotFitError) as error:
        memory_plan.compile_step(task(2**24), slice_of_eight)
    assert error.value.needed > slice_of_eight.memory


@needs_compiler
@pytest.mark.nightly
def test_what_is_computed_again_is_not_kept(whole, slice_of_eight):
    block = memory_plan.compile_step(task(compute=Compute(remat='block')), slice_of_eight)
    assert whole.peak > 1.5 * block.peak
    assert whole.state == block.state


@needs_compiler
@pytest.mark.nightly
def test_fsdp_splits_the_state_and_leaves_the_activations_split(whole, slice_of_eight):
    """Left alone, the compiler gathers the batch on every chip, which takes several times more."""
    mesh = MeshConfig(fsdp=8, fsdp_min_mb=0.0)
    fsdp = memory_plan.compile_step(task(mesh=mesh), slice_of_eight)
    rates = 4 * 2**20  # bytes of the table of learning rates, which every chip holds
    assert fsdp.state - rates < (whole.state - rates) / 4
    assert fsdp.peak - fsdp.state < 1.2 * (whole.peak - whole.state)


def fake_step(memory_per_image, state=100):
    """A step whose memory grows with the batch, as those of real networks do."""

    def step(config, where):
        needed = state + memory_per_image[config.compute.remat] * config.batch_size
        if needed > where.memory:
            raise DoesNotFitError(needed)
        return memory_plan.StepMemory(state, needed, [])

    return step


@pytest.mark.parametrize('batch_size, expected', [(64, 'none'), (256, 'dots'), (1024, 'block')])
def test_the_first_policy_that_fits_is_found(monkeypatch, batch_size, expected):
    per_image = {'none': 100, 'dots': 30, 'block': 7}
    monkeypatch.setattr(memory_plan, 'compile_step', fake_step(per_image))
    where, small = Topology('test', jax.devices(), 10_000), task(batch_size)
    tried = list(memory_plan.try_remat_policies(small, 'none', where))
    policy, result = tried[-1]
    assert policy == expected and isinstance(result, memory_plan.StepMemory)
    assert all(isinstance(result, DoesNotFitError) for _, result in tried[:-1])


@pytest.mark.gate
@needs_compiler
def test_the_program_says_what_fits_and_what_lies_where(tmp_path):
    command = [sys.executable, '-m', 'vit_jax.plan', '--config=tests/tiny_config.py']
    command += ['--topology=v5e:2x2', '--config.batch_size=16', '--config.mesh.fsdp=4']
    command += ['--config.mesh.fsdp_min_mb=0', '--config.mesh.max_replicated_fraction=0.5']
    how = {'env': environment(), 'cwd': ROOT, 'capture_output': True, 'text': True}
    done = subprocess.run(command, timeout=180, **how)
    assert done.returncode == 0, done.stderr
    for line in (
        'topology    v5e:2x2: 4 x TPU v5 lite, 15.75 GiB each',
        'mesh        data=1 x fsdp=4 x tensor=1',
        'remat       dots  fits: ',  # what trains on TPUs, whatever fits
        'encoder/block/mlp/dense1/kernel',
        'state with optimizer: ',
    ):
        assert line in done.stdout, done.stdout
