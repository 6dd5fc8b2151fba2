"""Masked autoencoders are those of transformers, and leave a plain encoder behind."""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests import tiny
from vit_jax import inspect_data
from vit_jax.base import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.checkpoints.store import load_params
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import Compute, ViTConfig, build
from vit_jax.models.autoencoder import build_decoder
from vit_jax.planning import ahead_of_time
from vit_jax.tasks.autoencoding import make_autoencoder_sums
from vit_jax.tasks.making import make_task
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.objectives import TASK_PARAMS, MaskedAutoencoder

# Written by ViTMAEForPreTraining (transformers 5.24) with random parameters, images and noise:
# its loss with and without normalized pixels, and the gradients of the first.
REFERENCE = 'tests/reference/mae_hf.npz'
ENCODER = ViTConfig(
    image_size=(16, 16),
    patch_size=(4, 4),
    width=16,
    depth=2,
    mlp_dim=24,
    num_heads=2,
    gelu='exact',
)
DECODER = dataclasses.replace(
    ENCODER, width=12, mlp_dim=48, pool='none', class_tokens=1, positions='learned'
)
SMALL = MaskedAutoencoder(decoder_depth=1, decoder_width=16, decoder_heads=2)


def blocks(arrays, prefix, heads):
    """Parameters of two blocks of transformers, stacked as ours."""
    layers = []
    for layer in range(2):
        of = {name: arrays[f'{prefix}.{layer}.{name}'] for name in NAMES}
        width = len(of['layernorm_before.weight'])
        split = width, heads, width // heads
        attention = {
            name: {
                'kernel': of[f'attention.{short}_proj.weight'].T.reshape(split),
                'bias': of[f'attention.{short}_proj.bias'].reshape(split[1:]),
            }
            for name, short in (('query', 'q'), ('key', 'k'), ('value', 'v'))
        }
        attention['out'] = {
            'kernel': of['attention.o_proj.weight'].T.reshape(*split[1:], width),
            'bias': of['attention.o_proj.bias'],
        }
        mlp = {f'dense{i}': linear(of, f'mlp.fc{i}') for i in (1, 2)}
        norms = {
            'norm1': norm(of, 'layernorm_before'),
            'norm2': norm(of, 'layernorm_after'),
        }
        layers.append({'attention': attention, 'mlp': mlp} | norms)
    return jax.tree.map(lambda *each: np.stack(each), *layers)


NAMES = [
    f'{name}.{kind}'
    for name in (
        'layernorm_before',
        'layernorm_after',
        'mlp.fc1',
        'mlp.fc2',
        *(f'attention.{short}_proj' for short in 'qkvo'),
    )
    for kind in ('weight', 'bias')
]


def linear(arrays, name):
    return {'kernel': arrays[f'{name}.weight'].T, 'bias': arrays[f'{name}.bias']}


def norm(arrays, name):
    return {'scale': arrays[f'{name}.weight'], 'bias': arrays[f'{name}.bias']}


def ours(arrays, prefix):
    """All arrays of transformers with our names; positions have no gradients there."""
    arrays = {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}
    encoder = {'block': blocks(arrays, 'vit.layers', 2), 'norm': norm(arrays, 'vit.layernorm')}
    decoder = {
        'block': blocks(arrays, 'decoder.decoder_layers', 2),
        'norm': norm(arrays, 'decoder.decoder_norm'),
    }
    kernel = arrays['vit.embeddings.patch_embeddings.projection.weight'].transpose(2, 3, 1, 0)
    embedding = {
        'kernel': kernel,
        'bias': arrays['vit.embeddings.patch_embeddings.projection.bias'],
    }
    task = {
        'embedding': linear(arrays, 'decoder.decoder_embed'),
        'encoder': decoder,
        'head': linear(arrays, 'decoder.decoder_pred'),
        'mask_token': arrays['decoder.mask_token'],
    }
    params = {
        'cls': arrays['vit.embeddings.cls_token'],
        'embedding': embedding,
        'encoder': encoder,
        TASK_PARAMS: task,
    }
    if prefix == 'param/':
        params['pos_embedding'] = arrays['vit.embeddings.position_embeddings']
        task['pos_embedding'] = arrays['decoder.decoder_pos_embed']
    return params


