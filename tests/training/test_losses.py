import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.training.losses import LossConfig, correct, make_loss, targets_of

LOGITS = jnp.array([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
LABELS = jnp.array([0, 2])


def loss(kind, smoothing=0.0, labels=LABELS):
    return make_loss(LossConfig(kind=kind, label_smoothing=smoothing))(
        LOGITS, targets_of(labels, 3)
    )


def test_equal_logits_cost_the_logarithm_of_the_number_of_classes():
    assert loss('softmax')[1] == pytest.approx(np.log(3))
    assert loss('sigmoid')[1] == pytest.approx(3 * np.log(2))


def test_losses_are_their_definitions():
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    np.testing.assert_allclose(loss('softmax'), [-np.log(p[0, 0]), -np.log(p[1, 2])], rtol=1e-6)
    q = 1 / (1 + np.exp(-LOGITS))
    expected = -np.log([q[0, 0], q[1, 2]]) - np.log(
        [(1 - q[0, 1]) * (1 - q[0, 2]), (1 - q[1, 0]) * (1 - q[1, 1])]
    )
    np.testing.assert_allclose(loss('sigmoid'), expected, rtol=1e-6)


@pytest.mark.parametrize('kind', ['softmax', 'sigmoid'])
def test_smoothing_mixes_the_label_with_all_classes_alike(kind):
    uniform = jnp.full((2, 3), 1 / 3)
    expected = 0.9 * loss(kind) + 0.1 * loss(kind, labels=uniform)
    np.testing.assert_allclose(loss(kind, 0.1), expected, rtol=1e-6)


def test_a_prediction_is_correct_where_the_highest_logit_is_the_label():
    assert correct(LOGITS, targets_of(jnp.array([0, 1]), 3)).tolist() == [1, 0]
    shared = jnp.array([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])
    np.testing.assert_allclose(correct(LOGITS, shared), [0.7, 0.0])
