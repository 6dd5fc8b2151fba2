"""Batches on the devices from a source of images, each a pure function of (seed, step).

Each process loads its own rows of the global batch, which does not depend on the number of
processes, devices or threads. A batch holds `images` (b h w 3, uint8), `labels` (b, or b k if
multi-label), `mask` (b), False for padding and for images that could not be read, and `epoch` and
`example` (b), from which all randomness of an example is derived.
"""

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Literal

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.base import Batch, Int, Record, UInt8, UserError, require, require_between
from vit_jax.data.image_decoding import MAX_PIXELS, MOST_PIXELS
from vit_jax.data.image_preprocessing import Crop, Preprocessing, Size, decode_and_crop
from vit_jax.data.sources.base import Label, Source
from vit_jax.distributed.meshes import MeshConfig, batch_sharding, make_mesh, put, rows_here

OnUnreadable = Literal['error', 'skip']
_SKIPPED = '--config.loader.on_unreadable=skip leaves out what cannot be read'
_ROWS = 4  # of a batch that one thread reads at a time: few, so that all threads end together


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
        """Reads one batch with the threads of the pool; None is padding, which is masked.

        Raises UserError for an unreadable image; with on_unreadable='skip' it is masked instead.
        """
        drawn = _describe(refs)
        images = _aligned_zeros((len(refs), *self.size, 3))
        labels = np.zeros((len(refs), *self.source.label_shape), np.int32)

        def read_rows(start: int) -> None:
            for row, ref in enumerate(refs[start : start + _ROWS], start):
                if ref is None:
                    continue
                try:
                    images[row], labels[row] = self.example(ref)
                except UserError as error:
                    if self.on_unreadable != 'skip':
                        raise UserError(f'{error} ({_SKIPPED})') from error
                    drawn['mask'][row] = False
                    if self.on_skipped is not None:
                        self.on_skipped(str(error))

        list(pool.map(read_rows, range(0, len(refs), _ROWS)))  # raises what a thread raised
        return drawn | {'images': images, 'labels': labels}

    def example(self, ref: ExampleRef) -> tuple[UInt8[np.ndarray, 'h w 3'], Label]:
        """Reads an image, cropped to the size, and its label. UserError names an unreadable one."""
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
                # The first epoch reads all files to their ends, and stops at a damaged one.
                to_end=ref.epoch == 0 or self.on_unreadable == 'skip',
            )
            return image, label
        except (ValueError, OSError) as error:
            why = getattr(error, 'strerror', None) or error
            raise UserError(f'{self.source.name_of(ref.index)}: {why}') from error


def reader_for(
    source: Source, preprocessing: Preprocessing, size: Size, **options: Any
) -> ImageReader:
    """Returns a reader of images as a model with this preprocessing and image size needs them."""
    rotation = preprocessing.exif_rotation
    return ImageReader(source, preprocessing.crop, size, exif_rotation=rotation, **options)


def make_warning(*, shown: int = 5) -> Callable[[str], None]:
    """Returns a function that warns of images that are left out: the first few, once each."""
    named: set[str] = set()

    def warn(text: str) -> None:
        if text in named or len(named) >= shown:
            return
        named.add(text)
        rest = '; others are not named: vit_jax.inspect_data lists all'
        logging.warning('left out: %s%s', text, rest if len(named) == shown else '')

    return warn


def _describe(refs: Sequence[ExampleRef | None]) -> Batch:
    """Returns `epoch`, `example` and `mask` of a batch; all are 0 for padding."""
    return {
        'epoch': np.array([ref.epoch if ref else 0 for ref in refs], np.int32),
        'example': np.array([ref.index if ref else 0 for ref in refs], np.int32),
        'mask': np.array([ref is not None for ref in refs]),
    }


def _aligned_zeros(shape: tuple[int, ...]) -> UInt8[np.ndarray, '...']:
    """Returns zeros at an address divisible by 64, which jax uses on a CPU without a copy."""
    size = math.prod(shape)
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    allowed = getattr(os, 'sched_getaffinity', None)  # not on macOS and Windows
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@dataclasses.dataclass(kw_only=True)
class LoaderConfig(Record):
    """How images reach the device. Only the last two can change what is learned and measured.

    `placement=device` reads all images once and keeps them there as one uint8 array, from which
    batches are gathered; `auto` does so if there is no random crop and they fit into `device_mb`.
    `on_unreadable=skip` leaves out what cannot be read, in training, evaluation and few-shot alike;
    it is counted, and the first few are named. An image of more than `max_pixels` cannot be read.
    """

    placement: Literal['auto', 'host', 'device'] = 'auto'  # host: read for each batch
    device_mb: float = 1024.0  # that `auto` gives the images, in MiB
    threads: int | None = None  # for decoding; None: one per core
    on_unreadable: OnUnreadable = 'error'  # the run ends; skip: it is left out, and counted
    max_pixels: int = MAX_PIXELS  # height x width as it is stored

    def check(self) -> None:
        require_between(self, 'max_pixels', low=1, high=MOST_PIXELS)
        require_between(self, 'device_mb', low=0)
        require_between(self, 'threads', low=1)


