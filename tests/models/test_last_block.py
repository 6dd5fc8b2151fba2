"""Where the head reads the class token alone, the last block is computed for it alone."""

import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax.base.tree_names import named_leaves
from vit_jax.models import Compute, build, count_multiply_adds

PARALLEL = {'parallel': True, 'qk_norm': True, 'norm': 'rms', 'qkv_bias': False}
# Each has other tokens, skip connections or positions.
FIRST, *SELDOM = [
    {'positions': 'rope', 'registers': 2, 'pool': 'cls_dist'},
    {'blocks_without_skips': (2,), 'positions': 'relative', 'layer_scale': 0.1, 'gelu': None},
    {'depth': 1},
    {'pre_norm': True, 'class_tokens': 2, 'final_norm': 'after_pool'},
    {'positions_at': 'every_layer_shared', 'representation_size': 6},
    {'positions_at': 'every_layer', **PARALLEL},
]


GPU = {'layout': 'flat', 'attention': 'xla', 'unroll': 3}
OTHERS = [
    {'layout': 'batched', 'attention': 'xla', 'remat': 'dots'},
    {'attention': 'blockwise', 'unroll': 2, 'remat': 'block'},
]


@pytest.mark.parametrize(
    'of, compute',
    [
        pytest.param({}, {}, marks=pytest.mark.gate),
        pytest.param(FIRST, {}, marks=pytest.mark.gate),
        pytest.param({}, GPU, marks=pytest.mark.gate),
        *(pytest.param(of, {}, marks=pytest.mark.nightly) for of in SELDOM),
        *(pytest.param({}, compute, marks=pytest.mark.nightly) for compute in OTHERS),
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
    left_out = count_multiply_adds(config) - count_multiply_adds(config, last_block='class_tokens')
    n, d, hidden = config.num_tokens, config.width, config.mlp_dim
    query_and_out, mlp, mixing = 2 * d * d, 2 * d * hidden, 2 * n * d
    assert left_out == (n - 1) * (query_and_out + mlp + mixing)


@pytest.mark.parametrize(
    'last_block', [pytest.param('whole', marks=pytest.mark.gate), 'class_tokens']
)
def test_parameters_of_another_depth_are_rejected(last_block):
    model = build(tiny.model(depth=2), compute=Compute(last_block=last_block))
    _, deeper = tiny.built(tiny.model(depth=4))
    with pytest.raises(ValueError, match=r'\b4\b'):
        model.apply(deeper, tiny.images(1))
