import dataclasses

import jax
import pytest

from tests import tiny
from vit_jax.models import Compute, build, variant
from vit_jax.models.choices import Training, activations, choose

B16 = variant('B/16')
GIB = 2**30


@pytest.mark.parametrize(
    'platform, layout, unroll, attention, remat',
    [
        ('cpu', 'flat', 1, 'head_major', 'dots'),
        ('gpu', 'flat', 12, 'auto', 'none'),
        ('cuda', 'flat', 12, 'auto', 'none'),
        ('tpu', 'batched', 1, 'xla', 'none'),
    ],
)
def test_each_kind_of_device_has_its_own_way(platform, layout, unroll, attention, remat):
    training = Training(images=64, memory=None)
    chosen = choose(Compute(), B16, platform=platform, training=training).compute
    assert chosen == Compute(layout=layout, unroll=unroll, attention=attention, remat=remat)
    forward = choose(Compute(), B16, platform=platform).compute
    assert forward == dataclasses.replace(chosen, remat='none')


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_what_is_said_stays(platform):
    said = Compute(remat='block', unroll=3, attention='xla', layout='batched')
    training = Training(images=10**6, memory=1)
    assert choose(said, B16, platform=platform, training=training) == (said, '')


@pytest.mark.parametrize(
    'images, remat', [(64, 'none'), (128, 'none'), (256, 'dots'), (512, 'block'), (4096, 'block')]
)
def test_a_larger_batch_recomputes_more(images, remat):
    """The B/16 of 86 M parameters in bfloat16, of which 256 images took 15.5 GB."""
    training = Training(images=images, memory=16 * GIB - 16 * 86_000_000)
    choice = choose(Compute(dtype='bfloat16'), B16, platform='gpu', training=training)
    assert choice.compute.remat == remat
    assert ('fit into its memory' in choice.why) == (remat != 'none')


@pytest.mark.full
@pytest.mark.parametrize('remat', ['none', 'dots', 'block'])
def test_the_estimate_of_memory_is_what_a_program_takes(remat):
    """Within a third, as the compiler shares and copies memory in its own ways."""
    config = tiny.model(image_size=(32, 32), width=64, mlp_dim=256, depth=24, num_classes=2)
    compute = Compute(remat=remat, unroll=1, attention='xla', layout='flat')
    model = build(config, compute=compute)

    def peak(images):
        params = jax.eval_shape(model.init, jax.random.key(0))
        batch = jax.ShapeDtypeStruct((images, 32, 32, 3), 'float32')
        loss = jax.grad(lambda p, x: model.apply(p, x).std())
        return jax.jit(loss).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    per_image = (peak(64) - peak(32)) / 32
    assert 2 / 3 < per_image / activations(config, compute)[remat] < 3 / 2
