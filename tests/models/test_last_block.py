"""Where the head reads the class token alone, the last block is computed for it alone."""

import math

import jax
import numpy as np
import optax
import pytest

from tests import tiny
from vit_jax.base.tree_names import named_leaves
from vit_jax.models import Compute, build, multiply_adds

PARALLEL = {'parallel': True, 'qk_norm': True, 'norm': 'rms', 'qkv_bias': False}
OFTEN = [
    {},
    {'positions': 'rope', 'registers': 2, 'pool': 'cls_dist'},
    {'blocks_without_skips': (2,), 'positions': 'relative', 'layer_scale': 0.1, 'gelu': None},
]
SELDOM = [
    {'depth': 1},
    {'pre_norm': True, 'class_tokens': 2, 'final_norm': 'after_pool'},
    {'positions_at': 'every_layer_shared', 'representation_size': 6},
    {'positions_at': 'every_layer', **PARALLEL},
]


@pytest.mark.parametrize(
    'of, compute',
    [
        *((of, {}) for of in OFTEN),
        ({}, {'layout': 'flat', 'attention': 'xla', 'unroll': 3}),
        *(pytest.param(of, {}, marks=pytest.mark.full) for of in SELDOM),
        *(
            pytest.param({}, compute, marks=pytest.mark.full)
            for compute in (
                {'layout': 'batched', 'attention': 'xla', 'remat': 'dots'},
                {'attention': 'blockwise', 'unroll': 2, 'remat': 'block'},
            )
        ),
    ],
)
def test_what_is_read_and_all_gradients_are_those_of_the_whole_block(of, compute):
    """Within rounding, as products of other numbers of rows are summed in another order."""
    images, found = tiny.images(4), []
    for last_block in 'whole', 'class_tokens':
        model, params = tiny.built(
            tiny.model(**of), compute=Compute(last_block=last_block, **compute)
        )

        def loss(params, model=model):
            logits = model.apply(params, images)
            return logits.std(), logits

        gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
        found.append({'logits': logits, **named_leaves(gradient)})
    whole, read = found
    for name, leaf in read.items():
        np.testing.assert_allclose(leaf, whole[name], rtol=1e-5, atol=2e-6, err_msg=name)


def test_of_the_last_block_the_keys_and_values_alone_are_of_all_tokens():
    config = tiny.model()
    left_out = multiply_adds(config) - multiply_adds(config, last_block='class_tokens')
    n, d, hidden = config.num_tokens, config.width, config.mlp_dim
    query_and_out, mlp, mixing = 2 * d * d, 2 * d * hidden, 2 * n * d
    assert left_out == (n - 1) * (query_and_out + mlp + mixing)


@pytest.mark.full
def test_a_loop_keeps_no_second_copy_of_parameters_or_gradients():
    """Nor for the block after it. Gradients are most of this program's memory."""
    config = tiny.model(width=64, mlp_dim=256, depth=8)
    taken = []
    for last_block in 'whole', 'class_tokens':
        model = build(config, compute=Compute(last_block=last_block, remat='dots'))
        params = jax.eval_shape(model.init, jax.random.key(0))
        gradient = jax.grad(lambda p, x, m=model: m.apply(p, x).std())
        step = jax.jit(lambda p, x, g=gradient: optax.tree.norm(g(p, x)))
        program = step.lower(params, tiny.images(2)).compile()
        taken.append(program.memory_analysis().temp_size_in_bytes)
    size = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(params))
    assert size < taken[0] < 2 * size
    assert taken[1] - taken[0] < 0.1 * size


def test_without_a_loop_stacked_parameters_are_split_once():
    """So that no gradient of one block is added to an array of those of all blocks."""
    compute = Compute(last_block='class_tokens', unroll=3, layout='flat', attention='xla')
    model = build(tiny.model(), compute=compute)
    params = jax.eval_shape(model.init, jax.random.key(0))
    gradient = jax.grad(lambda p: model.apply(p, tiny.images(2)).std())
    assert 'dynamic_slice' not in str(jax.make_jaxpr(gradient)(params))


@pytest.mark.parametrize(
    'last_block, message',
    [('whole', r'\b4\b'), ('class_tokens', 'parameters of 4 blocks, the model has 2')],
)
def test_parameters_of_another_depth_are_refused(last_block, message):
    model = build(tiny.model(depth=2), compute=Compute(last_block=last_block))
    deeper = build(tiny.model(depth=4)).init(jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        model.apply(deeper, tiny.images(1))
