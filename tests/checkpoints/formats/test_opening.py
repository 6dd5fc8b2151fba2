import json
import pathlib
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from orbax.checkpoint import PyTreeCheckpointHandler
from safetensors.numpy import save_file

import vit_jax
from tests import reference, tiny
from tests.networks import (
    ENDINGS,
    HYBRID,
    RESNET,
    ROOT_ALONE,
    assert_same_arrays,
    changed,
    contents,
    loaded,
)
from vit_jax.base.errors import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.checkpoints.card import Hints
from vit_jax.checkpoints.formats import google, huggingface, timm
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.opening import open_checkpoint
from vit_jax.checkpoints.formats.writing import format_for
from vit_jax.data import image_preprocessing, imagenet_classes
from vit_jax.models import ResNetConfig
from vit_jax.pretrained import LoadedModel


@pytest.mark.parametrize(
    'path, named, own, expected',
    [
        ('y.safetensors', None, 'huggingface', 'timm'),
        ('y.npz', None, 'bigvision', 'bigvision'),
        ('y.npz', 'google', 'timm', 'google'),
        ('y.stablehlo', None, 'timm', 'stablehlo'),
        ('y.v2', None, 'huggingface', 'huggingface'),
        ('y.npz', None, 'timm', None),
        ('y', None, 'timm', None),
        ('y.npz', 'vit_jax', 'timm', None),
        ('y.pth', None, 'vit_jax', None),
        ('y', 'tim', 'timm', None),
    ],
)
def test_the_ending_of_a_path_is_that_of_its_format(path, named, own, expected):
    if expected:
        assert format_for(path, named, own) == expected
        return
    with pytest.raises(UserError, match=named or path):
        format_for(path, named, own)


@pytest.mark.parametrize('name', reference.COMMITTED)
def test_a_file_is_written_back_as_it_was_read(name, tmp_path):
    path = pathlib.Path(reference.path(name))
    vit_jax.save(vit_jax.load(str(path), **reference.HINTS[name]), str(tmp_path / path.name))
    assert_same_arrays(contents(path), contents(tmp_path / path.name))


GOOGLE, BIGVISION = google.GOOGLE_LAYOUT, google.BIGVISION_LAYOUT
EXACT = tiny.model(gelu='exact')
MAP = tiny.model(pool='map')
VIT5 = tiny.model(gelu='exact', positions='learned_rope', norm='rms', qk_norm=True, layer_scale=1.0)
# The layouts that differ from a format's usual one, and what else the files hold. What is usual,
# of every kind of network, is in test_round_trips.
LAYOUTS = [
    (google.GOOGLE, tiny.model(representation_size=6), replace(GOOGLE, before_linen=False)),
    (google.GOOGLE, HYBRID, GOOGLE),
    (google.GOOGLE, HYBRID, replace(GOOGLE, group_norm_4d=False, before_linen=False)),
    (google.GOOGLE, ROOT_ALONE, GOOGLE),
    (google.GOOGLE, RESNET, GOOGLE),
    (google.BIGVISION, RESNET, BIGVISION),
    (google.BIGVISION, MAP, replace(BIGVISION, prefix='', stacked=True)),
    (google.BIGVISION, MAP, replace(BIGVISION, prefix='opt/target/')),
    (
        google.BIGVISION,
        tiny.model(),
        replace(BIGVISION, positions='Transformer/pos_embedding', class_row=True),
    ),
    (
        google.BIGVISION,
        tiny.model(pool='gap'),
        replace(BIGVISION, before_linen=True, prefix='opt/target/'),
    ),
    (google.BIGVISION, tiny.model(pool='gap'), replace(BIGVISION, dtype='bfloat16')),
    (timm.TIMM, EXACT, timm.Layout(class_row=False)),
    (timm.TIMM, EXACT, timm.Layout(prefix='module.')),
    (timm.TIMM, EXACT, timm.Layout(dtype='float16')),
    (timm.TIMM, replace(HYBRID, gelu='exact'), timm.Layout()),
    (timm.TIMM, replace(ROOT_ALONE, gelu='exact'), timm.Layout()),
    (
        huggingface.HUGGINGFACE,
        replace(EXACT, layer_norm_epsilon=1e-6),
        huggingface.Layout(prefix='vit.', family='vit_msn', bare_blocks=True),
    ),
    (
        huggingface.HUGGINGFACE,
        tiny.model(num_classes=None, representation_size=16, gelu='exact'),
        huggingface.Layout(prefix=''),
    ),
]


