"""Checkpoints of any origin as networks that can be used: `load`, look, `save`."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import (
    Array,
    Float,
    Params,
    Record,
    UInt8,
    UserError,
    require,
    tree_names,
    usable,
)
from vit_jax.base.records import Elsewhere
from vit_jax.checkpoints import names, transfer
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import opening, writing
from vit_jax.checkpoints.formats.array_files import error_prefix
from vit_jax.checkpoints.formats.base import Layout
from vit_jax.checkpoints.transfer import has_trained_head, head_params
from vit_jax.data.image_decoding import decode, to_rgb
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.data.sources.base import read_file
from vit_jax.models import (
    Compute,
    Gelu,
    Model,
    ModelConfig,
    ViTConfig,
    abstract_params,
    build,
    with_exact_products,
)
from vit_jax.models.taps import Reduction

ZERO_HEAD = (
    'the head is all zeros, as in the published ImageNet-21k files: it predicts nothing; '
    'fine-tune it, or use the features'
)
_PROJECTS = 'its head is a projection, for comparison with texts: it has no classes'
_REGRESSES = (
    'this model has no classes: its head is a regression, or has one output of unknown meaning; '
    'call `logits` in Python to get its numbers'
)
OutputName = Literal['logits', 'probabilities', 'features']
# Images may be this many times brighter than any that `prepare` makes: noise is, 0 to 255 is more.
_HEADROOM = 8


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Loaded:
    """A pre-trained network with what belongs to it.

    `logits`, `probabilities`, `features` and `capture` take images (b h w c) of
    `config.image_size` as `prepare` makes them, floating-point numbers (the published models:
    from -1 to 1). UserError for images of another size or type, or with numbers that are none.
    They can be used under jit, vmap and grad, where the values of images are not looked at. The
    parameters are constants there: `model.apply(params, images)` takes them as an argument.
    Equal are two that have the same card, parameters and way of computing. It can be pickled.
    """

    card: Card
    params: Params  # in host memory
    report: tuple[str, ...] = ('a network that is in no file',)  # what was found and changed
    ignored: tuple[str, ...] = ()  # names of what the file holds beside the network
    format: str = opening.OURS  # one of opening.NAMES
    layout: Layout | None = None
    compute: Compute = dataclasses.field(default_factory=lambda: Compute(dtype='float32'))
    origin: tuple[str, ...] = ()  # of one that was downloaded: URL, commit, digest

    def __repr__(self) -> str:
        return '\n'.join(self.report)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Loaded):
            return NotImplemented
        one, two = (tree_names.named_leaves(each.params) for each in (self, other))
        same = (self.card, self.compute, one.keys()) == (other.card, other.compute, two.keys())
        return same and all(np.array_equal(leaf, two[name]) for name, leaf in one.items())

    def __hash__(self) -> int:
        return hash(repr(self.card))

    def __getstate__(self) -> dict[str, Any]:
        """Without what was compiled."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

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
        """The network's functions. Raises UserError if only the name of its head is stored."""
        head = self.config.head
        way = 'load(..., head=FUNCTION), or --head=FILE.py:FUNCTION, hands it over'
        named = f'its head is the function {getattr(head, "name", "")}, which no checkpoint holds'
        require(not isinstance(head, Elsewhere), f'{named}: {way}')
        return build(self.config, compute=self.compute)

    def with_params(
        self,
        params: Params,
        *,
        class_names: Sequence[str] | None = None,
        loss: str | None = None,
    ) -> 'Loaded':
        """The network with other parameters, such as those that were trained from its own.

        `class_names` and `loss` are as before where they are not given. Raises UserError for
        parameters that have other names or shapes than its own.
        """
        given, own = (tree_names.named_leaves(each) for each in (params, self.params))
        tree_names.compare_names(given, own, where='params')
        card = self.card
        if class_names is not None:
            card = dataclasses.replace(card, class_names=tuple(class_names))
        card = dataclasses.replace(card, loss=loss or card.loss)
        host = jax.tree.map(np.asarray, params)
        return dataclasses.replace(self, card=card, params=host, origin=())

    @functools.cached_property
    def predicts(self) -> bool:
        """Has it a head that was trained, for classes?"""
        of_classes = not (self.card.projects or self.card.regresses)
        return of_classes and has_trained_head(self.params)

    def require_head(self, *, of_classes: bool = True) -> None:
        """Raises UserError without a trained head; `of_classes`: for CLIP's projection too."""
        if self.config.num_classes is None:
            raise UserError('the checkpoint has no head: use the features, or fine-tune it')
        if self.card.projects:
            require(not of_classes, f'{_PROJECTS}: use logits, the features, or fine-tune it')
        elif self.card.regresses:
            require(not of_classes, _REGRESSES)
        elif not self.predicts:
            raise UserError(ZERO_HEAD)

    def prepare(self, image: Any) -> Float[np.ndarray, 'h w c']:
        """One image as the network takes it.

        It is the path of a file, its bytes, a PIL image, or a uint8 array (h w), (h w 1) or
        (h w 3). Raises UserError for anything else.
        """
        channels = f'the network takes {self.config.channels} channels, which you have to prepare'
        require(self.config.channels == 3, f'{channels}; `prepare` makes 3')
        decoded = _decoded(image, exif_rotation=self.preprocessing.exif_rotation)
        cut = self.preprocessing.crop(decoded, self.config.image_size, None)
        return np.asarray(normalize(cut, self.preprocessing))

    def logits(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """(b k), what the head gives. Raises UserError for a network without a trained head."""
        return self.outputs(images, 'logits')[0]

    def probabilities(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """(b k), of each class: the sigmoid of its logit where the network was trained so, else
        the softmax. Raises UserError for a network without a trained head of classes.
        """
        return self.outputs(images, 'probabilities')[0]

    def features(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """(b d), what the head is given; with pool=none for each token, (b n d)."""
        return self.outputs(images, 'features')[0]

    def outputs(self, images: Array | np.ndarray, *names: OutputName) -> tuple[Any, ...]:
        """Several of these at once, for the price of one. Images may be split over devices."""
        if set(names) - {'features'}:
            self.require_head(of_classes='probabilities' in names)
        return _on_host(self._outputs(self.params, self._checked(images), names))

    def capture(
        self, images: Array | np.ndarray, names: Sequence[str] | Mapping[str, Reduction]
    ) -> tuple[Any, dict[str, Any]]:
        """The logits, or features without a head, and the intermediate arrays of these names, or
        what these functions make of them (the page "Look inside" lists them)."""
        wanted = tuple(names.items()) if isinstance(names, Mapping) else tuple(names)
        images = self._checked(images)
        # In one program with the taps, the logits would differ in their last bits.
        (logits,) = self._outputs(self.params, images, ('logits',))
        return _on_host((logits, self._capture(self.params, images, wanted)))

    def _checked(self, images: Array | np.ndarray) -> Float[Array, 'b h w c']:
        """The images as float32. Raises UserError for what `prepare` does not make."""
        is_array = isinstance(images, jax.Array | np.ndarray)
        kind = f'{images.dtype}{list(images.shape)}' if is_array else f'a {type(images).__name__}'
        expected = 'expected floating-point numbers of the shape (b, h, w, c), as `prepare` makes'
        fits = is_array and images.ndim == 4 and jnp.issubdtype(images.dtype, jnp.floating)
        require(fits, f'images are {kind}, {expected} them, stacked')
        if isinstance(images, jax.core.Tracer):
            return images.astype(jnp.float32)
        require(len(images) > 0, f'images are {kind}, expected at least one')
        how = self.preprocessing
        scaled = [(v - m) / s for v in (0, 255) for m, s in zip(how.mean, how.std, strict=True)]
        largest = max(float(images.max()), -float(images.min()))
        wrong = (
            f'images hold numbers up to {largest:g}, expected {min(scaled):g} to {max(scaled):g}'
        )
        limit = _HEADROOM * max(map(abs, scaled))
        require(largest <= limit, f'{wrong}, as `prepare` makes them of pixels from 0 to 255')
        return jnp.asarray(images, jnp.float32)

    @functools.cached_property
    def _outputs(self) -> Callable[..., tuple[Array, ...]]:
        functions: dict[OutputName, Callable[..., Array]] = {
            'logits': self.model.apply,
            'probabilities': lambda *values: self.card.probabilities(self.model.apply(*values)),
            'features': self.model.features,
        }
        # The compiler computes what they have in common once.
        return jax.jit(
            with_exact_products(
                lambda p, images, names: tuple(functions[n](p, images) for n in names)
            ),
            static_argnums=2,
        )

    @functools.cached_property
    def _capture(self) -> Callable[..., Any]:
        def capture(params: Params, images: Any, wanted: tuple[Any, ...]) -> Any:
            functions = all(isinstance(one, tuple) for one in wanted)
            return self.model.capture(params, images, dict(wanted) if functions else wanted)[1]

        return jax.jit(with_exact_products(capture), static_argnums=2)


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
    grid: int | tuple[int, int] | None = None,
    num_heads: int | None = None,
    gelu: Gelu | None = None,
    layer_norm_epsilon: float | None = None,
    image_size: int | tuple[int, int] | Literal['stored'] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    num_classes: int | Literal['keep'] | None = 'keep',
    new_channels: Literal['adapt', 'fresh'] = 'adapt',
    head: Callable[[int], Any] | None = None,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
) -> Loaded:
    """The network at a path: a file or directory of any format of `opening.NAMES`.

    Or of a name: `hf:OWNER/NAME`, `https://...`, `gs://...`, `augreg:B/16` (checkpoints/names.py),
    which is downloaded unless it was before; the report begins with what exactly that was.
    The first four are for what its file does not say of itself: the grid (height, width) of the
    position embeddings in patches, the number of heads, and so on. The others change the network:
    the size of images ('stored': that of the file's positions) and patches, the channels, and the
    head, which `num_classes=None` drops and another number replaces by one of zeros. The patch
    projection is adapted to other channels, or drawn anew with `new_channels='fresh'`. `head` is
    the function that made a head of one's own: no checkpoint holds it. The network computes in
    `dtype`; parameters, norms and outputs stay float32. Raises UserError or MissingFile.
    """
    path, compute = _path(path), Compute(dtype=dtype)
    hints = Hints(
        grid=_pair(grid), num_heads=num_heads, gelu=gelu, layer_norm_epsilon=layer_norm_epsilon
    )
    sizes = None if image_size == 'stored' else _pair(image_size), _pair(patch_size)
    changes = Changes(*sizes, channels, num_classes, new_channels)
    size: Any = 'stored' if image_size == 'stored' else changes.image_size
    checkpoint = opening.open_checkpoint(path, hints, image_size=size)
    if head is not None:
        checkpoint = _with_head(checkpoint, head)
    card, new = checkpoint.card, _changed_config(checkpoint.card.model, changes)
    was, how = card.model, changes.new_channels
    params, lines = transfer.changed(checkpoint.read(), old=was, new=new, new_channels=how)
    if new.num_classes != card.model.num_classes:  # what was said of the old head
        card = dataclasses.replace(card, class_names=(), loss=None)
    if new.num_classes is not None and not has_trained_head(params):
        lines.append(ZERO_HEAD)
    if card.projects:
        lines.append(_PROJECTS)
    elif card.regresses:
        lines.append(_REGRESSES)
    elif card.loss not in (None, 'softmax', 'sigmoid'):
        lines.append(f'trained with {card.loss}: probabilities are the softmax of its logits')
    return Loaded(
        card=dataclasses.replace(card, model=new, grid=new.grid),
        params=params,
        report=(checkpoint.path, *checkpoint.report, *lines),
        ignored=checkpoint.ignored,
        format=checkpoint.format,
        layout=checkpoint.layout,
        compute=compute,
        origin=checkpoint.origin,
    )


def save(
    loaded: Loaded,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    overwrite: bool = False,
    dtype: Literal['float32', 'bfloat16'] | None = None,
) -> list[str]:
    """Writes the network, in the format that it was read in, or in another of `opening.NAMES`.

    Without a `format` the path's ending chooses one that has it, such as timm for .safetensors. In
    its own format a file keeps the layout that was read, and the type of the numbers unless a
    `dtype` is given. Returns what a reader of the file has to know, line by line. Raises UserError
    where the format cannot hold the network, and where something is there that `overwrite` does
    not allow to replace.
    """
    path = _path(path)
    names.require_here(path)
    format = writing.format_for(path, format, loaded.format)
    require(
        overwrite or writing.is_free(path), f'{path}: exists already; overwrite=True replaces it'
    )
    layout = loaded.layout if format == loaded.format else None
    with writing.replacing(pathlib.Path(path), format) as place:
        return writing.write_checkpoint(
            str(place), format, card=loaded.card, params=loaded.params, layout=layout, dtype=dtype
        )


def _path(path: Any) -> str:
    """The text of a path. Raises UserError for what is none."""
    fits = isinstance(path, str | os.PathLike) and os.fspath(path) != ''
    require(fits, f'path={path!r}: expected that of a checkpoint, a file or a directory')
    return os.fspath(path)


def _changed_config(old: ModelConfig, changes: Changes) -> ModelConfig:
    if changes.patch_size is not None and not isinstance(old, ViTConfig):
        raise UserError(f'patch_size={changes.patch_size}: a ResNet has no patches')
    names = 'image_size', 'patch_size', 'channels'
    values = {n: getattr(changes, n) for n in names if getattr(changes, n) is not None}
    if changes.num_classes != 'keep':
        values['num_classes'] = changes.num_classes
    return dataclasses.replace(old, **values)


def _with_head(checkpoint: opening.Checkpoint, head: Callable[[int], Any]) -> opening.Checkpoint:
    """The checkpoint with the function of its head. Raises UserError for other parameters."""
    old = checkpoint.card.model
    params, where = checkpoint.read(), f'{checkpoint.path}: head'
    require(old.num_classes is not None, f'{where}: the checkpoint has no head')
    own = isinstance(old.head, Elsewhere)
    require(own, f'{checkpoint.path} has a {old.head} head; leave out head=FUNCTION')
    model = dataclasses.replace(old, head=head)
    with usable('head', 'a function from the number of classes to a flax module'):
        expected = abstract_params(model)
    tree_names.compare_names(head_params(params), head_params(expected), where=where)
    card = dataclasses.replace(checkpoint.card, model=model)
    return checkpoint._replace(card=card, read=lambda: params)


def _on_host(outputs: Any) -> Any:
    """The arrays as numpy's; those of a function that is being traced as they are."""
    traced = isinstance(jax.tree.leaves(outputs)[0], jax.core.Tracer)
    return outputs if traced else jax.tree.map(np.asarray, outputs)


def _decoded(image: Any, *, exif_rotation: bool) -> UInt8[np.ndarray, 'h w 3']:
    from PIL import Image

    if isinstance(image, str | os.PathLike):
        with error_prefix(os.fspath(image)):
            return decode(read_file(image), exif_rotation=exif_rotation)
    if isinstance(image, bytes):
        return decode(image, exif_rotation=exif_rotation)
    if isinstance(image, Image.Image):
        return to_rgb(image, exif_rotation=exif_rotation)
    kind, expected = type(image).__name__, 'expected uint8 of the shape (h, w), (h, w, 1 or 3)'
    is_array = isinstance(image, np.ndarray | jax.Array)
    require(is_array, f'{kind}: expected a path, bytes, a PIL image, or a uint8 array')
    fits = image.dtype == np.uint8 and image.size > 0
    fits = fits and (image.ndim == 2 or image.ndim == 3 and image.shape[2] in (1, 3))
    require(fits, f'an image is {image.dtype}{list(image.shape)}, {expected}, from 0 to 255')
    return decode(np.asarray(image), exif_rotation=exif_rotation)


def _pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size
