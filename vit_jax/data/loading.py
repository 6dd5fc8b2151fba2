"""From a source to batches on the devices, each a pure function of (seed, step).

The order of examples is decided for the global batch first; each process then takes the rows that
lie on its devices, so a batch does not depend on the number of processes, devices or loader
threads. A batch is `images` (b h w 3, uint8), `labels` (b, or b k where an image has several),
`mask` (b), False for padding and for images that could not be read, and `epoch` and `example` (b):
what all randomness about an example is made from.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Literal

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.base.array_types import Batch, Int, UInt8
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.data.image_preprocessing import Crop, Size, decode
from vit_jax.data.sources.base import Label, Source
from vit_jax.parallel.meshes import put, rows_here


@dataclasses.dataclass(kw_only=True)
class LoaderConfig(Record):
    """How images reach the device; what is trained does not depend on it.

    `placement=device` reads everything once and keeps it there as one uint8 array, from which
    batches are gathered; `auto` does so for images that need no random crop and together take at
    most `device_mb`.
    """

    placement: Literal['auto', 'host', 'device'] = 'auto'
    device_mb: float = 1024.0
    threads: int | None = None  # that decode images; None: one a core, for images at hand
    on_unreadable: Literal['error', 'skip'] = 'error'  # training only; evaluation never skips


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Examples of one size, by index."""

    source: Source
    crop: Crop
    size: Size
    exif_rotation: bool
    seed: int = 0
    skip_unreadable: bool = False

    def examples(self, draws: Sequence['ExampleRef | None'], pool: futures.Executor) -> Batch:
        """The examples drawn, as one batch of arrays; None is padding. The pool decodes."""
        images = _aligned((len(draws), *self.size, 3))
        labels = np.zeros((len(draws), *self.source.label_shape), np.int32)
        mask = np.zeros(len(draws), bool)

        def read(rows: range) -> None:
            for row in rows:
                draw = draws[row]
                if draw is None:
                    continue
                try:
                    images[row], labels[row] = self.example(draw)
                    mask[row] = True
                except ValueError:
                    if not self.skip_unreadable:
                        raise

        starts = range(0, len(draws), _ROWS)
        chunks = [range(start, min(start + _ROWS, len(draws))) for start in starts]
        list(pool.map(read, chunks))  # raises what a thread raised
        return {'images': images, 'labels': labels, 'mask': mask} | _names(draws)

    def example(self, draw: 'ExampleRef') -> tuple[UInt8[np.ndarray, 'h w 3'], Label]:
        """One image, cut to the size, and its label. UserError names one that cannot be read."""
        drawn_by = self.seed, draw.epoch, draw.index
        rng = np.random.default_rng(drawn_by) if self.crop.random else None
        try:
            stored, label = self.source.read(draw.index)
            image = decode(stored, exif_rotation=self.exif_rotation)
            return self.crop(image, self.size, rng), label
        except (ValueError, OSError) as error:
            raise UserError(f'{self.source.name_of(draw.index)}: {error}') from error


@dataclasses.dataclass(frozen=True)
class ExampleRef:
    """One example of a batch: which one, and how often all examples were drawn before it."""

    index: int
    epoch: int = 0


def _names(draws: Sequence[ExampleRef | None]) -> dict[str, Int[np.ndarray, 'b']]:
    """What a batch says of its examples; padding is called 0 of 0."""
    named = [draw or ExampleRef(0) for draw in draws]
    return {
        'epoch': np.array([draw.epoch for draw in named], np.int32),
        'example': np.array([draw.index for draw in named], np.int32),
    }


def cores() -> int:
    """Processor cores that this process may use."""
    allowed = getattr(os, 'sched_getaffinity', None)  # not on macOS and Windows
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _aligned(shape: tuple[int, ...]) -> UInt8[np.ndarray, '...']:
    """Zeros that begin at a multiple of 64 bytes: those a CPU device takes without a copy."""
    size = math.prod(shape)
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)


Sampler = Callable[[int], ExampleRef | None]
_ROWS = 4  # of a batch that one thread reads at a time: few, so that all end together


