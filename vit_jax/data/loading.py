"""Batches on the devices from a source of images, each a pure function of (seed, step).

Each process loads its own rows of the global batch, which does not depend on the number of
processes, devices or threads. It holds `images` (b h w 3, uint8), `labels` (b, or b k if
multi-label), `mask` (b), False for padding and for images that could not be read, and `epoch` and
`example` (b), from which all randomness of an example is derived.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Literal

import grain
import jax
import numpy as np
import psutil
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.base import Batch, Int, Record, UInt8, UserError, require, require_between
from vit_jax.data.image_preprocessing import (
    MAX_PIXELS,
    MOST_PIXELS,
    Crop,
    Preprocessing,
    Size,
    decode_and_crop,
)
from vit_jax.data.sources.base import Label, Source
from vit_jax.parallel.meshes import put, rows_here

OnUnreadable = Literal['error', 'skip']


@dataclasses.dataclass(kw_only=True)
class LoaderConfig(Record):
    """How images reach the device. Only the last two can change what is learned and measured.

    `placement=device` reads all images once and keeps them there as one uint8 array, from which
    batches are gathered; `auto` does so if there is no random crop and they fit into `device_mb`.
    `on_unreadable=skip` leaves out what cannot be read, in training, evaluation and few-shot alike;
    it is counted, and the first few are named. An image of more than `max_pixels` cannot be read.
    """

    placement: Literal['auto', 'host', 'device'] = 'auto'
    device_mb: float = 1024.0
    threads: int | None = None  # for decoding; None: one per core
    on_unreadable: OnUnreadable = 'error'
    max_pixels: int = MAX_PIXELS  # height x width as it is stored

    def check(self) -> None:
        require_between(self, 'max_pixels', low=1, high=MOST_PIXELS)
        require_between(self, 'device_mb', low=0)
        require_between(self, 'threads', low=1)


@dataclasses.dataclass(frozen=True)
class ExampleRef:
    """An example by its index in the source and its epoch, from 0."""

    index: int
    epoch: int = 0


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Reads, decodes and crops examples to one size; random crops by (seed, epoch, index)."""

    source: Source
    crop: Crop
    size: Size
    exif_rotation: bool
    seed: int = 0
    on_unreadable: OnUnreadable = 'error'
    max_pixels: int = MAX_PIXELS
    on_skipped: Callable[[str], None] | None = None  # gets the message about each that is masked

    def examples(self, refs: Sequence[ExampleRef | None], pool: futures.Executor) -> Batch:
        """One batch of arrays, read by the pool's threads; None is padding, which is masked.

        Raises UserError for an unreadable image; with on_unreadable='skip' it is masked.
        """
        images = _aligned((len(refs), *self.size, 3))
        labels = np.zeros((len(refs), *self.source.label_shape), np.int32)
        mask = np.zeros(len(refs), bool)

        def read(rows: range) -> None:
            for row in rows:
                if (ref := refs[row]) is not None:
                    try:
                        images[row], labels[row] = self.example(ref)
                        mask[row] = True
                    except UserError as error:
                        if self.on_unreadable != 'skip':
                            raise UserError(f'{error} ({_SKIPPED})') from error
                        if self.on_skipped is not None:
                            self.on_skipped(str(error))

        rows = range(len(refs))
        list(pool.map(read, (rows[i : i + _ROWS] for i in rows[::_ROWS])))  # raises what one raised
        return {'images': images, 'labels': labels, 'mask': mask} | _epochs_and_indices(refs)

    def example(self, ref: ExampleRef) -> tuple[UInt8[np.ndarray, 'h w 3'], Label]:
        """One image, cropped to the size, and its label. UserError names one that is unreadable."""
        key = self.seed, ref.epoch, ref.index
        rng = np.random.default_rng(key) if self.crop.random else None
        try:
            stored, label = self.source.read(ref.index)
            image = decode_and_crop(
                stored,
                self.crop,
                self.size,
                rng,
                exif_rotation=self.exif_rotation,
                max_pixels=self.max_pixels,
            )
            return image, label
        except (ValueError, OSError) as error:
            why = getattr(error, 'strerror', None) or error
            raise UserError(f'{self.source.name_of(ref.index)}: {why}') from error


