import dataclasses
import pathlib
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image as pillow

import vit_jax
from tests import reference, tiny
from tests.networks import HYBRID, RESNET, changed, contents, loaded
from vit_jax import convert, predict
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import huggingface
from vit_jax.cli import config_files
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.experiment import training_run
from vit_jax.models import Compute
from vit_jax.pretrained import ZERO_HEAD
from vit_jax.training.duration import Duration

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


def test_a_head_of_zeros_gives_features_and_no_predictions(tmp_path):
    network = vit_jax.load(zero_headed(tmp_path))
    images = np.asarray(tiny.images())
    assert ZERO_HEAD in network.report
    without = vit_jax.load(zero_headed(tmp_path), num_classes=None)
    np.testing.assert_array_equal(without.features(images), network.features(images))
    for each in network, without:
        with pytest.raises(UserError, match='head'):
            each.logits(images)


PICTURE = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)


def test_an_image_is_a_path_its_bytes_a_pil_image_or_an_array(tmp_path):
    network, path = loaded(tiny.model()), tmp_path / 'x.png'
    exif = pillow.Exif()
    exif[274] = 6  # to be turned by a quarter
    pillow.fromarray(PICTURE).save(path, exif=exif)
    for rotation, array in (False, PICTURE), (True, np.rot90(PICTURE, -1)):
        turned = changed(network, preprocessing=Preprocessing(exif_rotation=rotation))
        expected = turned.preprocess(array)
        assert expected.shape == (8, 8, 3) and np.abs(expected).max() <= 1
        for image in str(path), path, path.read_bytes(), pillow.open(path), jnp.asarray(array):
            np.testing.assert_array_equal(turned.preprocess(image), expected)
    gray = PICTURE[..., 0]
    expected = network.preprocess(np.stack([gray] * 3, axis=-1))
    for image in gray, gray[..., None], pillow.fromarray(gray):
        np.testing.assert_array_equal(network.preprocess(image), expected)


@pytest.mark.parametrize(
    'image, name',
    [
        (PICTURE / 255, 'float64'),
        (PICTURE[None], '12, 20, 3'),
        (PICTURE[..., :2], '12, 20, 2'),
        ([PICTURE], 'list'),
        (pillow.new('I', (9, 9)), '16 bits'),
        ('absent.jpg', 'absent.jpg'),
    ],
)
def test_anything_but_an_image_is_rejected(image, name):
    with pytest.raises(UserError, match=name):
        loaded(tiny.model()).preprocess(image)


@pytest.mark.parametrize('num_classes, count', [(10, 1), (10, 9), (10, 11), (None, 2)])
def test_there_are_as_many_class_names_as_outputs_or_none(num_classes, count):
    vit, names = loaded(tiny.model(num_classes=num_classes)), [str(i) for i in range(count)]
    with pytest.raises(UserError, match='class_names'):
        vit.with_params(vit.params, class_names=names)
    with pytest.raises(UserError, match='class_names'):
        records.from_dict(Card, records.to_dict(vit.card) | {'class_names': names}, where='card')


@pytest.mark.parametrize('name', ['B/16', 'vit_base_patch16_224'])
def test_a_name_without_its_kind_is_told_the_kinds(name):
    with pytest.raises(UserError, match=f'{name}.*hf:, augreg:, vit:'):
        vit_jax.load(name)


@pytest.mark.parametrize('count', [1, 3])
def test_a_regression_has_no_classes_to_predict(count, tmp_path):
    vit = loaded(tiny.model(num_classes=count, gelu='exact'), huggingface.HUGGINGFACE)
    vit_jax.save(changed(vit, loss='regression'), tmp_path / 'x')
    again = vit_jax.load(tmp_path / 'x')
    assert again.logits(np.asarray(tiny.images())).shape[1] == count
    with pytest.raises(UserError, match='regression'):
        again.probabilities(np.asarray(tiny.images()))
    with pytest.raises(UserError, match='regression'):
        run(predict, tmp_path / 'x', photos(tmp_path))


