import dataclasses
import math
import types

import jax
import pytest

from tests import tiny
from vit_jax.base.errors import UserError
from vit_jax.models import Compute, Regularization, build, variant
from vit_jax.models.compute import PORTABLE, activations, has_fast_bfloat16, resolve_compute
from vit_jax.models.resnet import ResNetConfig

B16 = variant('B/16')
GIB = 2**30


@pytest.mark.parametrize(
    'platform, layout, unroll, attention, remat',
    [
        ('cpu', 'flat', 1, 'xla', 'dots'),
        ('gpu', 'flat', 12, 'xla', 'none'),
        ('cuda', 'flat', 12, 'xla', 'none'),
        ('tpu', 'batched', 1, 'xla', 'dots'),
    ],
)
def test_each_kind_of_device_has_its_own_way(platform, layout, unroll, attention, remat):
    chosen = resolve_compute(Compute(), B16, platform=platform, memory=math.inf)
    assert chosen == Compute(
        dtype='float32',
        layout=layout,
        unroll=unroll,
        attention=attention,
        remat=remat,
        last_block='class_tokens',
    )
    forward = resolve_compute(Compute(), B16, platform=platform)
    assert forward == dataclasses.replace(chosen, remat='none')


@pytest.mark.parametrize(
    'platform, capability, is_fast',
    [('tpu', None, True), ('gpu', '8.0', True), ('gpu', '7.5', False), ('cpu', None, False)],
)
def test_tpus_and_new_gpus_multiply_faster_in_bfloat16(platform, capability, is_fast):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    assert has_fast_bfloat16(device) == is_fast


@pytest.mark.parametrize(
    'heads, dtype, attention',
    [(12, 'bfloat16', 'cudnn'), (12, 'float32', 'xla'), (64, 'bfloat16', 'xla')],
)
def test_a_gpu_takes_cudnn_where_it_has_heads_of_that_size(heads, dtype, attention):
    """It takes sizes that are multiples of 8; 64 heads of 768 features have 12 each."""
    model = dataclasses.replace(B16, num_heads=heads)
    assert resolve_compute(Compute(dtype=dtype), model, platform='gpu').attention == attention


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
@pytest.mark.parametrize('model', [B16, ResNetConfig()])
def test_a_model_that_is_not_trained_computes_in_float32(platform, model):
    assert resolve_compute(Compute(), model, platform=platform).dtype == 'float32'


def test_a_tpu_recomputes_where_its_loop_is_rolled_alone():
    for compute, model in (Compute(unroll=12), B16), (Compute(), ResNetConfig()):
        assert resolve_compute(compute, model, platform='tpu', memory=math.inf).remat == 'none'


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_relative_positions_are_computed_by_xla(platform):
    model = dataclasses.replace(B16, positions='relative')
    for size in 224, 640:
        config = dataclasses.replace(model, image_size=(size, size))
        found = resolve_compute(Compute(dtype='bfloat16'), config, platform=platform)
        assert found.attention == 'xla'
        with pytest.raises(UserError, match='attention=blockwise: does not support relative'):
            resolve_compute(Compute(attention='blockwise'), config, platform=platform)


@pytest.mark.parametrize('attention, platform', [('cudnn', 'gpu'), ('splash', 'tpu')])
def test_a_fused_kernel_is_of_one_kind_of_device_without_relative_positions(attention, platform):
    said = Compute(attention=attention, dtype='bfloat16')
    assert resolve_compute(said, B16, platform=platform).attention == attention
    relative = dataclasses.replace(B16, positions='relative')
    with pytest.raises(
        UserError, match=f'attention={attention}: does not support relative positions'
    ):
        build(relative, compute=said, platform=platform)
    with pytest.raises(UserError, match=f'needs a {platform.upper()}, got a CPU; set'):
        build(B16, compute=said, platform='cpu')


def test_the_kernel_of_cudnn_is_rejected_in_float32():
    with pytest.raises(UserError, match='attention=cudnn: computes in bfloat16, got .*float32'):
        build(B16, compute=Compute(attention='cudnn', dtype='float32'), platform='gpu')


@pytest.mark.parametrize(
    'platform, attention', [('cpu', 'blockwise'), ('gpu', 'cudnn'), ('tpu', 'splash')]
)
def test_a_long_sequence_has_a_fused_kernel_where_there_is_one(platform, attention):
    long = dataclasses.replace(B16, image_size=(640, 640))
    compute = resolve_compute(Compute(dtype='bfloat16'), long, platform=platform)
    assert compute.attention == attention
    without = dataclasses.replace(compute, attention='blockwise')
    assert activations(long, compute)['none'] == activations(long, without)['none']


