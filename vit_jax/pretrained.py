"""Loads, applies and saves models, in the checkpoint format of any supported library."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Array, Float, Params, UInt8, UserError, records, require, tree_names
from vit_jax.base.errors import redact_url
from vit_jax.base.storage import is_remote, usable
from vit_jax.checkpoints import remote, transfer
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import opening, writing
from vit_jax.checkpoints.formats.array_files import error_prefix
from vit_jax.checkpoints.formats.base import Layout
from vit_jax.checkpoints.transfer import has_trained_head, head_params
from vit_jax.data.image_decoding import decode, decode_pillow
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.data.sources.base import match_names, read_image_file
from vit_jax.distributed import meshes
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.distributed.sharding_rules import abstract_arrays, shardings_for
from vit_jax.models import (
    Compute,
    Gelu,
    Model,
    ModelConfig,
    ViTConfig,
    abstract_params,
    build,
    with_highest_precision,
)
from vit_jax.models.taps import Reduction

ZERO_HEAD = (
    'the head is all zeros, as in the published ImageNet-21k files, so it cannot classify; '
    'fine-tune it, or use the features'
)
_PROJECTION_HEAD = 'the head is a projection for comparison with text embeddings and has no classes'
_REGRESSION_HEAD = (
    'the head is a regression, or one output of unknown meaning, and has no classes; '
    'call `logits` in Python to get its output'
)
OutputName = Literal['logits', 'probabilities', 'features']
# Images may have values of up to this factor times the largest value that `preprocess` can return.
# Images with added noise are then accepted, and images with values from 0 to 255 are rejected.
_HEADROOM = 8


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LoadedModel:
    """A pre-trained model with its card.

    `logits`, `probabilities`, `features` and `capture` take images (b h w c) of
    `config.image_size`, normalized as by `preprocess` (for the published models, floats from -1 to
    1). They raise UserError for images of another size or type, or with much larger values. They
    work under jit, vmap and grad, where values are not checked and the parameters are constants;
    `model.apply(params, images)` takes the parameters as an argument. Two objects are equal if
    card, parameters and compute options are equal. Objects can be pickled.
    """

    card: Card
    params: Params  # in host memory
    report: tuple[str, ...] = ('a model without a file',)  # what was read and changed, in lines
    ignored: tuple[str, ...] = ()  # names of arrays in the file that the model does not use
    format: str = opening.OURS  # one of opening.NAMES
    layout: Layout | None = None  # names and layout of the arrays in the file; None: the usual ones
    compute: Compute = dataclasses.field(default_factory=lambda: Compute(dtype='float32'))
    origin: tuple[str, ...] = ()  # URL, commit and digests of a downloaded checkpoint

    def __repr__(self) -> str:
        return '\n'.join(self.report)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LoadedModel):
            return NotImplemented
        if self.card != other.card or self.compute != other.compute:
            return False
        ours = tree_names.named_leaves(self.params)
        theirs = tree_names.named_leaves(other.params)
        return ours.keys() == theirs.keys() and all(
            np.array_equal(leaf, theirs[name]) for name, leaf in ours.items()
        )

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
        """The class names; () if the checkpoint has none."""
        return self.card.class_names

    @functools.cached_property
    def model(self) -> Model:
        """The model's functions. Raises UserError for a custom head whose function is missing."""
        head = self.config.head
        if isinstance(head, records.UnresolvedFunction):
            raise UserError(
                f'the head is the function {head.name}, not part of the checkpoint; '
                'pass it with load(..., head=FUNCTION), or --head=FILE.py:FUNCTION'
            )
        return build(self.config, compute=self.compute)

    def with_params(
        self, params: Params, *, class_names: Sequence[str] | None = None, loss: str | None = None
    ) -> 'LoadedModel':
        """Returns the model with other parameters, for example fine-tuned ones.

        Args:
          params: The new parameters. UserError is raised if names or shapes differ.
          class_names: The new class names; None: the old ones.
          loss: The loss of the new training (see `Card`); None: the old one.
        """
        tree_names.compare_leaves(
            tree_names.named_leaves(params), tree_names.named_leaves(self.params), where='params'
        )
        card = self.card
        if class_names is not None:
            card = dataclasses.replace(card, class_names=tuple(class_names))
        card = dataclasses.replace(card, loss=loss or card.loss)
        host = jax.tree.map(np.asarray, params)
        return dataclasses.replace(self, card=card, params=host, origin=())

    def place_frozen(
        self, compute: Compute, mesh: Mesh, config: MeshConfig, *, abstract: bool = False
    ) -> Params:
        """Returns the parameters of this model on the mesh, in `compute.dtype`.

        They are sharded like the train state, but without `config.rules`, which name arrays of the
        other model. With `abstract`, they are only shapes and shardings.
        """
        params = jax.tree.map(lambda leaf: np.asarray(leaf, jnp.dtype(compute.dtype)), self.params)
        shardings = shardings_for(params, mesh, dataclasses.replace(config, rules=()))
        place = abstract_arrays if abstract else meshes.put
        return place(params, shardings)

    @functools.cached_property
    def is_classifier(self) -> bool:
        """Whether the model has a trained head for classes."""
        has_classes = not (self.card.is_projection or self.card.is_regression)
        return has_classes and has_trained_head(self.params)

    def require_head(self, *, classifier: bool = True) -> None:
        """Raises UserError without a trained head, or with `classifier`, without a classifier."""
        if self.config.num_classes is None:
            raise UserError(
                'the checkpoint has no head; expected a classifier, or use its features'
            )
        if self.card.is_projection:
            require(not classifier, f'{_PROJECTION_HEAD}; use logits or features, or fine-tune it')
        elif self.card.is_regression:
            require(not classifier, _REGRESSION_HEAD)
        elif not self.is_classifier:
            raise UserError(ZERO_HEAD)

    def require_classes(self, names: Sequence[str]) -> None:
        """Raises UserError unless the model is a classifier for these classes, in this order.

        Names are compared if the model and the classes have names other than numbers.
        """
        self.require_head()
        num_classes = self.config.num_classes
        require(
            num_classes == len(names),
            f'the checkpoint has {num_classes} classes; '
            f'expected the {len(names)} classes of the data',
        )
        numbers = tuple(str(number) for number in range(len(names)))
        if self.class_names in ((), numbers) or tuple(names) == numbers:
            return
        own_names = match_names(names, self.class_names)
        for name, own in zip(names, self.class_names, strict=False):
            require(
                own_names.get(name) == own,
                f'the checkpoint has the class {own!r} where the data has {name!r}; '
                'expected the same classes in the same order',
            )

    def preprocess(self, image: Any) -> Float[np.ndarray, 'h w c']:
        """Decodes, resizes, crops and normalizes an image for the model.

        Args:
          image: The path of an image file, its bytes, a PIL image, or a uint8 array (h w), (h w 1)
            or (h w 3).

        Raises:
          UserError: For any other value, or if the model does not take 3 channels.
        """
        require(
            self.config.channels == 3,
            f'the model takes {self.config.channels} channels, but `preprocess` returns 3; '
            'normalize the images in your own code',
        )
        decoded = _decode_image(image, exif_rotation=self.preprocessing.exif_rotation)
        cropped = self.preprocessing.crop(decoded, self.config.image_size, None)
        return np.asarray(normalize(cropped, self.preprocessing))

    def logits(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """Returns the output of the head, (b k). Raises UserError if there is no trained head."""
        return self.outputs(images, 'logits')[0]

    def probabilities(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """Returns class probabilities, (b k): the sigmoid or softmax of the logits.

        Raises UserError if there is no trained classifier head.
        """
        return self.outputs(images, 'probabilities')[0]

    def features(self, images: Array | np.ndarray) -> Float[Array | np.ndarray, '...']:
        """Returns the input of the head, (b d); with pool=none (b n d).

        With pool=cls_dist, returns the mean of the inputs of both heads, as timm does.
        """
        return self.outputs(images, 'features')[0]

    def outputs(self, images: Array | np.ndarray, *names: OutputName) -> tuple[Any, ...]:
        """Returns outputs from one forward pass.

        Args:
          images: Images (b h w c), as returned by `preprocess`. They may be sharded over devices.
          names: Any of logits, probabilities and features.
        """
        if set(names) - {'features'}:
            self.require_head(classifier='probabilities' in names)
        return _to_host(self._outputs(self.params, self._check_images(images), names))

    def capture(
        self, images: Array | np.ndarray, names: Sequence[str] | Mapping[str, Reduction]
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the logits (features if there is no head) and intermediate arrays.

        Args:
          images: Images (b h w c), as returned by `preprocess`.
          names: Names of intermediate arrays (see docs/visualize.md), or a mapping from names to
            functions that reduce the arrays.
        """
        wanted = tuple(names.items()) if isinstance(names, Mapping) else tuple(names)
        images = self._check_images(images)
        # A program that also returns intermediate arrays may round the logits differently.
        (logits,) = self._outputs(self.params, images, ('logits',))
        return _to_host((logits, self._capture(self.params, images, wanted)))

    def _check_images(self, images: Array | np.ndarray) -> Float[Array, 'b h w c']:
        """Returns images as float32. Raises UserError for images that are not preprocessed."""
        are_floats = (
            isinstance(images, jax.Array | np.ndarray)
            and images.ndim == 4
            and jnp.issubdtype(images.dtype, jnp.floating)
            and len(images) > 0
        )
        require(
            are_floats,
            f'images: got {_describe_type(images)}; '
            'expected floats of shape (b, h, w, c), as returned by `preprocess`',
        )
        if isinstance(images, jax.core.Tracer):
            return images.astype(jnp.float32)
        mean = np.asarray(self.preprocessing.mean)
        std = np.asarray(self.preprocessing.std)
        low = float(((0 - mean) / std).min())
        high = float(((255 - mean) / std).max())
        largest = max(float(images.max()), -float(images.min()))
        require(
            largest <= _HEADROOM * max(abs(low), abs(high)),
            f'images: got values up to {largest:g}; expected {low:g} to {high:g}, '
            'as returned by `preprocess`',
        )
        return jnp.asarray(images, jnp.float32)

    @functools.cached_property
    def _outputs(self) -> Callable[..., tuple[Array, ...]]:
        functions: dict[OutputName, Callable[..., Array]] = {
            'logits': self.model.apply,
            'probabilities': lambda *values: self.card.probabilities(self.model.apply(*values)),
            'features': self.model.features,
        }
        if getattr(self.config, 'pool', None) == 'cls_dist':
            functions['features'] = self._mean_features

        # XLA computes the common part of the outputs once.
        def outputs(params: Params, images: Any, names: tuple[OutputName, ...]) -> Any:
            return tuple(functions[name](params, images) for name in names)

        return jax.jit(with_highest_precision(outputs), static_argnums=2)

    def _mean_features(self, params: Params, images: Any) -> Array:
        """Returns the mean of the features of both heads, which the model concatenates."""
        class_token, dist_token = jnp.split(self.model.features(params, images), 2, axis=1)
        return (class_token + dist_token) / 2

    @functools.cached_property
    def _capture(self) -> Callable[..., Any]:
        def capture(params: Params, images: Any, wanted: tuple[Any, ...]) -> Any:
            is_mapping = all(isinstance(item, tuple) for item in wanted)
            _, captured = self.model.capture(params, images, dict(wanted) if is_mapping else wanted)
            return captured

        return jax.jit(with_highest_precision(capture), static_argnums=2)


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
    head: Callable[[int], Any] | str | os.PathLike[str] | None = None,
    dtype: Literal['float32', 'bfloat16'] = 'float32',
) -> LoadedModel:
    """Loads a model from a checkpoint file or directory. The format is detected.

    Args:
      path: A local path, or the name of a remote checkpoint: hf:OWNER/NAME[@REVISION],
        https://HOST/FILE, gs://BUCKET/FILE, augreg:VARIANT or vit:VARIANT.
      grid: (rows, columns) of the position embeddings, if the file does not determine it.
      num_heads: Number of attention heads, if the file does not determine it.
      gelu: Formula of the GELU (exact, tanh or quick), if the file does not determine it.
      layer_norm_epsilon: Epsilon of LayerNorm, if the file does not determine it.
      image_size: Resizes position embeddings to this (height, width). 'stored' keeps them. None
        resizes them to the image size that the checkpoint's own preprocessor produces.
      patch_size: Resizes the patch embedding to patches of this (height, width).
      channels: Adapts the patch embedding to images with this number of channels.
      num_classes: 'keep' keeps the head, None removes it, and a number replaces it with a head of
        zeros.
      head: The function from num_classes to a flax module that made a custom head, which
        checkpoints do not contain; or an npz file of class vectors, which replace the projection of
        CLIP, or are added to a model without a head (`transfer.with_class_vectors`).
      dtype: Type of matrix products. Parameters, norms and outputs are float32.

    Raises:
      UserError: If the checkpoint is missing (MissingFile), or cannot be read or changed.
    """
    path = os.fspath(path)
    size = _pair(image_size)
    hints = Hints(
        grid=_pair(grid), num_heads=num_heads, gelu=gelu, layer_norm_epsilon=layer_norm_epsilon
    )
    checkpoint = opening.open_checkpoint(path, hints, image_size=size)
    if head is not None:
        checkpoint = _attach_head(checkpoint, head)
    card = checkpoint.card
    old = card.model
    require(
        patch_size is None or isinstance(old, ViTConfig),
        f'patch_size={patch_size}: a ResNet has no patches',
    )
    changes: dict[str, Any] = {}
    if patch_size is not None:
        changes['patch_size'] = _pair(patch_size)
    if channels is not None:
        changes['channels'] = channels
    if size not in (None, 'stored'):
        changes['image_size'] = size
    new = dataclasses.replace(old, **changes)
    if num_classes != 'keep' and num_classes != old.num_classes:
        new = transfer.replace_head(new, num_classes, keep=['representation_size', 'patch_outputs'])
    params, lines = transfer.adapt_and_replace_head(checkpoint.read(), old=old, new=new)
    if new.num_classes != old.num_classes:  # class names and loss describe the old head
        card = dataclasses.replace(card, class_names=(), loss=None)
    card = dataclasses.replace(card, model=new, grid=new.grid)
    return LoadedModel(
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
    """Returns remarks for users of the head."""
    lines = []
    if card.model.num_classes is not None and not has_trained_head(params):
        lines.append(ZERO_HEAD)
    if card.is_projection:
        lines.append(_PROJECTION_HEAD)
    elif card.is_regression:
        lines.append(_REGRESSION_HEAD)
    elif card.loss not in (None, 'softmax', 'sigmoid'):
        lines.append(f'trained with the loss {card.loss}: probabilities are softmax of the logits')
    return lines


def save(
    loaded: LoadedModel,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    overwrite: bool = False,
    dtype: Literal['float32', 'bfloat16'] | None = None,
) -> list[str]:
    """Writes a model in the format in which it was read, or in another format.

    If the format stays the same, arrays keep the names and the layout that were read.

    Args:
      loaded: The model.
      path: File or directory to write.
      format: google, bigvision, timm, huggingface, open_clip, vit_jax or stablehlo. None: the
        format in which the model was read, unless the ending of the path implies another one, for
        example timm for .safetensors.
      overwrite: Whether to replace an existing checkpoint.
      dtype: Type of the parameters in the file. None: the type that was read, or float32 if that
        type would round them.

    Returns:
      Notes for users of the file.

    Raises:
      UserError: If the format cannot represent the model, or if the path exists and `overwrite` is
        False.
    """
    path = os.fspath(path)
    remote.require_local(path)
    format = writing.format_for(path, format, loaded.format)
    require(
        overwrite or writing.is_free(path),
        f'{path}: exists already; pass overwrite=True to replace it',
    )
    layout = loaded.layout if format == loaded.format else None
    return writing.write_checkpoint(
        path, format, card=loaded.card, params=loaded.params, layout=layout, dtype=dtype
    )


def _attach_head(
    checkpoint: opening.Checkpoint, head: Callable[[int], Any] | str | os.PathLike[str]
) -> opening.Checkpoint:
    """Returns the checkpoint with another head. Raises UserError if the head does not fit."""
    params = checkpoint.read()
    if not callable(head):
        card, params = transfer.with_class_vectors(checkpoint.card, params, os.fspath(head))
        lines = [*checkpoint.report, f'head: {card.model.num_classes} class vectors from {head}']
        return checkpoint._replace(card=card, read=lambda: params, report=lines)
    old = checkpoint.card.model
    where = f'{checkpoint.path}: head'
    require(old.num_classes is not None, f'{where}: the checkpoint has no head')
    is_custom = isinstance(old.head, records.UnresolvedFunction)
    require(is_custom, f'{where}: the checkpoint has a {old.head} head; leave out head=FUNCTION')
    model = dataclasses.replace(old, head=head)
    with usable('head', 'a function from the number of classes to a flax module'):
        expected = abstract_params(model)
    tree_names.compare_leaves(head_params(params), head_params(expected), where=where)
    card = dataclasses.replace(checkpoint.card, model=model)
    return checkpoint._replace(card=card, read=lambda: params)


def _to_host(outputs: Any) -> Any:
    """Returns numpy arrays, or the traced arrays inside a traced function."""
    traced = isinstance(jax.tree.leaves(outputs)[0], jax.core.Tracer)
    return outputs if traced else jax.tree.map(np.asarray, outputs)


def _decode_image(image: Any, *, exif_rotation: bool) -> UInt8[np.ndarray, 'h w 3']:
    from PIL import Image

    if isinstance(image, str | os.PathLike):
        path = os.fspath(image)
        require(not is_remote(path), f'{redact_url(path)}: expected the path of an image on a disk')
        with usable(path):
            stored = read_image_file(path)
        with error_prefix(path):
            return decode(stored, exif_rotation=exif_rotation)
    if isinstance(image, bytes):
        return decode(image, exif_rotation=exif_rotation)
    if isinstance(image, Image.Image):
        return decode_pillow(image, exif_rotation=exif_rotation)
    is_uint8_image = (
        isinstance(image, np.ndarray | jax.Array)
        and image.dtype == np.uint8
        and image.size > 0
        and (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3)))
    )
    require(
        is_uint8_image,
        f'image: got {_describe_type(image)}; expected a path, bytes, a PIL image, '
        'or a uint8 array (h w), (h w 1) or (h w 3)',
    )
    return decode(np.asarray(image), exif_rotation=exif_rotation)


def _describe_type(value: Any) -> str:
    """Describes dtype and shape of an array, or the type of another value."""
    if isinstance(value, np.ndarray | jax.Array):
        return f'{value.dtype}{list(value.shape)}'
    return type(value).__name__


def _pair(size: Any) -> Any:
    """Expands an int to (height, width); returns other values unchanged."""
    return (size, size) if isinstance(size, int) else size
