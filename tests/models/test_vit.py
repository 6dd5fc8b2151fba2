import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.base.tree_names import named_leaves
from vit_jax.models import Compute, Regularization, build
from vit_jax.models.vit import Dense, drop_branch


def in_float64(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def norm(x, layer, config):
    x = x - x.mean(-1, keepdims=True) * (config.norm == 'layer')
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.layer_norm_epsilon)
    return x * layer['scale'] + layer.get('bias', 0)


def gelu(x, config):
    if config.gelu == 'exact':
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def dense(x, layer):
    return x @ layer['kernel'] + layer['bias']


def attention(x, y, layer, config):
    """Attention of tokens x to tokens y: its weights, the outputs of its heads, its output."""
    q, k, v = (
        np.einsum('bnd,dhk->bnhk', tokens, layer[name]['kernel']) + layer[name].get('bias', 0)
        for name, tokens in (('query', x), ('key', y), ('value', y))
    )
    if 'query_norm' in layer:
        q, k = norm(q, layer['query_norm'], config), norm(k, layer['key_norm'], config)
    weights = np.exp(np.einsum('bqhk,bnhk->bhqn', q, k) / math.sqrt(q.shape[-1]))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum('bhqn,bnhk->bqhk', weights, v)
    out = np.einsum('bqhk,hkd->bqd', heads, layer['out']['kernel']) + layer['out']['bias']
    return weights, heads, out


def mlp(x, layer, config):
    """The hidden units of an MLP, and its output."""
    hidden = gelu(dense(x, layer['dense1']), config)
    return hidden, dense(hidden, layer['dense2'])


def tokens_by_the_paper(params, images, config):
    """The taps of equations 1 to 4 and 6 to 8, in float64; the last one is `norm`."""
    p = in_float64(params)
    (rows, columns), (ph, pw) = config.grid, config.patch_size
    x = np.asarray(images, np.float64).reshape(len(images), rows, ph, columns, pw, -1)
    patches = x.swapaxes(2, 3).reshape(len(images), rows * columns, -1)
    z = patches @ p['embedding']['kernel'].reshape(-1, config.width) + p['embedding']['bias']
    classes = [np.tile(p[name], (len(z), 1, 1)) for name in ('cls', 'dist') if name in p]
    z = np.concatenate([*classes, z], axis=1) + p['pos_embedding']
    if config.registers:
        registers = np.tile(p['registers'], (len(z), 1, 1))
        z = np.concatenate([z[:, : len(classes)], registers, z[:, len(classes) :]], axis=1)
    taps, blocks = {'embedding': z}, []
    for layer in range(config.depth):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], p['encoder']['block'])
        seen = {'norm1': norm(z, block['norm1'], config)}
        weights, heads, out = attention(seen['norm1'], seen['norm1'], block['attention'], config)
        seen |= {'attention/weights': weights, 'attention/heads': heads, 'attention/out': out}
        seen['attention/residual'] = z, out
        z = z + out
        if not config.parallel:
            seen['norm2'] = norm(z, block['norm2'], config)
        hidden, out = mlp(seen.get('norm2', seen['norm1']), block['mlp'], config)
        seen |= {'mlp/hidden': hidden, 'mlp/out': out, 'mlp/residual': (z, out)}
        z = z + out
        blocks.append(seen | {'tokens': z})
    taps |= jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
    return taps | {'norm': norm(z, p['encoder']['norm'], config)}


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'registers': 2, 'gelu': 'exact', 'layer_norm_epsilon': 1e-2},
        {'representation_size': 5, 'image_size': (6, 12), 'patch_size': (2, 3)},
        {'qk_norm': True},
        {'parallel': True, 'qk_norm': True, 'norm': 'rms', 'qkv_bias': False},
    ],
)
def test_logits_and_all_intermediates_follow_the_equations_of_the_paper(changes):
    """Of models with a class token; test_pooling.py has the others."""
    config = tiny.model(**changes)
    model, params = tiny.built(config)
    images = tiny.images(config=config)
    taps, p = tokens_by_the_paper(params, images, config), in_float64(params)
    expected = taps['norm'][:, 0]
    if config.representation_size:
        expected = np.tanh(dense(expected, p['pre_logits']))
    expected = dense(expected, p['head'])
    logits, seen = jax.jit(model.capture, static_argnums=2)(params, images, tuple(taps))
    found = {'logits': logits, 'without capture': jax.jit(model.apply)(params, images)} | seen
    for name, array in ({'logits': expected, 'without capture': expected} | taps).items():
        # float32 rounding of sums over at most 50 terms, through three blocks
        for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(array), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)