@pytest.mark.parametrize(
    'of, last_block',
    [
        ({'pool': 'cls', 'depth': 16}, 'class_tokens'),
        ({'pool': 'cls', 'depth': 17}, 'whole'),
        ({'pool': 'cls_dist'}, 'class_tokens'),
        ({'pool': 'cls_gap'}, 'whole'),
        ({'pool': 'gap', 'class_tokens': 1}, 'whole'),
        ({'pool': 'map'}, 'whole'),
        ({'pool': 'none'}, 'whole'),
        ({'patch_outputs': 8}, 'whole'),
    ],
)
def test_no_patch_is_left_out_that_the_head_reads(of, last_block):
    """In a loop a block of its own is for networks of few blocks."""
    model = dataclasses.replace(B16, **of)
    assert resolve_compute(Compute(), model, platform='cpu').last_block == last_block
    assert resolve_compute(Compute(), model, platform='gpu').last_block == (
        'whole' if model.num_tokens_read is None else 'class_tokens'
    )
    if model.num_tokens_read is None:
        with pytest.raises(UserError, match=f'heads read patches too .pool={model.pool}'):
            resolve_compute(Compute(last_block='class_tokens'), model, platform='cpu')


@pytest.mark.parametrize('drawn', ['dropout', 'stochastic_depth'])
def test_what_is_drawn_at_random_is_left_as_it_was(drawn):
    regularization = Regularization(**{drawn: 0.1})
    found = resolve_compute(Compute(), B16, platform='tpu', regularization=regularization)
    assert found.last_block == 'whole'
    with pytest.raises(UserError, match='need whole blocks; set it to auto'):
        build(B16, compute=Compute(last_block='class_tokens'), regularization=regularization)


def test_a_resnet_has_no_attention_to_refuse():
    said = Compute(attention='cudnn')
    assert resolve_compute(said, ResNetConfig(), platform='cpu').attention == 'cudnn'


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_what_is_said_stays(platform):
    said = dataclasses.replace(PORTABLE, remat='block', unroll=3)
    assert resolve_compute(said, B16, platform=platform, memory=1.0) == said


@pytest.mark.parametrize(
    'images, remat', [(64, 'none'), (128, 'none'), (256, 'dots'), (512, 'block'), (4096, 'block')]
)
def test_a_larger_batch_recomputes_more(images, remat):
    """The B/16 of 86 M parameters in bfloat16, of which 256 images took 15.5 GB."""
    memory = (16 * GIB - 16 * 86_000_000) / images
    asked = Compute(dtype='bfloat16')
    assert resolve_compute(asked, B16, platform='gpu', memory=memory).remat == remat


@pytest.mark.parametrize('name, megabytes', [('B/16', 205), ('L/16', 540)])
def test_the_estimate_is_what_plans_for_tpus_say(name, megabytes):
    """An image at remat=none in bfloat16, of benchmarks/results/plan_tpu.txt; within a tenth."""
    model = variant(name, num_classes=1000)
    said = Compute(dtype='bfloat16', last_block='whole')
    compute = resolve_compute(said, model, platform='tpu')
    assert activations(model, compute)['none'] / 1e6 == pytest.approx(megabytes, rel=0.1)


def test_a_program_for_devices_that_are_not_here_is_theirs():
    """Tokens are rows of one matrix on a CPU alone."""
    flat = {}
    for platform in 'tpu', 'cpu':
        model = build(tiny.model(), platform=platform)
        params = jax.eval_shape(model.init, jax.random.key(0))
        program = str(jax.make_jaxpr(model.features)(params, tiny.images(2)))
        flat[platform] = 'f32[10,32] = dot_general' in program  # 2 images of 5 tokens
    assert flat == {'tpu': False, 'cpu': True}


@pytest.mark.full
@pytest.mark.parametrize('remat', ['none', 'dots', 'block'])
def test_the_estimate_of_memory_is_what_a_program_takes(remat):
    """Within a third, as the compiler shares and copies memory in its own ways."""
    config = tiny.model(image_size=(32, 32), width=64, mlp_dim=256, depth=24, num_classes=2)
    compute = Compute(dtype='float32', remat=remat, unroll=1, attention='xla', layout='flat')
    model = build(config, compute=compute)

    def peak(images):
        params = jax.eval_shape(model.init, jax.random.key(0))
        batch = jax.ShapeDtypeStruct((images, 32, 32, 3), 'float32')
        loss = jax.grad(lambda p, x: model.apply(p, x).std())
        return jax.jit(loss).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    per_image = (peak(64) - peak(32)) / 32
    assert 2 / 3 < per_image / activations(config, compute)[remat] < 3 / 2
