import csv
import dataclasses
import json
import pathlib
import pickle
import shutil
import subprocess
import sys

import cv2
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image as pillow

import vit_jax
from tests import reference, tiny
from tests.networks import HYBRID, RESNET, changed, contents, loaded
from vit_jax import augreg, convert, predict
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.checkpoints.augreg_index import fine_tuned, listed, pick, read_index
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import huggingface
from vit_jax.cli import app, config_files
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment import probing_run, training_run
from vit_jax.models import Compute
from vit_jax.pretrained import ZERO_HEAD
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import ScheduleConfig

NAME = 'google_vit_token_prelogits'


def saved(tmp_path, config, **values):
    path = str(tmp_path / 'file.npz')
    vit_jax.save(loaded(config, **values), path)
    return path


def run(module, *arguments):
    return module.main(module.make_parser().parse_args([str(a) for a in arguments]))


def photos(tmp_path):
    return str(tiny.draw_photos(tmp_path / 'photos', [(40, 30)] * 5))


def zero_headed(tmp_path):
    network = loaded(tiny.model())
    head = jax.tree.map(np.zeros_like, network.params['head'])
    network = changed(network, params=network.params | {'head': head})
    vit_jax.save(network, str(tmp_path / 'zero.npz'), overwrite=True)
    return str(tmp_path / 'zero.npz')


def test_a_head_of_zeros_refuses_to_predict_and_gives_features(tmp_path):
    network = vit_jax.load(zero_headed(tmp_path))
    images = np.asarray(tiny.images())
    with pytest.raises(ValueError, match='the head is all zeros, as in the published ImageNet-21k'):
        network.logits(images)
    assert np.abs(network.features(images)).max() > 0
    assert ZERO_HEAD in network.report
    without = vit_jax.load(zero_headed(tmp_path), num_classes=None)
    np.testing.assert_array_equal(without.features(images), network.features(images))
    with pytest.raises(ValueError, match='the checkpoint has no head'):
        without.logits(images)


PICTURE = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)


def test_an_image_is_a_path_its_bytes_a_pil_image_or_an_array(tmp_path):
    network, path = loaded(tiny.model()), tmp_path / 'x.png'
    exif = pillow.Exif()
    exif[274] = 6  # to be turned by a quarter
    pillow.fromarray(PICTURE).save(path, exif=exif)
    for rotation, array in (False, PICTURE), (True, np.rot90(PICTURE, -1)):
        turned = changed(network, preprocessing=Preprocessing(exif_rotation=rotation))
        expected = turned.prepare(array)
        assert expected.shape == (8, 8, 3) and np.abs(expected).max() <= 1
        for image in str(path), path, path.read_bytes(), pillow.open(path), jnp.asarray(array):
            np.testing.assert_array_equal(turned.prepare(image), expected)
    grey = PICTURE[..., 0]
    expected = network.prepare(np.stack([grey] * 3, axis=-1))
    for image in grey, grey[..., None], pillow.fromarray(grey):
        np.testing.assert_array_equal(network.prepare(image), expected)


def test_what_is_no_image_is_refused_with_what_would_be_right(tmp_path):
    network, array = loaded(tiny.model()), r'expected uint8 of the shape \(h, w\), \(h, w, 1 or 3\)'
    (tmp_path / 'text.jpg').write_bytes(b'no image')
    for image, message in [
        (PICTURE / 255, r'an image is float64\[12, 20, 3\], ' + array),
        (PICTURE.astype(np.float32), r'an image is float32\[12, 20, 3\], ' + array),
        (PICTURE[None], r'an image is uint8\[1, 12, 20, 3\], ' + array),
        (PICTURE[:0], r'an image is uint8\[0, 20, 3\], ' + array),
        (PICTURE[..., :2], r'an image is uint8\[12, 20, 2\], ' + array),
        ([PICTURE], 'list: expected a path, bytes, a PIL image, or a uint8 array'),
        (None, 'NoneType: expected a path'),
        (pillow.new('I', (9, 9)), 'are not supported; expected 8 or 16 bits a channel'),
        (tmp_path / 'text.jpg', 'text.jpg: not a whole image'),
        (tmp_path / 'absent.jpg', 'absent.jpg: no such file'),
    ]:
        with pytest.raises(UserError, match=message):
            network.prepare(image)