def rounded(network: LoadedModel, dtype: str) -> LoadedModel:
    """The network with values that the type holds."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype).astype('float32'), network.params)
    return changed(network, params=params)


def without_a_position_of_the_class_token(network: LoadedModel) -> LoadedModel:
    positions = network.params['pos_embedding'].copy()
    positions[:, 0] = 0
    return changed(network, params=network.params | {'pos_embedding': positions})


@pytest.mark.parametrize(
    'form, config, layout',
    [
        pytest.param(*each, marks=[pytest.mark.gate] if number % 4 != 1 else [])
        for number, each in enumerate(LAYOUTS)
    ],
)
def test_writing_is_the_inverse_of_reading(form, config, layout, tmp_path):
    network = rounded(loaded(config, form, layout), layout.dtype)
    if not layout.class_row and getattr(config, 'pool', '') == 'cls':
        network = without_a_position_of_the_class_token(network)
    path = tmp_path / f'one{ENDINGS[form.name]}'
    vit_jax.save(network, str(path))
    hints = {} if isinstance(config, ResNetConfig) else {'grid': config.grid}
    again = vit_jax.load(str(path), **hints)
    assert again.layout == layout
    if isinstance(config, ResNetConfig):  # whose file does not say what images it is for
        again = vit_jax.load(str(path), image_size=config.image_size)
    assert again.config == config
    assert_same_arrays(named_leaves(network.params), named_leaves(again.params))
    copy = tmp_path / f'two{ENDINGS[form.name]}'
    vit_jax.save(again, str(copy))
    assert_same_arrays(contents(path), contents(copy))


@pytest.mark.gate
@pytest.mark.parametrize('format', ENDINGS)
def test_numbers_are_rounded_to_bfloat16_where_a_file_can_say_so(format, tmp_path):
    theirs = {
        'open_clip': {'layer_norm_epsilon': 1e-5, 'pre_norm': True, 'num_classes': None},
        'vit5': {'positions': 'learned_rope', 'norm': 'rms', 'qk_norm': True, 'layer_scale': 1.0},
    }
    config = tiny.model(gelu='exact', **theirs.get(format, {}))
    network, path = loaded(config), tmp_path / f'x{ENDINGS[format]}'
    if format == 'vit5':
        network = without_a_position_of_the_class_token(network)
    if path.suffix == '.npz':
        with pytest.raises(UserError, match='dtype=bfloat16'):
            vit_jax.save(network, path, format, dtype='bfloat16')
        assert not path.exists()
        return
    assert 'parameters: rounded to bfloat16' in vit_jax.save(
        network, path, format, dtype='bfloat16'
    )
    again = vit_jax.load(path, **({} if format == 'vit_jax' else {'grid': (2, 2)}))
    assert_same_arrays(
        named_leaves(again.params), named_leaves(rounded(network, 'bfloat16').params)
    )
    if format == 'vit_jax':
        stored = PyTreeCheckpointHandler().metadata(path / 'params').tree
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(stored)} == {'bfloat16'}
        return
    assert again.layout.dtype == 'bfloat16'
    if format == 'huggingface':
        assert json.loads((path / 'config.json').read_text())['dtype'] == 'bfloat16'
    vit_jax.save(again, path, overwrite=True, dtype='float32')
    assert vit_jax.load(path, grid=(2, 2)).layout.dtype == 'float32'
    # Other parameters, which the type of the file would round, are not rounded.
    vit_jax.save(again.with_params(network.params), path, overwrite=True)
    kept = vit_jax.load(path, grid=(2, 2))
    assert_same_arrays(named_leaves(kept.params), named_leaves(network.params))


def test_what_a_file_cannot_say_is_said_when_it_is_written(tmp_path):
    config = tiny.model(gelu='exact', layer_norm_epsilon=1e-12, image_size=(12, 8))
    (note,) = vit_jax.save(loaded(config), tmp_path / 'x.npz', 'google')
    assert "gelu='exact', layer_norm_epsilon=1e-12, grid=(3, 2)" in note
    (note,) = vit_jax.save(loaded(RESNET), tmp_path / 'y.npz', 'google')
    assert 'image_size=(64, 64)' in note


@pytest.mark.parametrize(
    'config, format, name',
    [
        (tiny.model(pool='map'), 'google', 'pool/'),
        (tiny.model(), 'open_clip', 'head/bias'),
        (tiny.model(positions='rope'), 'google', 'rope'),
        (tiny.model(parallel=True), 'timm', 'parallel'),
        (tiny.model(positions_at='every_layer'), 'huggingface', 'pos_embedding'),
        (HYBRID, 'huggingface', 'backbone'),
        (RESNET, 'timm', 'ResNet'),
        (replace(VIT5, pre_norm=True), 'vit5', 'pre_norm'),
        (replace(VIT5, representation_size=6), 'vit5', 'representation_size'),
        (replace(VIT5, gelu='tanh'), 'vit5', 'gelu'),
        (tiny.model(), 'flax', 'flax'),
    ],
)
def test_what_a_format_cannot_hold_is_rejected(config, format, name, tmp_path):
    path = tmp_path / f'x{ENDINGS.get(format, ".npz")}'
    with pytest.raises(UserError, match=name):
        vit_jax.save(loaded(config, google.GOOGLE), path, format)
    assert not path.exists()


@pytest.mark.gate
@pytest.mark.parametrize(
    'options',
    [{'positions': 'relative'}, {'positions': 'learned2d', 'positions_at': 'every_layer'}],
)
def test_what_our_format_alone_has_comes_back_in_it(options, tmp_path):
    config = tiny.model(
        parallel=True, qk_norm=True, norm='rms', qkv_bias=False, pool='map', **options
    )
    network = loaded(config)
    vit_jax.save(network, str(tmp_path / 'x'), 'vit_jax')
    again = vit_jax.load(str(tmp_path / 'x'))
    images = np.asarray(tiny.images(config=config))
    assert again.config == config
    np.testing.assert_array_equal(again.logits(images), network.logits(images))


def saved(tmp_path, config, form):
    path = tmp_path / f'file{ENDINGS[form.name]}'
    vit_jax.save(loaded(config, form), str(path), overwrite=True)
    return str(path)


def bare(path, config, form=timm.TIMM):
    """A file without our card."""
    save_file(contents(saved(path, config, form)), path / 'bare.safetensors')
    return path / 'bare.safetensors'


@pytest.mark.parametrize(
    'size, grid, other', [((52, 60), (13, 15), (14, 14)), ((12, 20), (3, 5), None)]
)
def test_an_ambiguous_grid_is_asked_for(size, grid, other, tmp_path):
    config = tiny.model(image_size=size)  # 196 positions: 14x14, or 13x15 and a class token?
    path = saved(tmp_path, config, google.GOOGLE)
    with pytest.raises(NeedsHint, match='grid='):
        vit_jax.load(path)
    assert vit_jax.load(path, grid=grid).config == config
    if other:
        assert vit_jax.load(path, grid=other).config.grid == other
    with pytest.raises(UserError, match='pos_embedding'):
        vit_jax.load(path, grid=(9, 9))


def test_what_no_array_shows_is_asked_for(tmp_path):
    fixed = tiny.model(pool='gap', positions='sincos2d')
    path = saved(tmp_path, fixed, google.BIGVISION)
    with pytest.raises(NeedsHint, match='grid='):
        vit_jax.load(path)
    assert vit_jax.load(path, grid=fixed.grid).config == fixed
    path = bare(tmp_path, tiny.model(gelu='exact'))
    with pytest.raises(NeedsHint, match='num_heads='):
        vit_jax.load(path)
    with pytest.raises(UserError, match='num_heads=5'):
        vit_jax.load(path, num_heads=5)
    assert vit_jax.load(path, num_heads=2).config.num_heads == 2


@pytest.mark.gate
def test_a_subtree_of_an_npz_is_read_and_the_rest_is_listed(tmp_path):
    config, form = MAP, google.BIGVISION
    tower = contents(saved(tmp_path, config, form))
    both = {name.replace('params/', 'params/img/'): array for name, array in tower.items()}
    both |= {'params/txt/head/kernel': np.ones((2, 2), np.float32), 'opt/step': np.asarray(3)}
    np.savez(tmp_path / 'two.npz', **both)
    for key in ':img', '':
        network = vit_jax.load(f'{tmp_path}/two.npz{key}')
        assert_same_arrays(named_leaves(network.params), named_leaves(loaded(config, form).params))
        assert network.ignored == ('opt/step', 'params/txt/head/kernel')
    assert any('2 arrays, such as opt/step' in line for line in network.report)
    # What a training keeps next to the parameters is no other model.
    for kept in 'ema_params', 'opt_state/0/mu/params':
        both |= {f'{kept}{name.removeprefix("params")}': 0 * array for name, array in both.items()}
    np.savez(tmp_path / 'two.npz', **both)
    network = vit_jax.load(f'{tmp_path}/two.npz')
    assert_same_arrays(named_leaves(network.params), named_leaves(loaded(config, form).params))
    both |= {name.replace('params/img/', 'params/other/'): a for name, a in both.items()}
    np.savez(tmp_path / 'two.npz', **both)
    for key, name in ('', 'FILE:params/other'), (':nothing', 'nothing'):
        with pytest.raises(UserError, match=name):
            vit_jax.load(f'{tmp_path}/two.npz{key}')


@pytest.mark.parametrize(
    'file, classes, known',
    [
        ('B_16--imagenet2012-res_8.npz', 1000, True),
        ('vit.augreg_in21k_ft_in1k.safetensors', 1000, True),
        ('B_16.npz', 1000, False),
        ('B_16--imagenet2012-res_8.npz', 100, False),
    ],
)
def test_a_file_whose_name_says_imagenet_has_the_names_of_its_classes(
    file, classes, known, tmp_path
):
    network = loaded(tiny.model(num_classes=classes, gelu='exact'))
    vit_jax.save(network, str(tmp_path / file))
    if file.endswith('.safetensors'):  # without the card that ours has
        save_file(contents(tmp_path / file), tmp_path / file)
    again = vit_jax.load(str(tmp_path / file), num_heads=network.config.num_heads)
    assert again.class_names == (imagenet_classes.names() if known else ())
    assert any("class names: ImageNet's, from" in line for line in again.report) == known


def test_the_loss_of_a_hugging_face_directory_is_its_problem_type(tmp_path):
    types = {'sigmoid': 'multi_label_classification', 'softmax': 'single_label_classification'}
    for loss in 'sigmoid', 'softmax':
        network = loaded(tiny.model(gelu='exact'), huggingface.HUGGINGFACE, loss=loss)
        folder = tmp_path / loss
        vit_jax.save(network, folder)
        said = json.loads((folder / 'config.json').read_text())
        assert said['problem_type'] == types[loss]
        save_file(contents(folder), folder / 'model.safetensors')  # without a card of ours
        assert vit_jax.load(folder).card.loss == loss
    (folder / 'config.json').write_text(json.dumps(said | {'problem_type': 'regression'}))
    assert 'head is a regression' in repr(vit_jax.load(folder))


@pytest.mark.parametrize('resize', ['bilinear_antialias', 'bicubic_antialias'])
@pytest.mark.parametrize('kind', [image_preprocessing.Resize, image_preprocessing.CentralCrop])
def test_preprocessing_survives_in_the_words_of_transformers(kind, resize, tmp_path):
    preprocessing = image_preprocessing.Preprocessing(
        crop=kind(resize=resize), exif_rotation=False, mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0)
    )
    config = tiny.model(
        gelu='exact', image_size=(224, 224), patch_size=(112, 112), position_resize='bicubic'
    )
    network = loaded(config, huggingface.HUGGINGFACE, preprocessing=preprocessing)
    assert not vit_jax.save(network, str(tmp_path / 'hf'))
    save_file(contents(tmp_path / 'hf'), tmp_path / 'hf' / 'model.safetensors')  # no card of ours
    again = vit_jax.load(str(tmp_path / 'hf')).preprocessing
    expected = preprocessing.crop
    if kind is image_preprocessing.CentralCrop:
        expected = replace(expected, rounding='transformers')
    assert again.crop == expected and not again.exif_rotation
    assert again.mean == pytest.approx(preprocessing.mean)
    assert again.std == pytest.approx(preprocessing.std)


def test_two_files_of_weights_in_a_directory_are_not_chosen_from(tmp_path):
    saved(tmp_path, tiny.model(), google.GOOGLE)
    shutil.copy(tmp_path / 'file.npz', tmp_path / 'other.npz')
    with pytest.raises(ValueError, match='file.npz, other.npz'):
        vit_jax.load(str(tmp_path))


def test_formats_are_told_apart_by_content_not_by_name(tmp_path):
    path = saved(tmp_path, tiny.model(), google.GOOGLE)
    shutil.move(path, tmp_path / 'weights.safetensors')
    assert vit_jax.load(str(tmp_path / 'weights.safetensors')).format == 'google'
    shutil.move(saved(tmp_path, tiny.model(), timm.TIMM), tmp_path / 'weights.npz')
    assert vit_jax.load(str(tmp_path / 'weights.npz')).format == 'timm'


def test_the_card_of_a_file_of_ours_counts_whatever_stands_next_to_it(tmp_path):
    network = loaded(tiny.model(gelu='exact'), huggingface.HUGGINGFACE)
    vit_jax.save(network, tmp_path)
    assert 'ignored' not in str(vit_jax.load(tmp_path).report)
    (tmp_path / 'config.json').write_text('{"num_attention_heads": 4}')
    opened = vit_jax.load(tmp_path)
    assert opened == network
    assert 'config.json: num_attention_heads=4 is ignored' in str(opened.report)
    with pytest.raises(UserError, match='num_heads'):
        vit_jax.load(tmp_path, num_heads=4)


def test_a_work_directory_is_not_written_into(tmp_path):
    (tmp_path / 'events.jsonl').write_text('')
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(UserError, match=f'{tmp_path}: a work directory'):
        vit_jax.save(loaded(tiny.model(), huggingface.HUGGINGFACE), tmp_path, overwrite=True)
    assert (tmp_path / 'config.json').read_text() == '{}'


def test_one_file_of_weights_is_read_before_several(tmp_path):
    """As transformers does it."""
    network = loaded(tiny.model(gelu='exact'), huggingface.HUGGINGFACE)
    vit_jax.save(network, tmp_path)
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': {'a': 'model-1-of-1.safetensors'}}))
    assert_same_arrays(named_leaves(vit_jax.load(tmp_path).params), named_leaves(network.params))


def test_a_run_that_goes_on_is_read_as_it_was_opened(tmp_path):
    steps = tmp_path / 'checkpoints'
    networks = [loaded(tiny.model(gelu=gelu)) for gelu in ('exact', 'tanh')]
    vit_jax.save(networks[0], steps / '1', 'vit_jax')
    opened = open_checkpoint(str(tmp_path), Hints())
    vit_jax.save(networks[1], steps / '2', 'vit_jax')  # the newest, from here on
    assert_same_arrays(named_leaves(opened.read()), named_leaves(networks[0].params))
