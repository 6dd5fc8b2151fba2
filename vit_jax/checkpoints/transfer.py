"""Starts a model from pre-trained parameters, for other images, patches, channels or classes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Float, Params, UserError, plural, raise_all, records, require, tree_names
from vit_jax.base.npz import decode_names, open_npz
from vit_jax.checkpoints import resize
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import array_files
from vit_jax.data.sources.base import match_names
from vit_jax.models import Model, ModelConfig, ViTConfig, abstract_params, build
from vit_jax.models.masked_patches import MASKED
from vit_jax.models.model import build_validated, feature_width, init_params
from vit_jax.models.positions import FIXED_GRID, PositionKind

# Optional numbers in a file of class vectors, and their values if absent.
_NUMBERS = {'scale': 1.0, 'bias': 0.0}


class Transferred(NamedTuple):
    """Parameters of the new model, and one line for each change."""

    params: Params
    report: list[str]


def transfer(
    params: Params,
    *,
    old: ModelConfig,
    new: ModelConfig,
    fresh: Params,
    class_names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Transferred:
    """Initializes a model from a pre-trained one (ViT paper, section 3.2).

    The body is adapted to the new images (see `adapt`). The head comes from `fresh`, but classes
    with the same name in both models keep their column of a linear head. A tanh layer before the
    head is dropped if the new model has none. The mask token and the head that predicts patches are
    kept only if both models have them.

    Args:
      params: Parameters of `old`.
      old: The pre-trained model.
      new: The model to train.
      fresh: Initial parameters of `new`.
      class_names: The class names of `old` and of `new`.

    Raises:
      UserError: If an array does not fit the new model; the message names it.
    """
    pretrained = tree_names.named_leaves(params)
    expected = tree_names.named_leaves(fresh)
    head = head_params(fresh)
    tanh = [n for n in pretrained if n.startswith('pre_logits/') and n not in expected]
    masked = _changed_mask_arrays(pretrained, expected)
    dropped = {*head_params(params), *tanh, *masked}
    body = {name: leaf for name, leaf in pretrained.items() if name not in dropped}
    body, report = adapt(body, old=old, new=new)  # a flat dictionary is a pytree too
    expected_body = {n: leaf for n, leaf in expected.items() if n not in {*head, *masked}}
    tree_names.compare_leaves(body, expected_body, where='start_from')
    num_params = sum(math.prod(leaf.shape) for leaf in body.values())
    report.insert(
        0, f'{len(body)} of {len(expected_body)} arrays loaded, {num_params:,} parameters'
    )
    if head:
        both_are_linear = old.head == new.head == 'linear' and not tanh
        old_names, new_names = class_names if class_names and both_are_linear else ((), ())
        kept, line = _keep_known_classes(pretrained, head, old_names, new_names)
        to_zero = ' to zero' if new.head == 'linear' else ''
        report.append(line or f'head: reset{to_zero}, for {new.num_classes} classes')
        body |= kept
    elif head_params(params):
        report.append('head: dropped')
    if tanh:
        report.append('pre_logits: dropped with the pre-trained head')
    if masked:
        action = 'reset' if masked & expected.keys() else 'dropped'
        report.append(f'mask token and patch head: {action} ({", ".join(sorted(masked))})')
    return Transferred(tree_names.map_named(lambda name, leaf: body.get(name, leaf), fresh), report)


def _changed_mask_arrays(old: Params, new: Params) -> set[str]:
    """Returns the names of the arrays of mask token and patch head that differ.

    Only one model has such an array, or the models have it with different shapes.
    """
    names = {name for name in old.keys() | new.keys() if name.startswith(f'{MASKED}/')}
    return {
        name
        for name in names
        if name not in old or name not in new or np.shape(old[name]) != np.shape(new[name])
    }


def _keep_known_classes(
    pretrained: Params, fresh: Params, old: Sequence[str], new: Sequence[str]
) -> tuple[Params, str | None]:
    """Returns a linear head whose classes keep their old columns by name, and a report line.

    Returns no head (an empty dictionary) if the old model has less than half of the new classes: a
    few equal names may be a coincidence, and a mostly new head is better reset entirely.
    """
    old_columns = {name: column for column, name in enumerate(old)}
    matches = match_names(new, old)
    # Maps the columns of the new head to columns of the old one.
    columns = {i: old_columns[matches[name]] for i, name in enumerate(new) if name in matches}
    fits = pretrained.keys() >= fresh.keys() and all(
        pretrained[name].shape == (*leaf.shape[:-1], len(old)) for name, leaf in fresh.items()
    )
    if not columns or not fits:
        return {}, None
    count = f'{len(columns)} of {len(new)} classes'
    if 2 * len(columns) < len(new):
        return {}, f'head: reset to zero; only {count} have the name of a pre-trained class'
    targets = np.array([*columns])
    sources = np.array([*columns.values()])
    kept = {
        name: jnp.asarray(leaf).at[..., targets].set(np.asarray(pretrained[name])[..., sources])
        for name, leaf in fresh.items()
        if not isinstance(leaf, jax.ShapeDtypeStruct)  # abstract parameters have no values to set
    }
    line = f'head: kept for {count} (by name)'
    others = [repr(name) for name in new if name not in matches]
    if others:
        line += f'; new: {", ".join(others if len(others) <= 5 else [*others[:5], "..."])}'
    return kept, line


def adapt(params: Params, *, old: ModelConfig, new: ModelConfig) -> Transferred:
    """Adapts parameters to another image size, patch size or number of channels.

    Position embeddings are resized to the new grid. The patch projection is resized to the new
    patch size (FlexiViT, section 3.4), and its channels are summed or repeated.

    Raises:
      UserError: If relative positions would have to be resized, as they fit only one grid.
    """
    named = tree_names.named_leaves(params)
    report = []
    if isinstance(old, ViTConfig) and isinstance(new, ViTConfig):
        for name, resized in resize.resize_positions(named, old, new).items():
            named[name] = resized
            report.append(f'{name}: resized from {_change(old.grid, new.grid)} patches')
        if old.patch_size != new.patch_size:
            kernel = named['embedding/kernel']
            named['embedding/kernel'] = resize.resize_patches(kernel, new.patch_size)
            sizes = _change(old.patch_size, new.patch_size)
            report.append(f'embedding: resized from {sizes} pixels')
    if old.channels != new.channels:
        first = next((n for n in named if n.endswith('conv_root/kernel')), 'embedding/kernel')
        named[first] = resize.rechannel(np.asarray(named[first]), new.channels)
        how = 'summed' if new.channels == 1 else 'repeated and rescaled'
        report.append(f'{first}: {old.channels} channels {how} to {new.channels}')
    return Transferred(tree_names.map_named(lambda name, _: named[name], params), report)


def with_patch_size(config: ModelConfig, patch_size: int | None) -> ModelConfig:
    """Returns the configuration with another patch size, in pixels per side; None: no change.

    Raises:
      UserError: If the parameters of the model cannot be resized, or if the patches do not fill the
        image.
    """
    if patch_size is None or getattr(config, 'patch_size', None) == (patch_size, patch_size):
        return config
    where = f'patch_size={patch_size}'
    if not isinstance(config, ViTConfig) or config.backbone is not None:
        raise UserError(f'{where}: a ResNet or hybrid has no other patch sizes; expected a ViT')
    if config.positions in FIXED_GRID:
        kinds = ', '.join(kind for kind in get_args(PositionKind) if kind not in FIXED_GRID)
        raise UserError(
            f'{where}: positions={config.positions} cannot be resized; expected one of {kinds}'
        )
    height, width = config.image_size
    sizes = [n for n in range(1, height + 1) if height % n == 0 == width % n]
    require(
        patch_size in sizes,
        f'{where}: patches do not fill an image of {height}x{width} pixels; '
        f'expected one of {", ".join(map(str, sizes))}',
    )
    return dataclasses.replace(config, patch_size=(patch_size, patch_size))


def build_at_patch_size(config: ModelConfig, patch_size: int | None, **options: Any) -> Model:
    """Builds a model with another patch size that takes the parameters of `config` (FlexiViT).

    The model's functions resize the patch embedding and the positions (see `adapt`). Gradients pass
    through the resizing.

    Args:
      config: The architecture of the parameters.
      patch_size: Pixels per side of a patch (see `with_patch_size`); None: as in `config`.
      **options: Other arguments of `build_validated`.
    """
    new = with_patch_size(config, patch_size)
    model = build_validated(new, **options)
    if new == config:
        return model

    def resized(function: Callable[..., Any], params: Params, *inputs: Any, **options: Any) -> Any:
        return function(adapt(params, old=config, new=new).params, *inputs, **options)

    names = 'apply', 'features', 'predict_patches', 'encode', 'capture'
    changes: dict[str, Any] = {
        name: functools.partial(resized, getattr(model, name)) for name in names
    }
    return model._replace(**changes, init=functools.partial(init_params, config))


def average_params(models: Sequence[tuple[str, Card, Params]], weights: Sequence[float]) -> Params:
    """Averages the parameters of models in float64 (model soups: arXiv 2203.05482; WiSE-FT).

    Args:
      models: Name, card and parameters of each model. Cards may differ in step and software.
      weights: A weight for each model, with a sum of 1.

    Raises:
      UserError: If the weights do not fit, or a model differs from the first in architecture,
        preprocessing, classes, loss or arrays; the message names the differences.
    """
    require(
        len(weights) == len(models) and math.isclose(sum(weights), 1, rel_tol=1e-6),
        f'weights={[*weights]}: expected {plural(len(models), "number")} with a sum of 1',
    )
    name, card, params = models[0]
    named = tree_names.named_leaves(params)
    for other, other_card, other_params in models[1:]:
        if lines := records.differences(_comparable(card), _comparable(other_card)):
            raise_all([f'{other}: cannot be averaged with {name}:', *lines])
        tree_names.compare_leaves(tree_names.named_leaves(other_params), named, where=other)
    average = functools.partial(np.average, axis=0, weights=np.asarray(weights, np.float64))
    trees = (params for _, _, params in models)
    return jax.tree.map(lambda *leaves: average(leaves).astype(np.float32), *trees)


def _comparable(card: Card) -> dict[str, Any]:
    values = records.to_dict(dataclasses.replace(card, step=0, software={}))
    return values | {'class_names': dict(enumerate(card.class_names))}


def _change(old: tuple[int, int], new: tuple[int, int]) -> str:
    return f'{old[0]}x{old[1]} to {new[0]}x{new[1]}'


def adapt_and_replace_head(params: Params, *, old: ModelConfig, new: ModelConfig) -> Transferred:
    """Adapts a model to other images, and replaces or removes its head if `num_classes` differs."""
    if new.num_classes == old.num_classes:
        return adapt(params, old=old, new=new)
    # Only the head is taken from `fresh`; without a head, names and shapes are enough.
    is_needed = new.num_classes is not None
    fresh = jax.jit(build(new).init)(jax.random.key(0)) if is_needed else abstract_params(new)
    return transfer(params, old=old, new=new, fresh=jax.device_get(fresh))


def replace_head(
    config: ModelConfig,
    num_classes: int | None,
    *,
    keep: Collection[Literal['head_bias', 'representation_size', 'patch_outputs']] = (),
) -> ModelConfig:
    """Returns the configuration with a linear layer as head (ViT paper, section 3.2).

    Args:
      config: The architecture, such as a pre-trained model's.
      num_classes: The number of classes; None: no head, the model returns the features.
      keep: Other fields of heads that are kept. By default, the bias starts at 0, and the tanh
        layer before the head and the head that predicts patches are removed.
    """
    default = type(config)()
    others = {'head_bias', 'representation_size', 'patch_outputs'} - {*keep}
    changes = {name: getattr(default, name) for name in others if hasattr(default, name)}
    return dataclasses.replace(config, num_classes=num_classes, head='linear', **changes)


def remove_head(config: ModelConfig) -> ModelConfig:
    """Returns the configuration without a head, but with its tanh layer: it returns features."""
    return replace_head(config, None, keep=['representation_size'])


class _ClassVectors(NamedTuple):
    """The contents of a file of class vectors."""

    vectors: Float[np.ndarray, 'k d']
    numbers: dict[str, Float[np.ndarray, '']]  # scale and bias
    has_bias: bool
    class_names: tuple[str, ...]  # empty if the file has none


def _read_class_vectors(path: str, width: int) -> _ClassVectors:
    """Reads a file of vectors of this width. Raises UserError if it cannot be used."""
    stored = open_npz(path)
    require(
        {'vectors'} <= {*stored} <= {'vectors', 'class_names', *_NUMBERS},
        f'got the arrays {", ".join(stored)}; expected vectors and, optionally, scale, bias '
        'and class_names',
    )
    shape = stored['vectors'].shape
    expected = (*shape[:1], width)
    require(shape == expected, f'vectors: got shape {shape}; expected {expected}')
    arrays: dict[str, Any] = {'vectors': stored['vectors'].read()}
    for name, default in _NUMBERS.items():
        arrays[name] = np.squeeze(stored[name].read() if name in stored else default)
        require(not arrays[name].shape, f'{name}: got shape {arrays[name].shape}; expected ()')
    arrays = {n: array.astype(np.float32, casting='same_kind') for n, array in arrays.items()}
    for name, array in arrays.items():
        require(np.isfinite(array).all(), f'{name}: got NaN or Inf; expected finite values')
    require(arrays['scale'] > 0, f'scale: got {arrays["scale"]}; expected a positive number')
    vectors = arrays.pop('vectors')
    require(vectors.any(axis=1).all(), 'vectors: got a vector of zeros, which has no direction')
    names = decode_names(stored['class_names'].read()) if 'class_names' in stored else ()
    return _ClassVectors(vectors, arrays, 'bias' in stored, tuple(names))


def with_class_vectors(card: Card, params: Params, path: str) -> tuple[Card, Params]:
    """Turns an image tower into a zero-shot classifier with a cosine head.

    Args:
      card: CLIP's image tower, whose projection is kept, or a model without a head.
      params: Its parameters.
      path: An npz file of `vectors` (k d), and optionally `scale` (a factor, not its logarithm;
        default: 1), `bias` (with it, probabilities are sigmoids) and `class_names` (k).

    Returns:
      The card and the parameters of the classifier.

    Raises:
      UserError: If the file cannot be used, or the checkpoint has another head.
    """
    model = card.model
    is_distilled = isinstance(model, ViTConfig) and model.pool == 'cls_dist'
    require(not is_distilled, f'head={path}: not supported with two heads (pool=cls_dist)')
    require(
        card.is_projection or model.num_classes is None,
        f'head={path}: the checkpoint has a head for {model.num_classes} classes; '
        'expected the projection of CLIP, or no head',
    )
    width = model.num_classes if card.is_projection else feature_width(model)
    assert width is not None  # a projection has a number of outputs
    kind = f'cosine:{width}' if card.is_projection else 'cosine'
    with array_files.error_prefix(path):
        stored = _read_class_vectors(path, width)
        num_classes = len(stored.vectors)
        classifier = dataclasses.replace(
            card,
            model=dataclasses.replace(model, num_classes=num_classes, head=kind, head_bias=0.0),
            class_names=stored.class_names,
            loss='sigmoid' if stored.has_bias else 'softmax',
        )
    head: dict[str, Any] = {'kernel': stored.vectors.T, **stored.numbers}
    if card.is_projection:
        head['projection'] = {'kernel': params['head']['kernel']}
    return classifier, params | {'head': head}


def head_params(params: Params) -> dict[str, Any]:
    """Returns the parameters of the head by their full names; empty if there is no head."""
    named = tree_names.named_leaves(params)
    return {name: leaf for name, leaf in named.items() if name.startswith('head/')}


def has_trained_head(params: Params) -> bool:
    """Returns whether there is a head and none of its matrices is all zeros."""
    head = head_params(params).values()
    return bool(head) and all(np.any(leaf) for leaf in head if leaf.ndim > 1)