OWN_HEAD = """
import flax.linen as nn
def two_layers(count): return nn.Sequential([nn.Dense(5), nn.gelu, nn.Dense(count)])
def wider(count): return nn.Sequential([nn.Dense(6), nn.gelu, nn.Dense(count)])
"""


@pytest.mark.gate
def test_a_custom_head_is_trained_from_a_checkpoint_and_given_again_to_use_it(tmp_path, capsys):
    file = tmp_path / 'mine.py'
    file.write_text(OWN_HEAD)
    two_layers, wider = (config_files.load_function(f'{file}:{n}') for n in ('two_layers', 'wider'))
    start, work = saved(tmp_path, tiny.model()), tmp_path / 'run'
    config = tiny.experiment(start_from=start, model=None, head=two_layers, total=Duration(steps=2))
    training_run.train(config, str(work))
    images = np.asarray(tiny.images())
    vit = vit_jax.load(work, head=two_layers)
    assert vit.logits(images).shape == (len(images), tiny.CLASSES)
    with pytest.raises(UserError, match='two_layers'):
        vit_jax.load(work).logits(images)
    with pytest.raises(UserError, match='head: '):
        vit_jax.load(work, head=wider)
    with pytest.raises(UserError, match='head'):
        vit_jax.load(start, head=two_layers)  # whose head is linear
    assert run(predict, work, photos(tmp_path), f'--head={file}:two_layers') == 0
    assert '1.png' in capsys.readouterr().out


def test_numbers_and_shapes_that_prepare_never_makes_are_rejected():
    network = loaded(tiny.model())
    images = np.zeros((2, 8, 8, 3), np.float32)
    for wrong, name in [
        (images + 255, '255'),
        (jnp.asarray(images) - 128, '128'),
        (images + np.nan, 'nan'),
        (images.astype(np.uint8), 'uint8'),
        (images[0], '8, 8, 3'),
        (images[:0], '0, 8, 8, 3'),
        (images[:, :4], '4, 8, 3'),
    ]:
        for function in network.logits, lambda x: network.capture(x, ['tokens']):
            with pytest.raises(UserError, match=name):
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
    _ = one.model, one.is_classifier
    again = pickle.loads(pickle.dumps(one))
    assert again == one and repr(again) == repr(one)


@pytest.mark.gate
def test_a_network_is_used_under_jit_vmap_and_grad():
    network, images = loaded(tiny.model()), tiny.images()
    logits = network.logits(images)
    mapped = jax.vmap(lambda image: network.logits(image[None])[0])
    for function in jax.jit(network.logits), jax.jit(mapped):
        np.testing.assert_allclose(function(images), logits, atol=1e-5)
    features = jax.jit(lambda x: network.capture(x, ['tokens'])[1]['tokens'])(images)
    assert features.shape == (3, 2, 5, 16)
    gradient = jax.grad(lambda x: network.logits(x)[:, 0].sum())(images)
    assert network.logits(images - 1e-2 * gradient)[:, 0].sum() < logits[:, 0].sum()


@pytest.mark.gate
def test_a_network_computes_in_bfloat16_if_told_to(tmp_path):
    path, images = saved(tmp_path, tiny.model()), np.asarray(tiny.images())
    exact, rounded = (vit_jax.load(path, dtype=d).logits(images) for d in ('float32', 'bfloat16'))
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact).max()
    assert rounded.dtype == np.float32


def test_other_images_change_what_they_must_and_nothing_else(tmp_path):
    path = saved(tmp_path, tiny.model())
    before = vit_jax.load(path)
    network = vit_jax.load(path, image_size=(12, 8), channels=1)
    assert network.config == tiny.model(image_size=(12, 8), channels=1)
    old, new = named_leaves(before.params), named_leaves(network.params)
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert changed == {'pos_embedding', 'embedding/kernel'}
    report = '\n'.join(network.report)
    assert re.search('pos_embedding: .*2x2 to 3x2', report)
    assert re.search('embedding/kernel: 3 .* 1$', report, re.MULTILINE)
    assert network.logits(np.zeros((1, 12, 8, 1), np.float32)).shape == (1, tiny.CLASSES)


