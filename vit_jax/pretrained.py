"""Checkpoints of any origin as networks that can be used: `load`, look, `save`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import records, tree_names
from vit_jax.base.array_types import Float, Params
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import opening
from vit_jax.checkpoints.formats.inference import Hints, summarize
from vit_jax.checkpoints.transfer import adapt, transfer
from vit_jax.data.image_preprocessing import Preprocessing, decode
from vit_jax.models import Model, ModelConfig, build, has_trained_head, parameter_count

ZERO_HEAD = (
    'the head is all zeros, as in the published ImageNet-21k files: it predicts nothing; '
    'fine-tune it, or use the features'
)


class Origin(NamedTuple):
    """A checkpoint that was recognised; its arrays are read when they are asked for."""

    path: str
    format: str  # one of opening.FORMATS
    layout: opening.Layout | None
    card: Card
    report: list[str]  # what was found out about it
    ignored: tuple[str, ...]  # names of what its file holds beside the network
    read: Callable[[], Params]


def find(path: str, hints: Hints, *, image_size: tuple[int, int] | None = None) -> Origin:
    """The checkpoint at a path: ours or another system's, told apart by its content.

    Raises UserError or MissingFile, in one sentence, where it cannot be used.
    """
    found = opening.find(path, hints, image_size=image_size)
    card = Card.read(found.card, where=f'{path}: card')
    step = f', step {card.step}' if found.format == opening.OURS else ''
    count = f'{parameter_count(card.model):,} parameters'
    report = [f'{found.format} layout{step}: {summarize(card.model)}; {count}']
    if found.ignored:
        report.append(f'ignored: {len(found.ignored)} arrays, such as {found.ignored[0]}')
    return Origin(path, found.format, found.layout, card, report, tuple(found.ignored), found.read)


@dataclasses.dataclass(frozen=True, repr=False)
class Loaded:
    """A pre-trained network with what belongs to it."""

    config: ModelConfig
    params: Params  # in host memory
    preprocessing: Preprocessing
    class_names: tuple[str, ...]  # () where the checkpoint has none
    report: tuple[str, ...]  # what was found out, and what was done
    ignored: tuple[str, ...]  # names of what the file holds beside the network
    format: str
    layout: opening.Layout | None

    def __repr__(self) -> str:
        return '\n'.join(self.report)

    @functools.cached_property
    def predicts(self) -> bool:
        """Has it a head that was trained?"""
        return has_trained_head(self.params)

    def require_head(self) -> None:
        """Raises UserError for a network that has no head, or one that is all zeros."""
        if self.config.num_classes is None:
            raise UserError('the checkpoint has no head: use the features, or fine-tune it')
        if not self.predicts:
            raise UserError(ZERO_HEAD)

    def prepare(self, image: bytes | np.ndarray) -> Float[np.ndarray, 'h w c']:
        """One image, an encoded file's bytes or a uint8 array, as the network takes it."""
        preprocessing = self.preprocessing
        decoded = decode(image, exif_rotation=preprocessing.exif_rotation)
        cut = preprocessing.crop(decoded, self.config.image_size, None)
        return np.asarray(preprocessing.scaled(cut))

    def logits(self, images: np.ndarray) -> Float[np.ndarray, 'b k']:
        """What the head gives for images (b h w c) of `config.image_size`, as `prepare` does them.

        The published models take float32 in [-1, 1]. Raises UserError for a network without a
        head, for one whose head is all zeros, and for images of another size or type.
        """
        self.require_head()
        return np.asarray(self._apply(self.params, _checked_images(images)))

    def features(self, images: np.ndarray) -> Float[np.ndarray, '...']:
        """What the head is given for images (b h w c)."""
        return np.asarray(self._features(self.params, _checked_images(images)))

    @functools.cached_property
    def model(self) -> Model:
        """The network's functions."""
        return build(self.config)

    @functools.cached_property
    def _apply(self) -> Callable[..., jax.Array]:
        return _exact(self.model.apply)

    @functools.cached_property
    def _features(self) -> Callable[..., jax.Array]:
        return _exact(self.model.features)


