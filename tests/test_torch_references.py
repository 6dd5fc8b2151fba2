"""Full-size networks against timm and transformers, which are written independently of Flax.

`.ci/nightly` installs the `torch` extra; without it they are skipped. The gate has the outputs of
these libraries for small networks, in tests/reference.
"""

import json
import types
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from PIL import Image

import vit_jax
from tests import reference
from tests.networks import assert_same_arrays, changed, loaded
from vit_jax.base import UserError
from vit_jax.base.tree_names import map_named, named_leaves
from vit_jax.data import three_augment
from vit_jax.data.image_preprocessing import SimpleRandomCrop
from vit_jax.data.three_augment import BRIGHTNESS, CONTRAST, SATURATION
from vit_jax.models import build, variant
from vit_jax.tasks.distillation import distillation_loss
from vit_jax.training.objectives import Distillation
from vit_jax.training.optimizer import OptimizerConfig, make_optimizer
from vit_jax.training.param_groups import make_param_groups

REASON = 'the torch extra is not installed: pip install -e ".[torch]"'
torch = pytest.importorskip('torch', reason=REASON)
transformers = pytest.importorskip('transformers', reason=REASON)
timm = pytest.importorskip('timm', reason=REASON)
pytestmark = pytest.mark.nightly

# timm's name, with what is not its default: the published weights go with the tanh GELU.
TIMM = {
    'Ti/16': 'vit_tiny_patch16_224',
    'B/32': 'vit_base_patch32_224',
    'R+Ti/16': 'vit_tiny_r_s16_p8_224',
    'R50+B/16': 'vit_base_r50_s16_224',
}
# float32 rounding; the hybrids are up to 50 layers deep before the first block
TOLERANCE = {'Ti/16': 1e-5, 'B/32': 1e-5, 'R+Ti/16': 1e-5, 'R50+B/16': 5e-5}
IMAGES = np.random.default_rng(1).uniform(-1, 1, (2, 224, 224, 3)).astype(np.float32)


@pytest.fixture(scope='module', params=TIMM)
def network(request):
    config = variant(request.param, num_classes=1000)
    rng = np.random.default_rng(0)

    def draw(name, leaf):
        values = 0.02 * rng.normal(size=leaf.shape).astype(np.float32)
        return 1 + 5 * values if name.endswith('scale') else values

    params = jax.eval_shape(build(config).init, jax.random.key(0))
    empty = loaded(variant('Ti/16', depth=1, image_size=(16, 16)))
    network = changed(empty, params=map_named(draw, params), model=config, grid=config.grid)
    return request.param, network


def as_the_papers_code(model):
    """timm's convolutions and norms with the paper's epsilons: 1e-5 on the deviation, and 1e-6."""
    for module in model.modules():
        if type(module).__name__ == 'StdConv2dSame':
            weight = module.weight.data
            deviation, mean = torch.std_mean(weight, (1, 2, 3), correction=0, keepdim=True)
            module.weight.data = (weight - mean) / (deviation + 1e-5)
            module.forward = types.MethodType(_plain_convolution, module)
        elif isinstance(module, torch.nn.GroupNorm):
            module.eps = 1e-6
    return model