LAYOUTS = {layout: Compute(dtype='float32', layout=layout) for layout in ('flat', 'batched')}


def applied(layer, x, params=None):
    """The parameters, the output, and its gradients by parameters and input."""
    params = layer.init(KEY, x) if params is None else params

    def total(params, x):
        return (layer.apply(params, x) ** 2).sum()

    return params, layer.apply(params, x), jax.grad(total, argnums=(0, 1))(params, x)


@pytest.mark.gate
@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize(
    'shape, features, axes', [((2, 5, 6), (3, 4), 1), ((2, 5, 2, 3), (8,), 2), ((2, 5, 6), (4,), 1)]
)
def test_a_dense_layer_is_flaxs(layout, shape, features, axes):
    x, bias = jax.random.normal(KEY, shape), nn.initializers.normal(1.0)
    own = Dense(features, LAYOUTS[layout], axes=axes, bias_init=bias)
    glorot = nn.initializers.xavier_uniform()
    flax = nn.DenseGeneral(features, axis=range(-axes, 0), kernel_init=glorot, bias_init=bias)
    params, *results = applied(own, x)
    expected, *others = applied(flax, x)
    for name, leaf in named_leaves(expected).items():  # to the bit: a seed means the same network
        np.testing.assert_array_equal(named_leaves(params)[name], leaf)
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gate
def test_initial_values_are_those_of_the_paper():
    config = tiny.model(width=192, mlp_dim=768, num_heads=3, head_bias=-6.9, pool='cls')
    params = jax.jit(build(config).init)(jax.random.key(0))
    block = params['encoder']['block']
    assert not params['cls'].any() and not params['head']['kernel'].any()
    assert (params['head']['bias'] == np.float32(-6.9)).all()
    limit = math.sqrt(6 / (192 + 192))  # Glorot uniform, of the whole projection and not a head's
    assert limit * 0.99 < jnp.abs(block['attention']['query']['kernel']).max() <= limit
    limit = math.sqrt(6 / (192 + 768))
    assert limit * 0.99 < jnp.abs(block['mlp']['dense1']['kernel']).max() <= limit
    assert 0 < jnp.abs(block['mlp']['dense1']['bias']).max() < 1e-5
    assert params['pos_embedding'].std() == pytest.approx(0.02, rel=0.1)  # 960 draws
    fan_in = math.prod(config.patch_size) * 3
    assert params['embedding']['kernel'].std() == pytest.approx(fan_in**-0.5, rel=0.05)
    first, second = block['mlp']['dense1']['kernel'][:2]
    assert (first != second).all()  # every layer has draws of its own


SCALED = {'parallel': True, 'qk_norm': True, 'norm': 'rms', 'qkv_bias': False}
SCALED |= {'positions_at': 'every_layer'}
TPU = Compute(layout='batched', attention='xla')
GPU = Compute(layout='flat', attention='xla', unroll=3)
OTHERS = (
    Compute(remat='dots', attention='blockwise'),
    Compute(remat='block'),
    Compute(remat='block', unroll=2),
)


