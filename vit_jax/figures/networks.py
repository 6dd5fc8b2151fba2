"""Networks beside the same images, and one pass of these images through a network."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Array, Batch, Float, Int, Params, UserError, counted, require
from vit_jax.data import loading
from vit_jax.data.image_preprocessing import normalize
from vit_jax.data.loading import ExampleRef, ImageReader, LoaderConfig
from vit_jax.distributed import meshes
from vit_jax.models import ResNetConfig, ViTConfig, with_exact_products
from vit_jax.models.taps import Reduction
from vit_jax.pretrained import Loaded

Numbers = dict[str, np.ndarray]  # what a picture is drawn from, and what is kept of it


class LeftOut(UserError):
    """A figure that cannot be made of this network or these images, and why: one sentence."""


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A network on the devices, and the images as it is shown them."""

    name: str
    loaded: Loaded
    params: Params  # on the devices of the mesh
    reader: ImageReader
    mesh: Mesh

    @property
    def vit(self) -> ViTConfig:
        """The architecture. Raises LeftOut for a ResNet."""
        if isinstance(self.loaded.config, ResNetConfig):
            raise LeftOut('a ResNet has neither tokens nor attention')
        return self.loaded.config

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return self.vit.prefix

    @property
    def class_tokens(self) -> int:
        """Those of them that are no registers: of the class, and of the distillation."""
        return self.vit.positioned_prefix

    @property
    def patch_size(self) -> tuple[float, float]:
        """Pixels of the image from one token to the next, (height, width)."""
        (height, width), (rows, columns) = self.loaded.config.image_size, self.loaded.config.grid
        return height / rows, width / columns

    def seen(self, wanted: Mapping[str, Reduction]) -> Callable[[Batch], dict[str, Any]]:
        """A compiled function from a batch to what `Model.capture` makes of it, on every device."""

        def run(params: Params, images: Float[Array, 'b h w c']) -> dict[str, Any]:
            return self.loaded.model.capture(params, images, wanted)[1]

        return self.compiled(run)

    def compiled(
        self, function: Callable[[Params, Float[Array, 'b h w c']], Any]
    ) -> Callable[[Batch], Any]:
        """A function of parameters and prepared images as one of batches, on every device."""

        @functools.partial(jax.jit, out_shardings=meshes.replicated(self.mesh))
        def run(params: Params, images: Array) -> Any:
            prepared = normalize(images, self.loaded.preprocessing)
            return with_exact_products(function)(params, prepared)

        return lambda batch: run(self.params, batch['images'])


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """Some networks, and the images that all of them are shown, in full batches."""

    networks: tuple[Network, ...]
    indices: Int[np.ndarray, 'n']  # of images that can be read
    batch_size: int
    probe_l2: float  # of the ridge regressions, not divided by the number of images
    # Passes on what it is given, so many, and shows how much is left.
    watched: Callable[[Iterable[Any], int], Iterable[Any]]

    def batches(self, network: Network, most: int | None = None) -> Iterator[Batch]:
        """Batches of the images as this network takes them: of so many images, but one at least."""
        count = len(self.indices) if most is None else min(most, len(self.indices))
        used = self.indices[: max(1, count // self.batch_size) * self.batch_size]
        loader = loading.make_loader(
            network.reader, LoaderConfig(placement='host'), meshes.batch_sharding(network.mesh)
        )
        found = loading.sequential_batches(loader, used, batch_size=self.batch_size)
        return iter(self.watched(found, len(used) // self.batch_size))

    def over(
        self, network: Network, wanted: Mapping[str, Reduction], most: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """What `Model.capture` makes of each batch, as numpy arrays, one batch after the other."""
        seen = network.seen(wanted)
        return (jax.device_get(seen(batch)) for batch in self.batches(network, most))

    def pictures(self, network: Network, count: int) -> Float[np.ndarray, 'n h w c']:
        """The first images as this network is shown them, from 0 to 1."""
        refs = self.indices[:count].tolist()
        images = [network.reader.example(ExampleRef(index))[0] for index in refs]
        return np.stack(images).astype(np.float32) / 255

    def require_images(self, least: int, what: str) -> None:
        """Raises LeftOut where a batch holds fewer images."""
        few = (
            f'{what} needs at least {least} images; there {"is" if self.batch_size == 1 else "are"}'
        )
        if self.batch_size < least:
            raise LeftOut(f'{few} {self.batch_size}')


def readable(
    reader: ImageReader, most: int, watched: Callable[[Iterable[Any], int], Iterable[Any]]
) -> tuple[Int[np.ndarray, 'n'], list[str]]:
    """So many images at most, evenly spread over all, and what is wrong with those left out.

    Raises UserError where none can be read.
    """
    total = len(reader.source)
    indices = np.unique(np.linspace(0, total - 1, min(most, total)).astype(int))

    def problem(index: int) -> str | None:
        try:
            reader.example(ExampleRef(index))
        except UserError as error:
            return str(error)
        return None

    with futures.ThreadPoolExecutor(loading.cores()) as pool:
        found = list(watched(pool.map(problem, indices.tolist()), len(indices)))
    problems = [text for text in found if text is not None]
    none = f'none of {counted(len(indices), "image")} can be read'
    require(len(problems) < len(indices), '; '.join([none, *problems[:1]]))
    return indices[[text is None for text in found]], problems


def batch_for(images: int, batch_size: int) -> tuple[int, Mesh]:
    """The size of full batches of so many images, and the devices that they are split over."""
    size, devices = images // -(-images // batch_size), jax.devices()  # so that few are left over
    used = math.gcd(size, len(devices)) if size % len(devices) else len(devices)
    return size, meshes.make_mesh(meshes.MeshConfig(), devices[:used])


def on_devices(name: str, loaded: Loaded, reader: ImageReader, mesh: Mesh) -> Network:
    """The network with its parameters on each device."""
    placed = jax.tree.map(lambda _: meshes.replicated(mesh), loaded.params)
    return Network(name, loaded, meshes.put(loaded.params, placed), reader, mesh)
