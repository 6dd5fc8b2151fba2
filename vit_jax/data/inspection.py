"""Inspects images before training: counts per class, unreadable and duplicate images."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import time
from collections.abc import Callable
from concurrent import futures
from typing import NamedTuple

import numpy as np

from vit_jax.data.image_decoding import decode, read_header
from vit_jax.data.loading import ImageReader, LoaderConfig, find_blocks, make_windows
from vit_jax.data.sources.base import Source, check_label, request_ahead

# In a window. With 3,000 blocks of images that are sorted into 1,000 classes, the number of images
# of a class in a batch has twice the variance of random order.
_BLOCKS_PER_CLASS = 3


class ImageInfo(NamedTuple):
    """A readable image: the digest of its bytes, class names, format and (height, width)."""

    digest: bytes
    classes: list[str]
    format: str
    size: tuple[int, int]


@dataclasses.dataclass
class SplitReport:
    """Summary of the images of a split, as vit_jax.inspect_data writes it to data.json."""

    images: int
    classes: dict[str, int]  # number of images per class
    formats: dict[str, int] = dataclasses.field(default_factory=dict)
    unreadable: list[str] = dataclasses.field(default_factory=list)  # NAME: reason
    duplicates: list[str] = dataclasses.field(default_factory=list)  # NAME = OTHER: equal bytes
    # NAME (classes) = OTHER (classes): equal bytes, but different classes.
    contradictory: list[str] = dataclasses.field(default_factory=list)
    height: list[int] = dataclasses.field(default_factory=list)  # minimum, median, maximum
    width: list[int] = dataclasses.field(default_factory=list)  # in pixels; empty without images


def scan(
    reader: ImageReader,
    pool: futures.Executor,
    done: Callable[[int], None],
    *,
    images_by_name: dict[str, ImageInfo],
) -> SplitReport:
    """Reads, decodes and crops every image of a source once.

    Args:
      reader: The reader of the source.
      pool: The threads that read.
      done: Is called with 1 after each image.
      images_by_name: The images of earlier scans, to find duplicates; this scan adds its images.
    """
    source = reader.source
    result = SplitReport(len(source), dict.fromkeys(source.class_names, 0))
    formats = collections.Counter[str]()
    sizes: list[tuple[int, int]] = []
    name_by_digest = {image.digest: name for name, image in reversed(images_by_name.items())}
    names = source.read_names(range(len(source)))
    images = itertools.chain.from_iterable(
        pool.map(functools.partial(_examine, reader), part) for part in request_ahead(source)
    )
    for name, image in zip(names, images, strict=True):
        done(1)
        if isinstance(image, str):
            result.unreadable.append(f'{name}: {image}')
            continue
        for class_name in image.classes:
            result.classes[class_name] += 1
        images_by_name[name] = image
        other = name_by_digest.setdefault(image.digest, name)
        if other is not name:
            classes = ', '.join(image.classes)
            other_classes = ', '.join(images_by_name[other].classes)
            if classes == other_classes:
                result.duplicates.append(f'{name} = {other}')
            else:
                result.contradictory.append(f'{name} ({classes}) = {other} ({other_classes})')
        formats[image.format] += 1
        sizes.append(image.size)
    result.formats = dict(formats.most_common())
    if sizes:
        heights_widths = np.percentile(sizes, [0, 50, 100], axis=0).astype(int).T
        result.height, result.width = heights_widths.tolist()
    return result


def check_order(source: Source, config: LoaderConfig, batch_size: int) -> str | None:
    """Returns a warning if images are stored by class and windows are too small to mix them well.

    If each block has one class and a window has few blocks, a batch has few classes.
    """
    places = source.places
    num_classes = len(source.class_names)
    if places is None or source.multi_label or num_classes < 2:
        return None
    shares = np.bincount(source.labels) / len(source)
    run_length = len(source) / (1 + np.count_nonzero(np.diff(source.labels)))
    is_sorted = run_length > 4 / max(1e-9, 1 - (shares**2).sum())  # 4 times as in random order
    windows = make_windows(source, config, batch_size)
    images = windows.lanes * windows.size
    blocks = images * len(find_blocks(source, windows)) / len(source)
    enough = _BLOCKS_PER_CLASS * num_classes
    if not is_sorted or blocks >= enough or images > len(source) - batch_size:
        return None
    block_bytes = places.num_bytes / len(places.find_blocks(len(source)))
    return (
        f'{run_length:,.0f} neighbors in the shards have the same class on average, and a window '
        f'has {blocks:,.0f} blocks; write the shards in random order, or set '
        f'--config.loader.shuffle_gb={enough * block_bytes / 2**30:.2g}'
    )


class BucketSpeed(NamedTuple):
    """How fast this process reads a bucket."""

    latency: float  # seconds until a single image has arrived
    bytes_per_second: float  # in large requests
    images_per_second: float


def measure_bucket(source: Source) -> BucketSpeed:
    """Reads up to 64 blocks from all over the shards of a source in a bucket."""
    places = source.places
    assert places is not None
    starts = places.find_blocks(len(source))
    stops = np.append(starts[1:], len(source))
    chosen = np.unique(np.linspace(0, len(starts) - 1, 64).astype(int))
    indices = np.concatenate([np.arange(starts[n], stops[n]) for n in chosen])
    latencies = []
    for index in indices[:3]:
        start = time.monotonic()
        source.read(int(index))
        latencies.append(time.monotonic() - start)
    start = time.monotonic()
    with places.request(indices) as ranges:
        ranges.wait()
        seconds = time.monotonic() - start
        size = ranges.num_bytes
    return BucketSpeed(min(latencies), size / seconds, len(indices) / seconds)


def _examine(reader: ImageReader, index: int) -> ImageInfo | str:
    """Returns the properties of an image, or the reason why it is unreadable.

    Raises UserError if its label is not a whole number (see `check_label`).
    """
    source = reader.source
    max_pixels = reader.max_pixels
    try:
        stored, label = source.read(index)
        pixels = decode(stored, exif_rotation=True, max_pixels=max_pixels)
        reader.crop(pixels, reader.size, None)
    except (ValueError, OSError) as error:
        return getattr(error, 'strerror', None) or str(error)
    check_label(label, source.data)
    numbers = np.flatnonzero(label) if source.multi_label else [int(label)]
    kind = 'array' if isinstance(stored, np.ndarray) else read_header(stored, max_pixels).kind
    return ImageInfo(
        classes=[source.class_names[n] for n in numbers if source.class_names],
        format=kind,
        size=(pixels.shape[0], pixels.shape[1]),
        digest=hashlib.blake2b(bytes(stored), digest_size=16).digest(),
    )