@pytest.mark.parametrize('name, value', [('channels', -3), ('gelu', 'erf'), ('num_classes', '2')])
def test_a_wrong_override_is_named(name, value):
    # With --shape-checks, beartype's TypeError comes first.
    with pytest.raises((UserError, TypeError), match=name):
        vit_jax.load(reference.path(NAME), **{name: value})


def test_a_resnet_has_no_patches_to_resize(tmp_path):
    with pytest.raises(UserError, match='patch_size'):
        vit_jax.load(saved(tmp_path, RESNET), patch_size=8)


@pytest.mark.gate
def test_probabilities_follow_the_loss_of_the_training(tmp_path):
    images = np.asarray(tiny.images())
    for loss in None, 'softmax', 'sigmoid', 'my.module:loss':
        path = tmp_path / f'{loss}.safetensors'
        vit_jax.save(loaded(tiny.model(), loss=loss), path, 'timm')
        network = vit_jax.load(path)
        assert network.card.loss == loss
        function = jax.nn.sigmoid if loss == 'sigmoid' else jax.nn.softmax
        expected = function(network.logits(images))
        np.testing.assert_allclose(network.probabilities(images), expected, rtol=1e-6)
        assert ('my.module:loss' in repr(network)) == (loss == 'my.module:loss')
    other_head = vit_jax.load(tmp_path / 'sigmoid.safetensors', num_classes=3)
    assert other_head.card.loss is None and not other_head.is_classifier


@pytest.mark.parametrize('path', ['x', 'nets/x.npz'])
def test_a_missing_path_is_named(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=f'{tmp_path}/{path}'):
        vit_jax.load(tmp_path / path)


def test_a_hint_that_contradicts_the_file_is_rejected(tmp_path):
    with pytest.raises(UserError, match='num_heads'):
        vit_jax.load(reference.path(NAME), num_heads=2)
    vit_jax.save(loaded(tiny.model()), str(tmp_path / 'ours'), 'vit_jax')
    with pytest.raises(UserError, match='gelu'):
        vit_jax.load(str(tmp_path / 'ours'), gelu='exact')


@pytest.mark.gate
def test_a_checkpoint_of_ours_replaces_another_but_no_file_and_no_folder_of_others(tmp_path):
    network, path = loaded(HYBRID, class_names=tuple('abcdefghij')), tmp_path / 'ours'
    path.write_text('a file')
    with pytest.raises(UserError, match='ours: not a vit_jax checkpoint'):
        vit_jax.save(network, path, 'vit_jax', overwrite=True)
    path.unlink()
    vit_jax.save(network, path, 'vit_jax')
    again = vit_jax.load(path)
    assert again == network
    with pytest.raises(UserError, match='overwrite=True'):
        vit_jax.save(again, path)
    with pytest.raises(UserError, match='timm'):
        vit_jax.save(again, path, 'tim')
    renamed = changed(again, class_names=tuple('klmnopqrst'))
    left = tmp_path / '.partial-ours'  # by a removal that was killed
    left.mkdir()
    (left / 'file').touch()
    vit_jax.save(renamed, path, overwrite=True)
    assert vit_jax.load(path) == renamed
    assert {path.name for path in tmp_path.iterdir()} == {'ours', left.name}
    with pytest.raises(UserError, match='photos: '):
        vit_jax.save(network, photos(tmp_path), 'vit_jax', overwrite=True)
    small = loaded(tiny.model(gelu='exact'))
    with pytest.raises(UserError, match='ours: contains digests.json'):
        vit_jax.save(small, path, 'huggingface', overwrite=True)
    vit_jax.save(small, tmp_path / 'theirs', 'huggingface')
    clip = tiny.model(gelu='exact', layer_norm_epsilon=1e-5, pre_norm=True, num_classes=None)
    with pytest.raises(UserError, match='theirs: contains model.safetensors'):
        vit_jax.save(loaded(clip), tmp_path / 'theirs', 'open_clip', overwrite=True)
    assert len([*(tmp_path / 'photos').iterdir()]) == 5


