"""Loads batches of images onto the devices; each batch is a pure function of (seed, step).

Each process loads its own rows of the global batch, which does not depend on the number of
processes, devices or threads.

A batch is a dict of arrays: `images` (b h w 3, uint8); `labels` (b, or b k if multi-label); `mask`
(b), which is False for padding and unreadable images; `epoch` and `example` (b), from which all
randomness of an example is derived.
"""

import collections
import dataclasses
import errno
import functools
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.base import (
    Batch,
    Int,
    Record,
    StorageError,
    TransientError,
    UInt8,
    UInt64,
    UserError,
    require,
    require_between,
)
from vit_jax.base.progress import progress_bar
from vit_jax.base.ranges import Ranges
from vit_jax.data import sampling
from vit_jax.data.image_decoding import MAX_PIXELS, MAX_PIXELS_LIMIT, is_jpeg
from vit_jax.data.image_preprocessing import (
    Crop,
    InceptionCrop,
    Preprocessing,
    Size,
    crop_jpegs,
    decode_and_crop,
)
from vit_jax.data.sampling import PADDING, Examples, Sampler, Windows
from vit_jax.data.sources.base import (
    EncodedImage,
    Label,
    Places,
    Source,
    check_label,
    request_ahead,
)
from vit_jax.distributed.meshes import (
    MeshConfig,
    batch_sharding,
    count_processes_on_host,
    local_rows,
    make_mesh,
    put,
)
from vit_jax.distributed.processes import keep_alive

