"""Models from checkpoints of any format: `load`, use, `save`."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Params, UInt8, UserError, require, tree_names, usable
from vit_jax.base.records import Elsewhere
from vit_jax.checkpoints import remote, transfer
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
    """A pre-trained model with its card.

    `logits`, `probabilities`, `features` and `capture` take images (b h w c) of
    `config.image_size` as `prepare` makes them: floating-point numbers (for the published models
    from -1 to 1). They raise UserError for images of another size or type, or with much larger
    numbers. They can be used under jit, vmap and grad, where numbers are not checked and parameters
    are constants; `model.apply(params, images)` takes parameters as an argument. Two objects are
    equal if card, parameters and compute options are equal. It can be pickled.
    """

    card: Card
    params: Params  # in host memory
    report: tuple[str, ...] = ('a network that is in no file',)  # what was found and changed
    ignored: tuple[str, ...] = ()  # names of arrays in the file that the model does not use
    format: str = opening.OURS  # one of opening.NAMES
    layout: Layout | None = None
    compute: Compute = dataclasses.field(default_factory=lambda: Compute(dtype='float32'))
    origin: tuple[str, ...] = ()  # of a download: URL, commit, digests

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
        """Returns the fields, without compiled functions."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.card.model

    @property
    def preprocessing(self) -> Preprocessing:
        """How images are prepared for the model."""
        return self.card.preprocessing

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; () if the checkpoint has none."""
        return self.card.class_names

    @functools.cached_property
    def model(self) -> Model:
        """The model's functions. Raises UserError if only the name of its head is stored."""
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
        """Returns the model with other parameters, for example fine-tuned ones.

        `class_names` and `loss` stay as they are if they are None. Raises UserError for parameters
        of other names or shapes.
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
        """Whether the model has a trained head for classes."""
        of_classes = not (self.card.projects or self.card.regresses)
        return of_classes and has_trained_head(self.params)

    def require_head(self, *, of_classes: bool = True) -> None:
        """Raises UserError if there is no trained head, or none `of_classes`."""
        if self.config.num_classes is None:
            raise UserError('the checkpoint has no head: use the features, or fine-tune it')
        if self.card.projects:
            require(not of_classes, f'{_PROJECTS}: use logits, the features, or fine-tune it')
        elif self.card.regresses:
            require(not of_classes, _REGRESSES)
        elif not self.predicts:
            raise UserError(ZERO_HEAD)

    def prepare(self, image: Any) -> Float[np.ndarray, 'h w c']:
        """Prepares an image for the model.

        Args:
          image: The path of a file, its bytes, a PIL image, or a uint8 array (h w), (h w 1) or
            (h w 3).

        Raises:
          UserError: For anything else.
        """
        channels = f'the network takes {self.config.channels} channels, which you have to prepare'
        require(self.config.channels == 3, f'{channels}; `prepare` makes 3')
        decoded = _decoded(image, exif_rotation=self.preprocessing.exif_rotation)
        cut = self.preprocessing.crop(decoded, self.config.image_size, None)
        return np.asarray(normalize(cut, self.preprocessing))

    def logits(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """Returns the output of the head, (b k). Raises UserError if there is no trained head."""
        return self.outputs(images, 'logits')[0]

    def probabilities(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """Returns the probability of each class, (b k): a sigmoid or a softmax of the logits.

        Raises UserError if there is no trained head for classes.
        """
        return self.outputs(images, 'probabilities')[0]

    def features(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """Returns the input of the head, (b d); with pool=none that of each token, (b n d)."""
        return self.outputs(images, 'features')[0]

    def outputs(self, images: Array | np.ndarray, *names: OutputName) -> tuple[Any, ...]:
        """Returns several of these from one pass. Images may be sharded over devices."""
        if set(names) - {'features'}:
            self.require_head(of_classes='probabilities' in names)
        return _on_host(self._outputs(self.params, self._checked(images), names))

    def capture(
        self, images: Array | np.ndarray, names: Sequence[str] | Mapping[str, Reduction]
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the logits (features if there is no head) and intermediate arrays.

        `names` lists intermediate arrays (docs/visualize.md), or maps them to functions that
        reduce them.
        """
        wanted = tuple(names.items()) if isinstance(names, Mapping) else tuple(names)
        images = self._checked(images)
        # In one program with the taps, the logits would differ in their last bits.
        (logits,) = self._outputs(self.params, images, ('logits',))
        return _on_host((logits, self._capture(self.params, images, wanted)))

    def _checked(self, images: Array | np.ndarray) -> Float[Array, 'b h w c']:
        """Returns the images as float32. Raises UserError for what `prepare` does not make."""
        is_array = isinstance(images, jax.Array | np.ndarray)
        kind = f'{images.dtype}{list(images.shape)}' if is_array else type(images).__name__
        fits = is_array and images.ndim == 4 and jnp.issubdtype(images.dtype, jnp.floating)
        expected = 'floating-point numbers of the shape (b, h, w, c), as `prepare` makes them'
        require(fits and len(images) > 0, f'images are {kind}; expected {expected}')
        if isinstance(images, jax.core.Tracer):
            return images.astype(jnp.float32)
        how, largest = self.preprocessing, max(float(images.max()), -float(images.min()))
        scaled = [(v - m) / s for v in (0, 255) for m, s in zip(how.mean, how.std, strict=True)]
        text = f'images have numbers up to {largest:g}; expected {min(scaled):g} to {max(scaled):g}'
        fits = largest <= _HEADROOM * max(map(abs, scaled))
        require(fits, f'{text}, as `prepare` makes them of pixels from 0 to 255')
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
    head: Callable[[int], Any] | None = None,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
) -> Loaded:
    """Loads the model at a path: a file or directory of any format of `opening.NAMES`.

    Args:
      path: A local path, or the name of a remote checkpoint (checkpoints/remote.py).
      grid, num_heads, gelu, layer_norm_epsilon: What the file does not say of itself; the grid is
        that of the position embeddings, (height, width) in patches.
      image_size: Positions are resized to images of this (height, width); 'stored' leaves them.
      patch_size: The patch projection is resized to patches of this (height, width).
      channels: The patch projection is adapted to images with this number of channels.
      num_classes: None removes the head, a number replaces it by a head of zeros.
      head: The function that made a custom head; no checkpoint holds it.
      dtype: The type of matrix products; parameters, norms and outputs stay float32.

    Raises UserError if the checkpoint cannot be read or changed so, MissingFile if there is none.
    """
    path, size = os.fspath(path), _pair(image_size)
    hints = Hints(
        grid=_pair(grid), num_heads=num_heads, gelu=gelu, layer_norm_epsilon=layer_norm_epsilon
    )
    checkpoint = opening.open_checkpoint(path, hints, image_size=size)
    if head is not None:
        checkpoint = _with_head(checkpoint, head)
    card, old = checkpoint.card, checkpoint.card.model
    is_resnet = patch_size is not None and not isinstance(old, ViTConfig)
    require(not is_resnet, f'patch_size={patch_size}: a ResNet has no patches')
    changes: dict[str, Any] = {'patch_size': _pair(patch_size), 'channels': channels}
    changes['image_size'] = None if size == 'stored' else size
    changes = {name: value for name, value in changes.items() if value is not None}
    if num_classes != 'keep':
        changes['num_classes'] = num_classes
    new = dataclasses.replace(old, **changes)
    params, lines = transfer.changed(checkpoint.read(), old=old, new=new)
    if new.num_classes != old.num_classes:  # they describe the old head
        card = dataclasses.replace(card, class_names=(), loss=None)
    card = dataclasses.replace(card, model=new, grid=new.grid)
    return Loaded(
        card=card,
        params=params,
        report=(checkpoint.path, *checkpoint.report, *lines, *_head_remarks(card, params)),
        ignored=checkpoint.ignored,
        format=checkpoint.format,
        layout=checkpoint.layout,
        compute=Compute(dtype=dtype),
        origin=checkpoint.origin,
    )