def reader_for(
    source: Source, preprocessing: Preprocessing, size: Size, **options: Any
) -> ImageReader:
    """The images as a network of this preprocessing and image size is to see them."""
    return ImageReader(source, preprocessing.crop, size, preprocessing.exif_rotation, **options)


def make_warning(*, shown: int = 5) -> Callable[[str], None]:
    """A function that warns of each image that is left out, once, until so many were named."""
    named: set[str] = set()
    lock = threading.Lock()

    def warn(text: str) -> None:
        with lock:
            if text in named or len(named) == shown:
                return
            named.add(text)
            rest = '; others are not named: vit_jax.inspect_data lists all'
            logging.warning('left out: %s%s', text, rest if len(named) == shown else '')

    return warn


def _epochs_and_indices(refs: Sequence[ExampleRef | None]) -> dict[str, Int[np.ndarray, 'b']]:
    """`epoch` and `example` of a batch; both are 0 for padding."""
    of_row = [ref or ExampleRef(0) for ref in refs]
    return {
        'epoch': np.array([ref.epoch for ref in of_row], np.int32),
        'example': np.array([ref.index for ref in of_row], np.int32),
    }


def check_memory(batch_size: int, size: Size, *, name: str) -> None:
    """Raises UserError where the rows of a batch that are here exceed the machine's memory."""
    rows, (height, width) = -(-batch_size // jax.process_count()), size
    needed, held = rows * height * width * 3, psutil.virtual_memory().total
    text = f'{rows:,} images of {height}x{width} pixels are {needed / 2**30:,.0f} GiB'
    text += f', this machine has {held / 2**30:,.0f} GiB of memory'
    require(needed <= held, f'{name}={batch_size}: {text}')


def cores() -> int:
    """Processor cores that this process may use."""
    allowed = getattr(os, 'sched_getaffinity', None)  # not on macOS and Windows
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _aligned(shape: tuple[int, ...]) -> UInt8[np.ndarray, '...']:
    """Zeros at an address divisible by 64, which jax takes on a CPU without a copy."""
    size = math.prod(shape)
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)


Sampler = Callable[[int], ExampleRef | None]  # by position in the stream of examples, from 0
_SKIPPED = '--config.loader.on_unreadable=skip leaves out what cannot be read'
_ROWS = 4  # of a batch that one thread reads at a time: few, so that all end together