@pytest.mark.parametrize('count', [1, 2, tiny.CLASSES - 1, tiny.CLASSES + 1])
@pytest.mark.parametrize('door', ['with_params', 'changed', 'card', 'huggingface'])
def test_there_are_as_many_class_names_as_outputs_or_none(door, count, tmp_path):
    vit, names = loaded(tiny.model()), [f'class {i}' for i in range(count)]
    with pytest.raises(UserError, match='class_names|id2label'):
        if door == 'with_params':
            vit.with_params(vit.params, class_names=names)
        elif door == 'changed':
            changed(vit, class_names=tuple(names))
        elif door == 'card':
            Card.read(records.to_dict(vit.card) | {'class_names': names}, where='card')
        else:
            folder = shutil.copytree(reference.path('hf_vit'), tmp_path / 'hf')
            said = json.loads((folder / 'config.json').read_text())
            said['id2label'] = {str(i): name for i, name in enumerate(names)}
            (folder / 'config.json').write_text(json.dumps(said))
            vit_jax.load(folder)


def test_class_names_are_for_a_head():
    vit = loaded(tiny.model(num_classes=None))
    with pytest.raises(UserError, match='class_names: got 2; expected one for each of the 0'):
        vit.with_params(vit.params, class_names=['a', 'b'])


@pytest.mark.parametrize(
    ('name', 'meant'),
    [
        ('B/16', 'augreg:B/16 or vit:B/16'),
        ('ViT-L_16', 'augreg:L/16 or vit:L/16'),
        ('Ti/16-in21k', 'augreg:Ti/16-in21k'),
        ('google/vit-base-patch16-224', 'hf:google/vit-base-patch16-224'),
        ('timm/vit_base_patch16_224.augreg_in21k', 'hf:timm/vit_base_patch16_224.augreg_in21k'),
        ('vit_base_patch16_224', 'hf:timm/vit_base_patch16_224'),
        ('deit3_small_patch16_224.fb_in1k', 'hf:timm/deit3_small_patch16_224.fb_in1k'),
        ('nothing', None),
        ('a/b/c', None),
        ('tests/nothing', None),
    ],
)
def test_a_name_without_its_kind_is_guessed(name, meant):
    with pytest.raises(UserError) as error:
        vit_jax.load(name)
    assert (f'did you mean {meant}?' if meant else 'begins with hf:') in str(error.value)


@pytest.mark.parametrize('count', [1, 3])
def test_a_regression_has_no_classes_to_predict(count, tmp_path, capsys):
    vit = loaded(tiny.model(num_classes=count, gelu='exact'), huggingface.HUGGINGFACE)
    vit_jax.save(changed(vit, loss='regression'), tmp_path / 'x')
    said = json.loads((tmp_path / 'x/config.json').read_text())
    assert said['problem_type'] == 'regression'
    again = vit_jax.load(tmp_path / 'x')
    assert again.logits(np.asarray(tiny.images())).shape[1] == count
    with pytest.raises(UserError, match='has no classes: its head is a regression'):
        again.probabilities(np.asarray(tiny.images()))
    cv2.imwrite(str(tmp_path / '1.png'), np.zeros((9, 9, 3), np.uint8))
    with pytest.raises(UserError, match='regression'):
        run(predict, tmp_path / 'x', tmp_path / '1.png')


OWN_HEAD = """
import flax.linen as nn


def two_layers(num_classes):
    return nn.Sequential([nn.Dense(5), nn.gelu, nn.Dense(num_classes)])


def wider(num_classes):
    return nn.Sequential([nn.Dense(6), nn.gelu, nn.Dense(num_classes)])
"""