@pytest.mark.parametrize(
    'of, others',
    [
        pytest.param({}, (TPU, GPU), marks=pytest.mark.gate),
        pytest.param(SCALED, OTHERS, marks=pytest.mark.gate),
        pytest.param({}, OTHERS, marks=pytest.mark.nightly),
        pytest.param(SCALED, (TPU, GPU), marks=pytest.mark.nightly),
        pytest.param({'positions': 'relative'}, (TPU, GPU), marks=pytest.mark.nightly),
        pytest.param({'positions': 'relative'}, OTHERS, marks=pytest.mark.nightly),
    ],
)
def test_every_way_to_compute_gives_the_same_gradients(others, of):
    config = tiny.model(**of)
    regularization = Regularization(dropout=0.1, stochastic_depth=0.2)
    gradients = []
    for compute in (Compute(), *others):
        if config.positions == 'relative' and compute.attention == 'blockwise':
            continue  # rejected by name
        model, params = tiny.built(config, compute=compute, regularization=regularization)
        gradient = jax.jit(jax.grad(lambda p, m=model: m.apply(p, IMAGES, KEY).std()))(params)
        gradients.append(named_leaves(gradient))
    for other in gradients[1:]:
        for name, leaf in other.items():
            np.testing.assert_allclose(leaf, gradients[0][name], atol=2e-6, err_msg=name)


IMAGES, KEY = tiny.images(4), jax.random.key(3)


@pytest.mark.parametrize(
    'of',
    [
        pytest.param({'pool': 'cls'}, marks=pytest.mark.gate),
        pytest.param({'pool': 'map', 'positions': 'relative'}, marks=pytest.mark.gate),
        pytest.param({'pool': 'gap'}, marks=pytest.mark.nightly),
        pytest.param(
            {'positions': 'learned2d', 'positions_at': 'every_layer'}, marks=pytest.mark.gate
        ),
    ],
)
def test_every_leaf_learns(of):
    model, params = tiny.built(tiny.model(representation_size=6, **of))
    gradient = jax.jit(jax.grad(lambda p: model.apply(p, IMAGES).std()))(params)
    for name, leaf in named_leaves(gradient).items():
        if name.endswith('key/bias'):  # moves all logits of a query alike: softmax ignores it
            assert jnp.abs(leaf).max() < 1e-5
        else:
            assert jnp.abs(leaf).max() > 1e-7, name


def test_a_dropped_branch_keeps_its_mean():
    result = drop_branch(jnp.ones((4000, 2, 3)), jnp.asarray(0.2), key=KEY)
    assert np.unique(result).tolist() == [0, np.float32(1 / np.float32(0.8))]
    assert (result == result[:, :1, :1]).all()  # an example is dropped as a whole
    assert result.mean() == pytest.approx(1, abs=4 * 0.5 / np.sqrt(4000))  # 4 deviations


@pytest.mark.gate
@pytest.mark.parametrize('kind, branches', [('linear', 2), ('constant', 4)])
def test_stochastic_depth_is_none_in_the_first_block_if_linear_and_without_a_key(kind, branches):
    config = tiny.model(depth=2, pool='none', num_classes=None, positions='none')
    dropped = Regularization(stochastic_depth=0.5, stochastic_depth_kind=kind)
    model, params = tiny.built(config, regularization=dropped)
    keys = jax.random.split(jax.random.key(0), 512)
    run = jax.jit(jax.vmap(functools.partial(model.apply, params, IMAGES[:1])))
    outputs = np.unique(np.asarray(run(keys)).reshape(512, -1).round(4), axis=0)
    assert len(outputs) == 2**branches  # of the last block or both, each kept or dropped
    never = build(config, regularization=Regularization(stochastic_depth=0.0))
    np.testing.assert_array_equal(never.apply(params, IMAGES, KEY), never.apply(params, IMAGES))