def shuffled(count: int, *, seed: int) -> Sampler:
    """Every example once an epoch, each epoch in another random order, without end."""
    indices = grain.MapDataset.range(count).seed(seed).shuffle().repeat(None)
    return lambda position: ExampleRef(int(indices[position]), position // count)


def sequential(indices: Int[np.ndarray, 'n']) -> Sampler:
    """These examples once, then padding."""

    def draw(position: int) -> ExampleRef | None:
        return ExampleRef(int(indices[position])) if position < len(indices) else None

    return draw


@dataclasses.dataclass(frozen=True)
class Loader:
    """Where batches come from: `load` runs in threads on the host, `place` is given its result."""

    source: Source
    load: Callable[[Sequence[ExampleRef | None]], Batch]
    place: Callable[[Batch], Batch]
    sharding: NamedSharding
    preprocessing_id: str  # how an image became what it is in a batch


def make_loader(reader: ImageReader, config: LoaderConfig, sharding: NamedSharding) -> Loader:
    """A feed of the reader's examples, kept on the host or on the device as configured.

    Raises UserError where a random crop is asked to be kept on the device.
    """
    bytes_needed = len(reader.source) * reader.size[0] * reader.size[1] * 3
    fits = not reader.crop.random and bytes_needed <= config.device_mb * 2**20
    if config.placement == 'device' and reader.crop.random:
        name = type(reader.crop).__name__
        raise UserError(f'placement=device cannot keep {name}, which differs at every draw')
    import cv2  # loads here: digits and arrays of the right size do not need it

    cv2.setNumThreads(1)  # the pool's threads are enough; they decode without the interpreter
    pool = futures.ThreadPoolExecutor(config.threads or cores())
    prepared = repr((reader.crop, reader.size, reader.exif_rotation))
    if config.placement == 'device' or (config.placement == 'auto' and fits):
        with pool:
            load, place = _kept_on_device(reader, pool, sharding)
        return Loader(reader.source, load, place, sharding, prepared)

    def load_on_host(draws: Sequence[ExampleRef | None]) -> Batch:
        return reader.examples(draws, pool)

    return Loader(reader.source, load_on_host, lambda batch: batch, sharding, prepared)


def make_loaders(config: LoaderConfig, sharding: NamedSharding) -> Callable[[ImageReader], Loader]:
    """A function from readers to loaders, which makes each once: a split is on the device once."""
    made: dict[tuple[Any, ...], Loader] = {}

    def loader_of(reader: ImageReader) -> Loader:
        how = repr((reader.crop, reader.size, reader.exif_rotation, reader.skip_unreadable))
        name = id(reader.source), how
        if name not in made:
            made[name] = make_loader(reader, config, sharding)
        return made[name]

    return loader_of


def _kept_on_device(
    reader: ImageReader, pool: futures.Executor, sharding: NamedSharding
) -> tuple[Callable[[Sequence[ExampleRef | None]], Batch], Callable[[Batch], Batch]]:
    """All images read once; then `load` gives their numbers and `place` gathers them."""
    draws = [ExampleRef(index) for index in range(len(reader.source))]
    read = reader.examples(draws, pool)
    stored = put(read, dict.fromkeys(read, NamedSharding(sharding.mesh, PartitionSpec())))

    @jax.jit
    def gather(stored: Batch, drawn: Batch) -> Batch:
        batch = jax.tree.map(lambda array: array[drawn['example']], stored)
        drawn = drawn | {'mask': batch['mask'] & drawn['mask']}
        return jax.lax.with_sharding_constraint(batch | drawn, sharding)

    def load(draws: Sequence[ExampleRef | None]) -> Batch:
        return _names(draws) | {'mask': np.array([draw is not None for draw in draws])}

    return load, lambda drawn: gather(stored, drawn)


def batches(feed: Loader, order: Sampler, *, steps: range, batch_size: int) -> Iterator[Batch]:
    """The global batches of these steps, on the devices, loaded ahead of their use."""
    rows = rows_here(feed.sharding, batch_size)

    def load(step: int) -> Batch:
        return feed.load([order(int(step) * batch_size + int(row)) for row in rows])

    dataset = grain.MapDataset.range(steps.start, steps.stop).map(load)
    # Two batches ahead: one is being loaded while one waits.
    for local in dataset.to_iter_dataset(grain.ReadOptions(2, prefetch_buffer_size=2)):
        shapes = {name: (batch_size, *x.shape[1:]) for name, x in local.items()}
        yield feed.place(jax.make_array_from_process_local_data(feed.sharding, local, shapes))


def training_batches(feed: Loader, *, steps: range, batch_size: int, seed: int) -> Iterator[Batch]:
    """Batches of shuffled examples: batch n is the same wherever the iteration begins."""
    order = shuffled(len(feed.source), seed=seed)
    return batches(feed, order, steps=steps, batch_size=batch_size)


def sequential_batches(
    feed: Loader, indices: Int[np.ndarray, 'n'], *, batch_size: int
) -> Iterator[Batch]:
    """These examples once each, in order, the last batch filled up with padding."""
    steps = range(0, -(-len(indices) // batch_size))
    return batches(feed, sequential(indices), steps=steps, batch_size=batch_size)