@pytest.mark.full
def test_a_head_of_ones_own_is_trained_from_a_checkpoint_and_handed_over_to_use_it(
    tmp_path, capsys
):
    file = tmp_path / 'mine.py'
    file.write_text(OWN_HEAD)
    two_layers, wider = (config_files.load_function(f'{file}:{n}') for n in ('two_layers', 'wider'))
    start, work = saved(tmp_path, tiny.model()), tmp_path / 'run'
    config = tiny.experiment(start_from=start, model=None, head=two_layers, total=Duration(steps=2))
    training_run.train(config, str(work))
    images = np.asarray(tiny.images())
    vit = vit_jax.load(work, head=two_layers)
    assert vit.logits(images).shape == (len(images), tiny.CLASSES)
    again = vit_jax.load(work, image_size=16, head=two_layers)
    assert again.config.image_size == (16, 16)
    with pytest.raises(UserError, match='two_layers, which no checkpoint holds: load'):
        vit_jax.load(work).logits(images)
    with pytest.raises(UserError, match='head: the arrays do not fit'):
        vit_jax.load(work, head=wider)
    cv2.imwrite(str(tmp_path / '1.png'), np.zeros((9, 9, 3), np.uint8))
    assert run(predict, work, tmp_path / '1.png', f'--head={file}:two_layers') == 0
    assert '1.png' in capsys.readouterr().out
    with pytest.raises(UserError, match="two_layer: no such function; did you mean 'two_layers'"):
        run(predict, work, tmp_path / '1.png', f'--head={file}:two_layer')
    with pytest.raises(UserError, match='expected FILE.py:FUNCTION'):
        run(predict, work, tmp_path / '1.png', '--head=mine:two_layers')
    fewshot = tiny.experiment(
        start_from=str(work), model=None, fewshot=FewshotConfig(shots=(1,), seeds=(0,))
    )
    assert probing_run.probe(fewshot, str(tmp_path / 'probe'))


def test_a_linear_checkpoint_takes_no_other_head(tmp_path):
    path = saved(tmp_path, tiny.model())
    with pytest.raises(UserError, match='has a linear head; leave out'):
        vit_jax.load(path, head=lambda n: nn.Sequential([nn.Dense(5), nn.Dense(n)]))


def test_numbers_that_cannot_be_meant_are_refused():
    network = loaded(tiny.model())
    images = np.zeros((2, 8, 8, 3), np.float32)
    shape = 'expected floating-point numbers of the shape'
    numbers = r'images hold numbers up to {}, expected -1 to 1, as `prepare`'
    for wrong, message in [
        (images + 255, numbers.format(255)),
        (jnp.asarray(images) - 128, numbers.format(128)),
        (images + np.nan, numbers.format('nan')),
        (images.astype(np.uint8), r'images are uint8\[2, 8, 8, 3\], ' + shape),
        (images[0], r'images are float32\[8, 8, 3\], ' + shape),
        (images[:0], r'images are float32\[0, 8, 8, 3\], expected at least one'),
        (images[:, :4], r'images are \(4, 8, 3\), the model takes \(8, 8, 3\)'),
    ]:
        for function in network.logits, network.features, lambda x: network.capture(x, ['tokens']):
            with pytest.raises(UserError, match=message):
                function(wrong)
    raw = changed(network, preprocessing=Preprocessing(mean=(0.0,) * 3, std=(1.0,) * 3))
    assert raw.logits(images + 255).shape == (2, tiny.CLASSES)


def test_a_network_is_compared_pickled_and_a_key(tmp_path):
    path = saved(tmp_path, tiny.model())
    one, two = vit_jax.load(path), vit_jax.load(pathlib.Path(path))
    other = loaded(tiny.model(num_heads=4))
    assert one == two and one != other and one != 'text' and {one: 1}[two] == 1
    head = {name: leaf + 1 for name, leaf in one.params['head'].items()}
    assert one != changed(one, params=one.params | {'head': head})
    assert one != changed(one, class_names=tuple('abcdefghij'))
    assert one != dataclasses.replace(one, compute=Compute(dtype='bfloat16'))
    _ = one.model, one.predicts
    again = pickle.loads(pickle.dumps(one))
    assert again == one and repr(again) == repr(one)