def _head_remarks(card: Card, params: Params) -> list[str]:
    """Returns what a user of the head has to know."""
    lines = []
    if card.model.num_classes is not None and not has_trained_head(params):
        lines.append(ZERO_HEAD)
    if card.projects:
        lines.append(_PROJECTS)
    elif card.regresses:
        lines.append(_REGRESSES)
    elif card.loss not in (None, 'softmax', 'sigmoid'):
        lines.append(f'trained with {card.loss}: probabilities are the softmax of its logits')
    return lines


def save(
    loaded: Loaded,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    overwrite: bool = False,
    dtype: Literal['float32', 'bfloat16'] | None = None,
) -> list[str]:
    """Writes a model in the format in which it was read, or in another of `opening.NAMES`.

    Without a `format` the path's ending chooses one, for example timm for .safetensors. A file of
    the same format keeps the layout that was read, and the type of the numbers unless `dtype` is
    given. Returns lines that a user of the file has to know. Raises UserError if the format cannot
    hold the model, or if the path exists and `overwrite` is False.
    """
    path = os.fspath(path)
    remote.require_local(path)
    format = writing.format_for(path, format, loaded.format)
    is_free = overwrite or writing.is_free(path)
    require(is_free, f'{path}: exists already; overwrite=True replaces it')
    layout = loaded.layout if format == loaded.format else None
    return writing.write_checkpoint(
        path, format, card=loaded.card, params=loaded.params, layout=layout, dtype=dtype
    )


def _with_head(checkpoint: opening.Checkpoint, head: Callable[[int], Any]) -> opening.Checkpoint:
    """Returns the checkpoint with the function of its head. Raises UserError if it does not fit."""
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
    """Returns numpy arrays; inside a traced function, the arrays as they are."""
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
    is_array = isinstance(image, np.ndarray | jax.Array)
    kind = f'{image.dtype}{list(image.shape)}' if is_array else type(image).__name__
    fits = is_array and image.dtype == np.uint8 and image.size > 0
    fits = fits and (image.ndim == 2 or image.ndim == 3 and image.shape[2] in (1, 3))
    expected = 'a path, bytes, a PIL image, or a uint8 array (h w), (h w 1) or (h w 3)'
    require(fits, f'an image is {kind}; expected {expected}')
    return decode(np.asarray(image), exif_rotation=exif_rotation)


def _pair(size: Any) -> Any:
    """Returns the (height, width) of a square of this size; anything else as it is."""
    return (size, size) if isinstance(size, int) else size