OnUnreadable = Literal['error', 'skip']
_SKIP_HINT = '--config.loader.on_unreadable=skip skips unreadable images'
_MOST_ROWS = 16  # rows that a thread reads at a time: one call into C serves them all
_MOST_BYTES = 2**23  # a thread decodes its images once it holds this many encoded bytes
_MOST_AHEAD = 8  # batches that are loaded ahead
_SECONDS_BETWEEN_LINES = 60  # about the progress of the first window
_BLOCKS_PER_WINDOW = 8  # of a lane, at least
# Errors of the machine or the network, not of an image.
_TRANSIENT = {
    *(errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.ECONNABORTED, errno.ECONNRESET, errno.ENOTCONN),
    *(errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
}
_PAUSES = 0.1, 1.0, 10.0  # seconds before an image is read again


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Reads, decodes and crops examples; random crops depend on (seed, epoch, index) only."""

    source: Source
    crop: Crop
    size: Size  # (height, width) of the crops
    exif_rotation: bool  # whether to apply the EXIF orientation
    seed: int = 0  # seed of random crops
    on_unreadable: OnUnreadable = 'error'  # skip: mask unreadable images
    max_pixels: int = MAX_PIXELS  # images with more pixels are unreadable
    on_skipped: Callable[[str], None] | None = None  # called with a message per skipped image

    def examples(
        self, examples: Examples, pool: futures.Executor, *, rows_at_once: int = _MOST_ROWS
    ) -> Batch:
        """Reads a batch with the threads of the pool; padding is masked.

        Args:
          examples: The examples of the batch.
          pool: The threads.
          rows_at_once: The rows that a thread reads at a time.

        Raises:
          UserError: If an image is unreadable; it is masked instead if on_unreadable is 'skip'.
          TransientError: If an image cannot be read because the machine or the network fails.
        """
        count = len(examples.index)
        batch = _describe_examples(examples)
        batch['images'] = _aligned_empty((count, *self.size, 3))
        batch['images'][~batch['mask']] = 0
        batch['labels'] = np.zeros((count, *self.source.label_shape), np.int32)
        keys = self._keys(examples)

        def read(start: int) -> None:
            self._read_rows(range(start, min(start + rows_at_once, count)), examples, keys, batch)

        list(pool.map(read, range(0, count, rows_at_once)))  # raises the threads' exceptions
        return batch

    def example(self, index: int, epoch: int = 0) -> tuple[UInt8[np.ndarray, 'h w 3'], Label]:
        """Reads a cropped image and its label. Raises UserError if the image is unreadable."""
        keys = self._keys(Examples.of(index, epoch))
        try:
            stored, label = self._read(index)
            return self._crop(stored, None if keys is None else keys[0]), label
        except (ValueError, OSError) as error:
            raise UserError(self._describe(index, error)) from error

    def _keys(self, examples: Examples) -> UInt64[np.ndarray, 'n'] | None:
        return sampling.example_keys(self.seed, examples) if self.crop.random else None

    def _crop(self, stored: EncodedImage, key: np.uint64 | None) -> UInt8[np.ndarray, 'h w 3']:
        return decode_and_crop(
            stored,
            self.crop,
            self.size,
            key,
            exif_rotation=self.exif_rotation,
            max_pixels=self.max_pixels,
        )

    def _read(self, index: int) -> tuple[EncodedImage, Label]:
        """Reads an image. Retries after errors of the machine or the network, and after EIO."""
        for pause in *_PAUSES, None:
            try:
                return self.source.read(index)
            except OSError as error:
                is_transient = error.errno in _TRANSIENT
                if not is_transient and (error.errno != errno.EIO or pause is None):
                    raise  # the image is unreadable
                text = self._describe(index, error)
                if pause is None:
                    raise TransientError(
                        f'{text}; read {len(_PAUSES) + 1} times without success; check the disk '
                        'or the network, and run the same command again'
                    ) from error
            logging.warning('%s; reading it again in %g s', text, pause)
            time.sleep(pause)
        raise AssertionError

    def _read_rows(
        self,
        rows: range,
        examples: Examples,
        keys: UInt64[np.ndarray, 'n'] | None,
        batch: Batch,
    ) -> None:
        """Reads, decodes and crops these rows of a batch, JPEGs together if that is possible."""
        images: dict[int, EncodedImage] = {}
        errors: dict[int, Exception] = {}
        num_bytes = 0
        for row in rows:
            index = int(examples.index[row])
            if index == PADDING:
                continue
            try:
                image, label = self._read(index)
            except StorageError:  # the bucket cannot be read
                raise
            except (ValueError, OSError) as error:
                errors[row] = _without_frames(error)
                continue
            check_label(label, self.source.data)
            batch['labels'][row] = label
            images[row] = image
            num_bytes += len(image) if isinstance(image, bytes) else image.nbytes
            if num_bytes > _MOST_BYTES:
                self._crop_rows(images, examples, keys, batch, errors)
                images.clear()
                num_bytes = 0
        self._crop_rows(images, examples, keys, batch, errors)
        for row in sorted(errors):
            self._mask(row, int(examples.index[row]), errors[row], batch)

    def _crop_rows(
        self,
        images: dict[int, EncodedImage],
        examples: Examples,
        keys: UInt64[np.ndarray, 'n'] | None,
        batch: Batch,
        errors: dict[int, Exception],
    ) -> None:
        """Crops images into their rows; adds an error for each row that is unreadable."""
        cropped = self._crop_jpegs(images, examples, keys, batch)
        for row in images.keys() - cropped:
            try:
                image = self._crop(images[row], None if keys is None else keys[row])
            except (ValueError, OSError) as error:
                errors[row] = _without_frames(error)
            else:
                batch['images'][row] = image

    def _crop_jpegs(
        self,
        images: dict[int, EncodedImage],
        examples: Examples,
        keys: UInt64[np.ndarray, 'n'] | None,
        batch: Batch,
    ) -> set[int]:
        """Crops JPEGs into their rows with one call for all. Returns the rows that are done."""
        jpegs = {row: image for row, image in images.items() if is_jpeg(image)}
        if not isinstance(self.crop, InceptionCrop) or not jpegs:
            return set()
        assert keys is not None
        rows = [*jpegs]
        is_cropped = crop_jpegs(
            [*jpegs.values()],
            self.crop,
            keys[rows],
            [batch['images'][row] for row in rows],
            exif_rotation=self.exif_rotation,
            max_pixels=self.max_pixels,
            # The first epoch reads all files completely and stops at a damaged one.
            to_end=(examples.epoch[rows] == 0) | (self.on_unreadable == 'skip'),
        )
        return {*itertools.compress(rows, is_cropped)}

    def _describe(self, index: int, error: Exception) -> str:
        why = getattr(error, 'strerror', None) or error
        return f'{self.source.name_of(index)}: {why}'

    def _mask(self, row: int, index: int, error: Exception, batch: Batch) -> None:
        """Masks an unreadable image, or raises UserError."""
        text = self._describe(index, error)
        if self.on_unreadable != 'skip':
            raise UserError(f'{text} ({_SKIP_HINT})') from error
        batch['mask'][row] = False
        batch['images'][row] = 0
        batch['labels'][row] = 0
        if self.on_skipped is not None:
            self.on_skipped(text)


def _without_frames(error: Exception) -> Exception:
    """Removes the tracebacks of an error and of its causes, whose frames hold images in memory."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def make_reader(
    source: Source, preprocessing: Preprocessing, size: Size, **options: Any
) -> ImageReader:
    """Makes a reader for a model.

    Args:
      source: The images.
      preprocessing: The preprocessing of the model. For another crop, create an `ImageReader`.
      size: The model's image size (height, width).
      **options: Other fields of `ImageReader`, such as `seed`.
    """
    rotation = preprocessing.exif_rotation
    return ImageReader(source, preprocessing.crop, size, exif_rotation=rotation, **options)