@pytest.mark.full
def test_a_network_is_used_under_jit_vmap_and_grad():
    network, images = loaded(tiny.model()), tiny.images()
    logits = network.logits(images)
    np.testing.assert_allclose(jax.jit(network.logits)(images), logits, atol=1e-5)
    mapped = jax.vmap(lambda image: network.logits(image[None])[0])(images)
    np.testing.assert_allclose(mapped, logits, atol=1e-5)
    features = jax.jit(lambda x: network.capture(x, ['tokens'])[1]['tokens'])(images)
    assert features.shape == (3, 2, 5, 16)

    def loss(images):
        return network.logits(images)[:, 0].sum()

    moved = images - 1e-2 * jax.grad(loss)(images)
    assert loss(moved) < loss(images)
    by_params = jax.grad(lambda p: network.model.apply(p, images)[:, 0].sum())(network.params)
    np.testing.assert_allclose(by_params['head']['bias'][0], len(images), rtol=1e-6)


@pytest.mark.full
def test_a_network_computes_in_bfloat16_where_asked_to(tmp_path):
    path, images = saved(tmp_path, tiny.model()), np.asarray(tiny.images())
    exact, rounded = (vit_jax.load(path, dtype=dtype) for dtype in ('float32', 'bfloat16'))
    difference = np.abs(rounded.logits(images) - exact.logits(images)).max()
    assert 0 < difference < 0.1 * np.abs(exact.logits(images)).max()
    assert rounded.logits(images).dtype == np.float32
    with pytest.raises((UserError, TypeError), match='float16'):
        vit_jax.load(path, dtype='float16')


def test_other_images_change_what_they_must_and_nothing_else(tmp_path):
    path = saved(tmp_path, tiny.model())
    before = vit_jax.load(path)
    network = vit_jax.load(path, image_size=(12, 8), channels=1)
    assert network.config == tiny.model(image_size=(12, 8), channels=1)
    old, new = named_leaves(before.params), named_leaves(network.params)
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert changed == {'pos_embedding', 'embedding/kernel'}
    report = '\n'.join(network.report)
    assert 'pos_embedding: resized from 2x2 to 3x2 patches' in report
    assert 'embedding/kernel: 3 channels summed to 1' in report
    assert network.logits(np.zeros((1, 12, 8, 1), np.float32)).shape == (1, tiny.CLASSES)


@pytest.mark.full
def test_fresh_channels_are_drawn_anew_and_said(tmp_path):
    path = saved(tmp_path, HYBRID)
    network = vit_jax.load(path, grid=HYBRID.grid, channels=4, new_channels='fresh')
    assert any('conv_root/kernel: drawn anew, for 4 channels' in line for line in network.report)
    adapted = vit_jax.load(path, grid=HYBRID.grid, channels=4)
    assert any('not exact, as the kernel is standardised' in line for line in adapted.report)
    one, other = (n.params['backbone']['conv_root']['kernel'] for n in (network, adapted))
    assert one.shape == other.shape == (7, 7, 4, 32) and (one != other).all()


@pytest.mark.parametrize(
    'overrides, message',
    [
        ({'image_size': 3}, 'patch_size=.16, 16.: larger than the image, 3x3 pixels'),
        ({'new_channels': 'none'}, 'new_channels'),
        ({'num_heads': 2.5}, 'num_heads'),
        ({'gelu': 'erf'}, 'gelu'),
        ({'image_size': (8, 8, 8)}, 'image_size'),
        ({'num_classes': 'none'}, 'num_classes'),
    ],
)
def test_a_wrong_override_is_named(overrides, message):
    # In the tests shapes and types are checked by beartype, whose TypeError comes first.
    with pytest.raises((UserError, TypeError), match=message):
        vit_jax.load(reference.path(NAME), **overrides)


def test_a_resnet_has_no_patches_to_resize(tmp_path):
    with pytest.raises(ValueError, match='patch_size=.8, 8.: a ResNet has no patches'):
        vit_jax.load(saved(tmp_path, RESNET), patch_size=8)


