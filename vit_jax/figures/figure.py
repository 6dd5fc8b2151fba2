"""Defines figures, and their inputs: models on the devices, and images.

To add a figure, write NAME.py in this folder with a constant FIGURE, and add NAME to NAMES.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Array, Batch, Float, Int, Params, UserError, plural, require
from vit_jax.data import loading
from vit_jax.data.image_preprocessing import normalize
from vit_jax.data.loading import ImageReader, LoaderConfig
from vit_jax.distributed import meshes
from vit_jax.models import ResNetConfig, ViTConfig, with_highest_precision
from vit_jax.models.taps import Reduction
from vit_jax.pretrained import LoadedModel

# Figures in the order of the page. Their functions that draw need matplotlib, an extra.
NAMES = (
    'filters',
    'positions',
    'attention_distance',
    'rollout',
    'attention_maps',
    'cka',
    'skip_removal',
    'head_subsets',
    'residuals',
    'receptive_fields',
    'localization',
    'features',
    'outliers',
    'probes',
    'training_data',
)
Progress = Callable[[Iterable[Any], int], Iterable[Any]]  # yields the items, shows progress
Numbers = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of a paper: functions that compute, draw and summarize it.

    If `compute` raises UserError, the figure is skipped, with the message as the reason.
    """

    docstring: str  # TITLE (SOURCE). How it is computed, and what to look for.
    compute: Callable[..., Numbers]  # (images, model) or (images, *models)
    draw: Callable[[Numbers], Any]  # returns a matplotlib figure
    finding: Callable[[Numbers], str] = lambda _: ''  # a sentence with the main result
    compares_models: bool = False  # whether one picture shows all models
    needs_images: bool = True

    @property
    def title(self) -> str:
        return self.docstring.partition(' (')[0]

    @property
    def caption(self) -> str:
        """The source, how the figure is computed, and what to look for."""
        _, _, after_title = self.docstring.partition(' (')
        return ' '.join(after_title.replace(').', '.', 1).split())


