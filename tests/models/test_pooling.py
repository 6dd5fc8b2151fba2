"""Each pooling: its formula, the formats that hold it, and the figures that show its attention."""

import dataclasses
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable
from typing import NamedTuple, get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.models.test_vit import attention, dense, in_float64, mlp, norm, tokens_by_the_paper
from tests.networks import ENDINGS, assert_same_arrays
from vit_jax.base import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats.opening import OURS
from vit_jax.checkpoints.transfer import head_params, transfer
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.figures import figure
from vit_jax.models import abstract_params
from vit_jax.models.config import Pool
from vit_jax.pretrained import LoadedModel

POOLS = get_args(Pool)


class Pooling(NamedTuple):
    """What a pooling is; to add one, add its row to POOLINGS."""

    # features(tokens, patch_tokens, params, config) returns the pooled features.
    features: Callable
    # attention(rows, patch_rows, pool_weights) returns the attention of the head's input (b m). Its
    # arguments are the attention of all tokens (b n m), the attention of the patches, and the
    # weights of an attention pooling. None: the figures reject the pooling.
    attention: Callable | None
    formats: str = ''  # the formats of other libraries that have it


def by_attention(tokens, patches, params, config):
    """Scaling Vision Transformers, section 3.2: a learned query, and an MLP with a skip."""
    layers = params['pool']
    query = np.tile(layers['probe'], (len(patches), 1, 1))
    *_, x = attention(query, patches, layers['attention'], config)
    _, out = mlp(norm(x, layers['norm'], config), layers['mlp'], config)
    return (x + out)[:, 0]


def concatenated(*features):
    return np.concatenate(features, axis=-1)


POOLINGS = {
    'cls': Pooling(
        lambda tokens, *_: tokens[:, 0],
        lambda rows, *_: rows[:, 0],
        'google bigvision vit5 timm huggingface open_clip',
    ),
    'gap': Pooling(
        lambda tokens, patches, *_: patches.mean(axis=1),
        lambda rows, patches, _: patches.mean(axis=1),
        'google bigvision timm huggingface',
    ),
    'map': Pooling(
        by_attention,
        lambda rows, patches, weights: np.einsum('bp,bpm->bm', weights, patches),
        'bigvision timm',
    ),
    'none': Pooling(lambda tokens, *_: tokens, lambda rows, *_: rows.mean(axis=1), 'timm'),
    'cls_gap': Pooling(
        lambda tokens, patches, *_: concatenated(tokens[:, 0], patches.mean(axis=1)),
        lambda rows, patches, _: (rows[:, 0] + patches.mean(axis=1)) / 2,
    ),
    'cls_dist': Pooling(
        lambda tokens, *_: concatenated(tokens[:, 0], tokens[:, 1]),
        lambda rows, *_: rows[:, :2].mean(axis=1),
        'timm huggingface',
    ),
}


def row_of(pool):
    wanted = 'its formula, the attention that figures show, and the formats that have it'
    if pool not in POOLINGS:
        pytest.fail(f'pool={pool}: no row in POOLINGS, tests/models/test_pooling.py; add {wanted}')
    return POOLINGS[pool]


def logits_of(features, head):
    """The mean of the heads, each of which reads its part of the features."""
    heads = [head] if 'kernel' in head else [head['cls'], head['dist']]
    parts = np.split(features, len(heads), axis=-1)
    return np.mean([*map(dense, parts, heads)], axis=0)


@pytest.mark.parametrize('pool', POOLS)
def test_features_and_logits_follow_the_formula_of_the_pooling(pool):
    config = tiny.model(depth=1, registers=2, pool=pool)
    model, params = tiny.built(config)
    images = tiny.images(config=config)
    tokens, p = tokens_by_the_paper(params, images, config)['norm'], in_float64(params)
    features = row_of(pool).features(tokens, tokens[:, config.num_prefix_tokens :], p, config)
    found = jax.jit(lambda *given: (model.features(*given), model.apply(*given)))(params, images)
    for one, other in zip(found, (features, logits_of(features, p['head'])), strict=True):
        # float32 rounding of sums over at most 50 terms
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_parameters_load_into_another_pooling_only_if_each_array_fits():
    """Pairs such as `gap` and `none` have equal arrays: one can be fine-tuned as the other."""
    configs = [tiny.model(pool=pool) for pool in POOLS]
    models = [(config, abstract_params(config)) for config in configs]
    for (old, params), (new, fresh) in itertools.permutations(models, 2):
        bodies = [
            {(name, leaf.shape) for name, leaf in named_leaves(tree).items()}
            - {(name, leaf.shape) for name, leaf in head_params(tree).items()}
            for tree in (params, fresh)
        ]
        try:
            transfer(params, old=old, new=new, fresh=fresh)
            assert bodies[0] == bodies[1], (old.pool, new.pool)
        except UserError as error:
            differing = {name for name, _ in bodies[0] ^ bodies[1]}
            assert differing and all(name in str(error) for name in differing)


# The fields that a format of one family requires.
NEEDED = {
    'vit5': {'positions': 'learned_rope', 'norm': 'rms', 'qk_norm': True, 'layer_scale': 1.0},
    'open_clip': {'layer_norm_epsilon': 1e-5, 'pre_norm': True, 'num_classes': None},
}