def _plain_convolution(self, x):
    sides = zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
    total = [max(0, (-(-side // s) - 1) * s + k - side) for side, k, s in sides]
    pad = [p for t in reversed(total) for p in (t // 2, t - t // 2)]
    return torch.nn.functional.conv2d(
        torch.nn.functional.pad(x, pad), self.weight, None, self.stride
    )


def torch_logits(model):
    with torch.no_grad():
        out = model.eval()(torch.from_numpy(IMAGES.transpose(0, 3, 1, 2).copy()))
    return getattr(out, 'logits', out).numpy()


def test_timm_gives_the_same_logits_and_both_read_the_files_of_the_other(network, tmp_path):
    from safetensors.torch import load_file, save_file

    name, ours = network
    model = timm.create_model(TIMM[name], act_layer='gelu_tanh', num_classes=1000)
    vit_jax.save(ours, tmp_path / 'x.npz')
    model.load_pretrained(str(tmp_path / 'x.npz'))
    state = {key: array.clone() for key, array in model.state_dict().items()}
    vit_jax.save(ours, tmp_path / 'ours.safetensors', 'timm')
    model.load_state_dict(load_file(tmp_path / 'ours.safetensors'), strict=True)
    assert all(torch.equal(state[key], array) for key, array in model.state_dict().items())
    save_file(state, tmp_path / 'theirs.safetensors')
    torch.save(state, tmp_path / 'theirs.pth')
    for file in 'theirs.safetensors', 'theirs.pth':
        again = vit_jax.load(str(tmp_path / file), gelu='tanh')
        assert replace(again.config, position_resize='bilinear') == ours.config  # as each resizes
        assert_same_arrays(named_leaves(ours.params), named_leaves(again.params))
    logits = ours.logits(IMAGES)
    assert np.abs(logits).max() > 0.1
    theirs = torch_logits(as_the_papers_code(model))
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=TOLERANCE[name])


def test_transformers_gives_the_same_logits_and_its_files_are_read(network, tmp_path):
    name, ours = network
    if '+' in name:
        pytest.skip('transformers 5 has no hybrids any more')
    vit_jax.save(ours, str(tmp_path / 'ours'), 'huggingface')
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / 'ours')
    logits = torch_logits(model)
    np.testing.assert_allclose(ours.logits(IMAGES), logits, rtol=0, atol=TOLERANCE[name])
    model.save_pretrained(tmp_path / 'theirs')
    again = vit_jax.load(tmp_path / 'theirs')
    assert replace(again.config, position_resize='bilinear') == ours.config  # as each resizes
    assert_same_arrays(named_leaves(ours.params), named_leaves(again.params))


# Keys that earlier versions of transformers wrote into each config.json or vision_config.
EARLIER = {'top_k': 50, 'num_beams': 1, 'use_bfloat16': False, 'pruned_heads': {}, 'max_length': 20}
EARLIER |= {'tie_word_embeddings': True, 'begin_suppress_tokens': [1], 'length_penalty': 1.0}
SMALL = {'hidden_size': 64, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'image_size': 32}
CLASSES = 'ViTModel ViTMAEModel ViTMSNForImageClassification DeiTModel IJepaModel Dinov2Model'
CLASSES += ' Dinov2WithRegistersModel DINOv3ViTModel CLIPVisionModel SiglipVisionModel'


@pytest.mark.parametrize('name', CLASSES.split())
def test_all_keys_that_transformers_writes_are_known(name, tmp_path):
    cls = getattr(transformers, name)
    registers = {'num_register_tokens': 4} if 'DINOv3' in name else {}
    config = cls.config_class(**SMALL, patch_size=8, **registers)
    cls(config).save_pretrained(tmp_path)
    described = EARLIER | config.to_dict()
    if name.endswith('VisionModel'):  # as a part of two towers
        whole = getattr(transformers, name.replace('VisionModel', 'Config'))().to_dict()
        described = EARLIER | whole | {'vision_config': described}
    (tmp_path / 'config.json').write_text(json.dumps(described))
    assert vit_jax.load(tmp_path).config.width == 64


def test_all_keys_that_timm_writes_are_known(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', depth=1, num_classes=5)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    described = json.loads((tmp_path / 'config.json').read_text())
    known = vars(timm.models.PretrainedCfg()).keys() - {'label_offset', 'label_names', 'state_dict'}
    described['pretrained_cfg'] = dict.fromkeys(known, 'x') | described['pretrained_cfg']
    (tmp_path / 'config.json').write_text(json.dumps(described))
    assert vit_jax.load(tmp_path, num_heads=3).config.depth == 1


def test_query_and_key_norms_of_timm_are_read_and_written(tmp_path):
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', depth=2, num_classes=5, qk_norm=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    timm.models.save_for_hf(model, tmp_path, model_args={'qk_norm': True}, safe_serialization=True)
    network = vit_jax.load(tmp_path, num_heads=3)
    assert network.config.qk_norm
    np.testing.assert_allclose(network.logits(IMAGES), torch_logits(model), rtol=0, atol=2e-5)
    vit_jax.save(network, tmp_path / 'again.safetensors')
    again = load_file(tmp_path / 'again.safetensors')
    assert all(torch.equal(again[key], array) for key, array in model.state_dict().items())


@pytest.mark.parametrize('name', sorted({n.partition('.')[0] for n in reference.timm_names()}))
def test_one_block_of_what_timm_publishes_computes_the_same(name, tmp_path):
    """With random parameters; a model that is not supported is skipped with the error."""
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, depth=1, num_classes=5)
    except (TypeError, AssertionError) as error:
        assert 'depth' in str(error) or 'per block' in str(error)
        pytest.skip('its depth is its own')
    size = model.pretrained_cfg['input_size'][1:]
    images = torch.randn(1, 3, *size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        expected = model.eval()(images).numpy()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    attention = next((m for name, m in model.named_modules() if name.endswith('.attn')), None)
    hints = {} if attention is None else {'num_heads': attention.num_heads}
    try:
        network = vit_jax.load(tmp_path, **hints)
    except UserError as error:  # which names are read: tests/checkpoints/formats/test_timm_names.py
        pytest.skip(str(error).partition(': ')[2])
    if network.config.backbone:  # whose epsilons are the paper's here: up to 9e-5 from timm's own
        with torch.no_grad():
            expected = as_the_papers_code(model)(images).numpy()
    ours = jax.numpy.asarray(images.numpy().transpose(0, 2, 3, 1))
    logits = network.model.apply(network.params, ours)
    # float32 rounding
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5 * max(1, abs(expected).max()))


def test_lamb_is_timms_on_each_block_alone():
    from timm.optim import Lamb

    rng, shapes = np.random.default_rng(0), {'kernel': (2, 4, 3), 'bias': (2, 3)}
    draws = [{f'encoder/block/{n}': rng.normal(size=s) for n, s in shapes.items()} for _ in '12345']
    params, *gradients = jax.tree.map(np.float32, draws)
    config = OptimizerConfig(kind='lamb', weight_decay=0.05, clip_norm=1.0)
    groups = make_param_groups(config, params)
    optimizer = make_optimizer(config, lambda step: jax.numpy.asarray(0.01), groups)
    state, blocks = optimizer.init(params), jax.tree.map(lambda x: [*map(torch.tensor, x)], params)
    decays = {name: 0.05 * name.endswith('kernel') for name in blocks}
    parts = [{'params': blocks[name], 'weight_decay': decays[name]} for name in blocks]
    theirs = Lamb(parts, lr=0.01, max_grad_norm=1.0)
    for gradient in gradients:
        for name, tensors in blocks.items():
            for tensor, slope in zip(tensors, gradient[name], strict=True):
                tensor.grad = torch.tensor(slope)
        theirs.step()
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    for name, tensors in blocks.items():
        # Adam's bias correction 1 - b2 has a relative error of 1e-5 in float32.
        np.testing.assert_allclose(params[name], torch.stack(tensors), atol=1e-6)


class Outputs(torch.nn.Module):
    """A model of timm's tasks that returns parameters: logits of heads, or logits and features."""

    pretrained_cfg = {'mean': (0.5, 0.5, 0.5), 'std': (0.5, 0.5, 0.5)}
    num_classes, in_chans = 12, 3

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = torch.nn.ParameterList(map(torch.from_numpy, outputs))
        self.forward_features = self.set_distilled_training = lambda _: None
        self.forward_head = lambda _, pre_logits=False: self.outputs[int(pre_logits)]

    def forward(self, images):
        return self.outputs[0] if len(self.outputs) == 1 else (*self.outputs,)


@pytest.mark.parametrize('kind', ['kl', 'token', 'token_kl', 'features'])
def test_timms_distillation_tasks_have_the_same_gradients(kind):
    task = pytest.importorskip('timm.task', reason='this timm has no distillation tasks')
    rng, options = np.random.default_rng(0), {'task_loss_weight': 0.3}
    *own, outputs = rng.normal(size=(2 if kind == 'kl' else 3, 6, 12)).astype(np.float32)
    labels, t = rng.integers(0, 12, 6), 3.0 if 'kl' in kind else 1.0
    student, teacher = Outputs(*own), Outputs(*[outputs] * (2 if kind == 'features' else 1))
    options |= {'criterion': torch.nn.CrossEntropyLoss()}
    if kind == 'features':
        options |= {'student_feature_dim': 12, 'teacher_feature_dim': 12}
        run = task.FeatureDistillationTask(student, teacher, **options)
    elif kind == 'kl':
        run = task.LogitDistillationTask(student, teacher, temperature=t, **options)
    else:
        options |= {'distill_type': 'soft' if 'kl' in kind else 'hard', 'temperature': t}
        run = task.TokenDistillationTask(student, teacher, **options)
    run(torch.zeros(6, 3, 2, 2), torch.from_numpy(labels))['loss'].backward()
    config = Distillation(teacher='x', kind=kind, temperature=t)

    def loss(own):
        labeled = optax.softmax_cross_entropy_with_integer_labels(own[0], labels)
        distance = distillation_loss(config, own[-1], jax.numpy.asarray(outputs))
        return (0.3 * labeled + 0.7 * distance).mean()

    for ours, theirs in zip(jax.grad(loss)(own), student.outputs, strict=True):
        np.testing.assert_allclose(ours, theirs.grad, rtol=1e-5, atol=1e-7)  # float32 rounding


PHOTO = np.random.default_rng(0).integers(0, 256, (40, 53, 3), np.uint8)


def test_a_color_jitter_is_torchvisions_with_the_same_factors_and_order():
    functional = pytest.importorskip('torchvision.transforms.functional', reason=REASON)
    names = {BRIGHTNESS: 'brightness', CONTRAST: 'contrast', SATURATION: 'saturation'}
    for number in range(12):
        key, expected = jax.random.key(number), Image.fromarray(PHOTO)
        factors, order = three_augment.draw_color_jitter(key, 0.3)
        for operation in order.tolist():
            adjust = getattr(functional, f'adjust_{names[operation]}')
            expected = adjust(expected, float(factors[operation]))
        found = three_augment.apply_color_jitter(key, jax.numpy.asarray(PHOTO), 0.3)
        # One level from the rounding of the first, times at most 1.3 in each of the other two.
        np.testing.assert_allclose(found.astype(int), np.asarray(expected, int), atol=3)
        assert (np.asarray(found) != np.asarray(expected)).mean() <= 1e-3


@pytest.mark.parametrize('shape', [(50, 37), (37, 50), (24, 24), (7, 301)])
def test_a_simple_random_crop_is_torchvisions_at_the_same_place(shape):
    transforms = pytest.importorskip('torchvision.transforms', reason=REASON)
    image, rng = np.resize(PHOTO, (*shape, 3)), np.random.default_rng(0)
    resize = transforms.Resize(24, interpolation=transforms.InterpolationMode.BICUBIC)
    padded = transforms.functional.pad(resize(Image.fromarray(image)), 4, padding_mode='reflect')
    rng = np.random.default_rng(0)
    top, left = (rng.integers(0, side - 24 + 1) for side in padded.size[::-1])
    expected = transforms.functional.crop(padded, top, left, 24, 24)
    found = SimpleRandomCrop()(image, (24, 24), np.random.default_rng(0))
    np.testing.assert_array_equal(found, np.asarray(expected))


PROMPTS = 'a photo of a {}.', 'a blurry {}.'


@pytest.mark.parametrize('bias', [None, -9.5])
def test_zero_shot_logits_are_open_clips(bias, tmp_path):
    """Of a randomly initialized model, with class vectors from its text tower and prompts."""
    open_clip = pytest.importorskip('open_clip', reason='open_clip_torch is not installed')
    from safetensors.torch import save_file

    vision = {'image_size': 32, 'patch_size': 8, 'width': 64, 'layers': 2}
    text = {'context_length': 77, 'vocab_size': 49408, 'width': 64, 'heads': 2, 'layers': 1}
    torch.manual_seed(0)
    model = open_clip.model.CLIP(24, vision, text, init_logit_bias=bias).eval()
    described = {'model_cfg': {'embed_dim': 24, 'vision_cfg': vision, 'text_cfg': text}}
    (tmp_path / 'open_clip_config.json').write_text(json.dumps(described))
    save_file(model.state_dict(), tmp_path / 'open_clip_model.safetensors')
    vectors = open_clip.build_zero_shot_classifier(model, open_clip.tokenize, 'ab', PROMPTS).T
    arrays = {'vectors': vectors.numpy(), 'scale': model.logit_scale.exp().item()}
    arrays |= {} if bias is None else {'bias': model.logit_bias.item()}
    np.savez(tmp_path / 'classes.npz', **arrays)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = model.logit_scale.exp() * model.encode_image(images, normalize=True) @ vectors.T
        expected = expected + (0 if bias is None else model.logit_bias)
    found = vit_jax.load(tmp_path, head=tmp_path / 'classes.npz').logits(
        images.numpy().transpose(0, 2, 3, 1)
    )
    # float32 rounding, times the scale 14
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
