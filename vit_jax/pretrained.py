"""Checkpoints of any origin as networks that can be used: `load`, look, `save`."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Params, Record, UserError, tree_names
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import opening
from vit_jax.checkpoints.formats.base import Layout
from vit_jax.checkpoints.formats.inference import Hints
from vit_jax.checkpoints.transfer import adapt, transfer
from vit_jax.data.image_preprocessing import Preprocessing, decode, normalize
from vit_jax.models import Gelu, Model, ModelConfig, ViTConfig, build, has_trained_head

ZERO_HEAD = (
    'the head is all zeros, as in the published ImageNet-21k files: it predicts nothing; '
    'fine-tune it, or use the features'
)
OutputName = Literal['logits', 'probabilities', 'features']


@dataclasses.dataclass(frozen=True, repr=False)
class Loaded:
    """A pre-trained network with what belongs to it.

    `logits`, `probabilities`, `features` and `capture` take images (b h w c) of
    `config.image_size` as `prepare` makes them, floating-point numbers (the published models:
    from -1 to 1), and multiply in float32. UserError for images of another size or type.
    """

    card: Card
    params: Params  # in host memory
    report: tuple[str, ...]  # what was found in the file, and what was changed
    ignored: tuple[str, ...]  # names of what the file holds beside the network
    format: str  # one of opening.NAMES
    layout: Layout | None

    def __repr__(self) -> str:
        return '\n'.join(self.report)

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.card.model

    @property
    def preprocessing(self) -> Preprocessing:
        """How images become what the network takes."""
        return self.card.preprocessing

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; () where the checkpoint has none."""
        return self.card.class_names

    @functools.cached_property
    def model(self) -> Model:
        """The network's functions."""
        return build(self.config)

    @functools.cached_property
    def predicts(self) -> bool:
        """Has it a head that was trained?"""
        return has_trained_head(self.params)

    def require_head(self) -> None:
        """Raises UserError for a network that has no head, or one that was not trained."""
        if self.config.num_classes is None:
            raise UserError('the checkpoint has no head: use the features, or fine-tune it')
        if not self.predicts:
            raise UserError(ZERO_HEAD)

    def prepare(self, image: bytes | np.ndarray) -> Float[np.ndarray, 'h w c']:
        """One image, an encoded file's bytes or a uint8 array, as the network takes it."""
        decoded = decode(image, exif_rotation=self.preprocessing.exif_rotation)
        cut = self.preprocessing.crop(decoded, self.config.image_size, None)
        return np.asarray(normalize(cut, self.preprocessing))

    def logits(self, images: Array | np.ndarray) -> Float[np.ndarray, '...']:
        """(b k), what the head gives. Raises UserError for a network without a trained head."""
        return self.outputs(images, 'logits')[0]

    def probabilities(self, images: Array | np.ndarray) -> Float[np.ndarray, '...']:
        """(b k), of each class: the sigmoid of its logit where the network was trained so, else
        the softmax. Raises UserError for a network without a trained head.
        """
        return self.outputs(images, 'probabilities')[0]

    def features(self, images: Array | np.ndarray) -> Float[np.ndarray, '...']:
        """(b d), what the head is given; with pool=none for each token, (b n d)."""
        return self.outputs(images, 'features')[0]

    def outputs(self, images: Array | np.ndarray, *names: OutputName) -> tuple[np.ndarray, ...]:
        """Several of these at once, for the price of one. Images may be split over devices."""
        if set(names) - {'features'}:
            self.require_head()
        outputs = self._outputs(self.params, _checked_images(images), names)
        return tuple(map(np.asarray, outputs))

    def capture(
        self, images: Array | np.ndarray, names: Sequence[str]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The logits, or features without a head, and the intermediate arrays of these names."""
        captured = self._capture(self.params, _checked_images(images), tuple(names))
        return jax.tree.map(np.asarray, captured)

    @functools.cached_property
    def _outputs(self) -> Callable[..., tuple[Array, ...]]:
        to_probabilities = jax.nn.sigmoid if self.card.loss == 'sigmoid' else jax.nn.softmax
        functions: dict[OutputName, Callable[..., Array]] = {
            'logits': self.model.apply,
            'probabilities': lambda *values: to_probabilities(self.model.apply(*values)),
            'features': self.model.features,
        }
        # The compiler computes what they have in common once.
        return _exact(lambda p, images, names: tuple(functions[n](p, images) for n in names))

    @functools.cached_property
    def _capture(self) -> Callable[..., Any]:
        return _exact(self.model.capture)


@dataclasses.dataclass
class Changes(Record):
    """What `load` changes in the network; None leaves it as it is."""

    image_size: tuple[int, int] | None
    patch_size: tuple[int, int] | None
    channels: int | None
    num_classes: int | Literal['keep'] | None  # None: without a head
    new_channels: Literal['adapt', 'fresh']


def load(
    path: str | os.PathLike[str],
    *,
    grid: tuple[int, int] | None = None,
    num_heads: int | None = None,
    gelu: Gelu | None = None,
    layer_norm_epsilon: float | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    num_classes: int | Literal['keep'] | None = 'keep',
    new_channels: Literal['adapt', 'fresh'] = 'adapt',
) -> Loaded:
    """The network at a path: a file or directory of any format of `opening.NAMES`.

    The first four are for what its file does not say of itself: the grid (height, width) of the
    position embeddings in patches, the number of heads, and so on. The others change the network:
    the size of images and patches (height, width, or one number), the channels of images, and the
    head, which `num_classes=None` drops and another number replaces by one of zeros. The patch
    projection is adapted to other channels, or drawn anew with `new_channels='fresh'`. Raises
    UserError or MissingFile, in one sentence, where the file or a value cannot be used.
    """
    path = os.fspath(path)
    hints = Hints(grid=grid, num_heads=num_heads, gelu=gelu, layer_norm_epsilon=layer_norm_epsilon)
    sizes = _pair(image_size), _pair(patch_size)
    changes = Changes(*sizes, channels, num_classes, new_channels)
    checkpoint = opening.open_checkpoint(path, hints, image_size=changes.image_size)
    card, new = checkpoint.card, _changed_config(checkpoint.card.model, changes)
    params, lines = _changed_params(checkpoint.read(), card.model, new, changes.new_channels)
    if new.num_classes != card.model.num_classes:  # what was said of the old head
        card = dataclasses.replace(card, class_names=(), loss=None)
    if new.num_classes is not None and not has_trained_head(params):
        lines.append(ZERO_HEAD)
    if card.loss not in (None, 'softmax', 'sigmoid'):
        lines.append(f'trained with {card.loss}: probabilities are the softmax of its logits')
    return Loaded(
        card=dataclasses.replace(card, model=new, grid=new.grid),
        params=params,
        report=(path, *checkpoint.report, *lines),
        ignored=checkpoint.ignored,
        format=checkpoint.format,
        layout=checkpoint.layout,
    )


def save(loaded: Loaded, path: str | os.PathLike[str], format: str | None = None) -> list[str]:
    """Writes the network, in the format that it was read in, or in another of `opening.NAMES`.

    In its own format a file keeps the layout that was read. Returns what a reader of the file has
    to know, line by line. Raises UserError where the format cannot hold the network.
    """
    format = format or loaded.format
    layout = loaded.layout if format == loaded.format else None
    return opening.write_checkpoint(
        os.fspath(path), format, card=loaded.card, params=loaded.params, layout=layout
    )


def _changed_config(old: ModelConfig, changes: Changes) -> ModelConfig:
    if changes.patch_size is not None and not isinstance(old, ViTConfig):
        raise UserError(f'patch_size={changes.patch_size}: a ResNet has no patches')
    names = 'image_size', 'patch_size', 'channels'
    values = {n: getattr(changes, n) for n in names if getattr(changes, n) is not None}
    if changes.num_classes != 'keep':
        values['num_classes'] = changes.num_classes
    return dataclasses.replace(old, **values)


def _changed_params(
    params: Params, old: ModelConfig, new: ModelConfig, new_channels: Literal['adapt', 'fresh']
) -> tuple[Params, list[str]]:
    """The parameters of the changed network, and a line about each change."""
    report: list[str] = []
    if new.num_classes != old.num_classes:
        # Only the head is taken from `fresh`: without one, names and shapes will do.
        shapes = jax.eval_shape(build(new).init, jax.random.key(0))
        fresh = shapes if new.num_classes is None else _initial(new)
        params, report = transfer(params, old=old, new=new, fresh=fresh)
    elif new != old:
        params, report = adapt(params, old=old, new=new)
    if new_channels == 'fresh' and new.channels != old.channels:
        drawn, root = tree_names.named_leaves(_initial(new)), 'backbone/conv_root/kernel'
        first = root if root in drawn else 'embedding/kernel'
        params = tree_names.map_named(lambda n, leaf: drawn[n] if n == first else leaf, params)
        report.append(f'{first}: drawn anew, for {new.channels} channels')
    return params, report


def _initial(config: ModelConfig) -> Params:
    """First parameters of a network, in host memory."""
    return jax.device_get(jax.jit(build(config).init)(jax.random.key(0)))


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function with float32 products: TPUs, GPUs would round to bfloat16 or TF32."""

    def run(params: Params, images: Float[Array, 'b h w c'], names: tuple[str, ...]) -> Any:
        with jax.default_matmul_precision('highest'):
            return function(params, images, names)

    return jax.jit(run, static_argnums=2)


def _checked_images(images: Array | np.ndarray) -> Float[Array, 'b h w c']:
    if images.ndim != 4 or images.dtype.kind != 'f':
        expected = 'floating-point numbers of the shape (b, h, w, c), as `prepare` makes them'
        raise UserError(f'images are {images.dtype}{list(images.shape)}, expected {expected}')
    return jnp.asarray(images, jnp.float32)


def _pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size
