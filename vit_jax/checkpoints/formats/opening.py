"""Checkpoints of any origin: opened, whatever system wrote them.

A format is a record in a file of its own; to add one, write that file and name it in FORMATS.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from vit_jax.base import Params, UserError, counted, records, require, tree_names, usable
from vit_jax.base.storage import is_remote
from vit_jax.checkpoints import published, remote, store, transfer
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import (
    array_files,
    google,
    inference,
    name_map,
    stablehlo,
    wrappers,
)
from vit_jax.checkpoints.formats.array_files import LazyArray, error_prefix
from vit_jax.checkpoints.formats.base import Format, Layout, Recognised
from vit_jax.checkpoints.formats.google import BIGVISION, GOOGLE
from vit_jax.checkpoints.formats.huggingface import HUGGINGFACE
from vit_jax.checkpoints.formats.inference import Clues
from vit_jax.checkpoints.formats.json_files import json_object, read_json
from vit_jax.checkpoints.formats.open_clip import OPEN_CLIP
from vit_jax.checkpoints.formats.timm import TIMM
from vit_jax.data import imagenet_classes
from vit_jax.models import ModelConfig, ResNetConfig, abstract_params

# The first that matches a file's names reads it; bigvision takes what is not as google writes it.
FORMATS: tuple[Format[Any], ...] = GOOGLE, BIGVISION, TIMM, HUGGINGFACE, OPEN_CLIP
OURS = 'vit_jax'  # a directory that orbax wrote (checkpoints/store.py)
NAMES = (*(format.name for format in FORMATS), OURS, stablehlo.NAME)
CARD = 'vit_jax.card'  # in a safetensors file's metadata: the card, as JSON
_MOST_SHARDS = 1000
_LARGER = 8  # largest ratio of the processor's image size to the stored one
_PART = re.compile(rf'(.+(?:{"|".join(map(re.escape, array_files.ENDINGS))})):(.+)')
_Index = tuple[pathlib.Path, dict[str, str]]  # where it is, and files by names of arrays


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
    processor_size: tuple[int, int] | None = None  # of the images that its own processor makes


def open_checkpoint(
    path: str, hints: Hints, *, image_size: tuple[int, int] | Literal['stored'] | None = None
) -> Checkpoint:
    """The checkpoint at a path: a file or directory of any format, or `FILE:KEY`, a part of a file.

    The name of one that is elsewhere (checkpoints/remote.py) is downloaded, unless it was before.

    `image_size` (height, width) is that of the images for which the network is wanted; it settles
    a grid that the file leaves open. `stored` is the size of the file's positions. None is the size
    that the checkpoint's own processor makes, to which positions are resized, or the stored one.

    Raises UserError, in one sentence that begins with the path: MissingFile where nothing is there,
    NeedsHint where the file leaves open what network it is.
    """
    local, origin = remote.local(path)
    is_of_paper, path = path in published.FILES, remote.shown(path)
    if is_of_paper:  # their code has the GELU and the epsilon, whoever converted the file
        hints = Clues({}, hints).with_defaults(google.HINTS).hints
    place, subtree = pathlib.Path(local), ''
    with usable(path):
        if not place.exists() and (match := _PART.fullmatch(local)):
            place, subtree = pathlib.Path(match[1]), match[2].strip('/')
        files, index = ([], None) if is_remote(local) else _weights(place)
    if not files:
        return _of_ours(path, local, hints)
    try:
        found = array_files.read_array_files(files, subtree)
        if index:
            _check_index(*index, found.arrays)
    except UserError as error:
        if not origin:
            raise
        text = f'it came from {origin[0]}: remove it to have it downloaded again'
        raise type(error)(f'{error}; {text}') from error
    beside = place if place.is_dir() else place.parent
    described = {name: _json_beside(beside / name) for name in array_files.DESCRIPTIONS}
    with error_prefix(path):
        if {stablehlo.PROGRAM, stablehlo.CARD} <= found.arrays.keys():
            raise UserError('a program, made to be run: load the checkpoint that it was made from')
        embedded = found.metadata.get(CARD)
        own = Card.read(json_object(embedded), where='card') if embedded else None
        size = None if image_size == 'stored' else image_size
        clues = Clues(found.arrays, hints, size, subtree=subtree, beside=described)
        if not BIGVISION.matches(found.arrays) and (found.wanted or not own):
            arrays, ignored, remarks, _ = wrappers.by_prefix(found.arrays, found.wanted)
            clues = clues._replace(arrays=arrays)
            ignored, remarks = found.ignored + ignored, found.remarks + remarks
            found = found._replace(ignored=ignored, remarks=remarks)
        opened = _recognised(path, clues, own, found.ignored)
        if image_size is None and opened.processor_size and not own:
            opened = _resized(opened, opened.processor_size)
    if is_of_paper:
        opened = opened._replace(card=google.as_published(opened.card))
    if own is None:
        opened = _with_imagenet_names(opened, ' '.join([path, *origin]))
    return opened._replace(report=[*origin, *found.remarks, *opened.report], origin=origin)


def _of_ours(path: str, local: str, hints: Hints) -> Checkpoint:
    """The newest checkpoint of a work directory, or the one of a step."""
    if given := [name for name, value in vars(hints).items() if value is not None]:
        raise UserError(f'{path}: a checkpoint of ours says all of itself; drop {given[0]}')
    values, folder = store.load_card(local)
    card, count = Card.read(values, where=f'{path}: card'), store.count_params(folder)
    summary = inference.summarize(card.model, count, projects=card.projects)
    report = [f'{OURS} layout, step {card.step}: {summary}']

    def read() -> Params:
        params = store.load_params(str(folder))
        same = store.load_card(str(folder))[0] == values
        require(same, f'{path}: another checkpoint took its place while it was read')
        return params

    return Checkpoint(path, OURS, None, card, report, (), read)


def _with_imagenet_names(opened: Checkpoint, said: str) -> Checkpoint:
    """With names for its classes where the file has none, but is said to have ImageNet's."""
    card, found = opened.card, imagenet_classes.names()
    fits = card.model.num_classes == len(found) and imagenet_classes.is_said_by(said)
    if card.class_names or not fits:
        return opened
    report = [*opened.report, f"classes: ImageNet's {len(found):,}, as its name says"]
    return opened._replace(card=dataclasses.replace(card, class_names=found), report=report)


