"""A network that starts from another one's parameters: other images, another head."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Params, tree_names
from vit_jax.checkpoints import resize
from vit_jax.data.sources.base import matched_names
from vit_jax.models import ModelConfig, ViTConfig, abstract_params, build
from vit_jax.models.masked_patches import MASKED


class Transferred(NamedTuple):
    """Parameters of the new network, and one line for each thing that happened to them."""

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
    """The parameters of `old` in the network `new`, whose own initial ones are `fresh`.

    The head is the new network's. If `class_names` has the names of the old and the new classes,
    classes with the same name keep their part of a linear head. A tanh layer before the head that
    the new network does not have is dropped (section 3.2), as are the mask token and the head of
    patches; where the old one has no such, they are the new network's. The rest is adapted to the
    new images as `adapt` says; raises UserError with the names where it does not fit.
    """
    found, expected = tree_names.named_leaves(params), tree_names.named_leaves(fresh)
    head = head_params(fresh)
    tanh = [n for n in found if n.startswith('pre_logits/') and n not in expected]
    masked = _unlike(found, expected, f'{MASKED}/')
    dropped = {*head_params(params), *tanh, *masked}
    body = {name: leaf for name, leaf in found.items() if name not in dropped}
    body, report = adapt(body, old=old, new=new)  # a dictionary by whole names is a tree too
    wanted = {name: leaf for name, leaf in expected.items() if name not in {*head, *masked}}
    tree_names.compare_names(body, wanted, where='start_from')
    numbers = sum(math.prod(leaf.shape) for leaf in body.values())
    report.insert(0, f'{len(body)} of {len(wanted)} parameter arrays loaded, {numbers:,} numbers')
    if head:
        linear = old.head == new.head == 'linear' and not tanh
        names = class_names if class_names and linear else ((), ())
        kept, line = _keep_known_classes(found, head, *names)
        to_zero = ' to zero' if new.head == 'linear' else ''
        report.append(line or f'head: reset{to_zero}, for {new.num_classes} classes')
        body |= kept
    if tanh:
        report.append('pre_logits: dropped with the pre-trained head')
    if masked:
        new_ones = any(name in expected for name in masked)
        what = 'begin anew' if new_ones else 'dropped'
        report.append(f'mask token and head of patches: {what} ({", ".join(sorted(masked))})')
    return Transferred(tree_names.map_named(lambda name, leaf: body.get(name, leaf), fresh), report)


def _keep_known_classes(
    found: Params, fresh: Params, old: Sequence[str], new: Sequence[str]
) -> tuple[Params, str | None]:
    """Returns the linear head in which classes of the same name keep their columns, and a report.

    The head is empty unless the old network knows at least half of the new classes: a few equal
    names may be chance, and a head that is mostly new is better entirely new.
    """
    columns = {name: column for column, name in enumerate(old)}
    meant = matched_names(new, old)
    new = [meant.get(name, name) for name in new]
    known = [column for column, name in enumerate(new) if name in columns]
    fits = found.keys() >= fresh.keys() and all(
        found[name].shape == (*leaf.shape[:-1], len(old)) for name, leaf in fresh.items()
    )
    if not known or not fits:
        return {}, None
    count = f'{len(known)} of {len(new)} classes'
    if 2 * len(known) < len(new):
        return {}, f'head: reset to zero; only {count} are known by name'
    taken = [columns[new[column]] for column in known]
    kept = {
        name: jnp.asarray(leaf).at[..., np.array(known)].set(np.asarray(found[name])[..., taken])
        for name, leaf in fresh.items()
        if not isinstance(leaf, jax.ShapeDtypeStruct)  # else names and shapes will do
    }
    others = [repr(name) for name in new if name not in columns]
    more = f', and {len(others) - 5:,} more' if len(others) > 5 else ''
    added = f'; new: {", ".join(others[:5])}{more}' if others else ''
    return kept, f'head: kept for {count} (by name){added}'


def _unlike(found: Params, expected: Params, folder: str) -> set[str]:
    """The parameters in a folder that are not in both networks, or not of the same shape."""
    names = {name for name in {*found, *expected} if name.startswith(folder)}
    both = names & found.keys() & expected.keys()
    return names - {name for name in both if found[name].shape == expected[name].shape}


def adapt(params: Params, *, old: ModelConfig, new: ModelConfig) -> Transferred:
    """The same network for other images: of another size, patch size or number of channels.

    Position embeddings are resized to the new grid, the patch projection to the new patches (the
    pseudo-inverse of FlexiViT), and its channels are summed or repeated. Raises UserError for a
    kind of positions that no other grid can have.
    """
    named, report = tree_names.named_leaves(params), []
    if isinstance(old, ViTConfig) and isinstance(new, ViTConfig):
        for name, resized in resize.resize_positions(named, old, new).items():
            named[name] = resized
            report.append(f'{name}: resized from {_by(old.grid)} to {_by(new.grid)} patches')
        if old.patch_size != new.patch_size:
            kernel = np.asarray(named['embedding/kernel'])
            named['embedding/kernel'] = resize.resize_patches(kernel, new.patch_size)
            sizes = f'{_by(old.patch_size)} to {_by(new.patch_size)}'
            report.append(f'embedding: resized from {sizes} pixels (pseudo-inverse)')
    if old.channels != new.channels:
        first = next((n for n in named if n.endswith('conv_root/kernel')), 'embedding/kernel')
        named[first] = resize.rechannel(np.asarray(named[first]), new.channels)
        how = 'summed' if new.channels == 1 else 'repeated and rescaled'
        exact = '; not exact, as the kernel is standardised' if 'conv_root' in first else ''
        report.append(f'{first}: {old.channels} channels {how} to {new.channels}{exact}')
    return Transferred(tree_names.map_named(lambda name, _: named[name], params), report)


def _by(pair: tuple[int, int]) -> str:
    return f'{pair[0]}x{pair[1]}'


def changed(
    params: Params,
    *,
    old: ModelConfig,
    new: ModelConfig,
    new_channels: Literal['adapt', 'fresh'] = 'adapt',
) -> Transferred:
    """The network for other images, with another head, or none.

    `new_channels`: its first layer is the old one for another number, or is drawn anew.
    """
    report: list[str] = []
    if new.num_classes != old.num_classes:
        # Only the head is taken from `fresh`: without one, names and shapes will do.
        shapes = abstract_params(new)
        fresh = shapes if new.num_classes is None else _initial(new)
        params, report = transfer(params, old=old, new=new, fresh=fresh)
    elif new != old:
        params, report = adapt(params, old=old, new=new)
    if new_channels == 'fresh' and new.channels != old.channels:
        drawn, root = tree_names.named_leaves(_initial(new)), 'backbone/conv_root/kernel'
        first = root if root in drawn else 'embedding/kernel'
        params = tree_names.map_named(lambda n, leaf: drawn[n] if n == first else leaf, params)
        report.append(f'{first}: drawn anew, for {new.channels} channels')
    return Transferred(params, report)


def _initial(config: ModelConfig) -> Params:
    """First parameters of a network, in host memory."""
    return jax.device_get(jax.jit(build(config).init)(jax.random.key(0)))


def headless(config: ModelConfig) -> ModelConfig:
    """The network without any head: its outputs are the features."""
    changes: dict[str, Any] = {'num_classes': None, 'head': 'linear', 'head_bias': 0.0}
    if isinstance(config, ViTConfig):
        changes['patch_outputs'] = None
    return dataclasses.replace(config, **changes)


def for_task(
    config: ModelConfig, *, num_classes: int | None, image_size: tuple[int, int] | None
) -> ModelConfig:
    """The network to fine-tune: its whole head is a single linear layer (section 3.2)."""
    changes: dict[str, Any] = {'num_classes': num_classes, 'head': 'linear'}
    if isinstance(config, ViTConfig):
        changes |= {'representation_size': None, 'patch_outputs': None}
    return dataclasses.replace(config, image_size=image_size or config.image_size, **changes)


def head_params(params: Params) -> dict[str, Any]:
    """Returns the parameters of the head by their full names; none for a model without a head."""
    named = tree_names.named_leaves(params)
    return {name: leaf for name, leaf in named.items() if name.startswith('head/')}


def has_trained_head(params: Params) -> bool:
    """Whether there is a head without a matrix of zeros, which would predict nothing."""
    head = head_params(params).values()
    return bool(head) and all(np.any(leaf) for leaf in head if leaf.ndim > 1)
