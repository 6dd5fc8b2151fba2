"""Episodes: what is drawn, and what two classifiers make of it."""

import dataclasses

import numpy as np
import pytest

from vit_jax.base.errors import UserError
from vit_jax.evaluation import episodes
from vit_jax.evaluation.episodes import EpisodesConfig
from vit_jax.evaluation.probes import Labelled

LABELS = np.repeat([3, 5, 6, 8], [10, 20, 20, 30])
RNG = np.random.default_rng(0)
TASK = {'ways': 3, 'shots': 2, 'queries': 4, 'episodes': 50, 'seed': 1}


def test_an_episode_has_so_many_of_each_class_and_tests_on_others():
    for learned, tested in episodes.draw(LABELS, **TASK):
        assert not {*learned} & {*tested}
        for images, each in (learned, 2), (tested, 4):
            assert len({*images}) == len(images)
            counts = np.unique(LABELS[images], return_counts=True)[1]
            assert counts.tolist() == [each] * 3
        assert {*LABELS[learned]} == {*LABELS[tested]}


def test_the_first_episodes_of_many_are_those_of_few_and_a_seed_changes_them():
    few, many = ([*episodes.draw(LABELS, **TASK | {'episodes': n})][:3] for n in (3, 50))
    other = [*episodes.draw(LABELS, **TASK | {'seed': 2})][:3]
    np.testing.assert_equal(few, many)
    assert any((a[0] != b[0]).any() for a, b in zip(few, other, strict=True))


@pytest.mark.parametrize('classifier', ['centroid', 'ridge'])
def test_what_is_apart_is_told_apart_and_what_is_not_is_chance(classifier):
    apart = RNG.normal(size=(9, 64))[LABELS] + 0.01 * RNG.normal(size=(len(LABELS), 64))
    result = episodes.evaluate(apart, LABELS, classifier=classifier, **TASK)
    assert (result.mean, result.interval, result.accuracies.shape) == (1.0, 0.0, (50,))
    noise = RNG.normal(size=(len(LABELS), 9))
    many = TASK | {'episodes': 500}
    result = episodes.evaluate(noise, LABELS, classifier=classifier, **many)
    # Images are drawn again and again, which the interval does not know of: twice as wide.
    assert abs(result.mean - 1 / 3) < 3 * result.interval


def test_the_centroid_is_that_of_scikit_learn():
    neighbors = pytest.importorskip('sklearn.neighbors')
    x, labels = 100 + RNG.normal(size=(30, 7)), np.arange(30) % 4
    tested = 100 + RNG.normal(size=(200, 7))
    expected = neighbors.NearestCentroid().fit(x, labels).predict(tested)
    found = episodes._nearest_centroid(Labelled(x, labels), tested)
    np.testing.assert_array_equal(found, expected)


def test_the_interval_shrinks_with_the_root_of_the_number_of_episodes():
    noise = RNG.normal(size=(len(LABELS), 5))
    one, four = (episodes.evaluate(noise, LABELS, **TASK | {'episodes': n}) for n in (500, 2000))
    deviation = one.accuracies.std(ddof=1)
    np.testing.assert_allclose(one.interval, 1.96 * deviation / 500**0.5)
    assert 0.45 < four.interval / one.interval < 0.55


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(UserError, match=r'ways=5: of 4 classes 4 have 6 images or more'):
        episodes.evaluate(np.ones((80, 2)), LABELS, **TASK | {'ways': 5})
    with pytest.raises(UserError, match=r'ways=3: of 4 classes 1 have 25 images .*queries=23'):
        episodes.evaluate(np.ones((80, 2)), LABELS, **TASK | {'queries': 23})


@pytest.mark.parametrize(
    'values, why',
    [
        ({'ways': 1}, 'ways=1: expected at least 2'),
        ({'shots': 0}, r'shots=\(0,\): expected at least 1'),
        ({'queries': 0}, 'queries=0: expected at least 1'),
        ({'episodes': 0}, 'episodes=0: expected at least 2'),
        ({'episodes': 1}, 'episodes=1: expected at least 2'),
        ({'seed': -1}, 'seed=-1: expected at least 0'),
        ({'l2': 0.0}, 'l2=0.0: expected more than 0'),
    ],
)
def test_an_argument_that_makes_no_sense_is_one_sentence(values, why):
    with pytest.raises(UserError, match=f'^{why}$'):
        episodes.evaluate(np.ones((80, 2)), LABELS, **TASK | values)
    if 'l2' not in values:
        with pytest.raises(UserError, match=f'^{why}$'):
            episodes.draw(LABELS, **TASK | values)


def test_a_classifier_there_is_none_of_is_named_and_numbers_of_numpy_are_numbers():
    """Behind the functions that are called, whose types tests check."""
    with pytest.raises(UserError, match=r"^classifier='svm': expected one of centroid, ridge$"):
        episodes._check(**TASK, classifier='svm')
    episodes._check(**{name: np.int64(value) for name, value in TASK.items()})


def test_the_l2_of_the_ridge_classifier_is_asked_for_and_a_centroid_has_none():
    noise, names = RNG.normal(size=(len(LABELS), 9)), tuple('abcdefghi')

    def found(classifier, l2):
        config = EpisodesConfig(ways=3, shots=(2,), episodes=50, queries=4, classifier=classifier)
        return episodes.report(Labelled(noise, LABELS), names, config, l2=l2)['accuracy']

    assert found('ridge', 1e-3) != found('ridge', 1024.0)
    assert found('centroid', 1e-3) == found('centroid', 1024.0)


def test_a_report_draws_from_the_classes_that_are_named():
    names = tuple('abcdefghi')
    test = Labelled(np.eye(9)[LABELS], LABELS)
    config = EpisodesConfig(ways=2, shots=(1, 3), queries=5, episodes=4, classes=('f', 'g'))
    result = episodes.report(test, names, config)
    assert (result['mean'], result['classes']) == ({'1': 1.0, '3': 1.0}, ['f', 'g'])
    assert len(result['accuracy']['3']) == 4
    for classes, why in {
        ('f', 'z'): "there is no class 'z' in the data",
        ('f',): 'ways=2: of 1 classes 1 have 8 images or more',
    }.items():
        with pytest.raises(UserError, match=why):
            wrong = dataclasses.replace(config, classes=classes)
            episodes.require_possible(LABELS, names, wrong)