@functools.cache
def model_of(pool, family):
    config = tiny.model(depth=1, gelu='exact', pool=pool, **NEEDED.get(family, {}))
    params = jax.tree.map(np.array, tiny.random_params(abstract_params(config)))
    # Some formats add the position of the class token to the token, which rounds unless it is 0.
    params['pos_embedding'][:, 0] = 0
    card = Card(model=config, grid=config.grid, preprocessing=Preprocessing(exif_rotation=False))
    return LoadedModel(card, params, format=OURS, layout=None)


@pytest.mark.parametrize('pool', POOLS)
def test_each_format_returns_the_same_model_or_rejects_the_pooling(pool, tmp_path):
    """Equal parameters of an equal configuration have equal logits."""
    holds = {OURS, *row_of(pool).formats.split()}
    for format, ending in ENDINGS.items():
        network = model_of(pool, format if format in NEEDED else None)
        path = tmp_path / f'{format}{ending}'
        try:
            vit_jax.save(network, path, format)
        except UserError as error:
            assert format not in holds, f'{format}, pool={pool}: rejected, but listed in POOLINGS'
            usual = model_of('cls', format if format in NEEDED else None)
            own = named_leaves(network.params).keys() - named_leaves(usual.params).keys()
            names = 'pool', 'pos_embed', *own  # the positions, if it needs other class tokens
            assert any(name in str(error) for name in names), f'{format}, pool={pool}: {error}'
            continue
        advice = f'list it in POOLINGS, or reject it in vit_jax/checkpoints/formats/{format}.py'
        assert format in holds, f'{format}, pool={pool}: written, but not listed; {advice}'
        names = () if format == OURS else ('gelu', 'layer_norm_epsilon', 'grid')
        again = vit_jax.load(path, **{name: getattr(network.config, name) for name in names})
        assert again.config == network.config
        assert_same_arrays(named_leaves(again.params), named_leaves(network.params))


CONFIG = tiny.model(depth=2, registers=2, class_tokens=2, blocks_without_skips=(1,))


def planted():
    """Images with random attention of 2 blocks with 2 heads, and of the pooling."""
    rng, tokens = np.random.default_rng(0), CONFIG.num_tokens
    weights = rng.dirichlet(np.ones(tokens), size=(2, 3, 2, tokens)).astype(np.float32)
    pooling = rng.dirichlet(np.ones(4), size=(3, 2, 1)).astype(np.float32)  # of 4 patches

    def capture(model, wanted, most=None):
        found = {'attention/weights': [*map(wanted['attention/weights'], jnp.asarray(weights))]}
        if 'pool/attention/weights' in wanted:
            found['pool/attention/weights'] = wanted['pool/attention/weights'](jnp.asarray(pooling))
        return iter([{name: np.asarray(array) for name, array in found.items()}])

    photos = np.zeros((3, *CONFIG.image_size, 3), np.float32)
    images = mock.Mock(spec=figure.Images, capture=capture)
    images.first_images.side_effect = lambda model, count: photos[:count]
    return images, weights, pooling


def rolled_out(pool, read, weights, pooling):
    """Abnar and Zuidema: the mean over the heads, half of which is the skip connection."""
    first, second = weights.mean(axis=2)
    rolled = second @ (first + np.eye(first.shape[-1])) / 2
    return {'relevance': read(rolled, pooling.mean(axis=(1, 2)))}


def attention_of_heads(pool, read, weights, pooling):
    """Of the first image; for an attention pooling, the mean of the patches, then the pooling."""
    maps = [read(block[0], np.full((2, 4), 1 / 4)) for block in weights]
    return {'maps': np.stack([*maps, pooling[0, :, 0]] if pool == 'map' else maps)}


# The numbers of each figure of what the head reads, from the attention.
EXPECTED = {'rollout': rolled_out, 'attention_maps': attention_of_heads}


def test_each_figure_of_what_the_head_reads_is_in_the_table():
    reads = re.compile(r'\.pool\b|average_pooled_tokens')
    names = {
        name
        for name in figure.NAMES
        if reads.search(inspect.getsource(importlib.import_module(f'vit_jax.figures.{name}')))
    }
    missing = names - EXPECTED.keys()
    assert not missing, f'{missing}: add their numbers to EXPECTED, tests/models/test_pooling.py'


@pytest.mark.parametrize('name', EXPECTED)
@pytest.mark.parametrize('pool', POOLS)
def test_a_figure_shows_the_attention_of_what_the_head_reads_or_says_why_not(pool, name):
    images, weights, pooling = planted()
    config = dataclasses.replace(CONFIG, pool=pool)
    prefix, chosen = config.num_prefix_tokens, figure.find_figure(name)
    model = mock.Mock(spec=figure.PlacedModel, vit=config)
    if row_of(pool).attention is None:
        with pytest.raises(UserError, match=f'pool={pool}'):
            chosen.compute(images, model)
        return

    def read(rows, pooling):
        return row_of(pool).attention(rows, rows[:, prefix:], pooling)[:, prefix:]

    try:
        numbers = chosen.compute(images, model)
    except AssertionError as error:  # of `assert_never`
        where = 'a case, or a UserError, to average_pooled_tokens, figures/attention_maps.py'
        raise AssertionError(f'pool={pool}: not drawn by {name}; add {where}') from error
    for key, array in EXPECTED[name](pool, read, weights, pooling).items():
        np.testing.assert_allclose(numbers[key].reshape(array.shape), array, rtol=1e-5)
    assert chosen.draw(numbers).axes