@pytest.mark.full
def test_probabilities_are_of_the_loss_that_the_network_was_trained_with(tmp_path):
    images = np.asarray(tiny.images())
    for loss in None, 'softmax', 'sigmoid', 'my.module:loss':
        path = tmp_path / f'{loss}.safetensors'
        vit_jax.save(loaded(tiny.model(), loss=loss), path, 'timm')
        network = vit_jax.load(path)
        assert network.card.loss == loss
        function = jax.nn.sigmoid if loss == 'sigmoid' else jax.nn.softmax
        logits = network.logits(images)
        np.testing.assert_allclose(network.probabilities(images), function(logits), rtol=1e-6)
        assert ('trained with my.module:loss' in repr(network)) == (loss == 'my.module:loss')
    other_head = vit_jax.load(tmp_path / 'sigmoid.safetensors', num_classes=3)
    assert other_head.card.loss is None and not other_head.predicts


def test_any_head_predicts_that_is_not_as_it_was_initialised():
    network = loaded(tiny.model())
    hidden = {'hidden': {'kernel': np.eye(3)}, 'out': {'kernel': np.ones(3), 'bias': np.zeros(2)}}
    assert changed(network, params=network.params | {'head': hidden}).predicts
    biased = {'kernel': np.zeros((4, 2)), 'bias': np.full(2, -6.9)}
    assert not changed(network, params=network.params | {'head': biased}).predicts


def test_several_outputs_are_those_of_each():
    network, images = loaded(tiny.model()), np.asarray(tiny.images())
    logits, features = network.outputs(images, 'logits', 'features')
    np.testing.assert_array_equal(logits, network.logits(images))
    np.testing.assert_array_equal(features, network.features(images))


def test_a_path_that_is_none_is_refused_and_one_beside_another_is_guessed(tmp_path):
    network = loaded(tiny.model(depth=1))
    for use in vit_jax.load, lambda path: vit_jax.save(network, path):
        with pytest.raises(UserError, match="path='': expected that of a checkpoint"):
            use('')
    with pytest.raises(UserError, match=f'^{tmp_path}: is a directory, expected a file$'):
        network.prepare(tmp_path)
    (tmp_path / 'networks' / 'trial').mkdir(parents=True)
    (tmp_path / 'networks' / 'birds.npz').write_text('')
    for wrong, meant in {
        'networks/brids.npz': 'networks/birds.npz',
        'network/birds.npz': 'networks',
        'networks/tiral': 'networks/trial',
    }.items():
        with pytest.raises(FileNotFoundError, match=f"did you mean '{tmp_path}/{meant}'\\?$"):
            vit_jax.load(tmp_path / wrong)
    with pytest.raises(FileNotFoundError, match='x.npz: no such file$'):
        vit_jax.load(tmp_path / 'networks' / 'x.npz')


def test_a_hint_that_contradicts_the_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match='num_heads=2 was given, but the arrays have 4'):
        vit_jax.load(reference.path(NAME), num_heads=2)
    vit_jax.save(loaded(tiny.model()), str(tmp_path / 'ours'), 'vit_jax')
    with pytest.raises(ValueError, match='a checkpoint of ours says all of itself; drop gelu'):
        vit_jax.load(str(tmp_path / 'ours'), gelu='exact')


def test_a_checkpoint_of_ours_is_loaded_and_saved_alone(tmp_path):
    names = tuple(f'bird {i}' for i in range(tiny.CLASSES))
    network = loaded(HYBRID, class_names=names)
    (tmp_path / 'ours').mkdir()  # empty, it is no obstacle
    vit_jax.save(network, str(tmp_path / 'ours'), 'vit_jax')
    again = vit_jax.load(str(tmp_path / 'ours'))
    assert (again.config, again.class_names) == (HYBRID, names)
    for name, leaf in named_leaves(network.params).items():
        np.testing.assert_array_equal(named_leaves(again.params)[name], leaf)
    with pytest.raises(ValueError, match='ours: exists already; overwrite=True replaces it'):
        vit_jax.save(again, tmp_path / 'ours')
    with pytest.raises(ValueError, match="format='tim'; did you mean 'timm'?"):
        vit_jax.save(again, tmp_path / 'ours', 'tim')
    renamed = changed(again, class_names=names[::-1])
    (tmp_path / 'ours.replaced' / 'params').mkdir(parents=True)  # of one that was killed
    vit_jax.save(renamed, tmp_path / 'ours', overwrite=True)
    assert vit_jax.load(tmp_path / 'ours') == renamed
    assert [path.name for path in tmp_path.iterdir()] == ['ours']