def reference_sums(compute, **options):
    arrays = dict(np.load(REFERENCE))
    model = build(ENCODER, compute=compute)
    decoder = build_decoder(DECODER, width=16, outputs=48, compute=model.compute)
    noise = jnp.asarray(arrays['noise'])
    sums = make_autoencoder_sums(
        model, decoder, MaskedAutoencoder(**options), lambda images: images, lambda batch: noise
    )
    return arrays, sums


# The last block of the encoder must compute all tokens, although a class token alone is pooled.
@pytest.mark.gate
@pytest.mark.parametrize(
    'compute',
    [Compute(), Compute(last_block='class_tokens', unroll=2)],
)
def test_loss_and_gradients_are_those_of_transformers(compute):
    arrays, sums = reference_sums(compute)
    batch = {'images': jnp.asarray(arrays['images']), 'mask': jnp.ones(3, bool)}

    def loss(params):
        found = sums(params, batch)
        return found.sums['loss'] / found.num_examples

    found, gradients = jax.jit(jax.value_and_grad(loss))(ours(arrays, 'param/'))
    assert found == pytest.approx(float(arrays['loss']), rel=1e-5)
    theirs = named_leaves(ours(arrays, 'gradient/'))
    mine = named_leaves(gradients)
    assert mine.keys() - theirs.keys() == {'pos_embedding', f'{TASK_PARAMS}/pos_embedding'}
    for name, gradient in theirs.items():  # the largest gradients are about 1
        np.testing.assert_allclose(mine[name], gradient, atol=2e-5, err_msg=name)


@pytest.mark.gate
def test_pixels_that_are_not_normalized_are_another_target():
    arrays, sums = reference_sums(Compute(), normalize_targets=False)
    batch = {'images': jnp.asarray(arrays['images']), 'mask': jnp.array([True, True, True])}
    found = sums(ours(arrays, 'param/'), batch)
    assert found.sums['loss'] / 3 == pytest.approx(float(arrays['loss_of_pixels']), rel=1e-5)


@pytest.mark.gate
def test_removed_patches_are_not_seen():
    """Pixels of removed patches change targets, but not what the decoder says of them."""
    arrays, _ = reference_sums(Compute())
    model = build(ENCODER)
    kept = jnp.array([[0, 3, 9, 14]] * 3)
    images = jnp.asarray(arrays['images'])
    params = ours(arrays, 'param/')
    encoded = model.encode(params, images, kept)
    assert encoded.shape == (3, 5, 16)
    others = model.encode(params, images.at[:, 12:, 12:].set(9.0), kept)
    np.testing.assert_array_equal(encoded, others)
    changed = model.encode(params, images.at[:, :4, :4].set(9.0), kept)
    assert not np.array_equal(encoded, changed)
    every = jnp.arange(16)[None].repeat(3, 0)
    whole = model.encode(params, images, every)[:, 0]  # all patches: the features of the model
    np.testing.assert_allclose(whole, model.features(params, images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'objective': MaskedAutoencoder(fraction=0.99)}, 'fraction=0.99: 0 of 4 patches'),
        ({'model': tiny.model(num_classes=None, pool='map')}, 'pool=map'),
        (
            {'model': tiny.model(num_classes=None, pool='cls_gap', final_norm='after_pool')},
            'pool=cls_gap',
        ),
        ({'model': tiny.model(num_classes=10)}, 'num_classes=10: not used'),
        ({'metrics': ('auroc',)}, 'metrics: not supported with objective'),
        ({'reuse_head': True}, 'reuse_head: not supported with objective'),
        ({'loss': LossConfig(kind='sigmoid')}, '--config.loss=LossConfig'),
    ],
)
def test_what_it_does_not_use_is_rejected(changes, message):
    defaults = {'model': tiny.model(num_classes=None), 'objective': SMALL}
    with pytest.raises(UserError, match=message):
        build_experiment(tiny.experiment(**(defaults | changes)))


