import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.training.losses import example_metrics, targets_of

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(64, 9)).astype(np.float32)
LABELS = RNG.integers(0, 9, 64)


def test_a_hit_is_a_label_among_the_highest_logits():
    found = example_metrics(jnp.asarray(LOGITS), targets_of(jnp.asarray(LABELS), 9))
    rank = (LOGITS > LOGITS[np.arange(64), LABELS][:, None]).sum(axis=1)
    np.testing.assert_array_equal(found['accuracy'], rank < 1)
    np.testing.assert_array_equal(found['top5_accuracy'], rank < 5)


def test_a_network_that_knows_nothing_is_no_better_than_chance():
    found = example_metrics(jnp.zeros((9, 9)), jnp.eye(9))
    assert {name: float(hits.sum()) for name, hits in found.items()} == {
        'accuracy': 1,
        'top5_accuracy': 5,
    }


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


def test_five_classes_have_no_top_5():
    assert set(example_metrics(jnp.zeros((2, 5)), jnp.eye(5)[:2])) == {'accuracy'}


def test_devices_measure_their_own_examples():
    """No logits travel: they would be as many as the classes, for each example."""
    mesh = jax.make_mesh((8,), ('data',))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    logits, targets = jax.device_put((LOGITS, np.eye(9, dtype=np.float32)[LABELS]), rows)

    def means(logits, targets):
        return jax.tree.map(jnp.mean, example_metrics(logits, targets))

    assert 'all-gather' not in jax.jit(means).lower(logits, targets).compile().as_text()