@pytest.mark.full
def test_a_checkpoint_replaces_a_file_and_no_folder_of_other_things(tmp_path):
    network = loaded(tiny.model(depth=1))
    (tmp_path / 'file').write_text('old')
    vit_jax.save(network, tmp_path / 'file', 'vit_jax', overwrite=True)
    assert vit_jax.load(tmp_path / 'file') == network
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'photos' / 'x.jpg').write_text('')
    with pytest.raises(ValueError, match='photos: exists already, and is no checkpoint'):
        vit_jax.save(network, tmp_path / 'photos', 'vit_jax', overwrite=True)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob('[!f]*/*'))
    assert found == ['photos/x.jpg']


def test_a_configuration_is_told_where_to_say_what_a_file_does_not(tmp_path):
    config = tiny.experiment(model=None, start_from=reference.path('timm_gap_fcnorm'))
    with pytest.raises(ValueError, match=r'num_heads=N.*config\.hints\.NAME=VALUE'):
        training_run.train(config, str(tmp_path))


@pytest.mark.full
def test_a_resnet_is_trained_and_probed_by_the_same_programs(tmp_path):
    small = dataclasses.replace(RESNET, image_size=(16, 16), num_classes=None)
    config = tiny.experiment(model=small, total=Duration(steps=40), log_every_steps=10)
    config.schedule = ScheduleConfig(learning_rate=1e-2, warmup=Duration(steps=5))
    config.fewshot = FewshotConfig(shots=(5,), seeds=(0,))
    result = training_run.train(config, str(tmp_path / 'run'))
    assert result.evals['test']['accuracy'] > 0.4
    assert result.fewshot['sets']['digits']['mean']['5'] > 0.4
    network = vit_jax.load(str(tmp_path / 'run'))
    assert network.config == dataclasses.replace(small, num_classes=10)
    vit_jax.save(network, str(tmp_path / 'resnet.npz'), 'google')
    again = vit_jax.load(str(tmp_path / 'resnet.npz'), image_size=16)
    images = np.asarray(jax.random.normal(jax.random.key(0), (2, 16, 16, 3)))
    np.testing.assert_array_equal(again.logits(images), network.logits(images))


def test_predict_prints_the_classes_that_the_logits_say(tmp_path, capsys):
    names = tuple(f'bird {i}' for i in range(tiny.CLASSES))
    network = loaded(tiny.model(), class_names=names)
    vit_jax.save(network, str(tmp_path / 'ours'), 'vit_jax')
    folder = photos(tmp_path)
    assert run(predict, tmp_path / 'ours', folder, '--top=2', '--features', tmp_path / 'f.npz') == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    stored = np.load(tmp_path / 'f.npz')
    assert stored['paths'].tolist() == [f'{folder}/{i}.png' for i in range(5)]
    for index, line in enumerate(lines):
        image = cv2.cvtColor(cv2.imread(f'{folder}/{index}.png'), cv2.COLOR_BGR2RGB)
        image = cv2.resize(image, (8, 8), interpolation=cv2.INTER_LINEAR)
        image = (image.astype(np.float32) - 127.5) / 127.5
        stored_bytes = pathlib.Path(f'{folder}/{index}.png').read_bytes()
        np.testing.assert_array_equal(network.prepare(stored_bytes), image)
        probabilities = np.asarray(jax.nn.softmax(network.logits(image[None])[0]))
        first, second = np.argsort(-probabilities)[:2]
        said = f'bird {first} {probabilities[first]:.1%}, bird {second} {probabilities[second]:.1%}'
        assert line == f'{folder}/{index}.png  {said}'
        features = network.features(image[None])[0]
        np.testing.assert_allclose(stored['features'][index], features, atol=1e-5)