def make_warning(*, shown: int = 5) -> Callable[[str], None]:
    """Returns a function that logs warnings about skipped images: the first `shown`, once each."""
    logged: set[str] = set()

    def warn(text: str) -> None:
        if text in logged or len(logged) >= shown:
            return
        logged.add(text)
        rest = '; further warnings are suppressed: python -m vit_jax.inspect_data lists all'
        logging.warning('skipped: %s%s', text, rest if len(logged) == shown else '')

    return warn


def _describe_examples(examples: Examples) -> Batch:
    """Returns the arrays `epoch`, `example` and `mask` of a batch; `example` is 0 for padding."""
    return {
        'epoch': examples.epoch.astype(np.int32),
        'example': np.maximum(examples.index, 0).astype(np.int32),
        'mask': examples.index != PADDING,
    }


def _aligned_empty(shape: tuple[int, ...]) -> UInt8[np.ndarray, '...']:
    """Allocates bytes at an address divisible by 64, so that jax on a CPU does not copy them."""
    size = math.prod(shape)
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)


def count_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    allowed = getattr(os, 'sched_getaffinity', None)  # not on macOS and Windows
    return len(allowed(0)) if allowed else os.cpu_count() or 1


@dataclasses.dataclass(kw_only=True)
class LoaderConfig(Record):
    """Which images are in a training batch, and how they reach the device.

    `repeats` is repeated augmentation (Hoffer et al. 2020; DeiT): a batch has `repeats` times fewer
    different images, and each copy is augmented differently. `balance` makes the share of a class
    with n images proportional to n^(1 - balance). Neither of them changes evaluations or the
    number of images per epoch.

    `placement=device` reads all images once and keeps them on the device as one uint8 array, from
    which batches are gathered. `auto` does this if there is no random crop and the images fit into
    `device_mb`. `on_unreadable=skip` skips unreadable images in training, evaluation and few-shot
    evaluation; it counts them and names the first few. Images with more than `max_pixels` pixels
    are unreadable.

    Images in a bucket are read in blocks of neighbors. `shuffle_gb` is the size of the window of
    images, of all processes together, that are shuffled (see `sampling.shuffle_blocks`). Two
    windows are in memory.
    """

    placement: Literal['auto', 'host', 'device'] = 'auto'  # host: read images for each batch
    device_mb: float = 1024.0  # memory for images on the device with placement=auto, in MiB
    threads: int | None = None  # decoding threads; None: one per CPU core
    on_unreadable: OnUnreadable = 'error'  # error: stop; skip: skip and count unreadable images
    max_pixels: int = MAX_PIXELS  # largest stored height x width
    repeats: int = 1  # times that each image is in a training batch
    balance: float = 0.0  # 0: classes as frequent as their images; 1: all classes equally frequent
    shuffle_gb: float = 14.0  # GiB of images of a bucket that are shuffled together

    def check(self) -> None:
        require_between(self, 'max_pixels', low=1, high=MAX_PIXELS_LIMIT)
        require_between(self, 'device_mb', low=0)
        require_between(self, 'threads', 'repeats', low=1)
        require_between(self, 'shuffle_gb', above=0)
        require_between(self, 'balance', low=0, high=1)

    @property
    def num_threads(self) -> int:
        """The number of decoding threads."""
        return self.threads or count_cores()

    def check_batch_size(self, batch_size: int, *, mixes: bool) -> None:
        """Raises UserError unless a batch has room for `repeats` copies of each image.

        If `mixes` is true, also rejects a batch whose last image is a copy of its first one,
        because MixUp and CutMix mix the first image with the last.
        """
        where = f'loader.repeats={self.repeats}'
        most = max(1, batch_size // 2)
        require(
            self.repeats <= most,
            f'{where}: expected at most {most}, half of batch_size={batch_size}',
        )
        distinct = -(-batch_size // self.repeats)
        copies = -(-batch_size // distinct)
        require(
            copies == self.repeats,
            f'{where}: batch_size={batch_size} has room for {copies}; expected repeats={copies}',
        )
        if mixes and batch_size % distinct == 1:  # the last example is a copy of the first one
            raise UserError(
                f'{where}: MixUp and CutMix would mix an image with its copy at '
                f'batch_size={batch_size}; use another batch_size'
            )


def check_memory(
    batch_size: int,
    size: Size,
    name: str,
    *,
    accumulation_steps: int = 1,
    threads: int | None = None,
) -> None:
    """Raises UserError if the batches of this process need more than the machine's memory.

    These are the batch in use and those that are loaded ahead. On a CPU, jax also holds the images
    as float32.

    Args:
      batch_size: Images per batch of all processes.
      size: The (height, width) of the images.
      name: The flag or field of the batch size, for the message.
      accumulation_steps: Number of parts of a batch for gradient accumulation.
      threads: Decoding threads; None: one per CPU core.
    """
    rows = -(-batch_size // jax.process_count())
    height, width = size
    ahead = _batches_ahead(rows, threads or count_cores())
    copies = 1 + ahead + (4 / accumulation_steps if jax.default_backend() == 'cpu' else 0)
    needed = copies * rows * height * width * 3
    memory = psutil.virtual_memory().total
    require(
        needed <= memory,
        f'{name}={batch_size}: {rows:,} images of {height}x{width} pixels need '
        f'{needed / 2**30:,.0f} GiB; expected at most {memory / 2**30:,.0f} GiB, '
        'the memory of this machine',
    )


def training_sampler(
    source: Source, config: LoaderConfig, *, batch_size: int, seed: int
) -> Sampler:
    """Returns the sampler of training batches: shuffled, balanced and repeated as configured.

    Raises:
      UserError: If classes are to be balanced but an image has not exactly one class.
    """
    check_balance(source, config)
    if source.places is not None:
        windows = make_windows(source, config, batch_size)
        blocks = find_blocks(source, windows)
        sampler = sampling.shuffle_blocks(blocks, len(source), windows, seed=seed)
    elif config.balance:
        sampler = sampling.balance_classes(source.labels, balance=config.balance, seed=seed)
    else:
        sampler = sampling.shuffle(len(source), seed=seed)
    if config.repeats == 1:
        return sampler
    return sampling.repeat(sampler, config.repeats, batch_size=batch_size)


def make_windows(source: Source, config: LoaderConfig, batch_size: int) -> Windows:
    """Returns the windows in which images are shuffled that are read in blocks."""
    assert source.places is not None
    distinct = -(-batch_size // config.repeats)
    images = int(config.shuffle_gb * 2**30 * len(source) / source.places.num_bytes)
    return Windows.of(len(source), batch_size=distinct, shuffled_images=images)


def find_blocks(source: Source, windows: Windows) -> Int[np.ndarray, 'b']:
    """Returns the first image of each block of neighbors that are shuffled as one."""
    assert source.places is not None
    return source.places.find_blocks(max(1, windows.size // _BLOCKS_PER_WINDOW))


class WindowMemory(NamedTuple):
    """The memory of the images of a bucket that are shuffled together."""

    images: int
    window_bytes: int  # in all processes
    host_bytes: int  # of the windows that are in memory at a time on this host

    def __str__(self) -> str:
        window, host = (f'{size / 2**20:,.0f} MiB' for size in (self.window_bytes, self.host_bytes))
        return (
            f'shuffles {self.images:,} images at a time ({window} in all processes); this host '
            f'needs up to {host}'
        )


def check_window_memory(
    source: Source, config: LoaderConfig, batch_size: int, sharding: NamedSharding
) -> WindowMemory:
    """Returns the memory of windows. Raises UserError if it is above half of this host's memory."""
    assert source.places is not None
    windows = make_windows(source, config, batch_size)
    images = windows.lanes * windows.size
    window_bytes = round(images * source.places.num_bytes / len(source))
    # If an image is several times in a batch, its copies may be on several hosts.
    share = config.repeats * len(local_rows(sharding, batch_size)) / batch_size
    share = min(1.0, share * count_processes_on_host())
    # Batches that are loaded ahead are in later windows.
    in_memory = 2 if windows.steps >= _MOST_AHEAD else 2 + -(-_MOST_AHEAD // windows.steps)
    memory = WindowMemory(images, window_bytes, round(in_memory * window_bytes * share))
    most = psutil.virtual_memory().total // 2
    fits = 0.99 * config.shuffle_gb * most / max(1, memory.host_bytes)  # also when rounded
    require(
        memory.host_bytes <= most,
        f'config.loader.shuffle_gb={config.shuffle_gb:g}: {in_memory} windows need '
        f'{memory.host_bytes / 2**20:,.0f} MiB on this host, more than half of its memory '
        f'({most / 2**20:,.0f} MiB); expected at most {fits:.3g}',
    )
    return memory


def check_balance(source: Source, config: LoaderConfig) -> None:
    """Raises UserError if classes are to be balanced but an image has not exactly one class."""
    if config.balance:
        expected = f'expected 0 for {source.data} {source.split}'
        where = f'loader.balance={config.balance}'
        require(not source.multi_label, f'{where}: {expected}, because images have several classes')
        require(bool(source.class_names), f'{where}: {expected}, because images have no classes')
        require(source.places is None, f'{where}: {expected}, because images are read in blocks')


@dataclasses.dataclass(frozen=True)
class Loader:
    """The two steps that make a batch; `training_batches` and `sequential_batches` call them."""

    source: Source
    load: Callable[[Examples], Batch]  # reads into host memory
    gather: Callable[[Batch], Batch]  # maps the loaded arrays, moved to devices, to the batch
    request: Callable[[Examples], Ranges] | None  # requests images of a bucket before `load`
    sharding: NamedSharding  # of the batches
    config: LoaderConfig


def make_loader(
    reader: ImageReader, config: LoaderConfig | None = None, sharding: NamedSharding | None = None
) -> Loader:
    """Makes a loader that reads images for each batch, or keeps all images on the devices.

    Args:
      reader: Reads the images.
      config: How images reach the devices.
      sharding: The sharding of batches; None splits them over all devices.

    Raises:
      UserError: If `config.placement` is 'device' but the reader crops at random.
    """
    import cv2  # not all programs read images

    cv2.setNumThreads(1)  # the pool's threads suffice, because OpenCV releases the GIL
    config = config or LoaderConfig()
    sharding = sharding or batch_sharding(make_mesh(MeshConfig()))
    threads = config.num_threads
    pool = futures.ThreadPoolExecutor(threads)
    bytes_per_example = 3 * math.prod(reader.size) + 4 * math.prod(reader.source.label_shape)
    fits = len(reader.source) * bytes_per_example / 2**20 <= config.device_mb
    if reader.crop.random:
        require(
            config.placement != 'device',
            f'placement=device: expected auto or host with {type(reader.crop).__name__}, '
            'because random crops differ by epoch',
        )
    elif config.placement == 'device' or (config.placement == 'auto' and fits):
        with pool:
            return _keep_on_device(reader, pool, sharding, config)

    def load(examples: Examples) -> Batch:
        rows = _rows_at_once(len(examples.index), threads)
        return reader.examples(examples, pool, rows_at_once=rows)

    request = functools.partial(_request, places) if (places := reader.source.places) else None
    return Loader(reader.source, load, lambda batch: batch, request, sharding, config)


def make_loaders(config: LoaderConfig, sharding: NamedSharding) -> Callable[[ImageReader], Loader]:
    """Returns a function from readers to loaders that caches the loaders of equal readers."""
    cache: dict[tuple[int, str], Loader] = {}

    def loader_of(reader: ImageReader) -> Loader:
        names = [field.name for field in dataclasses.fields(reader)]
        options = [getattr(reader, name) for name in names if name not in ('source', 'on_skipped')]
        key = id(reader.source), repr(options)
        if key not in cache:
            cache[key] = make_loader(reader, config, sharding)
        return cache[key]

    return loader_of


def _keep_on_device(
    reader: ImageReader, pool: futures.Executor, sharding: NamedSharding, config: LoaderConfig
) -> Loader:
    """Reads all images once. `load` then returns indices, and `gather` looks the images up."""
    examples: Batch = {}
    for part in request_ahead(reader.source):
        batch = reader.examples(Examples.of(np.array(part)), pool)
        for name, array in batch.items():
            if name not in examples:
                examples[name] = np.empty((len(reader.source), *array.shape[1:]), array.dtype)
            examples[name][part.start : part.stop] = array
    stored = put(examples, dict.fromkeys(examples, NamedSharding(sharding.mesh, PartitionSpec())))
    gather = functools.partial(_gather, sharding, stored)
    return Loader(reader.source, _describe_examples, gather, None, sharding, config)


def _request(places: Places, examples: Examples) -> Ranges:
    return places.request(examples.index[examples.index != PADDING])


@functools.partial(jax.jit, static_argnums=0)
def _gather(sharding: NamedSharding, stored: Batch, refs: Batch) -> Batch:
    """Gathers a batch from stored examples."""
    batch = jax.tree.map(lambda array: array[refs['example']], stored)
    refs = refs | {'mask': batch['mask'] & refs['mask']}
    return jax.lax.with_sharding_constraint(batch | refs, sharding)


def _batches_ahead(rows: int, threads: int) -> int:
    """Returns how many batches are loaded ahead: as many as keep all threads busy twice."""
    return min(_MOST_AHEAD, max(2, -(-2 * _MOST_ROWS * threads // max(1, rows))))


def _rows_at_once(rows: int, threads: int) -> int:
    """Returns how many rows of a batch a thread reads: fewer if all batches have few rows."""
    return min(_MOST_ROWS, max(1, _MOST_AHEAD * rows // (2 * threads)))


def host_batches(
    loader: Loader,
    sampler: Sampler,
    *,
    steps: range,
    batch_size: int,
    rows: Int[np.ndarray, 'r'] | None = None,
) -> Iterator[Batch]:
    """Yields a part of the global batch of each step, loaded into host memory in the background.

    Args:
      loader: Loads the examples.
      sampler: Maps positions in the stream of examples to examples. Row r of step n has the
        position n * batch_size + r.
      steps: The steps of the batches.
      batch_size: Rows of the global batch.
      rows: The rows of the global batch to load; None: the rows of this process.
    """
    rows = local_rows(loader.sharding, batch_size) if rows is None else rows

    def find(of_steps: range) -> Examples:
        return sampler((np.array(of_steps)[:, None] * batch_size + rows).ravel())

    ahead = _batches_ahead(len(rows), loader.config.num_threads)
    pool = futures.ThreadPoolExecutor(ahead + 1)  # and one that requests windows
    windows = _RequestedWindows(loader.request, find, steps, sampler.steps_per_window)

    def load(step: int) -> Batch:
        windows.request(step)
        return loader.load(find(range(step, step + 1)))

    pending = collections.deque((step, pool.submit(load, step)) for step in steps[:ahead])
    later = iter(steps[ahead:])
    try:
        if pending:
            windows.wait_for_first(pending[0][1])
        while pending:
            step, future = pending.popleft()
            batch = future.result()
            for later_step in windows.release(step):
                pool.submit(windows.request, later_step)
            pending.extend((step, pool.submit(load, step)) for step in itertools.islice(later, 1))
            yield batch
    finally:
        running = [future for _, future in pending if not future.cancel()]
        pool.submit(windows.close, running)
        pool.shutdown(wait=False)


class _RequestedWindows:
    """Requests the images of a bucket, one window of steps at a time, before they are needed."""

    def __init__(
        self,
        request: Callable[[Examples], Ranges] | None,
        find: Callable[[range], Examples],
        steps: range,
        steps_per_window: int,
    ):
        self._request = request
        self._find = find
        self._steps = steps
        self._size = steps_per_window
        self._lock = threading.Lock()
        self._windows: dict[int, Ranges] = {}
        self._first = steps.start // steps_per_window  # earlier windows are released
        self._is_closed = False

    def request(self, step: int) -> None:
        """Requests the images of the window of a step, unless they are requested."""
        number = step // self._size
        first = max(number * self._size, self._steps.start)
        steps = range(first, min((number + 1) * self._size, self._steps.stop))
        if self._request is None or not steps or number in self._windows:
            return
        with self._lock:
            if self._is_closed:
                raise futures.CancelledError  # codespell:ignore
            if number not in self._windows and number >= self._first:
                self._windows[number] = self._request(self._find(steps))

    def wait_for_first(self, batch: futures.Future[Batch]) -> None:
        """Waits for the first batch, and shows how much of the first window has arrived."""
        if self._request is None or futures.wait([batch], timeout=1).done:
            return
        text = 'reading the first window of images'
        with progress_bar(transient=True) as bar:
            task = bar.add_task(text)
            logged = time.monotonic()
            arrived = 0
            while not futures.wait([batch], timeout=0.5).done:
                window = self._windows.get(self._steps.start // self._size)
                before = arrived
                arrived, size = (window.bytes_received, window.num_bytes) if window else (0, 0)
                if arrived > before:
                    keep_alive()
                bar.update(task, completed=arrived, total=size)
                if time.monotonic() - logged > _SECONDS_BETWEEN_LINES:
                    logged = time.monotonic()
                    logging.warning('%s: %d of %d MB', text, arrived / 1e6, size / 1e6)

    def release(self, step: int) -> list[int]:
        """If this step is the last one of its window, drops the window.

        Returns the first step of each window to request next.
        """
        if self._request is None:
            return []
        window = step // self._size
        is_last = (step + 1) % self._size == 0
        if is_last:
            with self._lock:  # another thread may be about to request it
                self._first = window + 1
                ranges = self._windows.pop(window, None)
            if ranges is not None:
                ranges.release()
        first = [window + 1] if step == self._steps.start else []
        return [number * self._size for number in [*first, *([window + 2] if is_last else [])]]

    def close(self, running: Sequence[futures.Future[Batch]]) -> None:
        """Cancels all requests, and drops all windows when these batches no longer need them."""
        with self._lock:
            self._is_closed = True
        for window in self._windows.values():
            window.cancel()
        futures.wait(running)
        for window in self._windows.values():
            window.release()


def to_devices(loader: Loader, local: Batch, batch_size: int) -> Batch:
    """Moves the rows of this process to the devices, as a part of the global batch.

    May block until the running step has finished.
    """
    shapes = {name: (batch_size, *x.shape[1:]) for name, x in local.items()}
    moved = jax.make_array_from_process_local_data(loader.sharding, local, shapes)
    return loader.gather(moved)


def batches(loader: Loader, sampler: Sampler, *, steps: range, batch_size: int) -> Iterator[Batch]:
    """Yields the global batches of these steps on the devices."""
    for local in host_batches(loader, sampler, steps=steps, batch_size=batch_size):
        yield to_devices(loader, local, batch_size)


def training_batches(
    loader: Loader, *, steps: range, batch_size: int, seed: int
) -> Iterator[Batch]:
    """Yields the batches of these steps, from examples that are shuffled anew in each epoch.

    Images are repeated and classes are balanced as the loader's configuration says. The batch of a
    step does not depend on the first step of `steps`.

    Args:
      loader: Makes the batches.
      steps: The steps of the batches, such as range(1000).
      batch_size: Images per batch of all processes.
      seed: Seed of the order.
    """
    sampler = training_sampler(loader.source, loader.config, batch_size=batch_size, seed=seed)
    return batches(loader, sampler, steps=steps, batch_size=batch_size)


def sequential_batches(
    loader: Loader, indices: Int[np.ndarray, 'n'], *, batch_size: int
) -> Iterator[Batch]:
    """Yields batches of the images with these indices once, in order; the last batch is padded."""

    steps = range(-(-len(indices) // batch_size))
    sampler = sampling.in_order(indices)
    return batches(loader, sampler, steps=steps, batch_size=batch_size)


def abstract_batch(
    mesh: Mesh, batch_size: int, image_size: Size, label_shape: tuple[int, ...] = ()
) -> Batch:
    """Returns the shape, dtype and sharding of each array of a batch as a jax.ShapeDtypeStruct."""
    shapes = {
        'images': ((batch_size, *image_size, 3), np.uint8),
        'labels': ((batch_size, *label_shape), np.int32),
        'mask': ((batch_size,), np.bool_),
        'epoch': ((batch_size,), np.int32),
        'example': ((batch_size,), np.int32),
    }
    sharding = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(*x, sharding=sharding) for name, x in shapes.items()}


class BatchSource(NamedTuple):
    """Makes batches on the devices of a mesh from the images of a reader."""

    mesh: Mesh
    make_loader: Callable[[ImageReader], Loader]
    batch_size: int

    def read(
        self, reader: ImageReader, indices: Int[np.ndarray, 'n'] | None = None
    ) -> Iterator[Batch]:
        """Yields batches of images in order, all if `indices` is None; the last one is padded."""
        if indices is None:
            indices = np.arange(len(reader.source))
        loader = self.make_loader(reader)
        return sequential_batches(loader, indices, batch_size=self.batch_size)

    def abstract(self, reader: ImageReader) -> Batch:
        """Returns shape, dtype and sharding of each array of a batch."""
        return abstract_batch(self.mesh, self.batch_size, reader.size, reader.source.label_shape)
