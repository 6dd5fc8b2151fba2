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


LOW, LONG, RELATIVE = {'dtype': 'bfloat16'}, {'image_size': (640, 640)}, {'positions': 'relative'}
CPU = {'dtype': 'float32', 'layout': 'flat', 'unroll': 1, 'attention': 'xla', 'remat': 'dots'}
GPU = CPU | {'unroll': 12, 'remat': 'none'}
TPU = CPU | {'layout': 'batched'}


@pytest.mark.parametrize(
    'platform, given, model, expected',
    [
        ('cpu', {}, {}, CPU),
        ('gpu', {}, {}, GPU),
        ('cuda', {}, {}, GPU),
        ('tpu', {}, {}, TPU),
        ('tpu', {'unroll': 12}, {}, {'remat': 'none'}),  # a rolled loop alone recomputes
        # cuDNN takes heads that are multiples of 8; 64 heads of 768 features have 12 each.
        ('gpu', LOW, {}, {'attention': 'cudnn'}),
        ('gpu', LOW, {'num_heads': 64}, {'attention': 'xla'}),
        ('cpu', LOW, LONG, {'attention': 'blockwise'}),
        ('gpu', LOW, LONG, {'attention': 'cudnn'}),
        ('tpu', LOW, LONG, {'attention': 'splash'}),
        *((p, LOW, RELATIVE, {'attention': 'xla'}) for p in ('cpu', 'gpu', 'tpu')),
        *((p, {}, RELATIVE | LONG, {'attention': 'xla'}) for p in ('cpu', 'gpu', 'tpu')),
        # In a loop, a separate last block is for few blocks; the head must not read patches.
        ('cpu', {}, {'depth': 16}, {'last_block': 'class_tokens'}),
        ('cpu', {}, {'depth': 17}, {'last_block': 'whole'}),
        ('gpu', {}, {'depth': 17}, {'last_block': 'class_tokens'}),
        ('cpu', {}, {'pool': 'cls_dist'}, {'last_block': 'class_tokens'}),
    ],
)
def test_each_platform_has_its_fastest_options(platform, given, model, expected):
    model = dataclasses.replace(B16, **model)
    found = resolve_compute(Compute(**given), model, platform=platform, memory=math.inf)
    assert vars(found) | expected == vars(found)
    untrained = resolve_compute(Compute(**given), model, platform=platform)
    assert untrained == dataclasses.replace(found, remat='none')


@pytest.mark.parametrize(
    'platform, capability, is_fast',
    [('tpu', None, True), ('gpu', '8.0', True), ('gpu', '7.5', False), ('cpu', None, False)],
)
def test_tpus_and_new_gpus_multiply_faster_in_bfloat16(platform, capability, is_fast):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    assert has_fast_bfloat16(device) == is_fast


@pytest.mark.parametrize(
    'platform, given, model, message',
    [
        ('cpu', LOW | {'attention': 'cudnn'}, {}, 'needs a GPU, got a CPU; set'),
        ('cpu', LOW | {'attention': 'splash'}, {}, 'needs a TPU, got a CPU; set'),
        ('gpu', LOW | {'attention': 'cudnn'}, RELATIVE, 'does not support relative positions'),
        ('tpu', LOW | {'attention': 'splash'}, RELATIVE, 'does not support relative positions'),
        ('cpu', {'attention': 'blockwise'}, RELATIVE, 'does not support relative positions'),
        ('gpu', {'attention': 'cudnn', 'dtype': 'float32'}, {}, 'computes in bfloat16, got .*f'),
        *(
            ('cpu', {'last_block': 'class_tokens'}, model, 'heads read patches too .pool=')
            for model in (
                {'pool': 'cls_gap'},
                {'pool': 'gap', 'class_tokens': 1},
                {'pool': 'map'},
                {'pool': 'none'},
                {'patch_outputs': 8},
            )
        ),
    ],
)
def test_an_option_that_does_not_fit_is_rejected_and_never_chosen(platform, given, model, message):
    model = dataclasses.replace(B16, **model)
    with pytest.raises(UserError, match=message):
        build(model, compute=Compute(**given), platform=platform)
    build(model, compute=Compute(), platform=platform)
    chosen = resolve_compute(Compute(), model, platform=platform)
    assert chosen.last_block == ('whole' if model.num_tokens_read is None else 'class_tokens')


def test_a_fused_kernel_keeps_no_weights():
    xla, cudnn = (
        activations(B16, resolve_compute(Compute(**given), B16, platform='gpu'))['none']
        for given in (LOW | {'attention': 'xla'}, LOW)
    )
    assert xla > cudnn


@pytest.mark.parametrize('drawn', ['dropout', 'stochastic_depth'])
def test_what_is_drawn_at_random_is_left_as_it_was(drawn):
    regularization = Regularization(**{drawn: 0.1})
    found = resolve_compute(Compute(), B16, platform='tpu', regularization=regularization)
    assert found.last_block == 'whole'
    with pytest.raises(UserError, match='need whole blocks; set last_block to auto'):
        build(B16, compute=Compute(last_block='class_tokens'), regularization=regularization)


def test_a_resnet_has_no_attention_to_refuse():
    said = Compute(attention='cudnn')
    assert resolve_compute(said, ResNetConfig(), platform='cpu').attention == 'cudnn'
    trained = resolve_compute(Compute(), ResNetConfig(), platform='tpu', memory=math.inf)
    assert trained.remat == 'none'  # it has no loop


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