def test_encoder_and_decoder_have_each_the_fastest_attention():
    """cuDNN wants heads of a multiple of 8: those of this encoder have 16, of the decoder 12."""
    architecture = tiny.model(width=32, depth=3, num_classes=None)
    decoder = MaskedAutoencoder(decoder_depth=2, decoder_width=24, decoder_heads=2)
    config = tiny.experiment(model=architecture, objective=decoder)
    model = build(architecture, compute=Compute(dtype='bfloat16', remat='none'), platform='gpu')
    task = make_task(config, num_classes=0)
    shape = 2, *architecture.image_size, architecture.channels
    batch = {'images': jnp.zeros(shape), 'mask': jnp.ones(2, bool)}
    batch |= {name: jnp.arange(2) for name in ('example', 'epoch')}
    params = jax.eval_shape(
        lambda key: model.init(key) | {TASK_PARAMS: task.init_params(config, architecture, key)},
        jax.random.key(0),
    )
    sums = task.train_sums(config, model, lambda images: images)
    with ahead_of_time.assume_cudnn():
        program = str(jax.make_jaxpr(sums)(params, batch))
    assert program.count('dot_product_attention_fwd_rule') == 3  # one per block of the encoder


def test_the_operations_are_those_of_the_visible_patches_and_of_the_decoder():
    architecture = tiny.model(width=32, depth=1, mlp_dim=64, num_heads=2, num_classes=None)
    objective = MaskedAutoencoder(decoder_depth=1, decoder_width=16, decoder_heads=2)
    config = tiny.experiment(model=architecture, objective=objective)
    counted = make_task(config, num_classes=0).count_multiply_adds(config, architecture)

    def block(tokens, width, hidden):
        return tokens * (4 * width**2 + 2 * width * hidden) + 2 * tokens**2 * width

    patches = architecture.grid[0] * architecture.grid[1]
    pixels = architecture.patch_size[0] * architecture.patch_size[1] * architecture.channels
    visible = 1 + objective.num_visible(patches)
    encoder = patches * pixels * 32 + block(visible, 32, 64)
    decoder = visible * 32 * 16 + block(1 + patches, 16, 64) + patches * 16 * pixels
    assert counted == encoder + decoder


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
    """A run without labels, and the same as two starts."""
    folder = tmp_path_factory.mktemp('mae')
    config = tiny.experiment(
        model=tiny.model(num_classes=None, positions='sincos2d'),
        objective=SMALL,
        total=Duration(steps=4),
        keep_best='test/loss',
    )
    return training_run.train(config, str(folder / 'run')), folder


@pytest.mark.gate
def test_a_folder_of_images_without_classes_is_enough(tmp_path, capsys):
    data = tmp_path / 'photos'
    data.mkdir()
    for number in range(12):
        image = np.full((9, 8, 3), 20 * number, np.uint8)
        Image.fromarray(image).save(data / f'{number}.jpg')
    config = tiny.experiment(
        data=str(data),
        model=tiny.model(num_classes=None),
        objective=SMALL,
        total=Duration(steps=2),
        batch_size=8,
        eval_split='test',
    )
    run = training_run.train(config, str(tmp_path / 'run'))
    assert len(run.experiment.train_reader.source) == 11 and np.isfinite(run.evals['test']['loss'])
    folder = tmp_path / 'inspected'
    assert inspect_data.main(argparse.Namespace(config=config, workdir=str(folder))) == 0
    with pytest.raises(UserError, match='the images have no classes'):
        build_experiment(dataclasses.replace(config, objective=None))
    with pytest.raises(UserError, match='photos: the images have no classes'):
        build_experiment(dataclasses.replace(config, fewshot=FewshotConfig()))
    sets = {'mine': ProbeSet(data=str(data))}
    with pytest.raises(UserError, match='photos: the images have no classes'):
        build_experiment(dataclasses.replace(config, fewshot=FewshotConfig(sets=sets)))


@pytest.mark.gate
def test_the_checkpoint_is_a_plain_encoder_that_others_read(pretrained, tmp_path):
    run, _ = pretrained
    assert TASK_PARAMS in run.state.params and run.evals['test'].keys() == {'loss'}
    stored = load_params(str(run.checkpoint))
    assert TASK_PARAMS not in stored
    encoder = vit_jax.load(str(run.folder))
    assert (encoder.config.num_classes, encoder.class_names) == (None, ())
    images = np.random.default_rng(0).uniform(-1, 1, (2, *encoder.config.image_size, 3))
    images = images[..., : encoder.config.channels].astype(np.float32)
    features = encoder.features(images)
    for path, form in ('x.safetensors', 'timm'), ('hf', 'huggingface'):
        vit_jax.save(encoder, str(tmp_path / path), form)
        again = vit_jax.load(str(tmp_path / path))
        np.testing.assert_allclose(again.features(images), features, rtol=1e-5, atol=1e-5)
