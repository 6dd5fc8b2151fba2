import numpy as np
import pytest
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from vit_jax.base.errors import UserError
from vit_jax.evaluation import probes
from vit_jax.evaluation.probes import Labeled, LogisticConfig

X, Y = make_classification(
    900, 12, n_informative=6, n_classes=4, n_clusters_per_class=1, flip_y=0.1, random_state=0
)
X, Y = (3 * X + np.arange(12)).astype(np.float32), 2 * Y + 1  # neither standardized nor 0 to 3
TRAIN, TEST = Labeled(X[:600], Y[:600]), Labeled(X[600:], Y[600:])


def test_neighbors_vote_as_scikit_learns_do():
    counts = 20, 1, 7
    found = probes.evaluate_knn(TRAIN, TEST, neighbors=counts)
    for neighbors in counts:
        reference = KNeighborsClassifier(
            neighbors, metric='cosine', weights=lambda far: np.exp(-far / probes.TEMPERATURE)
        ).fit(*TRAIN)
        assert found[neighbors] == reference.score(*TEST) and 0.5 < found[neighbors] < 1
        alone = probes.evaluate_knn(TRAIN, TEST, neighbors=(neighbors,))
        assert alone == {neighbors: found[neighbors]}
    assert len({*found.values()}) == 3


def test_an_image_is_its_own_neighbor_at_any_length():
    longer = TRAIN._replace(features=5 * TRAIN.features)
    assert probes.evaluate_knn(TRAIN, longer, neighbors=(1,)) == {1: 1.0}
    for neighbors in 0, 601:
        with pytest.raises(UserError, match=rf'neighbors=\(1, {neighbors}\)'):
            probes.evaluate_knn(TRAIN, TEST, neighbors=(1, neighbors))


@pytest.mark.gate
def test_logistic_weights_are_scikit_learns():
    l2 = 30.0
    x = (TRAIN.features - TRAIN.features.mean(axis=0)) / TRAIN.features.std(axis=0)
    reference = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=5000).fit(x, TRAIN.labels)
    config = LogisticConfig(l2=(l2,), tolerance=1e-6)
    fit = probes.fit_logistic(
        np.pad(x, ((0, 0), (0, 1)), constant_values=1.0),
        TRAIN.labels // 2,
        l2=l2 / 600,
        num_classes=4,
        max_iterations=200,
        tolerance=1e-6,
    )
    assert fit.max_gradient <= 1e-6
    weights = np.asarray(fit.weights)
    # a gradient of 1e-6 of the mean loss, in float32
    np.testing.assert_allclose(weights[:-1].T, reference.coef_, atol=2e-3)
    bias = weights[-1] - weights[-1].mean()  # softmax knows differences only
    np.testing.assert_allclose(bias, reference.intercept_ - reference.intercept_.mean(), atol=2e-3)
    test = (TEST.features - TRAIN.features.mean(axis=0)) / TRAIN.features.std(axis=0)
    found = probes.evaluate_logistic(TRAIN, TEST, config)
    assert found.accuracy == pytest.approx(reference.score(test, TEST.labels), abs=1 / 300)


@pytest.mark.gate
def test_the_strength_is_chosen_on_a_part_of_the_training_images():
    """Many useless features: only strong regularization generalizes."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 1200)
    features = rng.normal(size=(1200, 300)).astype(np.float32)
    features[:, 0] += 2 * labels
    data = Labeled(features[:600], labels[:600]), Labeled(features[600:], labels[600:])
    chosen = probes.evaluate_logistic(
        *data, LogisticConfig(l2=(1e-2, 300.0), validation_fraction=0.3)
    )
    assert chosen.l2 == 300.0 and chosen.converged
    weak = probes.evaluate_logistic(*data, LogisticConfig(l2=(1e-2,)))
    assert chosen.accuracy > weak.accuracy
    assert chosen == probes.evaluate_logistic(*data, LogisticConfig(l2=(300.0,)))


@pytest.mark.gate
def test_a_fit_that_was_stopped_says_so():
    config = LogisticConfig(l2=(1.0,), max_iterations=3, tolerance=1e-9)
    found = probes.evaluate_logistic(TRAIN, TEST, config)
    assert found.iterations == 3 and not found.converged


def test_a_class_that_was_never_seen_is_never_right():
    labels = TEST.labels.copy()
    labels[:30] = 99
    config = LogisticConfig(l2=(1.0,))
    known = Labeled(TEST.features[30:], TEST.labels[30:])
    known = probes.evaluate_logistic(TRAIN, known, config).accuracy
    found = probes.evaluate_logistic(TRAIN, TEST._replace(labels=labels), config).accuracy
    assert found == pytest.approx(known * 270 / 300)


@pytest.mark.parametrize(
    'values', [{'l2': ()}, {'l2': (1.0, -1.0)}, {'validation_fraction': 0.0}, {'tolerance': 0.0}]
)
def test_a_probe_that_cannot_be_fitted_is_refused(values):
    with pytest.raises(UserError, match=f'LogisticConfig.{next(iter(values))}='):
        LogisticConfig(**values)