def test_a_network_with_other_parameters_computes_with_these_and_keeps_nothing_of_the_old():
    network = changed(loaded(tiny.model()), loss='sigmoid', class_names=tuple('abcdefghij'))
    network = dataclasses.replace(network, origin=('https://x.org/a.npz',))
    doubled = jax.tree.map(lambda leaf: jnp.asarray(2 * leaf), network.params)
    other = network.with_params(doubled, class_names=tuple('klmnopqrst'), loss='softmax')
    assert (other.card.loss, other.class_names[0], other.origin) == ('softmax', 'k', ())
    shape = 2, *network.config.image_size, 3
    images = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    expected = network.model.apply(doubled, jnp.asarray(images))
    np.testing.assert_allclose(other.logits(images), expected, rtol=1e-5, atol=1e-5)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(other.params))
    with pytest.raises(
        ValueError, match=r'params: the arrays do not fit:\n  missing embedding/bias'
    ):
        network.with_params({k: v for k, v in doubled.items() if k != 'embedding'})


@pytest.mark.full
def test_predict_names_what_it_cannot_read_and_says_so_at_the_end(tmp_path, capsys):
    path, folder = saved(tmp_path, tiny.model()), photos(tmp_path)
    (tmp_path / 'photos' / '2.png').write_bytes(b'no image')
    (tmp_path / 'names.txt').write_text('\n'.join('abcdefghij'))
    assert run(predict, path, folder, '--class_names', tmp_path / 'names.txt') == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4 and '2.png' not in out
    assert f'unreadable: {folder}/2.png: not a whole image' in err
    assert '1 of 5 images cannot be read' in err
    run(predict, path, folder, '--features', tmp_path / 'f.npz')
    kept = np.load(tmp_path / 'f.npz')
    assert kept['paths'].tolist() == [f'{folder}/{i}.png' for i in (0, 1, 3, 4)]
    assert kept['features'].shape == (4, 16) and np.isfinite(kept['features']).all()
    assert run(predict, path, folder, '--max_pixels=1199') == 1
    assert capsys.readouterr().err.count('pixels, more than max_pixels=1,199') == 4
    (tmp_path / 'names.txt').write_text('a\nb')
    with pytest.raises(ValueError, match='2 lines for 10 classes'):
        run(predict, path, folder, '--class_names', tmp_path / 'names.txt')
    with pytest.raises(FileNotFoundError, match='0.pgn: no such image or folder; did .*0.png'):
        run(predict, path, f'{folder}/0.pgn')
    with pytest.raises(ValueError, match=r'features\.npz: '):
        run(predict, path, folder, '--features', tmp_path / 'nowhere/features.npz')
    for wrong in '--top=0', '--batch_size=x', '--grid=3,', '--num_heads=-1':
        with pytest.raises(SystemExit):
            run(predict, path, folder, wrong)
    assert "argument --top: '0' is not a whole number of at least 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match='the head is all zeros'):
        run(predict, zero_headed(tmp_path), folder)


@pytest.mark.full
def test_convert_writes_says_and_does_not_overwrite(tmp_path, capsys):
    source = reference.path('timm_token_nonsquare')
    target = tmp_path / 'x.npz'
    arguments = '--format=google', '--num_heads=3', '--grid=4,6'
    assert run(convert, source, target, *arguments) == 0
    said = capsys.readouterr().out
    assert "load this one with gelu='exact', grid=(4, 6)" in said
    images, logits = reference.images_and_logits('timm_token_nonsquare')
    network = vit_jax.load(str(target), gelu='exact', grid=(4, 6))
    np.testing.assert_allclose(network.logits(images), logits, atol=1e-5)
    with pytest.raises(ValueError, match='exists already; --overwrite'):
        run(convert, source, target, *arguments)
    assert run(convert, source, target, *arguments, '--overwrite') == 0
    ours = tmp_path / 'ours', '--format=vit_jax', '--grid=4,6'
    assert run(convert, target, *ours) == run(convert, target, *ours, '--overwrite') == 0
    with pytest.raises(ValueError, match='the format timm is a file whose name ends with'):
        run(convert, target, tmp_path / 'ours', '--format=timm', '--grid=4,6', '--overwrite')
    assert vit_jax.load(tmp_path / 'ours').config.grid == (4, 6)  # still there
    assert run(convert, target, tmp_path / 'y.npz', '--grid=4,6', '--drop_head') == 0
    assert 'head/bias' not in contents(tmp_path / 'y.npz')
    assert run(convert, target, tmp_path / 'z.safetensors', '--grid=4,6') == 0
    assert '(timm layout)' in capsys.readouterr().out


