"""Every implementation of attention gives the same; TPU kernels run in an interpreter."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.distributed import meshes
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.models import Compute, attention, build
from vit_jax.planning import ahead_of_time

DEVICES = 8
QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
OFFSETS = jax.random.normal(jax.random.key(2), (9, 4, 8))
QUERY_72 = jax.random.normal(jax.random.key(1), (3, 2, 5, 4, 72))


def by_definition(query, key, value, offsets):
    """q . (k + r) of every pair, with the vector r of its offset: an array (q n h k)."""
    queries, keys = query.shape[1], key.shape[1]
    of_pairs = offsets[np.arange(keys) - np.arange(queries)[:, None] + queries - 1]
    logits = jnp.einsum('bqhk,bqnhk->bhqn', query, key[:, None] + of_pairs)
    weights = jax.nn.softmax(logits / math.sqrt(query.shape[-1]), axis=-1)
    return jnp.einsum('bhqn,bnhk->bqhk', weights, value)


@pytest.mark.parametrize('queries', [5, 3])
def test_weights_have_logits_of_the_offsets_to_all_keys(queries):
    query, offsets = QUERY[:, :queries], OFFSETS[: queries + 4]
    expected = by_definition(query, KEY, VALUE, offsets)
    weights = attention.attention_weights(query, KEY, offsets)
    mixed = jnp.einsum('bhqn,bnhk->bqhk', weights, VALUE)
    np.testing.assert_allclose(mixed, expected, atol=1e-6)


@pytest.mark.parametrize('queries', [5, pytest.param(3, marks=pytest.mark.gate)])
@pytest.mark.parametrize(
    'implementation, relative',
    [('xla', None), ('xla', OFFSETS), ('blockwise', None)],
    ids=['xla', 'relative', 'blockwise'],
)
def test_each_implementation_has_the_result_and_gradient_of_the_definition(
    implementation, queries, relative, monkeypatch
):
    monkeypatch.setattr(attention, '_MAX_QUERIES', 2)  # 5 queries: two blocks, and one in a third
    arguments = [QUERY[:, :queries], KEY, VALUE]
    arguments += [] if relative is None else [relative[: queries + 4]]

    def attend(query, key, value, relative=None):
        options = {'relative': relative, 'implementation': implementation}
        return attention.attend(query, key, value, **options)

    def defined(query, key, value, relative=None):
        offsets = jnp.zeros((queries + 4, 4, 8)) if relative is None else relative
        return by_definition(query, key, value, offsets)

    def with_gradient(function):
        def total(*x):
            mixed = function(*x)
            return mixed.std(), mixed

        places = (0, 1, 2, 3)[: len(arguments)]
        return jax.jit(jax.grad(total, places, has_aux=True))(*arguments)

    found, expected = map(jax.tree.leaves, (with_gradient(attend), with_gradient(defined)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize('implementation', ['xla', 'blockwise'])
def test_logits_are_made_and_scaled_in_float32(implementation):
    """Half a percent of bfloat16's rounding of weights and result; rounded logits give 3 %."""
    low = [x.astype(jnp.bfloat16) for x in 9 * QUERY_72]
    exact = attention.attend(*(x.astype(jnp.float32) for x in low), implementation='xla')
    result = attention.attend(*low, implementation=implementation).astype(jnp.float32)
    assert jnp.abs(result - exact).max() < 0.005 * jnp.abs(exact).max()


OFFSETS_72 = jax.random.normal(jax.random.key(2), (9, 4, 72))


@pytest.mark.parametrize('relative', [False, True])
def test_the_backward_pass_keeps_nothing_of_all_queries_by_all_keys_in_float32(relative):
    low = [x.astype(jnp.bfloat16) for x in (*QUERY_72, *([OFFSETS_72] if relative else []))]

    def attend(query, key, value, relative=None):
        return attention.attend(query, key, value, relative=relative, implementation='xla')

    pull = jax.vjp(attend, *low)[1]
    kept = [x.dtype.name for x in jax.tree.leaves(pull) if x.shape == (2, 4, 5, 5)]
    assert kept == ['bfloat16']


