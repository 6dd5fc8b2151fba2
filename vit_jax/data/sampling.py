"""Computes the order of training examples and their random numbers from (seed, position).

All functions take and return arrays, because Python is too slow for one example at a time. Every
number comes from one hash, the mixing function of SplitMix64 ("Fast splittable pseudorandom number
generators", Steele et al. 2014).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.base import Float, Int, Num, UInt64

_GOLDEN = 0x9E3779B97F4A7C15  # the step of SplitMix64
_ROUNDS = 24  # with 12, some orders of 5 to 9 examples were more frequent than others
_MOST_LANES = 256
PADDING = -1  # index of an example that fills up a batch
# Purposes of hashes: equal numbers with different purposes have different hashes.
_ORDER = 0
_CLASS_ORDER = 1
_EXAMPLE = 2
_BLOCK_ORDER = 3
_WINDOW = 4


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples by their index in the source and their epoch, both from 0.

    The epoch is the number of earlier uses of the image. Different uses have different random
    numbers. Without repeats and class balance it is the number of complete passes over the source.
    """

    index: Int[np.ndarray, 'n']  # PADDING: no image
    epoch: Int[np.ndarray, 'n']

    @classmethod
    def of(cls, index: int | Int[np.ndarray, 'n'], epoch: int = 0) -> 'Examples':
        """Returns the examples with this index, or these indices, in one epoch."""
        indices = np.atleast_1d(np.asarray(index, np.int64))
        return cls(indices, np.full(len(indices), epoch))


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Maps positions in the stream of examples to examples."""

    find: Callable[[Int[np.ndarray, 'n']], Examples]
    steps_per_window: int = 1  # the steps whose images are requested together from a bucket

    def __call__(self, positions: Int[np.ndarray, 'n']) -> Examples:
        return self.find(positions)


def mix(state: UInt64[np.ndarray, '...']) -> UInt64[np.ndarray, '...']:
    """Scrambles each number with the output function of SplitMix64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def hash_numbers(*numbers: int | Num[np.ndarray, 'n']) -> UInt64[np.ndarray, 'n']:
    """Hashes a sequence of numbers to 64 bits; of arrays, the numbers at the same place."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mix((state ^ np.asarray(number).astype(np.uint64)) + np.uint64(_GOLDEN))
    return state


def draw_bits(keys: UInt64[np.ndarray, 'n'], indices: range) -> UInt64[np.ndarray, 'n k']:
    """Returns, for each key, the 64 random bits at each of these indices of its stream."""
    steps = np.arange(indices.start + 1, indices.stop + 1, dtype=np.uint64)
    return mix(keys[:, None] + steps * np.uint64(_GOLDEN))


def draw_uniform(keys: UInt64[np.ndarray, 'n'], indices: range) -> Float[np.ndarray, 'n k']:
    """Returns, for each key, the random number (0 to 1) at each of these indices of its stream."""
    return (draw_bits(keys, indices) >> np.uint64(11)) * 2.0**-53


class _Seed(np.random.bit_generator.ISpawnableSeedSequence):
    """Gives a generator of numpy the bits of its state, in a tenth of the time of `default_rng`."""

    def __init__(self, bits: UInt64[np.ndarray, '4']):
        self.bits = bits

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self.bits.view(dtype)[:n_words]

    @functools.cached_property
    def _parent(self) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.bits.tolist())

    def spawn(self, n_children: int) -> Any:
        return self._parent.spawn(n_children)


def make_generators(keys: UInt64[np.ndarray, 'n']) -> list[np.random.Generator]:
    """Makes a source of randomness from each key, for crops that draw their numbers themselves."""
    states = draw_bits(keys, range(4))  # PCG64 has a state of 4 x 64 bits
    generator_of: Any = np.random.PCG64  # its annotation lacks ISeedSequence
    return [np.random.Generator(generator_of(_Seed(bits))) for bits in states]


def permute(
    positions: Int[np.ndarray, 'n'],
    counts: int | Int[np.ndarray, 'n'],
    keys: UInt64[np.ndarray, 'n'],
) -> Int[np.ndarray, 'n']:
    """Maps each position to its place in a random order of `counts` items; a key selects the order.

    A generalized Feistel network permutes the cells of a nearly square table that has at least
    `counts` cells. It is applied again until the cell is below the count ("Ciphers with arbitrary
    finite domains", Black and Rogaway 2002).
    """
    counts = np.broadcast_to(counts, positions.shape).astype(np.uint64)
    rows = np.ceil(np.sqrt(counts)).astype(np.uint64)
    # Even: with odd sides, every round is an even permutation, and half of the orders cannot occur.
    columns = 2 * np.ceil(counts / (2 * rows)).astype(np.uint64)
    cells = positions.astype(np.uint64)
    pending = np.arange(len(cells))
    while len(pending):
        cells[pending] = _network(cells[pending], rows[pending], columns[pending], keys[pending])
        pending = pending[cells[pending] >= counts[pending]]
    return cells.astype(np.int64)


def _network(
    cells: UInt64[np.ndarray, 'n'],
    rows: UInt64[np.ndarray, 'n'],
    columns: UInt64[np.ndarray, 'n'],
    keys: UInt64[np.ndarray, 'n'],
) -> UInt64[np.ndarray, 'n']:
    """Applies the Feistel network once.

    Odd rounds shift the row by a hash of the column, even rounds the column by a hash of the row.
    """
    row, column = np.divmod(cells, columns)
    for number in range(1, _ROUNDS + 1):
        constant = np.uint64(number * _GOLDEN % 2**64)  # each round has its own hash
        if number % 2:
            row = (row + mix((keys ^ column) + constant) % rows) % rows
        else:
            column = (column + mix((keys ^ row) + constant) % columns) % columns
    return row * columns + column


def shuffle(count: int, *, seed: int) -> Sampler:
    """Returns a sampler of an endless stream that shuffles all examples anew in each epoch."""

    def find(positions: Int[np.ndarray, 'n']) -> Examples:
        epoch, place = np.divmod(positions, count)
        return Examples(permute(place, count, hash_numbers(seed, _ORDER, epoch)), epoch)

    return Sampler(find)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Splits a stream of examples into windows, which are shuffled separately.

    The rows of each batch are divided into lanes of `rows` rows each. A window consists of the
    batches of `steps` consecutive steps. Within a window, each lane gets `size` consecutive
    examples of the stream. So each process reads only the lanes that contain its rows.
    """

    lanes: int
    rows: int  # of a batch, for each lane
    steps: int

    @property
    def size(self) -> int:
        """The examples of a lane in a window."""
        return self.rows * self.steps

    @classmethod
    def of(cls, count: int, *, batch_size: int, shuffled_images: int) -> 'Windows':
        """Returns windows of about `shuffled_images` examples in all lanes, at most an epoch."""
        lanes = max(n for n in range(1, _MOST_LANES + 1) if batch_size % n == 0)
        steps = max(1, min(shuffled_images, count) // batch_size)
        return cls(lanes, batch_size // lanes, steps)


def shuffle_blocks(
    starts: Int[np.ndarray, 'b'], count: int, windows: Windows, *, seed: int
) -> Sampler:
    """Returns a sampler of an endless stream that shuffles blocks of neighbors in each epoch.

    The blocks of an epoch are shuffled and concatenated to a stream, and the examples of each lane
    and window of this stream are shuffled. Each example is used once in an epoch.

    Args:
      starts: The index of the first example of each block.
      count: The number of examples.
      windows: The parts of the stream that are shuffled.
      seed: Seed of the order.
    """
    sizes = np.diff(np.append(starts, count))

    @functools.lru_cache(maxsize=4)  # a window has examples of few epochs
    def order(epoch: int) -> tuple[Int[np.ndarray, 'b'], Int[np.ndarray, 'b']]:
        """Returns the first examples of all blocks in their order, and the positions after them."""
        keys = hash_numbers(seed, _BLOCK_ORDER, epoch, np.arange(len(starts)))
        blocks = np.argsort(keys, kind='stable')
        return starts[blocks], np.cumsum(sizes[blocks])

    def find(positions: Int[np.ndarray, 'n']) -> Examples:
        step, row = np.divmod(positions, windows.lanes * windows.rows)
        window, step_in_window = np.divmod(step, windows.steps)
        lane, row_in_lane = np.divmod(row, windows.rows)
        keys = hash_numbers(seed, _WINDOW, window, lane)
        place = permute(step_in_window * windows.rows + row_in_lane, windows.size, keys)
        epoch, place = np.divmod((window * windows.lanes + lane) * windows.size + place, count)
        index = np.zeros_like(place)
        for one in np.unique(epoch):
            of_epoch = epoch == one
            firsts, ends = order(int(one))
            block = np.searchsorted(ends, place[of_epoch], side='right')
            before = np.where(block, ends[block - 1], 0)
            index[of_epoch] = firsts[block] + place[of_epoch] - before
        return Examples(index, epoch)

    return Sampler(find, windows.steps)


def balance_classes(labels: Int[np.ndarray, 'n'], *, balance: float, seed: int) -> Sampler:
    """Returns a sampler of an endless stream in which rare classes are more frequent.

    An epoch has as many examples as there are images, in random order. A class of m images has a
    share of each epoch that is proportional to m^(1 - balance). Its number of examples in all
    epochs so far differs from the exact share by at most 1. The images of a class are used
    equally often, in an order that is shuffled anew in each pass.

    Args:
      labels: The class number of each image.
      balance: 0: classes are as frequent as their images; 1: all classes are equally frequent.
      seed: Seed of the order.
    """
    _, counts = np.unique(labels, return_counts=True)
    by_class = np.argsort(labels, kind='stable')
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])  # of each class, in `by_class`
    shares = np.cumsum(counts ** (1.0 - balance))
    # Rounded, because the last bit of a power depends on the processor.
    shares = np.concatenate([[0], np.rint(shares / shares[-1] * 2**40) / 2**40])
    order = shuffle(len(labels), seed=seed)

    @functools.lru_cache(maxsize=4)  # a batch has examples of few epochs
    def starts(epoch: int) -> Int[np.ndarray, 'c']:
        """Returns the first position of each class if all earlier examples are sorted by class."""
        return np.rint(shares * len(labels) * epoch).astype(np.int64)

    def find(positions: Int[np.ndarray, 'n']) -> Examples:
        places = order(positions)
        classes = np.zeros_like(places.index)
        uses = np.zeros_like(places.index)  # earlier uses of all images of the class
        for epoch in np.unique(places.epoch):
            of_epoch = places.epoch == epoch
            before = starts(int(epoch))
            in_epoch = starts(int(epoch) + 1) - before  # the epoch's positions sorted by class
            place = places.index[of_epoch]
            number = np.searchsorted(in_epoch, place, side='right') - 1
            classes[of_epoch] = number
            uses[of_epoch] = before[number + 1] - before[number] + place - in_epoch[number]
        epoch, place = np.divmod(uses, counts[classes])
        keys = hash_numbers(seed, _CLASS_ORDER, classes, epoch)
        place = permute(place, counts[classes], keys)
        return Examples(by_class[first[classes] + place], epoch)

    return Sampler(find)


def repeat(sampler: Sampler, repeats: int, *, batch_size: int) -> Sampler:
    """Returns a sampler whose batches have each example of a sampler `repeats` times.

    The copies of an image are `batch_size / repeats` rows apart, rounded up. So MixUp and CutMix,
    which mix neighbors, do not mix an image with its copy, and the copies are on different devices
    if there are `repeats` devices. If `repeats` does not divide the batch size, some images of a
    batch have fewer copies.
    """
    distinct = -(-batch_size // repeats)

    def find(positions: Int[np.ndarray, 'n']) -> Examples:
        step, row = np.divmod(positions, batch_size)
        copy, place = np.divmod(row, distinct)
        examples = sampler(step * distinct + place)
        return Examples(examples.index, examples.epoch * repeats + copy)

    return Sampler(find, sampler.steps_per_window)


def in_order(indices: Int[np.ndarray, 'n']) -> Sampler:
    """Returns a sampler of these examples once, and of padding after them."""
    padded = np.append(indices, PADDING)

    def find(positions: Int[np.ndarray, 'n']) -> Examples:
        return Examples.of(padded[np.minimum(positions, len(indices))])

    return Sampler(find)


def example_keys(seed: int, examples: Examples) -> UInt64[np.ndarray, 'n']:
    """Returns the keys of all random numbers of these examples on the host."""
    return hash_numbers(seed, _EXAMPLE, examples.epoch, examples.index)