def find_figure(name: str) -> Figure:
    """Imports the module of a figure and returns its FIGURE."""
    figure: Figure = importlib.import_module(f'vit_jax.figures.{name}').FIGURE
    return figure


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedModel:
    """A model on the devices, with a reader that prepares images for it."""

    name: str
    loaded: LoadedModel
    params: Params  # on the devices of the mesh
    reader: ImageReader
    mesh: Mesh

    @property
    def vit(self) -> ViTConfig:
        """The architecture. Raises UserError for a ResNet."""
        if isinstance(self.loaded.config, ResNetConfig):
            raise UserError('needs a ViT: a ResNet has neither tokens nor attention')
        return self.loaded.config

    @property
    def patch_size(self) -> tuple[float, float]:
        """Height and width in pixels from one token to the next."""
        height, width = self.loaded.config.image_size
        rows, columns = self.loaded.config.grid
        return height / rows, width / columns

    def capture(self, wanted: Mapping[str, Reduction]) -> Callable[[Batch], dict[str, Any]]:
        """Returns a compiled function from a batch to the intermediates of `Model.capture`."""
        return self.compile(lambda params, x: self.loaded.model.capture(params, x, wanted)[1])

    def compile(
        self, function: Callable[[Params, Float[Array, 'b h w c']], Any]
    ) -> Callable[[Batch], Any]:
        """Compiles a function of parameters and normalized images into a function of a batch."""

        @functools.partial(jax.jit, out_shardings=meshes.replicated(self.mesh))
        def run(params: Params, images: Array) -> Any:
            normalized = normalize(images, self.loaded.preprocessing)
            return with_highest_precision(function)(params, normalized)

        return lambda batch: run(self.params, batch['images'])


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """The images that all models process, in full batches."""

    indices: Int[np.ndarray, 'n']  # indices of readable images in the source
    batch_size: int
    progress: Progress = lambda items, total: items
    point: tuple[float, float] = (0.5, 0.5)  # (x, y) of a chosen patch, in fractions of the image

    def used_indices(self, most: int | None = None) -> Int[np.ndarray, 'm']:
        """Returns the indices in full batches: at most `most` images, but at least one batch."""
        count = len(self.indices) if most is None else min(most, len(self.indices))
        return self.indices[: max(1, count // self.batch_size) * self.batch_size]

    def batches(self, model: PlacedModel, most: int | None = None) -> Iterator[Batch]:
        """Yields the used images in batches, prepared for a model."""
        used = self.used_indices(most)
        sharding = meshes.batch_sharding(model.mesh)
        loader = loading.make_loader(model.reader, LoaderConfig(placement='host'), sharding)
        batches = loading.sequential_batches(loader, used, batch_size=self.batch_size)
        return iter(self.progress(batches, len(used) // self.batch_size))

    def capture(
        self, model: PlacedModel, wanted: Mapping[str, Reduction], most: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields the intermediates of `Model.capture` for each batch, as numpy arrays."""
        capture = model.capture(wanted)
        return (jax.device_get(capture(batch)) for batch in self.batches(model, most))

    def first_images(self, model: PlacedModel, count: int) -> Float[np.ndarray, 'n h w c']:
        """Returns the first images, cropped for a ViT, with values in [0, 1].

        Pixels at the bottom and the right that fill no patch are left out.
        """
        indices = self.indices[:count].tolist()
        images = [model.reader.example(index)[0] for index in indices]
        height, width = np.multiply(model.vit.grid, model.vit.patch_size_in_pixels)
        return np.stack(images)[:, :height, :width].astype(np.float32) / 255


def find_readable(
    reader: ImageReader, most: int, progress: Progress
) -> tuple[Int[np.ndarray, 'n'], list[str]]:
    """Selects at most `most` evenly spread images, and reads them all once.

    Returns the indices of readable images, and a message per unreadable image. Raises UserError if
    no image is readable.
    """
    total = len(reader.source)
    indices = np.unique(np.linspace(0, total - 1, min(most, total)).astype(int))

    def find_problem(index: int) -> str | None:
        try:
            reader.example(index)
        except UserError as error:
            return str(error)
        return None

    with futures.ThreadPoolExecutor(loading.count_cores()) as pool:
        results = list(progress(pool.map(find_problem, indices.tolist()), len(indices)))
    problems = [problem for problem in results if problem is not None]
    if len(problems) == len(indices):
        images = plural(len(indices), 'image')
        raise UserError('; '.join([f'none of {images} is readable', *problems[:1]]))
    is_readable = [problem is None for problem in results]
    return indices[is_readable], problems


def choose_batch(images: int, batch_size: int) -> tuple[int, Mesh]:
    """Returns a batch size that leaves few images over, and a mesh that divides it."""
    num_batches = -(-images // batch_size)
    size = images // num_batches
    devices = jax.devices()
    used_devices = devices[: math.gcd(size, len(devices))]
    return size, meshes.make_mesh(meshes.MeshConfig(), used_devices)


def put_on_devices(name: str, loaded: LoadedModel, reader: ImageReader, mesh: Mesh) -> PlacedModel:
    """Copies the parameters of a model to each device of the mesh."""
    sharding = jax.tree.map(lambda _: meshes.replicated(mesh), loaded.params)
    return PlacedModel(name, loaded, meshes.put(loaded.params, sharding), reader, mesh)


def require_finite(images: Images, model: PlacedModel) -> None:
    """Raises UserError if the logits of an image have NaN or infinity."""

    def finite(params: Params, batch: Float[Array, 'b h w c']) -> Array:
        logits = model.loaded.model.apply(params, batch)
        return jnp.isfinite(logits).reshape(len(logits), -1).all(axis=1)

    flags = map(model.compile(finite), images.batches(model))
    num_invalid = sum(int((~is_finite).sum()) for is_finite in flags)
    require(
        num_invalid == 0,
        f'{model.name}: NaN or infinity in the logits of {num_invalid} images; '
        'pass --figures=filters,positions, which need no images, or leave out the model',
    )
