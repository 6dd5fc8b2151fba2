"""Checkpoints written for any system: nothing that would come back as another network."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np

from vit_jax.base import Params, UserError, records, require, tree_names, usable, write_json
from vit_jax.checkpoints import digests, store
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import array_files, inference, name_map, stablehlo
from vit_jax.checkpoints.formats.array_files import LazyArray
from vit_jax.checkpoints.formats.base import Format, Layout
from vit_jax.checkpoints.formats.inference import Clues
from vit_jax.checkpoints.formats.name_map import NameRule
from vit_jax.checkpoints.formats.opening import CARD, FORMATS, NAMES, OURS, function_of, matched
from vit_jax.models import ModelConfig, ResNetConfig, ViTConfig
from vit_jax.models.masked_patches import MASKED
from vit_jax.models.model import position_array, position_tables

# What the name of a format's file ends with; the others are directories.
_SUFFIXES = {format.name: str(format.suffix) for format in FORMATS if not format.file_name}
_SUFFIXES |= {stablehlo.NAME: stablehlo.SUFFIX}
# Endings of files that other programs take: no folder is given such a name. All other dots are
# part of a name, as in run.v2 and lr0.1.
_FOREIGN = {*'.onnx .h5 .hdf5 .keras .tflite .pb .msgpack .pkl .pickle .joblib .mlmodel'.split()}
_FOREIGN |= {*'.mlpackage .gguf .ot .mar .engine .trt .zip .gz .tgz .7z .npy .json'.split()}
# What the networks of every other layout have: none holds ViT-22B, or positions in every layer.
_ELSEWHERE = {'parallel': False, 'qk_norm': False, 'norm': 'layer', 'qkv_bias': True}
_ELSEWHERE |= {'positions_at': 'stem'}


def format_for(
    path: str | os.PathLike[str], named: str | None, own: str, *, flag: str = 'format='
) -> str:
    """The format to write at a path: the one that is named, else `own`, that of the network.

    A path with the ending of another format's files is of that one. Raises UserError where there is
    no such format, where several have the ending, where a directory would have it, and where a
    file would have none; `flag` is how the caller says a format.
    """
    require(named in (None, *NAMES), f'format={named!r}; {records.nearest(str(named), NAMES)}')
    ending = pathlib.Path(path).suffix
    fitting = [name for name, suffix in _SUFFIXES.items() if suffix == ending]
    format = named or own
    if named is None and own not in fitting and fitting:
        choice = ' or '.join(flag + name for name in fitting)
        require(len(fitting) == 1, f'{path}: which format has this {ending} file? say {choice}')
        format = fitting[0]
    if named is None and ending != _SUFFIXES.get(format, ending):
        folders = ' or '.join(flag + name for name in NAMES if name not in _SUFFIXES)
        kept = f'no format is given, and {format}, which the network has, is a file'
        right = f'end the name with {_SUFFIXES[format]}, or, for a folder, say {folders}'
        raise UserError(f'{path}: {kept}: {right}')
    if format in _SUFFIXES:
        return format
    known = ', '.join(f'{name} ({_SUFFIXES.get(name, "a folder")})' for name in NAMES)
    is_foreign = ending.lower() in _FOREIGN
    require(not is_foreign, f'{path}: no {ending} files are written; expected one of {known}')
    if ending.lower() in {*array_files.ENDINGS, *_SUFFIXES.values()}:
        others = fitting or [f'{name} ({suffix})' for name, suffix in _SUFFIXES.items()]
        right = f'expected a name without {ending}, or the format {" or ".join(others)}'
        raise UserError(f'{path}: the format {format} is a directory: {right}')
    return format


def is_free(path: str | os.PathLike[str]) -> bool:
    """Is nothing there, or an empty directory?"""
    place = pathlib.Path(path)
    return not any(place.iterdir()) if place.is_dir() else not place.exists()


@contextlib.contextmanager
def replacing(place: pathlib.Path, format: str) -> Iterator[None]:
    """What cannot be written over is put aside, and back where its successor fails.

    That is a checkpoint of ours, a directory, and a file where one of ours goes.
    """
    old = place.with_name(f'{place.name}.replaced')
    aside = digests.is_complete(place) or (format == OURS and place.is_file())
    if aside:
        with usable(place):
            _remove(old)  # left by one that was killed
            place.rename(old)
    try:
        yield
    except BaseException:
        if aside:
            _remove(place)
            old.rename(place)
        raise
    if aside or digests.is_complete(old):
        _remove(old)


def _remove(path: pathlib.Path) -> None:
    """Removes a file, or a directory as far as that can be done."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_checkpoint(
    path: str,
    format: str,
    *,
    card: Card,
    params: Params,
    layout: Layout | None,
    dtype: Literal['float32', 'bfloat16'] | None = None,
) -> list[str]:
    """Writes a checkpoint in a format, and returns what a reader of it has to know, line by line.

    `layout` is the one that was read, to be kept, or None for the format's usual one. Numbers are
    rounded to a `dtype` that is given. Raises UserError where the format cannot hold the network:
    nothing is written that would come back as another one.
    """
    place = pathlib.Path(path)
    types = None, 'float32', 'bfloat16'
    require(dtype in types, f'dtype={dtype!r}: expected float32 or bfloat16')
    suffix = _SUFFIXES.get(format, '')
    if suffix not in ('', place.suffix):
        raise UserError(f'{path}: the format {format} is a file whose name ends with {suffix}')
    if dtype == 'bfloat16' and suffix == '.npz':
        able = ' or '.join(name for name in NAMES if _SUFFIXES.get(name) != suffix)
        raise UserError(f'dtype={dtype}: npz files do not say this type; write {able}')
    if format == OURS:
        params, notes = _in_type(params, dtype or 'float32', rounding=True)
        store.save_alone(place, params, records.to_dict(card))
        return notes
    card, params, left_out = _without_masked(card, params)
    if format == stablehlo.NAME:
        params, notes = _in_type(params, dtype or 'float32', rounding=True)
        return left_out + notes + stablehlo.write(place, card, params)
    return left_out + _write_arrays(place, format, card, params, layout, dtype)


