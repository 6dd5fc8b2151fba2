"""Attention by libraries' kernels: what cuDNN is given by XLA, and TPUs' kernel interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.models import Compute, attention, build, fused_attention
from vit_jax.parallel import ahead_of_time, meshes
from vit_jax.parallel.meshes import MeshConfig

QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))


@pytest.mark.full
@pytest.mark.parametrize('queries', [5, 1, 4])
def test_padding_to_an_even_length_changes_neither_result_nor_gradient(queries):
    """What cuDNN is given at odd lengths, computed by XLA."""

    def plain(query, key, value):
        return jax.nn.dot_product_attention(query, key, value)

    def padded(query, key, value):
        return fused_attention.attend_at_even_lengths(query, key, value, implementation='xla')

    arguments = QUERY[:, :queries], KEY, VALUE
    np.testing.assert_allclose(padded(*arguments), plain(*arguments), atol=1e-6)
    gradients = [
        jax.grad(lambda *a, f=f: f(*a).std(), argnums=(0, 1, 2))(*arguments)
        for f in (plain, padded)
    ]
    for expected, actual in zip(*gradients, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_auto_falls_back_aloud_where_cudnn_does_not_compile(monkeypatch, caplog):
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')  # this machine has no cuDNN
    fused_attention.cudnn_compiles.cache_clear()
    low = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    result = attention.attend(*low, implementation='auto')
    np.testing.assert_array_equal(result, attention.attend(*low, implementation='xla'))
    assert 'no cuDNN for queries (5, 4, 8), using XLA' in caplog.text
    fused_attention.cudnn_compiles.cache_clear()


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(fused_attention, '_INTERPRET', True)


def mesh_of(data, fsdp=1, tensor=1):
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    return meshes.make_mesh(config, jax.devices()[: data * fsdp * tensor])


def with_gradients(implementation, mesh, arguments):
    """On this mesh, what it gives and its gradients, of a sum in which each number weighs alike."""

    def total(query, key, value):
        mixed = attention.attend(query, key, value, implementation=implementation)
        return jnp.sin(mixed.astype(jnp.float32)).sum(), mixed

    gradient = meshes.traced_on(mesh, jax.grad(total, argnums=(0, 1, 2), has_aux=True))
    return jax.jit(gradient)(*jax.device_put(arguments, meshes.replicated(mesh)))


@pytest.mark.parametrize(
    'queries, keys, shape',
    [
        (5, 5, (1, 1, 1)),  # one block that is filled up
        pytest.param(130, 200, (2, 2, 2), marks=pytest.mark.full),  # two, on eight devices
        pytest.param(256, 128, (1, 1, 1), marks=pytest.mark.full),  # nothing is filled up
        pytest.param(5, 5, (8, 1, 1), marks=pytest.mark.full),  # more devices than examples
        pytest.param(5, 5, (1, 1, 8), marks=pytest.mark.full),  # more devices than heads
    ],
)
@pytest.mark.usefixtures('interpreted')
def test_splash_gives_what_xla_does_on_every_mesh(queries, keys, shape, monkeypatch):
    monkeypatch.setattr(fused_attention, '_BLOCK', 128)
    arguments = [
        jax.random.normal(jax.random.key(seed), (4, length, 2, 12))
        for seed, length in enumerate((queries, keys, keys))
    ]
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
    splash = functools.partial(fused_attention.splash, kept_as='')
    result = splash(*low).astype(jnp.float32)
    assert jnp.abs(result - exact).max() < 0.005 * jnp.abs(exact).max()


@pytest.mark.usefixtures('interpreted')
def test_each_device_mixes_its_own_examples_and_heads():
    mesh, split = mesh_of(2, 2, 2), jax.sharding.PartitionSpec(('data', 'fsdp'), None, 'tensor')
    sharding = jax.sharding.NamedSharding(mesh, split)
    arguments = [jax.ShapeDtypeStruct((4, 5, 2, 8), 'float32', sharding=sharding)] * 3
    splash = functools.partial(attention.attend, implementation='splash')
    compiled = jax.jit(meshes.traced_on(mesh, splash)).lower(*arguments).compile()
    assert compiled.output_shardings.is_equivalent_to(sharding, 4)
    assert not [kind for kind in ('all-gather', 'all-to-all') if kind in compiled.as_text()]


def test_without_a_mesh_several_devices_have_no_kernel():
    """The compiler could not split it."""
    without, blockwise = (
        str(jax.make_jaxpr(functools.partial(attention.attend, implementation=name))(*[QUERY] * 3))
        for name in ('splash', 'blockwise')
    )
    assert without == blockwise


def test_a_higher_precision_of_products_has_no_kernel():
    """A TPU's compiler refuses it in bfloat16."""
    splash = functools.partial(attention.attend, implementation='splash')
    traced = meshes.traced_on(mesh_of(1), splash)
    with jax.default_matmul_precision('highest'):
        assert 'pallas_call' not in str(jax.make_jaxpr(traced)(*[QUERY] * 3))
    assert 'pallas_call' in str(jax.make_jaxpr(traced)(*[QUERY] * 3))


@pytest.mark.parametrize(
    'length, most', [(5, 128), (1025, 1280), (1601, 1792), (2048, 2048), (4097, 4480)]
)
def test_a_sequence_is_filled_up_to_few_even_blocks(length, most):
    size, together = fused_attention._blocks(length)
    assert together == most and together % size == 0 and size % 128 == 0 and size <= 1024


@pytest.mark.full
@pytest.mark.parametrize('remat', ['none', 'dots', 'block'])
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
    loss = meshes.traced_on(mesh, jax.grad(lambda p, x: model.apply(p, x).std()))
    text = ahead_of_time.compile_for(chips, jax.jit(loss).lower(params, images)).as_text()
    assert text.count('"tpu_custom_call"') == (4 if remat == 'block' else 3)
    assert f'{tokens},{tokens}' not in text and '1536,1536' not in text  # nor as filled up