@pytest.mark.parametrize('queries, keys', [(2048, 2048), (2049, 1025)])
def test_no_program_for_a_long_sequence_has_all_queries_by_all_keys(queries, keys):
    query, key = (jax.ShapeDtypeStruct((1, n, 2, 4), 'float32') for n in (queries, keys))

    def total(query, key, value):
        return attention.attend(query, key, value, implementation='blockwise').sum()

    program = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(query, key, key))
    sizes = [math.prod(map(int, s.split(','))) for s in re.findall(r'f32\[([\d,]+)\]', program)]
    assert max(sizes) < queries * keys


def test_few_queries_are_computed_without_a_kernel():
    """Those of class tokens: no kernel of a GPU or a TPU is made for them."""
    for implementation in ('cudnn', 'splash', 'blockwise'):
        mixed = attention.attend(QUERY[:, :1], KEY, VALUE, implementation=implementation)
        assert (mixed == attention.attend(QUERY[:, :1], KEY, VALUE)).all()


@pytest.mark.gate
def test_padding_to_an_even_length_changes_neither_result_nor_gradient(monkeypatch):
    """What cuDNN is given at odd lengths, computed by XLA."""
    plain = jax.nn.dot_product_attention

    def by_xla(*arguments, implementation, **options):
        assert implementation == 'cudnn'
        return plain(*arguments, implementation='xla', **options)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', by_xla)
    padded = functools.partial(attention.attend, implementation='cudnn')
    arguments = QUERY, KEY, VALUE
    np.testing.assert_allclose(padded(*arguments), plain(*arguments), atol=1e-6)
    gradients = [
        jax.grad(lambda *a, f=f: f(*a).std(), argnums=(0, 1, 2))(*arguments)
        for f in (plain, padded)
    ]
    for expected, actual in zip(*gradients, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_kernel_of_cudnn_that_does_not_compile_is_logged(monkeypatch, caplog):
    attention.supports_cudnn.cache_clear()
    assert attention.supports_cudnn(5, 4, 8, 'bfloat16')  # for GPUs that are not attached
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')  # this machine has no cuDNN
    attention.supports_cudnn.cache_clear()
    assert not attention.supports_cudnn(5, 4, 8, 'bfloat16')
    assert 'cuDNN' in caplog.text and '5 tokens' in caplog.text
    attention.supports_cudnn.cache_clear()


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(attention, '_INTERPRET', True)


def mesh_of(data, fsdp=1, tensor=1):
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    return meshes.make_mesh(config, jax.devices()[: data * fsdp * tensor])


def with_gradients(implementation, mesh, arguments):
    """On this mesh, what it gives and its gradients, of a sum in which each number weighs alike."""

    def total(query, key, value):
        mixed = attention.attend(query, key, value, implementation=implementation)
        return jnp.sin(mixed.astype(jnp.float32)).sum(), mixed

    gradient = meshes.with_mesh(mesh, jax.grad(total, argnums=(0, 1, 2), has_aux=True))
    return jax.jit(gradient)(*jax.device_put(arguments, meshes.replicated(mesh)))


@pytest.mark.parametrize(
    'length, shape',
    [
        pytest.param(5, (1, 1, 1), marks=pytest.mark.gate),  # one block that is filled up
        pytest.param(1025, (2, 2, 2), marks=pytest.mark.gate),  # two, on eight devices
        pytest.param(5, (8, 1, 1), marks=pytest.mark.gate),  # more devices than examples
        pytest.param(5, (1, 1, 8), marks=pytest.mark.gate),  # more devices than heads
    ],
)
@pytest.mark.usefixtures('interpreted')
def test_splash_gives_what_xla_does_on_every_mesh(length, shape):
    arguments = [*jax.random.normal(jax.random.key(0), (3, 4, length, 2, 12))]
    found, mixed = with_gradients('splash', mesh_of(*shape), arguments)
    expected, same = with_gradients('xla', mesh_of(1), arguments)
    np.testing.assert_allclose(mixed, same, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.usefixtures('interpreted')
def test_splash_makes_logits_in_float32():
    """Half a percent of bfloat16's rounding of the result; rounded logits give 3 %."""
    low = 9 * jax.random.normal(jax.random.key(1), (3, 2, 5, 4, 64), jnp.bfloat16)
    exact = attention.attend(*(x.astype(jnp.float32) for x in low), implementation='xla')
    splash = functools.partial(attention.attend, implementation='splash')
    result = jax.jit(meshes.with_mesh(mesh_of(1), splash))(*low).astype(jnp.float32)
    assert jnp.abs(result - exact).max() < 0.005 * jnp.abs(exact).max()


@pytest.mark.usefixtures('interpreted')
def test_each_device_mixes_its_own_examples_and_heads():
    mesh, split = mesh_of(2, 2, 2), jax.sharding.PartitionSpec(('data', 'fsdp'), None, 'tensor')
    sharding = jax.sharding.NamedSharding(mesh, split)
    arguments = [jax.ShapeDtypeStruct((4, 5, 2, 8), 'float32', sharding=sharding)] * 3
    splash = functools.partial(attention.attend, implementation='splash')
    compiled = jax.jit(meshes.with_mesh(mesh, splash)).lower(*arguments).compile()
    assert compiled.output_shardings.is_equivalent_to(sharding, 4)
    assert not [kind for kind in ('all-gather', 'all-to-all') if kind in compiled.as_text()]


def test_a_higher_precision_of_products_has_no_kernel():
    """A TPU's compiler refuses it in bfloat16."""
    splash = functools.partial(attention.attend, implementation='splash')
    traced = meshes.with_mesh(mesh_of(1), splash)
    with jax.default_matmul_precision('highest'):
        assert 'pallas_call' not in str(jax.make_jaxpr(traced)(*[QUERY] * 3))
    assert 'pallas_call' in str(jax.make_jaxpr(traced)(*[QUERY] * 3))


@pytest.mark.parametrize(
    'remat',
    [
        pytest.param('dots', marks=pytest.mark.nightly),
        pytest.param('block', marks=pytest.mark.gate),
    ],
)
def test_a_network_of_long_sequences_is_trained_on_tpus_by_their_kernel(remat):
    """On four chips: forward and two parts of the backward pass, in the loop over the blocks; what
    the forward kernel gives is made once where products are kept. No array of n by n is there.
    """
    chips = ahead_of_time.find_topology('v5e:2x2')
    mesh = meshes.make_mesh(MeshConfig(data=2, tensor=2), chips.devices)
    config = tiny.model(image_size=(144, 144), patch_size=(4, 4), num_heads=2, num_classes=3)
    tokens = config.num_tokens
    assert tokens == 1297
    compute = Compute(dtype='bfloat16', remat=remat)
    model = build(config, compute=compute, platform='tpu')
    params = jax.eval_shape(model.init, jax.random.key(0))
    everywhere, split = meshes.replicated(mesh), meshes.batch_sharding(mesh)
    params = jax.tree.map(lambda x: x.update(sharding=everywhere), params)
    images = jax.ShapeDtypeStruct((4, 144, 144, 3), 'float32', sharding=split)
    loss = meshes.with_mesh(mesh, jax.grad(lambda p, x: model.apply(p, x).std()))
    text = ahead_of_time.compile_for(chips, jax.jit(loss).lower(params, images)).as_text()
    assert text.count('"tpu_custom_call"') == (4 if remat == 'block' else 3)
    assert f'{tokens},{tokens}' not in text and '1536,1536' not in text  # nor as filled up
