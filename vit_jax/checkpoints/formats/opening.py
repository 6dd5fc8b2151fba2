"""Checkpoints of any origin: opened, whatever system wrote them, and written for any system.

A format is a record in a file of its own; to add one, write that file and name it in FORMATS.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from vit_jax.base import Params, UserError, records, require, tree_names, usable, write_json
from vit_jax.base.storage import is_remote
from vit_jax.checkpoints import names, store
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import array_files, inference, name_map, stablehlo
from vit_jax.checkpoints.formats.array_files import (
    LazyArray,
    error_prefix,
    json_object,
    read_json,
)
from vit_jax.checkpoints.formats.base import Format, Layout, Recognised
from vit_jax.checkpoints.formats.google import BIGVISION, GOOGLE
from vit_jax.checkpoints.formats.huggingface import HUGGINGFACE
from vit_jax.checkpoints.formats.inference import Clues, Hints
from vit_jax.checkpoints.formats.name_map import NameRule
from vit_jax.checkpoints.formats.open_clip import OPEN_CLIP
from vit_jax.checkpoints.formats.timm import TIMM
from vit_jax.models import ModelConfig, ResNetConfig, build
from vit_jax.models.positions import as_array

# The first that matches a file's names reads it; bigvision takes what is not as google writes it.
FORMATS: tuple[Format[Any], ...] = GOOGLE, BIGVISION, TIMM, HUGGINGFACE, OPEN_CLIP
OURS = 'vit_jax'  # a directory that orbax wrote (checkpoints/store.py)
NAMES = (*(format.name for format in FORMATS), OURS, stablehlo.NAME)
# What the name of a format's file ends with; the others are directories.
_SUFFIXES = {format.name: str(format.suffix) for format in FORMATS if not format.file_name}
_SUFFIXES |= {stablehlo.NAME: stablehlo.SUFFIX}
_CARD = 'vit_jax.card'  # in a safetensors file's metadata: the card, as JSON
_MOST_SHARDS = 1000


class Checkpoint(NamedTuple):
    """A checkpoint that was opened; its arrays are not read yet."""

    path: str
    format: str  # one of NAMES
    layout: Layout | None  # how its arrays are named; None: as ours
    card: Card
    report: list[str]  # what it is, for people
    ignored: tuple[str, ...]  # names of what its file holds beside the network
    read: Callable[[], Params]  # the parameters, float32, in host memory; raises UserError
    origin: tuple[str, ...] = ()  # of one that was downloaded: from where, and what exactly


def open_checkpoint(
    path: str, hints: Hints, *, image_size: tuple[int, int] | None = None
) -> Checkpoint:
    """The checkpoint at a path: a file or directory of any format, or `FILE.npz:SUBTREE`.

    The name of one that is elsewhere (checkpoints/names.py) is downloaded, unless it was before.

    `image_size` (height, width) is that of the images for which the network is wanted; it settles
    a grid that the file leaves open. Raises UserError, in one sentence that begins with the path:
    MissingFile where nothing is there, NeedsHint where the file leaves open what network it is.
    """
    local, origin = names.local(path)
    path = names.shown(path)
    place, subtree = pathlib.Path(local), ''
    if not place.exists() and (match := re.fullmatch(r'(.+\.npz):(.+)', local)):
        place, subtree = pathlib.Path(match[1]), match[2].strip('/')
    files = [] if is_remote(local) else _weights(place) if place.is_dir() else [place]
    if not files:
        if given := [name for name, value in vars(hints).items() if value is not None]:
            raise UserError(f'{path}: a checkpoint of ours says all of itself; drop {given[0]}')
        values, folder = store.load_card(local)
        card, count = Card.read(values, where=f'{path}: card'), store.count_params(folder)
        summary = inference.summarize(card.model, count, projects=card.projects)
        report = [f'{OURS} layout, step {card.step}: {summary}']
        return Checkpoint(
            path, OURS, None, card, report, (), lambda: store.load_params(str(folder))
        )
    try:
        found = array_files.read_array_files(files)
    except UserError as error:
        if not origin:
            raise
        text = f'it came from {origin[0]}: remove it to have it downloaded again'
        raise type(error)(f'{error}; {text}') from error
    beside = place if place.is_dir() else place.parent
    described = {name: read_json(beside / name) for name in array_files.DESCRIPTIONS}
    with error_prefix(path):
        if {stablehlo.PROGRAM, stablehlo.CARD} <= found.arrays.keys():
            raise UserError('a program, made to be run: load the checkpoint that it was made from')
        embedded = found.metadata.get(_CARD)
        own = Card.read(json_object(embedded), where='card') if embedded else None
        clues = Clues(found.arrays, hints, image_size, subtree=subtree, beside=described)
        opened = _recognised(path, clues, own, found.ignored)
    return opened._replace(report=[*origin, *opened.report], origin=origin)


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
    if ending in {*array_files.ENDINGS, *_SUFFIXES.values()} and format not in _SUFFIXES:
        others = fitting or [f'{name} ({suffix})' for name, suffix in _SUFFIXES.items()]
        right = f'expected a name without {ending}, or the format {" or ".join(others)}'
        raise UserError(f'{path}: the format {format} is a directory: {right}')
    return format


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
    if format in (OURS, stablehlo.NAME):
        params, notes = _in_type(params, dtype or 'float32', rounding=True)
        if format == stablehlo.NAME:
            return notes + stablehlo.write(place, card, params)
        store.save_alone(place, params, records.to_dict(card))
        return notes
    return _write_arrays(place, format, card, params, layout, dtype)


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
    elif config.positions not in form.positions:
        count, width = config.num_tokens - config.registers, config.width
        table = as_array(config.positions, config.grid, length=count, width=width)
        params = params | {'pos_embedding': table}
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
        metadata = {_CARD: json.dumps(records.to_dict(card))}
        array_files.write_safetensors(target, arrays, metadata)
    if form.file_name:
        files = {form.described_in: description, **form.files_beside(config, card)}
        for name, content in files.items():
            write_json(place / name, content)
    return notes + type_notes + form.notes(config, card, layout) + resized


def _recognised(path: str, clues: Clues, own: Card | None, ignored: tuple[str, ...]) -> Checkpoint:
    """The checkpoint of a foreign file; `own` is the card that we put into it, if we wrote it."""
    arrays = clues.arrays
    form = next((form for form in FORMATS if form.matches(arrays)), None)
    if form is None:
        raise UserError(_unknown(arrays))
    if own:  # which says what the arrays do not
        clues = clues.with_defaults(inference.hints_of(own.model))
        if not form.file_name:  # and no file of the format does
            said = form.description(own.model, own, form.usual_layout(own.model))
            clues = clues._replace(beside={form.described_in: said})
    found = form.recognise(clues)
    config = own.model if own else found.config
    for name, hint in vars(clues.hints).items():
        if hint not in (None, stored := getattr(config, name, None)):
            raise UserError(f'{name}={hint} was given, but the arrays have {stored}')
    expected, resolved, skipped = _matched(form, config, found, arrays)
    shapes = {name: leaf.shape for name, leaf in tree_names.named_leaves(expected).items()}
    ignored = *skipped, *ignored
    types = {arrays[name].dtype.name for names in resolved.values() for name in names}
    layout = dataclasses.replace(found.layout, dtype=types.pop() if len(types) == 1 else 'float32')
    card = Card(
        model=config,
        grid=config.grid,
        preprocessing=own.preprocessing if own else found.preprocessing,
        class_names=own.class_names if own else found.class_names,
        loss=own.loss if own else found.loss,
    )

    def read() -> Params:
        with error_prefix(path):
            values = name_map.to_ours(resolved, arrays, shapes)
            return tree_names.map_named(lambda name, _: values[name], expected)

    count = sum(map(math.prod, shapes.values()))
    summary = inference.summarize(config, count, projects=card.projects)
    report = [f'{form.name} layout: {summary}']
    report += [] if own else found.remarks
    if ignored:
        report.append(f'ignored: {len(ignored)} arrays, such as {ignored[0]}')
    return Checkpoint(path, form.name, layout, card, report, ignored, read)


def _matched(
    form: Format[Any], config: ModelConfig, found: Recognised[Any], arrays: Mapping[str, LazyArray]
) -> tuple[Params, name_map.Resolved, list[str]]:
    """The parameters as shapes, where each is among the arrays, and the names that are ignored.

    Raises UserError for arrays that are missing, and for others that are not known.
    """
    expected = jax.eval_shape(build(config).init, jax.random.key(0))
    rules, zeros = form.rules(config, found.layout), found.layout.zeros
    ours = tree_names.named_leaves(expected)
    resolved = name_map.resolve(rules, config, ours, format=form.name, zeros=zeros)
    return expected, resolved, name_map.check_names(resolved, arrays, found.ignored)


def _unknown(names: Iterable[str]) -> str:
    """What is wrong with the arrays of no known format."""
    if any('root_block/' in name for name in names):
        return "of BiT's pre-activation ResNet, which is not the one of the paper"
    if any(re.match(r'(text_model|text)\.|token_embedding\.', name) for name in names):
        return 'of a text tower, without one of images'
    return f'its {len([*names])} arrays are those of no known ViT: {[*names][:3]} ...'


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
        _matched(form, found, recognised, stored)
    except UserError as error:
        raise UserError(f'the {form.name} layout has no such network: {error}') from error
    old, new = (records.to_dict(_function(each)) for each in (config, found))
    if lost := records.differences(old, new):
        raise UserError(
            f'the {form.name} layout has no such network, it would come back with {lost[0]}'
        )
    if isinstance(config, ResNetConfig) or config.positions != 'learned':
        return []
    theirs, ours = getattr(found, 'position_resize', ''), config.position_resize
    text = f'for images of another size its readers resize positions by {theirs}, not {ours}'
    return [text] if theirs != ours else []


def _function(config: ModelConfig) -> ModelConfig:
    """The network, without how its parameters began and would be resized."""
    if isinstance(config, ResNetConfig):
        return dataclasses.replace(config, head_bias=0.0)
    scale = None if config.layer_scale is None else 1.0
    return dataclasses.replace(config, head_bias=0.0, layer_scale=scale, position_resize='bilinear')


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


def _weights(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of weights in a directory, as other systems lay them out."""
    for name in array_files.WEIGHTS:
        index = folder / f'{name}{array_files.INDEX}'
        if index.is_file():
            return _shards(index)
        if (folder / name).is_file():
            return [folder / name]
    found = sorted(p for p in folder.iterdir() if p.suffix in array_files.ENDINGS and p.is_file())
    if len(found) > 1:
        names = ', '.join(p.name for p in found)
        raise UserError(f'{folder}: holds several files of weights; name one of {names}')
    return found


def _shards(index: pathlib.Path) -> list[pathlib.Path]:
    """The files that an index names. Raises UserError for an index that names others, or none."""
    named = read_json(index).get('weight_map')
    with error_prefix(index):
        if not isinstance(named, dict) or not all(isinstance(v, str) for v in named.values()):
            raise UserError('weight_map: expected names of files by names of arrays')
        shards = {*named.values()}
        if any(pathlib.PurePath(shard).name != shard for shard in shards) or not shards:
            raise UserError('names files outside of its directory, or none')
        if len(shards) > _MOST_SHARDS:
            raise UserError(f'names {len(shards):,} files, at most {_MOST_SHARDS:,} are read')
    return sorted(index.parent / shard for shard in shards)
