"""A loaded network on all local devices, and images as batches for it."""

from collections.abc import Iterator

import jax
import numpy as np

from vit_jax.base import Batch, Params, UserError
from vit_jax.data import loading
from vit_jax.data.loading import ImageReader, LoaderConfig, OnUnreadable
from vit_jax.data.sources.base import Source
from vit_jax.parallel import meshes
from vit_jax.pretrained import Loaded


def reader_for(
    loaded: Loaded, source: Source, on_unreadable: OnUnreadable = 'error'
) -> ImageReader:
    """The images as the network is to see them. UserError if it has no output for an image."""
    if getattr(loaded.config, 'pool', None) == 'none':
        raise UserError('pool=none: the network has outputs for every token, not for the image')
    how, size = loaded.preprocessing, loaded.config.image_size
    return ImageReader(source, how.crop, size, how.exif_rotation, on_unreadable=on_unreadable)


def on_devices(
    loaded: Loaded, reader: ImageReader, batch_size: int
) -> tuple[Params, Iterator[Batch]]:
    """The parameters on each device, and all images in order, `batch_size` or a few more at once.

    The batches are split over the devices.
    """
    mesh = meshes.make_mesh(meshes.MeshConfig())
    batch_size = -(-batch_size // mesh.size) * mesh.size
    loader = loading.make_loader(
        reader, LoaderConfig(placement='host'), meshes.batch_sharding(mesh)
    )
    indices = np.arange(len(reader.source))
    batches = loading.sequential_batches(loader, indices, batch_size=batch_size)
    return jax.device_put(loaded.params, meshes.replicated(mesh)), batches
