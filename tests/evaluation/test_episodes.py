"""Episodes: what is drawn, and what two classifiers make of it."""

import numpy as np
import pytest

from vit_jax.base.errors import UserError
from vit_jax.evaluation import episodes
from vit_jax.evaluation.episodes import EpisodesConfig
from vit_jax.evaluation.probes import Labeled

LABELS = np.repeat([0, 1, 2, 3], [10, 20, 20, 30])
NAMES = 'abcd'
RNG = np.random.default_rng(0)
APART = Labeled(RNG.normal(size=(4, 64))[LABELS] + 0.01 * RNG.normal(size=(80, 64)), LABELS)
NOISE = Labeled(RNG.normal(size=(80, 9)), LABELS)


def config(**changes):
    values = {'ways': 3, 'shots': (2,), 'queries': 4, 'episodes': 50, 'seed': 1}
    return EpisodesConfig(**values | changes)


def evaluate(images, **changes):
    (result,) = episodes.evaluate(images, NAMES, config(**changes)).values()
    return result


def test_an_episode_has_so_many_of_each_class_and_tests_on_others():
    for learned, tested in episodes.draw_episodes(LABELS, NAMES, config(), shots=2):
        assert not {*learned} & {*tested}
        for images, each in (learned, 2), (tested, 4):
            assert len({*images}) == len(images)
            counts = np.unique(LABELS[images], return_counts=True)[1]
            assert counts.tolist() == [each] * 3
        assert {*LABELS[learned]} == {*LABELS[tested]}


def test_the_first_episodes_of_many_are_those_of_few_and_a_seed_changes_them():
    def first(**changes):
        return [*episodes.draw_episodes(LABELS, NAMES, config(**changes), shots=2)][:3]

    few, many, other = first(episodes=3), first(episodes=50), first(seed=2)
    np.testing.assert_equal(few, many)
    assert any((a[0] != b[0]).any() for a, b in zip(few, other, strict=True))


@pytest.mark.parametrize('classifier', ['centroid', 'ridge'])
def test_what_is_apart_is_told_apart_and_what_is_not_is_chance(classifier):
    result = evaluate(APART, classifier=classifier)
    assert (result.mean, result.interval, result.accuracies.shape) == (1.0, 0.0, (50,))
    result = evaluate(NOISE, classifier=classifier, episodes=500)
    # Images are drawn again and again, which the interval does not know of: twice as wide.
    assert abs(result.mean - 1 / 3) < 3 * result.interval
    deviation = result.accuracies.std(ddof=1)
    np.testing.assert_allclose(result.interval, 1.96 * deviation / 500**0.5)


def test_the_centroid_is_that_of_scikit_learn():
    neighbors = pytest.importorskip('sklearn.neighbors')
    x, labels = 100 + RNG.normal(size=(30, 7)), np.arange(30) % 4
    tested = 100 + RNG.normal(size=(200, 7))
    expected = neighbors.NearestCentroid().fit(x, labels).predict(tested)
    found = episodes.fit_centroids(Labeled(x, labels)).predict(tested)
    np.testing.assert_array_equal(found, expected)


def test_the_ridge_classifier_uses_the_l2_and_the_centroid_does_not():
    def found(classifier, l2):
        task = config(classifier=classifier)
        return episodes.evaluate(NOISE, NAMES, task, l2=l2)[2].accuracies.tolist()

    assert found('ridge', 1e-3) != found('ridge', 1024.0)
    assert found('centroid', 1e-3) == found('centroid', 1024.0)


def test_a_report_has_the_classes_to_draw_from_and_each_number_of_shots():
    task = config(ways=2, shots=(1, 3), episodes=4, classes=('b', 'd'))
    result = episodes.report_episodes(task, episodes.evaluate(APART, NAMES, task))
    assert (result['mean'], result['classes']) == ({'1': 1.0, '3': 1.0}, ['b', 'd'])
    assert len(result['accuracy']['3']) == 4


@pytest.mark.parametrize(
    'changes, name',
    [
        ({'ways': 5}, 'ways=5'),
        ({'queries': 23}, 'queries=23'),
        ({'classes': ('b', 'z')}, "'z'"),
        ({'classes': ('b', 'c')}, 'ways=3'),
        *(({'shots': shots}, 'EpisodesConfig.shots') for shots in ((), (0,), (1, 1))),
        ({'episodes': 1}, 'EpisodesConfig.episodes'),
    ],
)
def test_what_cannot_be_drawn_is_named(changes, name):
    with pytest.raises(UserError, match=name):
        evaluate(NOISE, **changes)