def test_a_program_ends_with_one_line_that_says_what_is_wrong(tmp_path):
    (tmp_path / 'x.npz').write_bytes(b'hello, world')
    for name in 'convert', 'predict', 'augreg':
        words = [str(tmp_path / 'x.npz'), str(tmp_path)]
        words = ['B/16', f'--index={words[0]}'] if name == 'augreg' else words
        command = [sys.executable, '-m', f'vit_jax.{name}', *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 1 and result.stderr.startswith('error: '), result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert app.overrides(convert.make_parser().parse_args(['a', 'b', '--image_size=8'])) == {
        'image_size': (8, 8)
    }


COLUMNS = 'name ds epochs final_val filename adapt_ds adapt_resolution adapt_filename'.split()
COLUMNS += ['adapt_final_val', 'adapt_final_test', 'lr']


def index(tmp_path):
    tuned = 'imagenet2012 384 B_16-i21k-a--x 0.85 0.84', 'cifar100 224 B_16-i21k-a--y 0.93 0.92'
    rows = [
        *(['B/16', 'i21k', 300, 0.45, 'B_16-i21k-a', *text.split(), 0] for text in tuned),
        [
            'B/16',
            'i21k',
            300,
            0.47,
            'B_16-i21k-b',
            'imagenet2012',
            384,
            'B_16-i21k-b--x',
            0.8,
            0.8,
            0,
        ],
        ['B/16', 'i1k', 300, 0.81, 'B_16-i1k-c', '', '', '', '', '', 0],
        ['R50+L/32', 'i21k', 300, 0.5, 'R50_L_32-i21k-d', '', '', '', '', '', 0],
    ]
    with (tmp_path / 'index.csv').open('w') as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return str(tmp_path / 'index.csv')


def test_the_published_rule_picks_the_best_of_imagenet_21k(tmp_path, capsys):
    rows = read_index(index(tmp_path))
    assert pick(rows, 'B/16').filename == 'B_16-i21k-b'  # not the better one of another data set
    for name in 'R50+L/32', 'R50+ViT-L_32':
        assert pick(rows, name).filename == 'R50_L_32-i21k-d'
    assert pick(rows, 'B_16-i21k-a').filename == 'B_16-i21k-a'  # a name with a dash is the file
    assert [row.filename for row in listed(rows, 'B/16')] == [
        'B_16-i1k-c',
        'B_16-i21k-b',
        'B_16-i21k-a',
    ]
    assert [row.adapt_ds for row in fine_tuned(rows, 'B_16-i21k-a')] == ['cifar100', 'imagenet2012']
    assert run(augreg, 'B/16', f'--index={index(tmp_path)}') == 0
    assert 'picked    gs://vit_models/augreg/B_16-i21k-b.npz' in capsys.readouterr().out
    with pytest.raises(ValueError, match="no variant 'B/17' in the index; did you mean"):
        pick(rows, 'B/17')
    with pytest.raises(ValueError, match="no file 'B_16-i21k-x' in the index; did you mean"):
        pick(rows, 'B_16-i21k-x')
    (tmp_path / 'other.csv').write_text('a,b\n1,2\n')
    with pytest.raises(ValueError, match='not the AugReg index: no column name, ds'):
        read_index(str(tmp_path / 'other.csv'))
    (tmp_path / 'bad.csv').write_text(','.join(COLUMNS) + '\nB/16,i21k\n')
    with pytest.raises(ValueError, match='bad.csv, line 2: the line has too few columns'):
        read_index(str(tmp_path / 'bad.csv'))


def test_images_for_the_papers_files_are_prepared_as_the_papers_code_does():
    network = vit_jax.load(reference.path(NAME))
    assert network.preprocessing == Preprocessing(exif_rotation=False)