def test_a_configuration_without_a_needed_hint_is_told_its_field(tmp_path):
    config = tiny.experiment(model=None, start_from=reference.path('timm_gap_fcnorm'))
    with pytest.raises(UserError, match=r'config\.hints'):
        training_run.train(config, str(tmp_path))


@pytest.mark.gate
def test_a_resnet_is_trained_and_saved(tmp_path):
    small = dataclasses.replace(RESNET, image_size=(16, 16), num_classes=None)
    config = tiny.experiment(model=small, total=Duration(steps=3))
    training_run.train(config, str(tmp_path / 'run'))
    network = vit_jax.load(str(tmp_path / 'run'))
    assert network.config == dataclasses.replace(small, num_classes=10)
    vit_jax.save(network, str(tmp_path / 'resnet.npz'), 'google')
    again = vit_jax.load(str(tmp_path / 'resnet.npz'), image_size=16)
    images = tiny.images(config=small)
    np.testing.assert_array_equal(again.logits(images), network.logits(images))


@pytest.mark.gate
def test_predict_prints_the_classes_of_the_largest_logits(tmp_path, capsys):
    names = tuple(f'bird {i}' for i in range(tiny.CLASSES))
    network = loaded(tiny.model(), class_names=names)
    vit_jax.save(network, str(tmp_path / 'ours'), 'vit_jax')
    folder = photos(tmp_path)
    assert run(predict, tmp_path / 'ours', folder, '--top=2', '--features', tmp_path / 'f.npz') == 0
    paths = [f'{folder}/{i}.png' for i in range(5)]
    images = np.stack([network.preprocess(path) for path in paths])
    stored = np.load(tmp_path / 'f.npz')
    assert stored['paths'].tolist() == paths
    np.testing.assert_allclose(stored['features'], network.features(images), atol=1e-5)
    lines = capsys.readouterr().out.splitlines()
    for path, line, p in zip(paths, lines, network.probabilities(images), strict=True):
        first, second = np.argsort(-p)[:2]
        assert line == f'{path}  bird {first} {p[first]:.1%}, bird {second} {p[second]:.1%}'


@pytest.mark.gate
def test_a_network_with_other_parameters_computes_with_them():
    network = changed(loaded(tiny.model()), loss='sigmoid', class_names=tuple('abcdefghij'))
    network = dataclasses.replace(network, origin=('https://x.org/a.npz',))
    doubled = jax.tree.map(lambda leaf: jnp.asarray(2 * leaf), network.params)
    other = network.with_params(doubled, class_names=tuple('klmnopqrst'), loss='softmax')
    assert (other.card.loss, other.class_names[0], other.origin) == ('softmax', 'k', ())
    logits, features = other.outputs(tiny.images(), 'logits', 'features')
    expected = jax.jit(network.model.apply)(doubled, tiny.images())
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_array_equal(features, other.features(tiny.images()))
    with pytest.raises(UserError, match='embedding/bias'):
        network.with_params({k: v for k, v in doubled.items() if k != 'embedding'})


@pytest.mark.gate
def test_predict_names_what_it_cannot_read(tmp_path, capsys):
    path, folder = saved(tmp_path, tiny.model()), photos(tmp_path)
    (tmp_path / 'photos' / '2.png').write_bytes(b'no image')
    (tmp_path / 'names.txt').write_text('\n'.join('abcdefghij'))
    words = '--class_names', tmp_path / 'names.txt', '--features', tmp_path / 'f.npz'
    assert run(predict, path, folder, *words) == 1
    out, err = capsys.readouterr()
    assert out.count('.png') == 4 and '2.png' not in out
    assert f'{folder}/2.png' in err and '1 of 5 images' in err
    kept = np.load(tmp_path / 'f.npz')
    assert kept['paths'].tolist() == [f'{folder}/{i}.png' for i in (0, 1, 3, 4)]
    assert kept['features'].shape == (4, 16) and np.isfinite(kept['features']).all()
    with pytest.raises(UserError, match='f.npz.*--overwrite'):
        run(predict, path, folder, *words)
    (tmp_path / 'names.txt').write_text('a\nb')
    with pytest.raises(UserError, match='names.txt'):
        run(predict, path, folder, *words, '--overwrite')
    with pytest.raises(FileNotFoundError, match='0.pgn'):
        run(predict, path, f'{folder}/0.pgn')


