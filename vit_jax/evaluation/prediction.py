"""A loaded network on all local devices, and images as batches for it."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Batch, Params, UserError
from vit_jax.data import loading, reading
from vit_jax.data.loading import LoaderConfig
from vit_jax.data.reading import ImageReader
from vit_jax.data.sources.base import Source
from vit_jax.distributed import meshes
from vit_jax.pretrained import Loaded

_FEW = 32  # images: below, networks for all counts are one compiled program


def reader_for(loaded: Loaded, source: Source, max_pixels: int) -> ImageReader:
    """The images as the network is to see them; those that cannot be read are masked.

    Raises UserError for a network that has no output for an image.
    """
    if getattr(loaded.config, 'pool', None) == 'none':
        raise UserError('pool=none: the network has outputs for every token, not for the image')
    options = {'on_unreadable': 'skip', 'max_pixels': max_pixels}
    return reading.reader_for(source, loaded.preprocessing, loaded.config.image_size, **options)


def problem(reader: ImageReader, index: int) -> str:
    """Why an image cannot be read, which is tried once more."""
    try:
        reader.example(reading.ExampleRef(index))
    except ValueError as error:
        return str(error)
    return f'{reader.source.name_of(index)}: readable now'


def on_devices(
    loaded: Loaded, reader: ImageReader, batch_size: int, mesh: Mesh
) -> tuple[Params, Iterator[Batch]]:
    """The parameters on each device, and all images in order, `batch_size` or a few more at once.

    The batches are split over the devices. Raises UserError where they exceed the memory.
    """
    batch_size = min(batch_size, max(_FEW, len(reader.source)))
    loading.check_memory(batch_size, reader.size, '--batch_size')
    batch_size = -(-batch_size // mesh.size) * mesh.size
    loader = loading.make_loader(
        reader, LoaderConfig(placement='host'), meshes.batch_sharding(mesh)
    )
    indices = np.arange(len(reader.source))
    batches = loading.sequential_batches(loader, indices, batch_size=batch_size)
    return jax.device_put(loaded.params, meshes.replicated(mesh)), batches
