"""Checkpoints of any origin: opened, whatever system wrote them, and written for any system.

A format is a record in a file of its own; to add one, write that file and name it in FORMATS.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import Params, UserError, records, require, tree_names, usable, write_json
from vit_jax.base.storage import is_remote
from vit_jax.checkpoints import store
from vit_jax.checkpoints.card import Card
from vit_jax.checkpoints.formats import array_files, inference, name_map
from vit_jax.checkpoints.formats.array_files import (
    LazyArray,
    error_prefix,
    json_object,
    read_json,
)
from vit_jax.checkpoints.formats.base import Format, Layout
from vit_jax.checkpoints.formats.google import BIGVISION, GOOGLE
from vit_jax.checkpoints.formats.huggingface import HUGGINGFACE
from vit_jax.checkpoints.formats.inference import Clues, Hints
from vit_jax.checkpoints.formats.timm import TIMM
from vit_jax.models import ModelConfig, ResNetConfig, build
from vit_jax.models.positions import as_array

# The first that matches a file's names reads it; bigvision takes what is not as google writes it.
FORMATS: tuple[Format[Any], ...] = GOOGLE, BIGVISION, TIMM, HUGGINGFACE
OURS = 'vit_jax'  # a directory that orbax wrote (checkpoints/store.py)
NAMES = (*(format.name for format in FORMATS), OURS)
_CARD = 'vit_jax.card'  # in a safetensors file's metadata: the card, as JSON
_MOST_SHARDS = 1000
_ENDINGS = '.safetensors', '.npz', '.bin', '.pth', '.pt'  # of files of weights
_WEIGHTS = 'model.safetensors', 'pytorch_model.bin', 'open_clip_model.safetensors'


class Checkpoint(NamedTuple):
    """A checkpoint that was opened; its arrays are not read yet."""

    path: str
    format: str  # one of NAMES
    layout: Layout | None  # how its arrays are named; None: as ours
    card: Card
    report: list[str]  # what it is, for people
    ignored: tuple[str, ...]  # names of what its file holds beside the network
    read: Callable[[], Params]  # the parameters, float32, in host memory; raises UserError


def open_checkpoint(
    path: str, hints: Hints, *, image_size: tuple[int, int] | None = None
) -> Checkpoint:
    """The checkpoint at a path: a file or directory of any format, or `FILE.npz:SUBTREE`.

    `image_size` (height, width) is that of the images for which the network is wanted; it settles
    a grid that the file leaves open. Raises UserError, in one sentence that begins with the path:
    MissingFile where nothing is there, NeedsHint where the file leaves open what network it is.
    """
    place, subtree = pathlib.Path(path), ''
    if not place.exists() and (match := re.fullmatch(r'(.+\.npz):(.+)', path)):
        place, subtree = pathlib.Path(match[1]), match[2].strip('/')
    files = [] if is_remote(path) else _weights(place) if place.is_dir() else [place]
    if not files:
        if given := [name for name, value in vars(hints).items() if value is not None]:
            raise UserError(f'{path}: a checkpoint of ours says all of itself; drop {given[0]}')
        values, folder = store.load_card(path)
        card, count = Card.read(values, where=f'{path}: card'), store.count_params(folder)
        report = [f'{OURS} layout, step {card.step}: {inference.summarize(card.model, count)}']
        return Checkpoint(path, OURS, None, card, report, (), lambda: store.load_params(path))
    found = array_files.read_array_files(files)
    beside = place if place.is_dir() else place.parent
    described = [read_json(beside / f'{n}.json') for n in ('config', 'preprocessor_config')]
    with error_prefix(path):
        embedded = found.metadata.get(_CARD)
        own = Card.read(json_object(embedded), where='card') if embedded else None
        clues = Clues(found.arrays, hints, image_size, subtree, *described)
        return _recognised(path, clues, own, found.ignored)


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
    fitting = [form.name for form in FORMATS if form.suffix == ending and not form.file_name]
    format = named or own
    if named is None and own not in fitting and fitting:
        choice = ' or '.join(flag + name for name in fitting)
        require(len(fitting) == 1, f'{path}: which format has this {ending} file? say {choice}')
        format = fitting[0]
    files = {form.name: form.suffix for form in FORMATS if not form.file_name}
    if named is None and ending != files.get(format, ending):
        folders = ' or '.join(flag + name for name in NAMES if name not in files)
        kept = f'no format is given, and {format}, which the network has, is a file'
        right = f'end the name with {files[format]}, or, for a folder, say {folders}'
        raise UserError(f'{path}: {kept}: {right}')
    if ending in _ENDINGS and format not in files:
        others = fitting or [f'{name} ({suffix})' for name, suffix in files.items()]
        right = f'expected a name without {ending}, or the format {" or ".join(others)}'
        raise UserError(f'{path}: the format {format} is a directory: {right}')
    return format


def write_checkpoint(
    path: str, format: str, *, card: Card, params: Params, layout: Layout | None
) -> list[str]:
    """Writes a checkpoint in a format, and returns what a reader of it has to know, line by line.

    `layout` is the one that was read, to be kept, or None for the format's usual one. Raises
    UserError where the format cannot hold the network: nothing is written that would come back as
    another one.
    """
    place = pathlib.Path(path)
    if format == OURS:
        store.save_alone(place, params, records.to_dict(card))
        return []
    form = next(form for form in FORMATS if form.name == format)
    target = place / form.file_name if form.file_name else place
    if target.suffix != form.suffix:
        raise UserError(
            f'{target}: the format {format} is a file whose name ends with {form.suffix}'
        )
    config, notes = card.model, []
    if isinstance(config, ResNetConfig):
        require(form.resnets, f'the {format} layout has no such ResNet: write google or bigvision')
    elif config.positions not in form.positions:
        count, width = config.num_tokens, config.width
        table = as_array(config.positions, config.grid, length=count, width=width)
        params = params | {'pos_embedding': table}
        config = dataclasses.replace(config, positions='learned')
        card = dataclasses.replace(card, model=config)
        notes.append('positions: written as an array')
    layout = layout or form.usual_layout(config)
    beside = form.files_beside(config, card)
    named = _without_class_row(params, layout)
    resolved = name_map.resolve(form.rules(config, layout), config, named, format=format)
    arrays, type_notes = _in_type(name_map.to_theirs(resolved, named), layout.dtype)
    _check_comes_back(form, config, layout, arrays, beside)
    with usable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    if form.suffix == '.npz':
        array_files.write_npz(target, arrays)
    else:
        metadata = {_CARD: json.dumps(records.to_dict(card))}
        array_files.write_safetensors(target, arrays, metadata)
    for name, content in beside.items():
        write_json(place / name, content)
    return notes + type_notes + form.notes(config, card, layout)


def _recognised(path: str, clues: Clues, own: Card | None, ignored: tuple[str, ...]) -> Checkpoint:
    """The checkpoint of a foreign file; `own` is the card that we put into it, if we wrote it."""
    arrays = clues.arrays
    form = next((form for form in FORMATS if form.matches(arrays)), None)
    if form is None:
        if any('root_block/' in name for name in arrays):
            raise UserError("of BiT's pre-activation ResNet, which is not the one of the paper")
        raise UserError(f'its {len(arrays)} arrays are those of no known ViT: {[*arrays][:3]} ...')
    ours = inference.hints_of(own.model) if own else Hints()
    found = form.recognise(clues.with_defaults(ours))
    config = found.config
    for name, hint in vars(clues.hints).items():
        if hint not in (None, stored := getattr(config, name, None)):
            raise UserError(f'{name}={hint} was given, but the arrays have {stored}')
    expected = jax.eval_shape(build(config).init, jax.random.key(0))
    shapes = {name: leaf.shape for name, leaf in tree_names.named_leaves(expected).items()}
    rules = form.rules(config, found.layout)
    resolved = name_map.resolve(rules, config, shapes, format=form.name)
    ignored = *name_map.check_names(resolved, arrays, found.ignored), *ignored
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
    report = [f'{form.name} layout: {inference.summarize(config, count)}']
    if ignored:
        report.append(f'ignored: {len(ignored)} arrays, such as {ignored[0]}')
    return Checkpoint(path, form.name, layout, card, report, ignored, read)


def _check_comes_back(
    form: Format[Any],
    config: ModelConfig,
    layout: Layout,
    arrays: Mapping[str, np.ndarray],
    beside: Mapping[str, dict[str, Any]],
) -> None:
    """Raises UserError where these arrays would be read as another network, or as none.

    Arrays do not say all of a network: with pool=none and with pool=gap they are the same.
    """
    # A prefix says nothing of the network, and may hold the name of a subtree.
    stored = {
        name.removeprefix(layout.prefix): LazyArray(array.shape, array.dtype, array.copy)
        for name, array in arrays.items()
    }
    description = beside.get('config.json', {})
    clues = Clues(stored, inference.hints_of(config), config.image_size, config_json=description)
    try:  # only `init` looks at the head's bias
        found = dataclasses.replace(form.recognise(clues).config, head_bias=config.head_bias)
    except UserError as error:
        raise UserError(f'the {form.name} layout has no such network: {error}') from error
    if lost := records.differences(records.to_dict(config), records.to_dict(found)):
        raise UserError(
            f'the {form.name} layout has no such network, it would come back with {lost[0]}'
        )


def _without_class_row(params: Params, layout: Layout) -> dict[str, np.ndarray]:
    """Our arrays by name, with the class token's position in the token where it has no row."""
    named = {name: np.asarray(leaf) for name, leaf in tree_names.named_leaves(params).items()}
    if layout.class_row or not {'cls', 'pos_embedding'} <= set(named):
        return named
    row = named['pos_embedding'][:, :1]
    # Where it is zero, exactly the same array is written.
    return named | ({'cls': named['cls'] + row} if row.any() else {})


def _in_type(arrays: dict[str, np.ndarray], dtype: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays (float32) in the type that was read, where that loses nothing."""
    if dtype == 'float32':
        return arrays, []
    cast = {name: array.astype(np.dtype(dtype)) for name, array in arrays.items()}
    if all(np.array_equal(cast[name].astype(np.float32), arrays[name]) for name in cast):
        return cast, []
    return arrays, [f'written as float32: {dtype} would not hold the values']


def _weights(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of weights in a directory, as other systems lay them out."""
    for name in _WEIGHTS:
        index = folder / f'{name}.index.json'
        if index.is_file():
            return _shards(index)
        if (folder / name).is_file():
            return [folder / name]
    found = sorted(p for p in folder.iterdir() if p.suffix in _ENDINGS and p.is_file())
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