@pytest.mark.gate
def test_convert_writes_prints_and_does_not_overwrite(tmp_path, capsys):
    source, target = reference.path('timm_token_nonsquare'), tmp_path / 'x.npz'
    arguments = '--format=google', '--num_heads=3', '--grid=4,6'
    assert run(convert, source, target, *arguments) == 0
    assert "gelu='exact', grid=(4, 6)" in capsys.readouterr().out
    images, logits = reference.images_and_logits('timm_token_nonsquare')
    network = vit_jax.load(str(target), gelu='exact', grid=(4, 6))
    np.testing.assert_allclose(network.logits(images), logits, atol=1e-5)
    with pytest.raises(UserError, match='--overwrite'):
        run(convert, source, target, *arguments)
    ours = tmp_path / 'ours', '--format=vit_jax', '--grid=4,6'
    assert run(convert, target, *ours) == run(convert, target, *ours, '--overwrite') == 0
    with pytest.raises(UserError, match='timm'):
        run(convert, target, tmp_path / 'ours', '--format=timm', '--grid=4,6', '--overwrite')
    assert vit_jax.load(tmp_path / 'ours').config.grid == (4, 6)  # still there
    assert run(convert, target, tmp_path / 'z.safetensors', '--grid=4,6', '--drop_head') == 0
    assert '(timm ' in capsys.readouterr().out
    assert not any('head' in name for name in contents(tmp_path / 'z.safetensors'))


NAMES = tuple('abcdefghij')


@pytest.fixture(scope='module')
def named():
    return loaded(tiny.model(), class_names=NAMES)


@pytest.fixture(scope='module')
def other(named):
    """It has another head: logits are linear in the parameters that differ."""
    head = jax.tree.map(lambda leaf: np.flip(leaf) - 0.1, named.params['head'])
    return changed(named, params=named.params | {'head': head})


def average(folder, flag, *models):
    """Saves models, averages them, and loads the result."""
    paths = [folder / str(number) for number in range(len(models))]
    for model, path in zip(models, paths, strict=True):
        vit_jax.save(model, path, 'vit_jax', overwrite=True)
    run(convert, *paths, folder / 'out', '--overwrite', flag)
    return vit_jax.load(folder / 'out')


@pytest.mark.gate
def test_logits_of_averaged_heads_are_averages_and_copies_have_the_same_bits(
    named, other, tmp_path
):
    assert average(tmp_path, '--average', named, named, named) == named
    assert average(tmp_path, '--weights=1,0', named, other) == named
    one, two = (model.logits(tiny.images()) for model in (named, other))
    found = average(tmp_path, '--weights=.25,.75', named, other).logits(tiny.images())
    np.testing.assert_allclose(found, 0.25 * one + 0.75 * two, atol=1e-5)  # float32 rounding


def test_what_cannot_be_averaged_is_rejected_by_name(named, other, tmp_path):
    other_names = changed(named, class_names=(*NAMES[:9], 'z'))
    mean = Preprocessing(exif_rotation=False, mean=(1.0,) * 3)
    for name, flag, *models in (
        ('model.depth', '--average', named, loaded(tiny.model(depth=2), class_names=NAMES)),
        ("class_names.9: 'j' -> 'z'", '--average', named, other_names),
        ('preprocessing.mean', '--average', named, changed(named, preprocessing=mean)),
        ('IN: got 2', '--traceback', named, named),
        ('IN: got 1', '--average', named),
        ('weights', '--weights=.5,.6', named, named),
    ):
        with pytest.raises(UserError, match=name):
            average(tmp_path, flag, *models)


def test_images_for_the_papers_files_are_prepared_as_the_papers_code_does():
    network = vit_jax.load(reference.path(NAME))
    assert network.preprocessing == Preprocessing(exif_rotation=False)
