"""The order of examples and their random numbers."""

import collections
import itertools

import numpy as np
import pytest
import scipy.stats

from vit_jax.data import sampling
from vit_jax.data.image_preprocessing import InceptionCrop

IMAGENET = 1_281_167


def deviation(counts, expected):
    """How many standard deviations chi-square is above its mean for equally probable events."""
    freedom = len(counts) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return (chi_square - freedom) / np.sqrt(2 * freedom)


def pairs(examples):
    return [*zip(examples.index.tolist(), examples.epoch.tolist(), strict=True)]


def test_numbers_are_those_of_splitmix64():
    """The published sequence of the seed 1234567."""
    drawn = sampling.draw_bits(np.array([1234567], np.uint64), range(5))
    assert drawn.tolist() == [
        [6457827717110365317, 3203168211198807973, 9817491932198370423]
        + [4593380528125082431, 16408922859458223821]
    ]


@pytest.mark.parametrize(
    'sizes',
    [
        pytest.param(np.arange(1, 5001), marks=pytest.mark.gate, id='all'),
        pytest.param(np.r_[1:301, 301:5001:97], id='some'),
    ],
)
def test_each_epoch_has_each_example_once(sizes):
    """All sizes at once: the permutation may have another size for each position."""
    size_of = np.repeat(sizes, sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    places = sampling.permute(positions, size_of, sampling.hash_numbers(7, size_of))
    np.testing.assert_array_equal(np.sort(size_of * 5001 + places), size_of * 5001 + positions)


@pytest.mark.parametrize('count', [2, 3, 4, 5, 6, 7])
def test_every_order_is_equally_frequent(count):
    """Within 5 standard deviations of chi-square: about once in 3 million for true randomness."""
    repeats = 200_000
    keys = sampling.hash_numbers(0, np.arange(repeats))
    places = [sampling.permute(np.full(repeats, n), count, keys) for n in range(count)]
    numbers = np.stack(places).T @ count ** np.arange(count)
    orders = [np.dot(p, count ** np.arange(count)) for p in itertools.permutations(range(count))]
    counts = np.array([np.count_nonzero(numbers == order) for order in orders])
    assert counts.sum() == repeats
    assert abs(deviation(counts, repeats / len(orders))) < 5


@pytest.mark.parametrize('count', [1000, IMAGENET])
def test_an_order_looks_random(count):
    """Places, neighbors and epochs are independent: p-values are not tiny."""
    drawn = min(count, 100_000)
    order = sampling.shuffle(count, seed=3)
    first, second = (order(np.arange(drawn) + epoch * count).index for epoch in (0, 1))
    tenths = [10 * numbers // count for numbers in (first, np.roll(first, 1), second)]
    for one, other in itertools.combinations([10 * np.arange(drawn) // drawn, *tenths], 2):
        table = np.zeros((10, 10))
        np.add.at(table, (one, other), 1)
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-6


def test_orders_and_random_numbers_do_not_change():
    """Recorded on 2026-11-30: others would change every run that is resumed."""
    drawn = sampling.shuffle(10, seed=0)(np.array([0, 1, 9, 10, 11, 19, 29]))
    assert pairs(drawn) == [(7, 0), (5, 0), (9, 0), (2, 1), (3, 1), (7, 1), (6, 2)]
    order = sampling.shuffle(IMAGENET, seed=3)
    first = order(np.array([0, 1, 2, IMAGENET])).index.tolist()
    assert first == [271577, 709478, 1131026, 803187]
    balanced = sampling.balance_classes(np.repeat([0, 1], [3, 50]), balance=0.5, seed=3)
    assert pairs(balanced(np.arange(4))) == [(0, 1), (19, 0), (0, 2), (46, 0)]
    keys = sampling.example_keys(5, drawn)
    assert keys[:2].tolist() == [16314170811427534431, 15180312163832363698]
    assert sampling.make_generators(keys)[0].integers(1000, size=3).tolist() == [704, 294, 838]
    assert InceptionCrop().region((300, 500), keys[0]) == (68, 55, 187, 214)
    assert InceptionCrop().region((301, 200), keys[1]) == (146, 72, 100, 103)


def test_positions_have_the_same_examples_in_any_company():
    labels = np.random.default_rng(0).integers(0, 5, 74)
    balanced = sampling.balance_classes(labels, balance=0.5, seed=3)
    sampler = sampling.repeat(balanced, 3, batch_size=12)
    positions = np.random.default_rng(0).integers(0, 10_000, 500)
    together = sampler(positions)
    for number in range(0, 500, 50):
        alone = sampler(positions[[number]])
        assert (alone.index[0], alone.epoch[0]) == (together.index[number], together.epoch[number])


@pytest.mark.parametrize('repeats, batch_size', [(3, 12), (3, 32), (2, 7)])
def test_a_batch_repeats_its_images_with_other_random_numbers(repeats, batch_size):
    once = sampling.shuffle(37, seed=3)
    distinct = -(-batch_size // repeats)
    repeated = sampling.repeat(once, repeats, batch_size=batch_size)
    drawn = pairs(repeated(np.arange(20 * batch_size)))
    assert len({*drawn}) == len(drawn)  # an epoch and an image give different random numbers
    for step in range(20):
        rows = [index for index, _ in drawn[step * batch_size :][:batch_size]]
        images = once(step * distinct + np.arange(distinct)).index.tolist()
        assert rows == (repeats * images)[:batch_size]
        if len({*images}) == distinct:  # no epoch ends in this batch
            assert all(a != b for a, b in zip(rows, rows[-1:] + rows, strict=False))  # MixUp


@pytest.mark.parametrize('balance', [0.3, 1.0])
def test_classes_are_as_frequent_as_configured_and_their_images_take_turns(balance):
    sizes = np.array([1, 3, 0, 10, 60])
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), sizes))
    sampler = sampling.balance_classes(labels, balance=balance, seed=3)
    drawn = sampler(np.arange(7 * 74))
    shares = sizes ** (1 - balance) * (sizes > 0)
    for epochs in range(1, 8):
        uses = np.bincount(drawn.index[: epochs * 74], minlength=74)
        counts = np.bincount(labels, weights=uses)
        np.testing.assert_allclose(counts, epochs * 74 * shares / shares.sum(), atol=1)
        assert all(np.ptp(uses[labels == number]) <= 1 for number in (0, 1, 3, 4))
    assert max(collections.Counter(pairs(drawn)).values()) == 1
    assert np.count_nonzero(np.diff(labels[drawn.index[:74]])) > 20  # mixed
    first = {index for index in drawn.index[:74].tolist() if labels[index] == 4}  # part of a turn
    assert first != {*np.flatnonzero(labels == 4)[: len(first)]}


def test_classes_of_one_size_have_orders_of_their_own():
    """An epoch uses 30 of the 40 images of each of two classes."""
    labels = np.repeat([0, 1, 2], [10, 40, 40])
    indices = sampling.balance_classes(labels, balance=1.0, seed=3)(np.arange(90)).index
    one, other = ({*indices[(indices >= n) & (indices < n + 40)] - n} for n in (10, 50))
    assert len(one) == len(other) == 30 and one != other


def test_balance_does_not_depend_on_the_last_bit_of_a_power():
    """A quarter of 10 is 2.5: the last bit would decide whether it is rounded up."""
    labels = np.repeat([0, 1], [1, 9])
    positions = np.arange(200)
    expected = sampling.balance_classes(labels, balance=0.5, seed=0)(positions)
    for neighbor in np.nextafter(0.5, [0.0, 1.0]):
        found = sampling.balance_classes(labels, balance=float(neighbor), seed=0)(positions)
        np.testing.assert_array_equal(found.index, expected.index)


def cut(sizes):
    """The first example of each block, and the count of all."""
    return np.cumsum([0, *sizes[:-1]]), int(np.sum(sizes))


@pytest.mark.parametrize('batch_size', [1, 6, 16, 257, 512])
@pytest.mark.parametrize('shuffled_images', [1, 100, 10_000])
def test_blocks_are_shuffled_so_that_each_epoch_has_each_example_once(batch_size, shuffled_images):
    starts, count = cut(np.random.default_rng(0).integers(1, 20, 100))
    windows = sampling.Windows.of(count, batch_size=batch_size, shuffled_images=shuffled_images)
    sampler = sampling.shuffle_blocks(starts, count, windows, seed=3)
    per_window = windows.lanes * windows.size
    positions = np.arange(-(-5 * count // per_window) * per_window)
    examples = sampler(positions)
    assert windows.lanes * windows.rows == batch_size and windows.lanes <= 256
    assert per_window <= max(batch_size, min(count, shuffled_images))
    counts = collections.Counter(pairs(examples))
    assert max(counts.values()) == 1
    assert {pair for pair in counts if pair[1] < 5} == {*itertools.product(range(count), range(5))}
    some = np.random.default_rng(1).permutation(positions)[:500]
    assert pairs(sampler(some)) == [pairs(examples)[n] for n in some]


def test_a_lane_has_successive_blocks_and_orders_differ_by_seed_epoch_lane_and_window():
    starts, count = cut([10] * 64)
    windows = sampling.Windows(lanes=2, rows=4, steps=20)
    find = sampling.shuffle_blocks(starts, count, windows, seed=3)
    examples = find(np.arange(8 * 20 * 8))  # two epochs of 640 examples, each of four windows
    index = examples.index.reshape(8, 20, 2, 4).swapaxes(1, 2).reshape(8, 2, 80)
    for lane in index.reshape(16, 80):
        assert len({*(lane // 10)}) == 8  # complete blocks
    orders = index.reshape(16, 80) % 10
    assert len({order.tobytes() for order in orders}) == 16
    blocks = [np.unique(index[w] // 10).tobytes() for w in range(8)]
    assert len({*blocks}) == 8
    other = sampling.shuffle_blocks(starts, count, windows, seed=4)(np.arange(160))
    assert not (other.index == examples.index[:160]).all()


def test_batches_of_blocks_have_as_many_pairs_of_neighbors_as_random_batches():
    """Blocks of 10 in a window of 1,000: within 5 standard deviations of the expected number."""
    starts, count = cut([10] * 100)
    windows = sampling.Windows(lanes=4, rows=5, steps=50)
    find = sampling.shuffle_blocks(starts, count, windows, seed=0)
    batches = find(np.arange(20 * 50 * 400)).index.reshape(-1, 4, 5) // 10
    same = sum(
        (batches[:, :, i] == batches[:, :, j]).sum() for i, j in itertools.combinations(range(5), 2)
    )
    expected = batches.shape[0] * 4 * 10 * 9 / 249  # a lane has 250 examples of 25 blocks
    assert abs(same - expected) < 5 * np.sqrt(expected)