def _recognised(path: str, clues: Clues, own: Card | None, ignored: tuple[str, ...]) -> Checkpoint:
    """The checkpoint of a foreign file; `own` is the card that we put into it, if we wrote it."""
    arrays = clues.arrays
    form = next((form for form in FORMATS if form.matches(arrays)), None)
    if form is None:
        raise UserError(_unknown(arrays))
    if own:  # which says what the arrays do not
        own = _as_beside(form, clues, own)
        clues = clues.with_defaults(inference.hints_of(own.model))
        if not form.file_name:  # and no file of the format does
            said = form.description(own.model, own, form.usual_layout(own.model))
            clues = clues._replace(beside={form.described_in: said})
    found = form.recognise(clues)
    config = own.model if own else found.config
    for name, hint in vars(clues.hints).items():
        if hint not in (None, stored := getattr(config, name, None)):
            raise UserError(f'{name}={hint} was given, but the arrays have {stored}')
    expected, resolved, skipped = matched(form, config, found, arrays)
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
        report.append(f'not of it, ignored: {counted(len(ignored), "array")}, such as {ignored[0]}')
    opened = Checkpoint(path, form.name, layout, card, report, ignored, read)
    return opened._replace(processor_size=found.processor_size)


def _resized(opened: Checkpoint, size: tuple[int, int]) -> Checkpoint:
    """The checkpoint for images of another size, and a line that says so.

    Raises UserError for a size that is not meant: positions would fill the memory.
    """
    old = opened.card.model
    if size == old.image_size:
        return opened
    stored = ','.join(map(str, old.image_size))
    text = f'images of {size[0]}x{size[1]}, as its own processor makes them'
    fits = all(new <= _LARGER * side for new, side in zip(size, old.image_size, strict=True))
    text = f'{text}; image_size={stored} is that of its config.json'
    require(fits, f'{text}, {_LARGER} times smaller')
    new = dataclasses.replace(old, image_size=size)
    return opened._replace(
        card=dataclasses.replace(opened.card, model=new, grid=new.grid),
        report=[*opened.report, text],
        read=lambda: transfer.adapt(opened.read(), old=old, new=new).params,
    )


