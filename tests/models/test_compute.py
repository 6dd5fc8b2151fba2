import dataclasses
import math

import jax
import pytest

from tests import tiny
from vit_jax.base.errors import UserError
from vit_jax.models import Compute, Regularization, build, variant
from vit_jax.models.compute import activation_bytes, resolve_compute

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
    'platform, given, model, message',
    [
        ('cpu', LOW | {'attention': 'cudnn'}, {}, 'GPU'),
        ('cpu', LOW | {'attention': 'splash'}, {}, 'TPU'),
        ('gpu', LOW | {'attention': 'cudnn'}, RELATIVE, 'relative'),
        ('tpu', LOW | {'attention': 'splash'}, RELATIVE, 'relative'),
        ('cpu', {'attention': 'blockwise'}, RELATIVE, 'relative'),
        ('gpu', {'attention': 'cudnn', 'dtype': 'float32'}, {}, 'float32'),
        *(('cpu', {'last_block': 'class_tokens'}, {'pool': x}, 'pool=') for x in ('map', 'none')),
        ('cpu', {'last_block': 'class_tokens'}, {'pool': 'gap', 'class_tokens': 1}, 'pool=gap'),
        ('cpu', {'last_block': 'class_tokens'}, {'patch_outputs': 8}, 'patch_outputs=8'),
    ],
)
def test_an_option_that_does_not_fit_is_rejected_and_never_chosen(platform, given, model, message):
    model = dataclasses.replace(B16, **model)
    with pytest.raises(UserError, match=message):
        build(model, compute=Compute(**given), platform=platform)
    build(model, compute=Compute(), platform=platform)
    chosen = resolve_compute(Compute(), model, platform=platform)
    assert chosen.last_block == ('whole' if model.num_tokens_read is None else 'class_tokens')


@pytest.mark.parametrize('drawn', ['dropout', 'stochastic_depth'])
def test_what_is_drawn_at_random_is_left_as_it_was(drawn):
    regularization = Regularization(**{drawn: 0.1})
    found = resolve_compute(Compute(), B16, platform='tpu', regularization=regularization)
    assert found.last_block == 'whole'
    with pytest.raises(UserError, match='last_block'):
        build(B16, compute=Compute(last_block='class_tokens'), regularization=regularization)


@pytest.mark.parametrize(
    'images, remat', [(64, 'none'), (128, 'none'), (256, 'dots'), (512, 'block'), (4096, 'block')]
)
def test_a_larger_batch_recomputes_more(images, remat):
    """The B/16 of 86 M parameters in bfloat16, of which 256 images took 15.5 GB."""
    memory = (16 * GIB - 16 * 86_000_000) / images
    asked = Compute(dtype='bfloat16')
    assert resolve_compute(asked, B16, platform='gpu', memory=memory).remat == remat


def test_a_program_for_devices_that_are_not_here_is_theirs():
    """Tokens are rows of one matrix on a CPU alone."""
    flat = {}
    for platform in 'tpu', 'cpu':
        model = build(tiny.model(), platform=platform)
        params = jax.eval_shape(model.init, jax.random.key(0))
        program = str(jax.make_jaxpr(model.features)(params, tiny.images(2)))
        flat[platform] = 'f32[10,32] = dot_general' in program  # 2 images of 5 tokens
    assert flat == {'tpu': False, 'cpu': True}


@pytest.mark.gate
@pytest.mark.parametrize('remat', ['none', 'block'])
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
    assert 2 / 3 < per_image / activation_bytes(config, compute)[remat] < 3 / 2