def load(path: str, **overrides: Any) -> Loaded:
    """The network at a path: a file or directory of any of `opening.FORMATS`.

    What its file does not say of itself is told by `grid` (of its positions, in patches),
    `num_heads`, `gelu` and `layer_norm_epsilon`. The network is changed by `image_size` (height,
    width, or one number), `patch_size`, `channels` and `num_classes` (None: without a head);
    `new_channels='fresh'` begins the projection of other channels anew. Raises UserError or
    FileNotFoundError, in one sentence, where the file cannot be used.
    """
    hints, changes, new_channels = _sorted_overrides(overrides)
    origin = find(path, hints, image_size=changes.get('image_size'))
    old = origin.card.model
    new = dataclasses.replace(old, **changes)
    params, report = origin.read(), [path, *origin.report]
    if new.num_classes != old.num_classes:
        # Only the head is taken from there: without one, names and shapes will do.
        shapes = jax.eval_shape(build(new).init, jax.random.key(0))
        fresh = shapes if new.num_classes is None else _initial(new)
        params, said = transfer(params, old=old, new=new, fresh=fresh)
        report += said
    elif new != old:
        params, said = adapt(params, old=old, new=new)
        report += said
    if new_channels == 'fresh' and new.channels != old.channels:
        params, line = _with_fresh_channels(params, new)
        report.append(line)
    loaded = Loaded(
        config=new,
        params=params,
        preprocessing=origin.card.preprocessing,
        class_names=origin.card.class_names if new.num_classes == old.num_classes else (),
        report=tuple(report),
        ignored=origin.ignored,
        format=origin.format,
        layout=origin.layout,
    )
    if new.num_classes is not None and not loaded.predicts:
        loaded = dataclasses.replace(loaded, report=(*loaded.report, ZERO_HEAD))
    return loaded


def save(loaded: Loaded, path: str, format: str | None = None) -> list[str]:
    """Writes the network, in the format that it was read in, or in another one of `FORMATS`.

    In its own format a file keeps the layout that was read. Returns what a reader of the file has
    to be told. Raises UserError where the format cannot hold the network.
    """
    format = format or loaded.format
    if format not in opening.FORMATS:
        raise UserError(f'format={format!r}; {records.nearest(format, opening.FORMATS)}')
    layout = loaded.layout if format == loaded.format else None
    card = Card(
        step=0,
        model=loaded.config,
        grid=loaded.config.grid,
        preprocessing=loaded.preprocessing,
        class_names=loaded.class_names,
    )
    return opening.write(
        path,
        format,
        config=loaded.config,
        params=loaded.params,
        card=records.to_dict(card),
        layout=layout,
    )


def _exact(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The compiled function with float32 products: TPUs and GPUs would round them first."""

    def run(params: Params, images: Float[jax.Array, 'b h w c']) -> jax.Array:
        with jax.default_matmul_precision('highest'):
            return function(params, images)

    return jax.jit(run)


def _checked_images(images: np.ndarray) -> np.ndarray:
    if images.ndim != 4 or images.dtype.kind != 'f':
        raise UserError(
            f'images are {images.dtype}{list(images.shape)}, expected floating-point numbers of '
            f'the shape (b, h, w, c), as `prepare` makes them'
        )
    return np.asarray(images, np.float32)


def _sorted_overrides(overrides: dict[str, Any]) -> tuple[Hints, dict[str, Any], str]:
    """The hints, the changes to the network, and what happens to other channels."""
    hint_names = set(records.to_dict(Hints()))
    known = hint_names | {'image_size', 'patch_size', 'channels', 'num_classes', 'new_channels'}
    for name in overrides:
        if name not in known:
            raise UserError(f'load: no override {name!r}; {records.nearest(name, known)}')
    values = {name: overrides[name] for name in hint_names & set(overrides)}
    changes = {name: v for name, v in overrides.items() if name not in hint_names}
    new_channels = changes.pop('new_channels', 'adapt')
    if new_channels not in ('adapt', 'fresh'):
        raise UserError(f"load: new_channels={new_channels!r}; expected 'adapt' or 'fresh'")
    for name in ('image_size', 'patch_size'):
        if isinstance(changes.get(name), int):
            changes[name] = (changes[name], changes[name])
        if name in changes:
            changes[name] = tuple(changes[name])
    return records.from_dict(Hints, values, where='load'), changes, new_channels


def _initial(config: ModelConfig) -> Params:
    """First parameters of a network, in host memory."""
    params: Params = jax.device_get(jax.jit(build(config).init)(jax.random.key(0)))
    return params


def _with_fresh_channels(params: Params, config: ModelConfig) -> tuple[Params, str]:
    """The first kernel drawn anew."""
    fresh = tree_names.named_leaves(_initial(config))
    root = 'backbone/conv_root/kernel'
    first = root if root in fresh else 'embedding/kernel'
    replaced = tree_names.map_named(
        lambda name, leaf: fresh[name] if name == first else leaf, params
    )
    return replaced, f'{first}: drawn anew, for {config.channels} channels'
