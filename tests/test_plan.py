"""Compiling for devices that are not here. What needs a compiler is skipped where there is none."""

import importlib.util
import subprocess
import sys

import pytest

from tests import tiny
from tests.hosts import ROOT, environment
from vit_jax import plan
from vit_jax.models import Compute
from vit_jax.parallel import ahead_of_time
from vit_jax.parallel.ahead_of_time import DoesNotFit, Topology
from vit_jax.parallel.meshes import MeshConfig

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None, reason="no TPU compiler: pip install -e '.[tpu]'"
)


@pytest.fixture(scope='module')
def slice_of_eight():
    return ahead_of_time.find_topology('v5e:2x4')


@pytest.fixture(scope='module')
def whole(slice_of_eight):
    """A step whose state is whole on every chip."""
    return plan.step(task(), slice_of_eight, remat='none', batch_size=1024)


def task(**changes):
    model = tiny.model(image_size=(32, 32), width=256, mlp_dim=1024, depth=4, num_heads=4)
    config = tiny.experiment(model=model, batch_size=1024, **changes)
    return plan.Task(config.checked(config), tiny.CLASSES, 1438)


@pytest.mark.parametrize(
    'name, message',
    [
        ('v5e', 'expected KIND:SHAPE such as v5e:4x4'),
        ('a100:8', 'expected KIND:SHAPE'),
        ('v5e:4', 'expected KIND:SHAPE'),
    ],
)
def test_a_topology_that_is_no_name_says_what_one_is(name, message):
    with pytest.raises(ValueError, match=f'--topology={name}: {message}'):
        ahead_of_time.find_topology(name)


@needs_compiler
def test_the_chip_says_its_memory(slice_of_eight):
    assert len(slice_of_eight.devices) == 8
    assert slice_of_eight.memory == 15.75 * ahead_of_time.GIB  # as the compiler names it for v5e
    with pytest.raises(ValueError, match='--topology=v5e:3x5: '):
        ahead_of_time.find_topology('v5e:3x5')


@needs_compiler
def test_a_step_that_needs_more_than_the_chip_has_does_not_fit(slice_of_eight):
    """The one deliberate failure: 16 M images in one step, of which the compiler says the size."""
    with pytest.raises(DoesNotFit) as error:
        plan.step(task(), slice_of_eight, remat='none', batch_size=2**24)
    assert error.value.needed > slice_of_eight.memory


@needs_compiler
@pytest.mark.long
def test_what_is_computed_again_is_not_kept(whole, slice_of_eight):
    block = plan.step(task(), slice_of_eight, remat='block', batch_size=1024)
    assert whole.peak > 1.5 * block.peak
    assert whole.state == block.state and whole.collectives['all-reduce'] >= 1


@needs_compiler
def test_fsdp_splits_the_state_and_leaves_the_activations_split(whole, slice_of_eight):
    """Left alone, the compiler gathers the batch on every chip, which takes several times more."""
    mesh = MeshConfig(fsdp=8, fsdp_min_mb=0.0)
    fsdp = plan.step(task(mesh=mesh), slice_of_eight, remat='none', batch_size=1024)
    assert fsdp.state < whole.state / 4
    assert fsdp.peak - fsdp.state < 1.2 * (whole.peak - whole.state)
    assert fsdp.collectives['all-gather'] >= 1


def fake_step(memory_per_image, state=100):
    """A step whose memory grows with the batch, as those of real networks do."""

    def step(task, where, *, remat, batch_size):
        needed = state + memory_per_image[remat] * batch_size
        if needed > where.memory:
            raise DoesNotFit(needed)
        return plan.Fit(state, needed, {}, [])

    return step


@pytest.mark.parametrize('batch_size, expected', [(64, 'none'), (256, 'dots'), (1024, 'block')])
def test_the_first_policy_that_fits_is_found_and_the_largest_batch(
    batch_size, expected, monkeypatch
):
    per_image = {'none': 100, 'dots': 30, 'block': 7}
    monkeypatch.setattr(plan, 'step', fake_step(per_image))
    where = Topology('test', plan.jax.devices(), 10_000)
    small = task(compute=Compute())
    small.config.batch_size = batch_size
    tried = list(plan.tried(small, where))
    assert tried[-1][0] == expected and isinstance(tried[-1][1], plan.Fit)
    assert all(isinstance(result, DoesNotFit) for _, result in tried[:-1])
    best, fit = plan.largest_batch(small, where, *tried[-1])
    limit = (10_000 - 100) / per_image[expected]
    assert best % 8 == 0 and limit - 8 < best <= limit and fit.peak <= 10_000


def test_where_nothing_fits_a_smaller_batch_is_looked_for(monkeypatch):
    monkeypatch.setattr(plan, 'step', fake_step({'block': 7}))
    where = Topology('test', plan.jax.devices(), 10_000)
    large = task(compute=Compute(remat='block'))
    large.config.batch_size = 4096
    ((policy, result),) = plan.tried(large, where)
    best, _ = plan.largest_batch(large, where, policy, result)
    assert 1000 < best <= 9_900 / 7


@needs_compiler
def test_the_program_says_what_fits_and_what_lies_where(tmp_path):
    command = ['-m', 'vit_jax.plan', '--config=tests/tiny_config.py', '--topology=v5e:2x2']
    command += ['--config.batch_size=16', '--config.mesh.fsdp=4', '--config.mesh.fsdp_min_mb=0']
    done = subprocess.run(
        [sys.executable, *command, '--config.mesh.max_replicated_fraction=0.5', '--nolargest'],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    for line in (
        'topology    v5e:2x2: 4 x TPU v5 lite, 15.75 GiB each',
        'mesh        data=1 x fsdp=4 x tensor=1',
        'remat       none  fits: ',
        'collectives ',
        'encoder/block/mlp/dense1/kernel',
        'state, optimizer included: ',
    ):
        assert line in done.stdout, done.stdout