def _as_beside(form: Format[Any], clues: Clues, own: Card) -> Card:
    """The card within a file of ours, with the names of classes that the files beside it say.

    Raises UserError where these are of another network, or were changed since: other programs
    believe them, and not the card.
    """
    if not (form.file_name and clues.json(form.described_in)):
        return own
    found = form.recognise(clues)
    description = form.description(own.model, own, found.layout)
    beside = {form.described_in: description, **form.files_beside(own.model, own)}
    written = form.recognise(clues._replace(beside=beside))
    old, new = (records.to_dict(function_of(one.config)) for one in (written, found))
    lost = records.differences(old, new, where='model')
    lost += records.differences(written.loss, found.loss, where='loss')
    if all(clues.json(name) for name in beside):
        old, new = (records.to_dict(one.preprocessing) for one in (written, found))
        lost += records.differences(old, new, where='preprocessing')
    if lost:
        raise UserError(f'its own card and the files beside it do not agree: {lost[0]}')
    return dataclasses.replace(own, class_names=found.class_names or own.class_names)


def matched(
    form: Format[Any], config: ModelConfig, found: Recognised[Any], arrays: Mapping[str, LazyArray]
) -> tuple[Params, name_map.Resolved, list[str]]:
    """The parameters as shapes, where each is among the arrays, and the names that are ignored.

    Raises UserError for arrays that are missing, and for others that are not known.
    """
    expected = abstract_params(config)
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


def function_of(config: ModelConfig) -> ModelConfig:
    """The network, without how its parameters began and would be resized."""
    if isinstance(config, ResNetConfig):
        return dataclasses.replace(config, head_bias=0.0)
    scale = None if config.layer_scale is None else 1.0
    return dataclasses.replace(config, head_bias=0.0, layer_scale=scale, position_resize='bilinear')


def _weights(place: pathlib.Path) -> tuple[list[pathlib.Path], _Index | None]:
    """A file, or those of weights in a directory as other systems lay them out; and their index."""
    if not place.is_dir():
        return [place], None
    for name in array_files.WEIGHTS:  # transformers, too, prefers one file to several
        if os.path.lexists(place / name):
            return [place / name], None
        index = place / f'{name}{array_files.INDEX}'
        if os.path.lexists(index):
            named = _read_index(index)
            return sorted({place / shard for shard in named.values()}), (index, named)
    found = sorted(p for p in place.iterdir() if p.suffix in array_files.ENDINGS and p.is_file())
    if len(found) > 1:
        names = ', '.join(p.name for p in found)
        raise UserError(f'{place}: holds several files of weights; name one of {names}')
    return found, None


def _json_beside(path: pathlib.Path) -> dict[str, Any]:
    with error_prefix(path):
        return read_json(path)


def _read_index(index: pathlib.Path) -> dict[str, str]:
    """What it says: the file of its directory in which each array is, by names of arrays.

    Raises UserError for files elsewhere, and for none.
    """
    with error_prefix(index):
        named = read_json(index).get('weight_map')
        if not isinstance(named, dict) or not all(isinstance(v, str) for v in named.values()):
            raise UserError('weight_map: expected names of files by names of arrays')
        shards = set(named.values())
        if any(pathlib.PurePath(shard).name != shard for shard in shards) or not shards:
            raise UserError('names files outside of its directory, or none')
        if len(shards) > _MOST_SHARDS:
            raise UserError(f'names {len(shards):,} files, at most {_MOST_SHARDS:,} are read')
    return named


def _check_index(index: pathlib.Path, named: Iterable[str], arrays: Iterable[str]) -> None:
    """Raises UserError where an index names other arrays than its files hold."""
    in_index, there = set(named), set(arrays)
    if missing := in_index - there:
        raise UserError(f'{index}: names {min(missing)}, which is in none of its files')
    if strange := there - in_index:
        raise UserError(f'{index}: does not name {min(strange)}, which is in one of its files')
