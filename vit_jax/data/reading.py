"""Reads, decodes and crops images into batches in host memory, without jax."""

import dataclasses
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, Literal

import numpy as np

from vit_jax.base import Batch, Int, UInt8, UserError
from vit_jax.data.image_decoding import MAX_PIXELS
from vit_jax.data.image_preprocessing import Crop, Preprocessing, Size, decode_and_crop
from vit_jax.data.sources.base import Label, Source

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
        images = _aligned((len(refs), *self.size, 3))
        labels = np.zeros((len(refs), *self.source.label_shape), np.int32)
        mask = np.zeros(len(refs), bool)

        def read_rows(start: int) -> None:
            for row, ref in enumerate(refs[start : start + _ROWS], start):
                if ref is None:
                    continue
                try:
                    images[row], labels[row] = self.example(ref)
                    mask[row] = True
                except UserError as error:
                    if self.on_unreadable != 'skip':
                        raise UserError(f'{error} ({_SKIPPED})') from error
                    if self.on_skipped is not None:
                        self.on_skipped(str(error))

        list(pool.map(read_rows, range(0, len(refs), _ROWS)))  # raises what a thread raised
        return {'images': images, 'labels': labels, 'mask': mask} | epochs_and_indices(refs)

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
    lock = threading.Lock()

    def warn(text: str) -> None:
        with lock:
            if text in named or len(named) == shown:
                return
            named.add(text)
            rest = '; others are not named: vit_jax.inspect_data lists all'
            logging.warning('left out: %s%s', text, rest if len(named) == shown else '')

    return warn


def epochs_and_indices(refs: Sequence[ExampleRef | None]) -> dict[str, Int[np.ndarray, 'b']]:
    """Returns `epoch` and `example` of a batch; both are 0 for padding."""
    return {
        'epoch': np.array([ref.epoch if ref else 0 for ref in refs], np.int32),
        'example': np.array([ref.index if ref else 0 for ref in refs], np.int32),
    }


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    allowed = getattr(os, 'sched_getaffinity', None)  # not on macOS and Windows
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _aligned(shape: tuple[int, ...]) -> UInt8[np.ndarray, '...']:
    """Returns zeros at an address divisible by 64, which jax uses on a CPU without a copy."""
    size = math.prod(shape)
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)
