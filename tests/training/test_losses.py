import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base.errors import UserError
from vit_jax.training.losses import LossConfig, make_loss, make_targets
from vit_jax.training.metrics import example_metrics

LOGITS = jnp.array([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
LABELS = jnp.array([0, 2])


def loss(kind, smoothing=0.0, labels=LABELS):
    return make_loss(LossConfig(kind=kind, label_smoothing=smoothing))(
        LOGITS, make_targets(labels, 3)
    )


def test_losses_are_their_definitions():
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    np.testing.assert_allclose(loss('softmax'), [-np.log(p[0, 0]), -np.log(p[1, 2])], rtol=1e-6)
    q = 1 / (1 + np.exp(-LOGITS))
    expected = -np.log([q[0, 0], q[1, 2]]) - np.log(
        [(1 - q[0, 1]) * (1 - q[0, 2]), (1 - q[1, 0]) * (1 - q[1, 1])]
    )
    np.testing.assert_allclose(loss('sigmoid'), expected, rtol=1e-6)


def test_both_classes_of_a_mixed_image_are_right_with_binary_targets():
    mixed, both = jnp.array([[0.7, 0.0, 0.3]] * 2), jnp.array([[1, 0, 1]] * 2)
    binary = make_loss(LossConfig(kind='sigmoid', binary_targets=True))
    np.testing.assert_array_equal(binary(LOGITS, mixed), loss('sigmoid', labels=both))


@pytest.mark.parametrize('kind', ['softmax', 'sigmoid'])
def test_smoothing_mixes_the_label_with_all_classes_alike(kind):
    uniform = jnp.full((2, 3), 1 / 3)
    expected = 0.9 * loss(kind) + 0.1 * loss(kind, labels=uniform)
    np.testing.assert_allclose(loss(kind, 0.1), expected, rtol=1e-6)


def test_a_function_is_its_own_loss_and_gives_one_number_an_example():
    def far(logits, targets):
        return jnp.abs(logits - targets).sum(axis=-1)

    targets = make_targets(LABELS, 3)
    np.testing.assert_array_equal(make_loss(far)(LOGITS, targets), far(LOGITS, targets))
    with pytest.raises(UserError, match='test_losses.py'):
        make_loss(lambda logits, targets: jnp.abs(logits))(LOGITS, targets)


RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(64, 9)).astype(np.float32)
TRUE = RNG.integers(0, 9, 64)


def test_a_hit_is_a_label_among_the_highest_logits():
    found = example_metrics(jnp.asarray(SCORES), make_targets(jnp.asarray(TRUE), 9))
    rank = (SCORES > SCORES[np.arange(64), TRUE][:, None]).sum(axis=1)
    np.testing.assert_array_equal(found['accuracy'], rank < 1)
    np.testing.assert_array_equal(found['top5_accuracy'], rank < 5)


def test_of_several_labels_one_hit_is_enough_and_shares_of_a_label_are_added():
    logits = -jnp.arange(9.0)[None]  # the first class is the most probable
    for row, accuracy, top5 in (
        ([1, 1, 0, 0, 0, 0, 1, 0, 0], 1, 1),
        ([0, 1, 1, 0, 0, 0, 0, 0, 1], 0, 1),
        ([0.7, 0, 0, 0, 0, 0.3, 0, 0, 0], 0.7, 0.7),
        ([0.25, 0, 0, 0, 0.75, 0, 0, 0, 0], 0.25, 1),
    ):
        found = example_metrics(logits, jnp.asarray([row], jnp.float32))
        np.testing.assert_allclose(found['accuracy'], accuracy)
        np.testing.assert_allclose(found['top5_accuracy'], top5)


def test_devices_measure_their_own_examples():
    """No logits travel: they would be as many as the classes, for each example."""
    mesh = jax.make_mesh((8,), ('data',))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    logits, targets = jax.device_put((SCORES, np.eye(9, dtype=np.float32)[TRUE]), rows)

    def means(logits, targets):
        return jax.tree.map(jnp.mean, example_metrics(logits, targets))

    assert 'all-gather' not in jax.jit(means).lower(logits, targets).compile().as_text()
