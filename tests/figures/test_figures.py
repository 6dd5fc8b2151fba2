"""What figures are computed from: laws of their numbers, and what is left out, on tiny networks."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import networks as files
from tests import tiny
from vit_jax.analysis import cka
from vit_jax.base import tree_names
from vit_jax.data import loading
from vit_jax.data.sources.opening import make_opener
from vit_jax.figures import layers, networks, paths, probing, representations, vit_paper
from vit_jax.figures.networks import LeftOut, Study
from vit_jax.models import Backbone, ResNetConfig, build, variant

VIT = tiny.model(image_size=(8, 8), patch_size=(4, 4))
RESNET = ResNetConfig(
    image_size=(16, 16), backbone=Backbone(blocks=(2, 1), width=32), num_classes=tiny.CLASSES
)


def study(*configs, images=16, batch_size=8, source=None):
    source = source or make_opener()('digits', 'test')
    size, mesh = networks.batch_for(images, batch_size)
    placed = []
    for index, config in enumerate(configs):
        loaded = config if hasattr(config, 'params') else files.loaded(config)
        reader = loading.reader_for(source, loaded.preprocessing, loaded.config.image_size)
        placed.append(networks.on_devices(f'n{index}', loaded, reader, mesh))
    return Study(tuple(placed), np.arange(images), size, 1024.0, lambda batches, count: batches)


def whole(one, *names):
    """All taps of these names, of all batches, stacked along a first axis."""
    network = one.networks[0]
    seen = network.seen(dict.fromkeys(names, lambda whole: whole))
    return [*map(seen, one.batches(network))]


def test_vit_b16_has_the_74_layers_of_the_paper():
    assert len(layers.every(variant('B/16'))) == 74
    assert len(layers.every(variant('R50x1'))) == 3 + 16 * 7


@pytest.mark.full
def test_the_similarity_of_layers_is_the_cka_of_their_whole_arrays():
    one = study(VIT)
    found = representations.similarity(one)
    batches = whole(one, 'embedding', 'mlp/hidden')
    hidden = np.stack([batch['mlp/hidden'][1] for batch in batches])
    first = np.stack([batch['embedding'] for batch in batches])
    i, j = (found['layers'].tolist().index(name) for name in ('embedding', 'block1/mlp hidden'))
    np.testing.assert_allclose(found['cka'][i, j], cka.minibatch_cka(first, hidden), rtol=1e-4)
    np.testing.assert_allclose(np.diag(found['cka']), 1, rtol=1e-5)


@pytest.mark.full
def test_a_network_beside_itself_is_compared_as_alone():
    found = representations.similarity(study(VIT, VIT), layers.sums)['cka']
    n = len(found) // 2
    np.testing.assert_allclose(found[:n, n:], found[:n, :n], rtol=1e-5)
    amounts = representations.training_data(study(VIT, RESNET, VIT))
    np.testing.assert_allclose(amounts['cka'], 1, rtol=1e-5)
    assert amounts['names'].tolist() == ['n2']


@pytest.mark.full
def test_ratio_and_cosine_are_means_over_tokens_of_each_kind():
    one = study(VIT, images=8)
    found = paths.residuals(one, one.networks[0])
    (batch,) = whole(one, 'mlp/residual')
    skip, branch = (np.asarray(part, np.float64) for part in batch['mlp/residual'])
    ratio = np.linalg.norm(skip, axis=-1) / np.linalg.norm(branch, axis=-1)
    kinds = found['kinds'].tolist()
    patches, token = (kinds.index(f'MLP, {kind}') for kind in ('patches', 'class token'))
    np.testing.assert_allclose(found['ratio'][token], ratio[:, :, 0].mean(axis=1), rtol=1e-4)
    np.testing.assert_allclose(found['ratio'][patches], ratio[:, :, 1:].mean((1, 2)), rtol=1e-4)
    norms = np.linalg.norm(branch, axis=-1) * np.linalg.norm(skip + branch, axis=-1)
    cosine = (branch * (skip + branch)).sum(axis=-1) / norms
    np.testing.assert_allclose(found['cosine'][token], cosine[:, :, 0].mean(axis=1), rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('pool', ['cls', 'gap', 'map'])
def test_relevance_is_that_of_what_the_head_is_given(pool):
    """And in a block without skip connections nothing goes past attention."""
    one = study(tiny.model(pool=pool, blocks_without_skips=(1,)), images=8)
    names = ['attention/weights'] + ['pool/attention/weights'] * (pool == 'map')
    (batch,) = whole(one, *names)
    rolled = np.eye(batch['attention/weights'].shape[-1])
    for block, weights in enumerate(np.asarray(batch['attention/weights'], np.float64)):
        mean = weights.mean(axis=1)
        rolled = (mean if block == 1 else (mean + np.eye(mean.shape[-1])) / 2) @ rolled
    expected = {
        'cls': lambda: rolled[:, 0, 1:],
        'gap': lambda: rolled.mean(axis=1),
        'map': lambda: np.einsum('bhqn,bnm->bhm', batch['pool/attention/weights'], rolled).mean(1),
    }[pool]()
    relevance = vit_paper.rollout(one, one.networks[0])['relevance']
    np.testing.assert_allclose(relevance.reshape(6, -1), expected[:6], rtol=1e-4)
    maps = vit_paper.attention_maps(one, one.networks[0])
    assert maps['layers'].tolist() == ['0', '1', '2'] + ['pool'] * (pool == 'map')
    first = np.asarray(batch['attention/weights'])[:, 0]
    of_query = first[:, :, 0, 1:] if pool == 'cls' else first.mean(axis=2)
    np.testing.assert_allclose(maps['maps'][:3].reshape(3, 2, -1), of_query, rtol=1e-5)


@pytest.mark.full
def test_distances_are_in_pixels_down_and_across():
    """A head that sees all alike, on patches of 2 rows and 4 columns of pixels."""
    loaded = files.loaded(tiny.model(patch_size=(2, 4), pool='gap'))
    key = loaded.params['encoder']['block']['attention']['key']
    loaded.params['encoder']['block']['attention']['key'] = jax.tree.map(np.zeros_like, key)
    one = study(loaded)
    found = vit_paper.attention_distance(one, one.networks[0])
    places = np.array([(2 * i, 4 * j) for i in range(4) for j in range(2)])
    mean = np.linalg.norm(places[:, None] - places, axis=-1).mean()
    np.testing.assert_allclose(found['distance'], mean, rtol=1e-5)
    np.testing.assert_allclose(found['uniform'], mean, rtol=1e-5)


@pytest.mark.full
def test_a_network_without_skips_is_shown_beside_its_whole_one():
    cut = tiny.model(blocks_without_skips=(1,))
    one = study(RESNET, cut, VIT)
    found = representations.skip_removal(one)
    assert found['names'].tolist() == ['n1', 'n2']
    removed = found['layers'][found['removed'][0]].tolist()
    inside = [str(layer) for layer in layers.every(VIT) if layer.block == 1]
    assert removed == inside[1:]  # the first norm sees what is before the block
    assert not found['removed'][1].any()
    alone = representations.similarity(dataclasses.replace(one, networks=one.networks[1:2]))
    np.testing.assert_allclose(found['cka'][0], alone['cka'], rtol=1e-5)
    assert not np.allclose(found['cka'][0], found['cka'][1], atol=0.1)
    values = paths.residuals(one, one.networks[1])
    np.testing.assert_array_equal(values['ratio'][:, 1], 0)
    np.testing.assert_allclose(values['cosine'][:, 1], 1, rtol=1e-5)


@pytest.mark.full
def test_tokens_are_placed_where_their_patches_are():
    """The tokens of a network that changes nothing are about their own patches."""
    config = tiny.model(patch_size=(4, 2), positions='none', pool='gap', width=24, depth=1)
    loaded = files.loaded(config)
    eye = np.eye(24, dtype=np.float32).reshape(4, 2, 3, 24)
    zeroed = ('attention/out/kernel', 'attention/out/bias', 'dense2/kernel', 'dense2/bias')

    def simple(name, leaf):
        if name == 'embedding/kernel':
            return eye
        return np.zeros_like(leaf) if name.endswith(zeroed) or name == 'embedding/bias' else leaf

    one = study(files.changed(loaded, params=tree_names.map_named(simple, loaded.params)))
    found = representations.localisation(one, one.networks[0])
    assert found['cka'].shape == (8, 2, 4)
    for place, own in zip(found['cka'], found['tokens'].tolist(), strict=True):
        if np.isfinite(place[tuple(own)]):  # else the patch is the same in all digits
            np.testing.assert_allclose(place[tuple(own)], 1, rtol=1e-5)


@pytest.mark.full
def test_images_that_cannot_be_cut_into_places_leave_localisation_out():
    one = study(dataclasses.replace(RESNET, image_size=(20, 16)))
    with pytest.raises(LeftOut, match='20x16 pixels cannot be cut into 3x2 equal patches'):
        representations.localisation(one, one.networks[0])


@pytest.mark.full
def test_a_patch_sees_itself_alone_before_tokens_are_mixed():
    """Without attention the field of every block is the patch in the middle."""
    loaded = files.loaded(VIT)
    value = loaded.params['encoder']['block']['attention']['value']
    loaded.params['encoder']['block']['attention']['value'] = jax.tree.map(np.zeros_like, value)
    one = study(loaded, images=8)
    after = paths.fields(one, one.networks[0])['after']
    outside = np.ones((8, 8), bool)
    outside[4:, 4:] = False
    assert after.shape == (3, 8, 8)
    assert (after[:, ~outside] > 0).all() and not after[:, outside].any()


@pytest.mark.full
def test_subsets_of_heads_go_from_near_to_far():
    windows = representations._windows(np.array([3.0, 1.0, 4.0, 2.0, 9.0, 6.0]))
    assert windows.sum(axis=1).tolist() == [2] * 5
    assert np.flatnonzero(windows[0]).tolist() == [1, 3]
    assert np.flatnonzero(windows[-1]).tolist() == [4, 5]
    found = representations.head_subsets(study(tiny.model(num_heads=4), RESNET))
    assert (np.diff(found['distance']) >= 0).all()
    assert found['layers'].tolist() == ['root', 'stage1/unit1/out']


@pytest.mark.full
def test_probes_need_labels_and_a_few_images_of_each_class():
    both = study(VIT, RESNET, images=160)
    found, task = probing.probes(both), probing._task(both)
    largest = np.bincount(task.labels[task.tested]).max() / len(task.tested)
    assert found['series'].tolist()[:2] == ['n0: class token', 'n0: mean of patches']
    # The class token is the same for all images yet, so that all are said to be of one class.
    assert found['accuracy'][0, 0] <= largest < 0.25
    assert np.nanmax(found['accuracy']) > 0.3
    with pytest.raises(LeftOut, match='2 images are too few for probes'):
        probing.probes(study(VIT, images=2))
    digits = make_opener()('digits', 'test')
    with pytest.raises(LeftOut, match='no labels'):
        probing.probes(study(VIT, source=dataclasses.replace(digits, class_names=())))


@pytest.mark.full
@pytest.mark.parametrize(
    'compute, message',
    [
        (representations.similarity, 'CKA needs at least 4 images; there is 1'),
        (representations.head_subsets, 'CKA needs at least 4 images'),
    ],
)
def test_one_image_has_no_cka(compute, message):
    with pytest.raises(LeftOut, match=message):
        compute(study(VIT, RESNET, images=1))


def test_what_a_network_does_not_have_is_said():
    one = study(RESNET)
    with pytest.raises(LeftOut, match='a ResNet has neither tokens nor attention'):
        vit_paper.attention_distance(one, one.networks[0])
    for options, message in (
        ({'positions': 'none'}, 'no position embeddings'),
        ({'positions': 'relative'}, 'no position embeddings'),
        ({'positions_at': 'every_layer'}, 'each layer has position embeddings of its own'),
    ):
        one = study(tiny.model(**options))
        with pytest.raises(LeftOut, match=message):
            vit_paper.position_embeddings(one, one.networks[0])
    with pytest.raises(LeftOut, match='a network that was trained with .*blocks_without_skips'):
        representations.skip_removal(one)


def test_positions_of_rows_and_columns_are_shown_of_each_patch():
    options = {'positions': 'learned2d', 'positions_at': 'every_layer_shared'}
    one = study(tiny.model(image_size=(8, 12), **options))
    similarity = vit_paper.position_embeddings(one, one.networks[0])['similarity']
    x, y = (one.networks[0].loaded.params[f'pos_embedding_{axis}'][0] for axis in 'xy')
    first, other = (np.concatenate([x[c], y[r]]) for r, c in ((0, 0), (1, 2)))
    cosine = first @ other / np.linalg.norm(first) / np.linalg.norm(other)
    np.testing.assert_allclose(similarity[0, 0, 1, 2], cosine, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    'config, name, layer',
    [
        (VIT, 'encoder/block/mlp/dense1/bias', 'block1/mlp hidden'),
        (VIT, 'embedding/bias', 'embedding'),
        (tiny.model(pool='map'), 'pool/mlp/dense1/bias', 'pool/mlp/hidden'),
        (RESNET, 'backbone/stage1/unit2/norm2/scale', 'stage1/unit2/norm2'),
    ],
)
def test_the_layer_where_nan_begins_is_found(config, name, layer):
    loaded = files.loaded(config)
    one = study(loaded)
    assert layers.first_not_finite(one, one.networks[0]) is None
    leaf = tree_names.named_leaves(loaded.params)[name].copy()
    leaf[1 if leaf.ndim > 1 else slice(None)] = np.nan
    params = tree_names.map_named(lambda n, old: leaf if n == name else old, loaded.params)
    one = study(files.changed(loaded, params=params))
    assert str(layers.first_not_finite(one, one.networks[0])) == layer


@pytest.mark.parametrize('changes', [{}, {'parallel': True, 'qk_norm': True, 'norm': 'rms'}])
def test_every_layer_is_there_to_be_seen(changes):
    config = tiny.model(depth=1, **changes)
    model = build(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    names = {layer.tap for layer in layers.every(config)}
    _, seen = jax.eval_shape(lambda p, x: model.capture(p, x, names), shapes, tiny.images())
    assert seen.keys() == names
