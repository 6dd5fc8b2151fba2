import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base.errors import UserError
from vit_jax.training.losses import LossConfig, make_loss, of_any, targets_of

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


def test_where_any_class_is_right_an_image_without_one_is_still_a_number():
    labels = jnp.array([[1, 1, 0], [0, 0, 0]])
    found = of_any(make_loss(LossConfig()))(LOGITS, targets_of(labels, 3))
    logs = LOGITS[0] - np.log(np.exp(LOGITS[0]).sum())
    np.testing.assert_allclose(found, [-(logs[0] + logs[1]) / 2, 0], rtol=1e-6)


@pytest.mark.parametrize('kind', ['softmax', 'sigmoid'])
def test_where_any_class_is_right_an_image_of_one_class_has_the_same_loss(kind):
    """So evaluations of images with one class and with several share a function."""
    found = of_any(make_loss(LossConfig(kind=kind)))(LOGITS, targets_of(LABELS, 3))
    np.testing.assert_array_equal(found, loss(kind))


@pytest.mark.parametrize('kind', ['softmax', 'sigmoid'])
def test_smoothing_mixes_the_label_with_all_classes_alike(kind):
    uniform = jnp.full((2, 3), 1 / 3)
    expected = 0.9 * loss(kind) + 0.1 * loss(kind, labels=uniform)
    np.testing.assert_allclose(loss(kind, 0.1), expected, rtol=1e-6)


def test_a_function_is_its_own_loss_and_gives_one_number_an_example():
    def far(logits, targets):
        return jnp.abs(logits - targets).sum(axis=-1)

    targets = targets_of(LABELS, 3)
    np.testing.assert_array_equal(make_loss(far)(LOGITS, targets), far(LOGITS, targets))
    for wrong, shape in (jnp.mean, r'\(\)'), (jnp.abs, r'\(2, 3\)'):
        with pytest.raises(
            UserError,
            match=f'test_losses.py, line .* gives shape {shape}.*one number for each example',
        ):
            make_loss(lambda logits, targets: wrong(logits))(LOGITS, targets)  # noqa: B023


def test_smoothing_leaves_something_of_the_label():
    for share in -0.1, 1.0, float('nan'):
        with pytest.raises(UserError, match='LossConfig.label_smoothing=.*at least 0'):
            LossConfig(label_smoothing=share)