def _without_masked(card: Card, params: Params) -> tuple[Card, Params, list[str]]:
    """The network without what only masked patch prediction needs, and a line where that was."""
    if not isinstance(card.model, ViTConfig) or MASKED not in params:
        return card, params, []
    card = dataclasses.replace(card, model=dataclasses.replace(card.model, patch_outputs=None))
    params = {name: part for name, part in params.items() if name != MASKED}
    return card, params, ['mask token and head of patches: left out']


def _write_arrays(
    place: pathlib.Path,
    format: str,
    card: Card,
    params: Params,
    layout: Layout | None,
    dtype: str | None,
) -> list[str]:
    """`write_checkpoint` of a format of FORMATS."""
    form = next(form for form in FORMATS if form.name == format)
    target = place / form.file_name if form.file_name else place
    config, notes = card.model, []
    if isinstance(config, ResNetConfig):
        require(form.resnets, f'the {format} layout has no such ResNet: write google or bigvision')
    for name, usual in _ELSEWHERE.items():
        if (value := getattr(config, name, usual)) != usual:
            raise UserError(f'the {format} layout has {name}={usual}, not {value}: write {OURS}')
    if isinstance(config, ViTConfig) and config.positions not in form.positions:
        table, own = position_array(config, params), position_tables(config)
        kept = {name: leaf for name, leaf in params.items() if name not in own}
        params = kept | {'pos_embedding': table}
        config = dataclasses.replace(config, positions='learned')
        card = dataclasses.replace(card, model=config)
        notes.append('positions: written as an array')
    layout = layout or form.usual_layout(config)
    named = _without_class_row(params, layout)
    named, type_notes = _in_type(named, dtype or layout.dtype, rounding=dtype is not None)
    layout = dataclasses.replace(
        layout,
        zeros=_still_zero(form.rules(config, layout), layout, named),
        dtype=next(iter(named.values())).dtype.name,
    )
    description = form.description(config, card, layout)
    resolved = name_map.resolve(
        form.rules(config, layout), config, named, format=format, zeros=layout.zeros
    )
    arrays = name_map.to_theirs(resolved, named)
    resized = _check_comes_back(form, config, layout, arrays, description)
    with usable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    if form.suffix == '.npz':
        array_files.write_npz(target, arrays)
    else:
        metadata = {CARD: json.dumps(records.to_dict(card))}
        array_files.write_safetensors(target, arrays, metadata)
    if form.file_name:
        files = {form.described_in: description, **form.files_beside(config, card)}
        for name, content in files.items():
            write_json(place / name, content)
    return notes + type_notes + form.notes(config, card, layout) + resized