def shuffled(count: int, *, seed: int) -> Sampler:
    """Every example once per epoch, each epoch in another random order, without end."""
    indices = grain.MapDataset.range(count).seed(seed).shuffle().repeat(None)
    return lambda position: ExampleRef(int(indices[position]), position // count)


@dataclasses.dataclass(frozen=True)
class Loader:
    """Where batches come from: `load` runs in threads on the host, `place` on its result."""

    source: Source
    load: Callable[[Sequence[ExampleRef | None]], Batch]
    place: Callable[[Batch], Batch]
    sharding: NamedSharding


def make_loader(reader: ImageReader, config: LoaderConfig, sharding: NamedSharding) -> Loader:
    """A loader that keeps the examples on the host, or on the device (but no random crops)."""
    if config.placement == 'device' and reader.crop.random:
        crop = type(reader.crop).__name__
        raise UserError(f'placement=device cannot keep {crop}, which differs at every draw')
    size_mb = len(reader.source) * math.prod(reader.size) * 3 / 2**20
    fits = not reader.crop.random and size_mb <= config.device_mb
    on_device = config.placement == 'device' or (config.placement == 'auto' and fits)
    import cv2  # imported here: who only imports this module need not have it

    cv2.setNumThreads(1)  # the pool's threads suffice; OpenCV releases the interpreter lock
    pool = futures.ThreadPoolExecutor(config.threads or cores())
    if on_device:
        with pool:
            return _kept_on_device(reader, pool, sharding)
    load = functools.partial(reader.examples, pool=pool)
    return Loader(reader.source, load, lambda batch: batch, sharding)


def make_loaders(config: LoaderConfig, sharding: NamedSharding) -> Callable[[ImageReader], Loader]:
    """A function from readers to loaders, which makes each once: a split is on the device once."""
    made: dict[tuple[int, str], Loader] = {}

    def loader_of(reader: ImageReader) -> Loader:
        how = reader.crop, reader.size, reader.exif_rotation
        name = id(reader.source), repr((*how, reader.on_unreadable, reader.max_pixels))
        if name not in made:
            made[name] = make_loader(reader, config, sharding)
        return made[name]

    return loader_of


def _kept_on_device(reader: ImageReader, pool: futures.Executor, sharding: NamedSharding) -> Loader:
    """All images read once; then `load` gives indices and `place` gathers their images."""
    read = reader.examples([*map(ExampleRef, range(len(reader.source)))], pool)
    stored = put(read, dict.fromkeys(read, NamedSharding(sharding.mesh, PartitionSpec())))

    @jax.jit
    def gather(stored: Batch, drawn: Batch) -> Batch:
        batch = jax.tree.map(lambda array: array[drawn['example']], stored)
        drawn = drawn | {'mask': batch['mask'] & drawn['mask']}
        return jax.lax.with_sharding_constraint(batch | drawn, sharding)

    def load(refs: Sequence[ExampleRef | None]) -> Batch:
        return _epochs_and_indices(refs) | {'mask': np.array([ref is not None for ref in refs])}

    return Loader(reader.source, load, functools.partial(gather, stored), sharding)


@contextlib.contextmanager
def read_beside(
    loaders: Sequence[Loader], *, index: int, count: int
) -> Iterator[Callable[[], None]]:
    """Begins to read every image once, in threads: process `index` of `count` reads its share.

    Gives a function that waits for the end and raises UserError for an image that cannot be read.
    What is left to read on leaving is not read. Loaders that keep all on the device have done so.
    """

    def read(loader: Loader, part: Sequence[int]) -> None:
        loader.load([*map(ExampleRef, part)])

    def wait() -> None:
        for one in begun:
            one.result()

    with futures.ThreadPoolExecutor(1) as thread:  # a loader has threads of its own
        shares = [(loader, range(index, len(loader.source), count)) for loader in loaders]
        begun = [
            thread.submit(read, loader, own[start : start + 64])
            for loader, own in shares
            for start in range(0, len(own), 64)
        ]
        try:
            yield wait
        finally:
            thread.shutdown(cancel_futures=True)


def host_batches(
    loader: Loader, sampler: Sampler, *, steps: range, rows: Int[np.ndarray, 'r'], batch_size: int
) -> Iterator[Batch]:
    """These rows of the global batch of each step, in host memory, loaded ahead of their use."""

    def load(step: int) -> Batch:
        return loader.load([sampler(int(step) * batch_size + int(row)) for row in rows])

    dataset = grain.MapDataset.range(steps.start, steps.stop).map(load)
    # Two batches ahead: one is being loaded while one waits.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(2, prefetch_buffer_size=2)))


def batches(loader: Loader, sampler: Sampler, *, steps: range, batch_size: int) -> Iterator[Batch]:
    """The global batches of these steps, on the devices; each process loads its own rows."""
    rows = rows_here(loader.sharding, batch_size)
    for local in host_batches(loader, sampler, steps=steps, rows=rows, batch_size=batch_size):
        shapes = {name: (batch_size, *x.shape[1:]) for name, x in local.items()}
        yield loader.place(jax.make_array_from_process_local_data(loader.sharding, local, shapes))


def training_batches(
    loader: Loader, *, steps: range, batch_size: int, seed: int
) -> Iterator[Batch]:
    """Batches of shuffled examples: batch n is the same wherever the iteration begins."""
    sampler = shuffled(len(loader.source), seed=seed)
    return batches(loader, sampler, steps=steps, batch_size=batch_size)


def sequential_batches(
    loader: Loader, indices: Int[np.ndarray, 'n'], *, batch_size: int
) -> Iterator[Batch]:
    """These examples once each, in order, the last batch filled up with padding."""

    def sampler(position: int) -> ExampleRef | None:
        return ExampleRef(int(indices[position])) if position < len(indices) else None

    steps = range(-(-len(indices) // batch_size))
    return batches(loader, sampler, steps=steps, batch_size=batch_size)
