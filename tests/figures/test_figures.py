"""What figures are computed from: laws of their numbers, and what is left out, on tiny networks."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import networks as files
from tests import tiny
from vit_jax.analysis import cka
from vit_jax.base import UserError, tree_names
from vit_jax.data import loading
from vit_jax.data.sources.opening import make_opener
from vit_jax.figures import figure, head_subsets, layers
from vit_jax.figures.cka import compare_layers
from vit_jax.models import Backbone, ResNetConfig, build, variant

VIT = tiny.model(image_size=(8, 8), patch_size=(4, 4))
RESNET = ResNetConfig(
    image_size=(16, 16), backbone=Backbone(blocks=(2, 1), width=32), num_classes=tiny.CLASSES
)


open_source = make_opener()  # caches what it opens


def opened(*configs, images=16, source=None):
    """Returns images and networks: the arguments of `compute`."""
    source = source or open_source('digits', 'test')
    size, mesh = figure.choose_batch(images, 8)
    networks = []
    for index, config in enumerate(configs):
        loaded = config if hasattr(config, 'params') else files.loaded(config)
        reader = loading.make_reader(source, loaded.preprocessing, loaded.config.image_size)
        networks.append(figure.put_on_devices(f'n{index}', loaded, reader, mesh))
    return figure.Images(np.arange(images), size), *networks


def test_a_batch_is_split_over_as_many_devices_as_divide_it(monkeypatch):
    monkeypatch.setattr(jax, 'devices', jax.local_devices)  # all eight
    size, mesh = figure.choose_batch(12, 8)
    assert (size, mesh.size) == (6, 2)


def compute(name, *arguments):
    return figure.find_figure(name).compute(*arguments)


def whole(images, network, *names):
    """All taps of these names, of all batches."""
    capture = network.capture(dict.fromkeys(names, lambda whole: whole))
    return [*map(capture, images.batches(network))]


def test_vit_b16_has_the_74_layers_of_the_paper():
    assert len(layers.all_layers(variant('B/16'))) == 74
    assert len(layers.all_layers(variant('R50x1'))) == 3 + 16 * 7


@pytest.mark.gate
def test_the_similarity_of_layers_is_the_cka_of_their_whole_arrays():
    images, network = opened(VIT)
    found = compute('cka', images, network)
    batches = whole(images, network, 'embedding', 'mlp/hidden')
    hidden = np.stack([batch['mlp/hidden'][1] for batch in batches])
    first = np.stack([batch['embedding'] for batch in batches])
    i, j = (found['layers'].tolist().index(name) for name in ('embedding', 'block1/mlp hidden'))
    np.testing.assert_allclose(found['cka'][i, j], cka.minibatch_cka(first, hidden), rtol=1e-4)
    np.testing.assert_allclose(np.diag(found['cka']), 1, rtol=1e-5)


@pytest.mark.gate
def test_a_network_is_compared_with_itself_as_alone():
    images, *networks = opened(VIT, RESNET, VIT)
    found = compare_layers(images, networks[::2], layers.output_layers)['cka']
    n = len(found) // 2
    np.testing.assert_allclose(found[:n, n:], found[:n, :n], rtol=1e-5)
    amounts = compute('training_data', images, *networks)
    np.testing.assert_allclose(amounts['cka'], 1, rtol=1e-5)
    assert amounts['names'].tolist() == ['n2']


@pytest.mark.gate
def test_ratio_and_cosine_are_means_over_tokens_of_each_kind():
    images, network = opened(VIT, images=8)
    found = compute('residuals', images, network)
    (batch,) = whole(images, network, 'mlp/residual')
    skip, branch = (np.asarray(part, np.float64) for part in batch['mlp/residual'])
    ratio = np.linalg.norm(skip, axis=-1) / np.linalg.norm(branch, axis=-1)
    kinds = found['kinds'].tolist()
    patches, token = (kinds.index(f'MLP, {kind}') for kind in ('patches', 'class token'))
    np.testing.assert_allclose(found['ratio'][token], ratio[:, :, 0].mean(axis=1), rtol=1e-4)
    np.testing.assert_allclose(found['ratio'][patches], ratio[:, :, 1:].mean((1, 2)), rtol=1e-4)
    norms = np.linalg.norm(branch, axis=-1) * np.linalg.norm(skip + branch, axis=-1)
    cosine = (branch * (skip + branch)).sum(axis=-1) / norms
    np.testing.assert_allclose(found['cosine'][token], cosine[:, :, 0].mean(axis=1), rtol=1e-4)


@pytest.mark.gate
def test_distances_are_in_pixels_down_and_across():
    """A head that attends equally to patches of 2 rows and 4 columns of pixels."""
    loaded = files.loaded(tiny.model(patch_size=(2, 4), pool='gap'))
    key = loaded.params['encoder']['block']['attention']['key']
    loaded.params['encoder']['block']['attention']['key'] = jax.tree.map(np.zeros_like, key)
    found = compute('attention_distance', *opened(loaded))
    places = np.array([(2 * i, 4 * j) for i in range(4) for j in range(2)])
    mean = np.linalg.norm(places[:, None] - places, axis=-1).mean()
    np.testing.assert_allclose(found['distance'], mean, rtol=1e-5)
    np.testing.assert_allclose(found['uniform'], mean, rtol=1e-5)


@pytest.mark.gate
def test_a_network_without_skips_is_compared_with_its_whole_one():
    images, *networks = opened(RESNET, tiny.model(blocks_without_skips=(1,)), VIT)
    found = compute('skip_removal', images, *networks)
    assert found['names'].tolist() == ['n1', 'n2']
    removed = found['layers'][found['removed'][0]].tolist()
    inside = [str(layer) for layer in layers.all_layers(VIT) if layer.block == 1]
    assert removed == inside[1:]  # the first norm is before the skip connections
    assert not found['removed'][1].any()
    assert not np.allclose(found['cka'][0], found['cka'][1], atol=0.1)
    values = compute('residuals', images, networks[1])
    np.testing.assert_array_equal(values['ratio'][:, 1], 0)
    np.testing.assert_allclose(values['cosine'][:, 1], 1, rtol=1e-5)


@pytest.mark.gate
def test_tokens_are_placed_where_their_patches_are():
    """The tokens of a network that changes nothing represent their own patches."""
    config = tiny.model(patch_size=(4, 2), positions='none', pool='gap', width=24, depth=1)
    loaded = files.loaded(config)
    eye = np.eye(24, dtype=np.float32).reshape(4, 2, 3, 24)
    zeroed = ('attention/out/kernel', 'attention/out/bias', 'dense2/kernel', 'dense2/bias')

    def simple(name, leaf):
        if name == 'embedding/kernel':
            return eye
        return np.zeros_like(leaf) if name.endswith(zeroed) or name == 'embedding/bias' else leaf

    loaded = files.changed(loaded, params=tree_names.map_named(simple, loaded.params))
    found = compute('localization', *opened(loaded))
    assert found['cka'].shape == (8, 2, 4)
    for place, own in zip(found['cka'], found['tokens'].tolist(), strict=True):
        if np.isfinite(place[tuple(own)]):  # else the patch is the same in all digits
            np.testing.assert_allclose(place[tuple(own)], 1, rtol=1e-5)


@pytest.mark.gate
def test_a_patch_sees_itself_alone_before_tokens_are_mixed():
    """Without attention the field of every block is the patch in the middle."""
    loaded = files.loaded(VIT)
    value = loaded.params['encoder']['block']['attention']['value']
    loaded.params['encoder']['block']['attention']['value'] = jax.tree.map(np.zeros_like, value)
    after = compute('receptive_fields', *opened(loaded, images=8))['after']
    outside = np.ones((8, 8), bool)
    outside[4:, 4:] = False
    assert after.shape == (3, 8, 8)
    assert (after[:, ~outside] > 0).all() and not after[:, outside].any()


@pytest.mark.gate
def test_subsets_of_heads_go_from_near_to_far():
    windows = head_subsets._windows(np.array([3.0, 1.0, 4.0, 2.0, 9.0, 6.0]))
    assert windows.sum(axis=1).tolist() == [2] * 5
    assert np.flatnonzero(windows[0]).tolist() == [1, 3]
    assert np.flatnonzero(windows[-1]).tolist() == [4, 5]
    found = compute('head_subsets', *opened(tiny.model(num_heads=4), RESNET))
    assert (np.diff(found['distance']) >= 0).all()
    assert found['layers'].tolist() == ['root', 'stage1/unit1/out']


@pytest.mark.gate
def test_probes_need_labels_and_a_few_images_of_each_class():
    found = compute('probes', *opened(VIT, RESNET, images=160))
    series = dict(zip(found['series'].tolist(), found['accuracy'], strict=True))
    # The embedding of the class token is the same for all images.
    assert series['n0: class token'][0] < 0.25 < 0.3 < np.nanmax(found['accuracy'])
    assert np.isfinite(series['n1: mean of positions']).sum() == 4  # root and three units
    with pytest.raises(UserError, match='2 images'):
        compute('probes', *opened(VIT, images=2))
    digits = open_source('digits', 'test')
    with pytest.raises(UserError, match='label'):
        compute('probes', *opened(VIT, source=dataclasses.replace(digits, class_names=())))


@dataclasses.dataclass(frozen=True, eq=False)
class Planted(figure.Images):
    """Images whose intermediates are given arrays; blocks are along the first axis of `tokens`."""

    taps: dict = dataclasses.field(default_factory=dict)

    def capture(self, model, wanted, most=None):
        for start in range(0, self.taps[[*wanted][0]].shape[-3], self.batch_size):
            rows = slice(start, start + self.batch_size)
            part = {name: tap[..., rows, :, :] for name, tap in self.taps.items()}
            yield {
                name: np.stack([*map(f, part[name])]) if name == 'tokens' else f(part[name])
                for name, f in wanted.items()
            }

    def first_images(self, model, count):
        return np.zeros((count, *model.vit.image_size, 3), np.float32)


def planted(point=(0.5, 0.5), **taps):
    return Planted(np.arange(9), 4, point=point, taps=taps)


def wide(**changes):
    """A network of 2x3 patches."""
    return opened(tiny.model(**{'image_size': (8, 12)} | changes))[1]


def test_planted_components_come_back_and_other_tokens_do_not_count():
    """Of 7 images 6 are drawn. The sign makes the largest entry of a component positive."""
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(7 * 6, 3))
    latents, _ = np.linalg.qr(latents - latents.mean(axis=0))  # uncorrelated, with equal variances
    directions, _ = np.linalg.qr(rng.normal(size=(16, 3)))
    tokens = 100 * rng.normal(size=(7, 4 + 6, 16)).astype(np.float32)
    tokens[:, 4:] = (3 + latents * (2, 9, 5) @ directions.T).reshape(7, 6, 16)
    found = compute('features', planted(norm=tokens), wide(registers=3))
    np.testing.assert_allclose(found['explained'], np.array([81, 25, 4]) / 110, rtol=1e-5)
    largest = directions[np.abs(directions).argmax(axis=0), range(3)]
    scores = (latents * np.sign(largest))[: 6 * 6, [1, 2, 0]]
    scores = (scores - scores.min(axis=0)) / np.ptp(scores, axis=0)
    np.testing.assert_allclose(found['components'], scores.reshape(6, 2, 3, 3), atol=1e-4)


@pytest.mark.parametrize(
    'point, patch', [((0.5, 0.5), (1, 1)), ((0, 0), (0, 0)), ((1, 1), (1, 2)), ((0.7, 0.4), (0, 2))]
)
def test_similarity_is_the_cosine_with_the_patch_of_the_same_image_at_the_point(point, patch):
    tokens = np.random.default_rng(0).normal(size=(2, 1 + 6, 16)) + 1
    found = compute('features', planted(point, norm=tokens), wide())
    assert found['patch'].tolist() == list(patch)
    unit = (tokens / np.linalg.norm(tokens, axis=-1, keepdims=True))[:, 1:].reshape(2, 2, 3, 16)
    expected = np.einsum('brcd,bd->brc', unit, unit[:, *patch])
    np.testing.assert_allclose(found['similarity'], expected, atol=1e-6)
    np.testing.assert_allclose(found['similarity'][:, *patch], 1, rtol=1e-6)


def test_planted_outliers_are_counted_where_they_are():
    """Norms are 1, in the last block 3; 12.5 is more than 4 times 3, and 11.5 is not."""
    norms = np.ones((3, 5, 3 + 6))
    norms[:, :, 0], norms[:, :, 1:3] = 50, 20
    norms[1, 0, 3:] = 7  # not in the last block
    norms[2, :, 3:] = 3
    norms[2, 0, 3 + 4] = norms[2, 4, 3] = 12.5
    norms[2, 1, 3] = 11.5
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(*norms.shape, 16))
    tokens *= (norms / np.linalg.norm(tokens, axis=-1))[..., None]
    models = wide(pool='gap'), wide(registers=2)
    plain = planted(tokens=tokens[:, :, 3:])
    both = planted(tokens=tokens)
    found = compute('outliers', plain, models[0]) | {
        f'{key[:-1]}1': value for key, value in compute('outliers', both, models[1]).items()
    }
    expected = np.zeros((5, 2, 3), bool)
    expected[0, 1, 1] = expected[4, 0, 0] = True
    for i in '01':
        np.testing.assert_array_equal(found[f'outliers{i}'], expected)
        ranks = np.quantile(norms[:, :, 3:], (0.5, 0.99, 1), axis=(1, 2))
        np.testing.assert_allclose(found[f'patches{i}'], ranks, rtol=1e-6)
    np.testing.assert_allclose(found['class token1'], 50, rtol=1e-6)
    np.testing.assert_allclose(found['registers1'], 20, rtol=1e-6)
    assert 'class token0' not in found and 'registers0' not in found
    assert f'n0 {2 / 30:.2%}' in figure.find_figure('outliers').finding(found)


@pytest.mark.parametrize(
    'config',
    [
        pytest.param(tiny.model(pool='map', registers=2), marks=pytest.mark.gate),
        pytest.param(tiny.model(pool='gap', final_norm='after_pool'), marks=pytest.mark.gate),
        pytest.param(tiny.model(pool='none', patch_size=(2, 4)), marks=pytest.mark.nightly),
        pytest.param(files.HYBRID, marks=pytest.mark.nightly),
    ],
)
def test_features_are_the_last_tokens_of_any_vit(config):
    images, network, resnet = opened(config, RESNET)
    found = compute('features', images, network)
    last = 'norm' if config.final_norm == 'before_pool' else 'tokens'
    taps = whole(images, network, *{last, 'tokens'})[0]
    tokens = taps[last] if last == 'norm' else taps[last][-1]
    patches = np.asarray(tokens)[:6, config.num_prefix_tokens :].astype(np.float64)
    unit = patches / np.linalg.norm(patches, axis=-1, keepdims=True)
    chosen = np.ravel_multi_index(found['patch'], config.grid)
    expected = np.einsum('bnd,bd->bn', unit, unit[:, chosen])
    np.testing.assert_allclose(found['similarity'].reshape(6, -1), expected, atol=1e-5)
    assert found['images'].shape == (6, *config.image_size, 3)
    norms = compute('outliers', images, resnet, network)
    assert norms['names'].tolist() == ['n0'] and norms['patches0'].shape == (3, config.depth)


@pytest.mark.parametrize(
    'name, config, images, what',
    [
        ('cka', VIT, 1, '1 images'),
        ('features', RESNET, 16, 'ResNet'),
        ('skip_removal', RESNET, 16, 'blocks_without_skips'),
        ('localization', dataclasses.replace(RESNET, image_size=(20, 16)), 16, '20x16'),
        ('positions', tiny.model(positions='none'), 16, 'position'),
        ('positions', tiny.model(positions='relative'), 16, 'position'),
        ('positions', tiny.model(positions_at='every_layer'), 16, 'each layer'),
    ],
)
def test_a_figure_that_cannot_be_made_names_what_is_missing(name, config, images, what):
    with pytest.raises(UserError, match=what):
        compute(name, *opened(config, images=images))


def test_positions_of_rows_and_columns_are_combined_for_each_patch():
    options = {'positions': 'learned2d', 'positions_at': 'every_layer_shared'}
    images, network = opened(tiny.model(image_size=(8, 12), **options))
    similarity = compute('positions', images, network)['similarity']
    x, y = (network.loaded.params[f'pos_embedding_{axis}'][0] for axis in 'xy')
    first, other = (np.concatenate([x[c], y[r]]) for r, c in ((0, 0), (1, 2)))
    cosine = first @ other / np.linalg.norm(first) / np.linalg.norm(other)
    np.testing.assert_allclose(similarity[0, 0, 1, 2], cosine, rtol=1e-5)


@pytest.mark.parametrize('changes', [{}, {'parallel': True, 'qk_norm': True, 'norm': 'rms'}])
def test_every_layer_can_be_captured(changes):
    config = tiny.model(depth=1, **changes)
    model = build(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    names = {layer.tap for layer in layers.all_layers(config)}
    _, found = jax.eval_shape(lambda p, x: model.capture(p, x, names), shapes, tiny.images())
    assert found.keys() == names