def check_memory(batch_size: int, size: Size, name: str, accumulation_steps: int = 1) -> None:
    """Raises UserError if the images of this host's batches exceed the machine's memory.

    One batch is read while another is used. A CPU also holds the images as float32.
    """
    rows, (height, width) = -(-batch_size // jax.process_count()), size
    copies = 2 + (4 / accumulation_steps if jax.default_backend() == 'cpu' else 0)
    needed, held = copies * rows * height * width * 3, psutil.virtual_memory().total
    text = f'{rows:,} images of {height}x{width} pixels need {needed / 2**30:,.0f} GiB'
    text += f'; expected at most {held / 2**30:,.0f} GiB, the memory of this machine'
    require(needed <= held, f'{name}={batch_size}: {text}')


Sampler = Callable[[int], ExampleRef | None]  # by position in the stream of examples, from 0


def shuffled(count: int, *, seed: int) -> Sampler:
    """Draws every example once per epoch, each epoch in another random order, without end."""
    import grain  # takes a quarter of a second, and not all programs read batches

    indices = grain.MapDataset.range(count).seed(seed).shuffle().repeat(None)
    return lambda position: ExampleRef(int(indices[position]), position // count)


@dataclasses.dataclass(frozen=True)
class Loader:
    """Makes batches: `load` runs in threads on the host, `place` puts its result on devices."""

    source: Source
    load: Callable[[Sequence[ExampleRef | None]], Batch]
    place: Callable[[Batch], Batch]
    sharding: NamedSharding


def make_loader(
    reader: ImageReader, config: LoaderConfig | None = None, sharding: NamedSharding | None = None
) -> Loader:
    """Makes a loader that reads images for each batch, or reads all once and keeps them on devices.

    Batches are split over all devices if no `sharding` is given.
    """
    import cv2  # not all programs read images

    cv2.setNumThreads(1)  # the pool's threads suffice; OpenCV releases the interpreter lock
    config = config or LoaderConfig()
    sharding = sharding or batch_sharding(make_mesh(MeshConfig()))
    pool = futures.ThreadPoolExecutor(config.threads or cores())
    fits = len(reader.source) * math.prod(reader.size) * 3 / 2**20 <= config.device_mb
    if reader.crop.random:
        changing = f'placement=device cannot keep {type(reader.crop).__name__}'
        require(config.placement != 'device', f'{changing}, which differs at every draw')
    elif config.placement == 'device' or (config.placement == 'auto' and fits):
        with pool:
            return _keep_on_device(reader, pool, sharding)
    load = functools.partial(reader.examples, pool=pool)
    return Loader(reader.source, load, lambda batch: batch, sharding)


def make_loaders(config: LoaderConfig, sharding: NamedSharding) -> Callable[[ImageReader], Loader]:
    """Returns a function from readers to loaders that makes the loader of equal readers once."""
    made: dict[tuple[int, str], Loader] = {}

    def loader_of(reader: ImageReader) -> Loader:
        how = reader.crop, reader.size, reader.exif_rotation
        name = id(reader.source), repr((*how, reader.on_unreadable, reader.max_pixels))
        if name not in made:
            made[name] = make_loader(reader, config, sharding)
        return made[name]

    return loader_of


def _keep_on_device(reader: ImageReader, pool: futures.Executor, sharding: NamedSharding) -> Loader:
    """Reads all images once; then `load` describes a batch and `place` gathers its images."""
    read = reader.examples([*map(ExampleRef, range(len(reader.source)))], pool)
    stored = put(read, dict.fromkeys(read, NamedSharding(sharding.mesh, PartitionSpec())))

    @jax.jit
    def gather(stored: Batch, drawn: Batch) -> Batch:
        batch = jax.tree.map(lambda array: array[drawn['example']], stored)
        drawn = drawn | {'mask': batch['mask'] & drawn['mask']}
        return jax.lax.with_sharding_constraint(batch | drawn, sharding)

    return Loader(reader.source, _describe, functools.partial(gather, stored), sharding)


def host_batches(
    loader: Loader, sampler: Sampler, *, steps: range, rows: Int[np.ndarray, 'r'], batch_size: int
) -> Iterator[Batch]:
    """Loads these rows of the global batch of each step, in host memory, ahead of their use."""
    import grain

    def load(step: int) -> Batch:
        return loader.load([sampler(int(step) * batch_size + int(row)) for row in rows])

    dataset = grain.MapDataset.range(steps.start, steps.stop).map(load)
    # Two batches ahead: one is loaded while one waits.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(2, prefetch_buffer_size=2)))


def batches(loader: Loader, sampler: Sampler, *, steps: range, batch_size: int) -> Iterator[Batch]:
    """Yields the global batches of these steps, on the devices."""
    rows = rows_here(loader.sharding, batch_size)
    for local in host_batches(loader, sampler, steps=steps, rows=rows, batch_size=batch_size):
        shapes = {name: (batch_size, *x.shape[1:]) for name, x in local.items()}
        yield loader.place(jax.make_array_from_process_local_data(loader.sharding, local, shapes))


def training_batches(
    loader: Loader, *, steps: range, batch_size: int, seed: int
) -> Iterator[Batch]:
    """Yields batches of shuffled examples: batch n is the same wherever the iteration starts."""
    sampler = shuffled(len(loader.source), seed=seed)
    return batches(loader, sampler, steps=steps, batch_size=batch_size)


def sequential_batches(
    loader: Loader, indices: Int[np.ndarray, 'n'], *, batch_size: int
) -> Iterator[Batch]:
    """Yields these examples once each, in order; the last batch is filled up with padding."""

    def sampler(position: int) -> ExampleRef | None:
        return ExampleRef(int(indices[position])) if position < len(indices) else None

    steps = range(-(-len(indices) // batch_size))
    return batches(loader, sampler, steps=steps, batch_size=batch_size)


def abstract_batch(
    mesh: Mesh, batch_size: int, image_size: Size, label_shape: tuple[int, ...] = ()
) -> Batch:
    """Returns shape, type and sharding of each array of a batch."""
    shapes = {
        'images': ((batch_size, *image_size, 3), np.uint8),
        'labels': ((batch_size, *label_shape), np.int32),
        'mask': ((batch_size,), np.bool_),
        'epoch': ((batch_size,), np.int32),
        'example': ((batch_size,), np.int32),
    }
    sharding = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(*x, sharding=sharding) for name, x in shapes.items()}