@pytest.mark.gate
def test_stochastic_depth_grows_linearly_from_the_first_block_to_the_last():
    almost_one = Regularization(stochastic_depth=0.99999)
    model, params = tiny.built(tiny.model(depth=2), regularization=almost_one)
    first = jax.tree.map(lambda leaf: leaf[:1], params['encoder']['block'])
    alone = params | {'encoder': params['encoder'] | {'block': first}}
    expected = build(tiny.model(depth=1)).apply(alone, IMAGES)
    # Rounding differs between programs, but a dropped block changes logits by 0.01 or more.
    np.testing.assert_allclose(model.apply(params, IMAGES, KEY), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gate
def test_pixels_at_the_bottom_and_the_right_that_fill_no_patch_are_ignored():
    config = tiny.model(image_size=(10, 11))
    model, params = tiny.built(config)
    images = tiny.images(config=config)
    cut = images.at[:, 8:].set(7).at[:, :, 8:].set(7)
    np.testing.assert_array_equal(model.apply(params, cut), model.apply(params, images))
    assert (model.apply(params, images.at[:, 0].set(7)) != model.apply(params, images)).any()


def test_dropout_is_active_only_with_a_key_and_depends_on_it():
    model, params = tiny.built(tiny.model(), regularization=Regularization(dropout=0.5))
    apply = jax.jit(model.apply)
    one, two = (apply(params, IMAGES, jax.random.key(i)) for i in (1, 2))
    assert (one != two).all()
    np.testing.assert_array_equal(one, apply(params, IMAGES, jax.random.key(1)))
    np.testing.assert_array_equal(apply(params, IMAGES), apply(params, IMAGES))


@pytest.mark.gate
def test_bfloat16_stays_near_float32_with_float32_parameters_and_logits():
    config = tiny.model()
    model, params = tiny.built(config, compute=Compute(dtype='bfloat16'))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'float32'}
    logits, exact = model.apply(params, IMAGES), build(config).apply(params, IMAGES)
    assert logits.dtype == jnp.float32
    error = jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact)
    assert 1e-4 < error < 3e-2  # bfloat16 has 8 bits: 0.4 % each, over a dozen layers of sums


def test_the_first_parameters_come_from_one_program_however_the_network_is_computed():
    fast = Compute(dtype='bfloat16', remat='block', unroll=3)
    programs = [
        str(jax.make_jaxpr(build(tiny.model(), compute=compute).init)(KEY))
        for compute in (Compute(), fast)
    ]
    assert programs[0] == programs[1]


@pytest.mark.gate
def test_the_program_does_not_grow_with_depth():
    def lines(depth):
        model = build(tiny.model(depth=depth))
        params = jax.eval_shape(model.init, jax.random.key(0))
        step = jax.grad(lambda p, x: model.apply(p, x).sum())
        return len(jax.jit(step).lower(params, IMAGES).as_text().splitlines())

    assert lines(16) == lines(4)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'image_size': (3, 8)}, 'patch_size='),
        ({'class_tokens': 0}, 'class_tokens=0'),
        ({'pool': 'cls_dist', 'class_tokens': 1}, 'class_tokens=1'),
        ({'pool': 'cls_dist', 'representation_size': 4}, 'pool=cls_dist'),
        ({'positions': 'rope', 'num_heads': 8}, 'width=16'),
        ({'positions': 'learned_rope', 'registers': 3}, 'registers=3'),
        ({'parallel': True, 'blocks_without_skips': (1,)}, 'blocks_without_skips'),
        ({'num_heads': 3}, 'num_heads=3'),
        ({'width': 18, 'positions': 'sincos2d'}, 'width=18'),
        ({'positions_at': 'every_layer', 'positions': 'relative'}, 'positions'),
        ({'depth': 0}, 'depth=0'),
        ({'layer_norm_epsilon': 0.0}, 'layer_norm_epsilon=0.0'),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, message):
    for config in tiny.model, lambda **values: tiny.assigned(tiny.model(), **values):
        with pytest.raises(ValueError, match=message):
            model = build(config(**changes))
            jax.eval_shape(model.init, jax.random.key(0))


def test_images_of_another_size_are_refused():
    model, params = tiny.built(tiny.model())
    with pytest.raises(ValueError, match=r'\(4, 8, 3\)'):
        model.apply(params, jnp.zeros((1, 4, 8, 3)))