def _check_comes_back(
    form: Format[Any],
    config: ModelConfig,
    layout: Layout,
    arrays: Mapping[str, np.ndarray],
    description: dict[str, Any],
) -> list[str]:
    """What a reader of these arrays does otherwise with images of another size, line by line.

    Raises UserError where they would be read as another network, or as none: arrays do not say all
    of a network; with pool=none and with pool=gap they are the same.
    """
    # A prefix says nothing of the network, and may hold the name of a subtree.
    stored = {
        name.removeprefix(layout.prefix): LazyArray(array.shape, array.dtype, array.copy)
        for name, array in arrays.items()
    }
    beside: dict[str, dict[str, Any]] = {form.described_in: description}
    clues = Clues(stored, inference.hints_of(config), config.image_size, beside=beside)
    try:
        recognised = form.recognise(clues)
        found = recognised.config
        matched(form, found, recognised, stored)
    except UserError as error:
        raise UserError(f'the {form.name} layout has no such network: {error}') from error
    old, new = (records.to_dict(function_of(each)) for each in (config, found))
    if lost := records.differences(old, new):
        raise UserError(
            f'the {form.name} layout has no such network, it would come back with {lost[0]}'
        )
    if isinstance(config, ResNetConfig) or config.positions != 'learned':
        return []
    theirs, ours = getattr(found, 'position_resize', ''), config.position_resize
    text = f'for images of another size its readers resize positions by {theirs}, not {ours}'
    return [text] if theirs != ours else []


def _still_zero(
    rules: list[NameRule], layout: Layout, ours: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """Of the arrays that were not in the file, those that are still zero."""
    absent = (rule for rule in rules if rule.theirs in layout.zeros)
    return tuple(r.theirs for r in absent if not any(np.any(ours.get(n, 0)) for n in r.ours))


def _without_class_row(params: Params, layout: Layout) -> dict[str, np.ndarray]:
    """Our arrays by name, with the class token's position in the token where it has no row."""
    named = {name: np.asarray(leaf) for name, leaf in tree_names.named_leaves(params).items()}
    if layout.class_row or not {'cls', 'pos_embedding'} <= set(named):
        return named
    row = named['pos_embedding'][:, :1]
    # Where it is zero, exactly the same array is written.
    return named | ({'cls': named['cls'] + row} if row.any() else {})


def _in_type(arrays: Params, dtype: str, *, rounding: bool) -> tuple[Params, list[str]]:
    """The arrays (float32) in another type; without `rounding` only where that loses nothing."""
    if dtype == 'float32':
        return arrays, []
    cast = jax.tree.map(lambda array: np.asarray(array).astype(dtype), arrays)
    exact = jax.tree.map(lambda new, old: np.array_equal(new.astype(old.dtype), old), cast, arrays)
    if all(jax.tree.leaves(exact)):
        return cast, []
    if rounding:
        return cast, [f'parameters: rounded to {dtype}']
    return arrays, [f'written as float32: {dtype} would not hold the values']
