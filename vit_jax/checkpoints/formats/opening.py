"""Opens checkpoints of all supported formats, and compares their arrays with the model.

Each format is a record in its own module; to add one, write the module and list it in FORMATS.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax.base import Params, UserError, plural, records, require, tree_names, usable
from vit_jax.base.storage import is_remote
from vit_jax.checkpoints import remote, store, transfer
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import array_files, google, inference, name_map, stablehlo
from vit_jax.checkpoints.formats.array_files import FileContents, LazyArray
from vit_jax.checkpoints.formats.base import Format, Layout, ParsedCheckpoint
from vit_jax.checkpoints.formats.google import BIGVISION, GOOGLE
from vit_jax.checkpoints.formats.huggingface import HUGGINGFACE, PREFIXES
from vit_jax.checkpoints.formats.open_clip import OPEN_CLIP
from vit_jax.checkpoints.formats.timm import TIMM
from vit_jax.checkpoints.formats.vit5 import VIT5
from vit_jax.checkpoints.formats.wrappers import unwrap
from vit_jax.data import imagenet_classes
from vit_jax.models import abstract_params

# The first format that matches a file's names parses it: the more special format comes first.
FORMATS: tuple[Format[Any], ...] = GOOGLE, BIGVISION, VIT5, TIMM, HUGGINGFACE, OPEN_CLIP
# Prefixes that formats put before the names of the body.
OWN_PREFIXES = 'visual.', 'visual.trunk.', *sorted(PREFIXES)
OURS = 'vit_jax'  # a directory written with orbax (checkpoints/store.py)
NAMES = (*(format.name for format in FORMATS), OURS, stablehlo.NAME)
# Keys in the metadata of safetensors files that vit_jax writes; the values are JSON.
CARD = 'vit_jax.card'
LAYOUT = 'vit_jax.layout'
_PART = re.compile(rf'(.+(?:{"|".join(map(re.escape, array_files.ENDINGS))})):(.+)')


class Checkpoint(NamedTuple):
    """An opened checkpoint whose arrays are not read yet."""

    path: str
    format: str  # google, bigvision, timm, vit5, huggingface, open_clip or vit_jax
    layout: Layout | None  # None for a vit_jax directory
    card: Card
    report: list[str]  # lines for the user: format, model, assumptions and ignored arrays
    ignored: tuple[str, ...]  # names of arrays that do not belong to the model
    read: Callable[[], Params]  # reads parameters as float32 into host memory; raises UserError
    origin: tuple[str, ...] = ()  # lines with the URL, commit and digests of a download


def open_checkpoint(
    path: str, hints: Hints, *, image_size: tuple[int, int] | Literal['stored'] | None = None
) -> Checkpoint:
    """Opens a checkpoint without reading its arrays.

    Args:
      path: A file or directory of any format, `FILE:KEY` for a part of a file, or a remote name
        (hf:, https://, gs://, augreg: or vit:; see checkpoints/remote.py), which is downloaded
        unless it is in the cache.
      hints: Values that the file may leave open.
      image_size: If None, positions are resized to the image size that the checkpoint's own
        preprocessor produces. Otherwise the size in the file is kept: pass `stored`, or the size
        to which the caller resizes the model afterwards.

    Raises:
      MissingFile: If the path does not exist.
      NeedsHint: If the file does not determine the model.
      UserError: If the checkpoint is not supported or damaged; the message names the path.
    """
    local, origin = remote.fetch(path)
    is_of_paper = path in remote.PUBLISHED
    path = remote.redact(path)
    if is_of_paper:  # converted copies also have the GELU and epsilon of the paper's code
        hints = inference.with_defaults(hints, google.HINTS)
    local_path = pathlib.Path(local)
    key = ''
    with usable(path):
        if not local_path.exists() and (match := _PART.fullmatch(local)):
            local_path = pathlib.Path(match[1])
            key = match[2].strip('/')
        files = [] if is_remote(local) else _find_weights(local_path)
    if not files:
        return _open_own(path, local, hints)
    with remote.suggest_new_download(str(local_path)):
        shards = [array_files.read_array_file(file) for file in files]
    folder = local_path if local_path.is_dir() else local_path.parent
    contents = FileContents(
        arrays={name: array for shard in shards for name, array in shard.arrays.items()},
        metadata=shards[0].metadata,
        descriptions=array_files.read_descriptions(folder),
        key=key,
    )
    with array_files.error_prefix(path):
        require(stablehlo.PROGRAM not in contents.arrays, 'a program (StableHLO), not a checkpoint')
        checkpoint = _parse(path, str(local_path), contents, hints, resized=image_size is None)
    addresses = ' '.join([path, *origin])
    card = google.as_published(checkpoint.card) if is_of_paper else checkpoint.card
    report = [*origin, *checkpoint.report]
    has_no_names = CARD not in contents.metadata and not card.class_names
    if has_no_names and card.model.num_classes == 1000 and imagenet_classes.is_in_name(addresses):
        card = dataclasses.replace(card, class_names=imagenet_classes.names())
        report.append("class names: ImageNet's, from the checkpoint's name")
    return checkpoint._replace(card=card, report=report, origin=origin)


def _find_weights(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the file itself, or the files of weights in a directory."""
    if not path.is_dir():
        return [path]
    for name in array_files.WEIGHTS:  # like transformers, prefers a single file to shards
        index = path / f'{name}{array_files.INDEX}'
        if os.path.lexists(path / name):
            if index.exists():
                logging.warning('%s: %s is read, and not the shards of %s', path, name, index.name)
            return [path / name]
        if os.path.lexists(index):
            shards = {*array_files.read_json_object(index).part('weight_map').values()}
            return sorted(path / pathlib.PurePath(str(shard)).name for shard in shards)
    files = sorted(p for p in path.iterdir() if p.suffix in array_files.ENDINGS and p.is_file())
    listed = ', '.join(file.name for file in files)
    require(len(files) < 2, f'{path}: contains several files of weights; pass one of {listed}')
    return files


def _open_own(path: str, local: str, hints: Hints) -> Checkpoint:
    """Opens a vit_jax checkpoint, or the newest one of a work directory."""
    if names := [name for name, value in vars(hints).items() if value is not None]:
        raise UserError(f'{path}: {names[0]} cannot be set for a vit_jax checkpoint; leave it out')
    values, folder = store.load_card(local)
    card = records.from_dict(Card, values, where=f'{path}: card')
    summary = inference.summarize(card.model, store.count_params(folder), card.is_projection)
    return Checkpoint(
        path=path,
        format=OURS,
        layout=None,
        card=card,
        report=[f'{OURS} format, step {card.step}: {summary}'],
        ignored=(),
        read=functools.partial(store.load_params, str(folder)),
    )


def _parse(
    path: str, file: str, contents: FileContents, hints: Hints, *, resized: bool
) -> Checkpoint:
    """Parses a file; a card in a file that vit_jax wrote takes precedence over other sources.

    `path` is the name for messages, `file` the local copy.
    """
    is_own = CARD in contents.metadata and not contents.key
    if not is_own:
        contents = unwrap(contents, OWN_PREFIXES)
    arrays = contents.arrays
    form = next((form for form in FORMATS if form.matches(arrays)), None)
    if form is None:
        raise UserError(f'no supported format has these {len(arrays)} arrays: {[*arrays][:3]} ...')
    parsed = _parse_own(form, contents) if is_own else form.parse(contents, hints)
    config = parsed.config
    for name, hint in vars(hints).items():
        stored = getattr(config, name, None)
        require(hint in (None, stored), f'{name}={hint} contradicts the file, which has {stored}')
    matched = match_arrays(form, parsed, arrays)
    shapes = {name: leaf.shape for name, leaf in tree_names.named_leaves(matched.params).items()}
    num_params = sum(map(math.prod, shapes.values()))
    dtypes = {arrays[name].dtype.name for names in matched.rules.values() for name in names}
    dtype = dtypes.pop() if len(dtypes) == 1 else 'float32'
    size = (parsed.processor_size if resized else None) or config.image_size
    new = dataclasses.replace(config, image_size=size)
    card = Card(
        model=new,
        grid=new.grid,
        preprocessing=parsed.preprocessing,
        class_names=parsed.class_names,
        loss=parsed.loss,
    )

    def read() -> Params:
        with remote.suggest_new_download(file), array_files.error_prefix(path):
            params_by_name = name_map.to_ours(matched.rules, arrays, shapes)
        params = tree_names.map_named(lambda name, _: params_by_name[name], matched.params)
        return transfer.adapt(params, old=config, new=new).params

    summary = inference.summarize(config, num_params, card.is_projection)
    report = [*contents.remarks, f'{form.name} format: {summary}', *parsed.remarks]
    ignored = (*matched.ignored, *contents.ignored)
    if ignored:
        report.append(
            f'ignored, not part of the model: {plural(len(ignored), "array")}, such as {ignored[0]}'
        )
    if size != config.image_size:
        report.append(f'image size {size[0]}x{size[1]}, from the JSON file of its preprocessor')
    return Checkpoint(
        path=path,
        format=form.name,
        layout=dataclasses.replace(parsed.layout, dtype=dtype),
        card=card,
        report=report,
        ignored=ignored,
        read=read,
    )


def _parse_own(form: Format[Any], contents: FileContents) -> ParsedCheckpoint[Any]:
    """Parses the card in a safetensors file that vit_jax wrote.

    The remarks name values in JSON files that differ from the card.
    """
    card = records.from_dict(Card, json.loads(contents.metadata[CARD]), where='card')
    usual = form.usual_layout(card.model)
    stored = json.loads(contents.metadata.get(LAYOUT, '{}'))
    layout = records.from_dict(type(usual), vars(usual) | stored, where='layout')
    written = form.descriptions(card.model, card, layout)
    remarks = [
        f'{file}: {key}={contents.descriptions[file][key]!r:.80} is ignored; the model card is used'
        for file, key in _find_differences(written, contents.descriptions)
    ]
    return ParsedCheckpoint(
        card.model,
        layout,
        card.preprocessing,
        card.class_names,
        loss=card.loss,
        remarks=tuple(remarks),
    )


def _find_differences(
    written: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Returns the (file, key) of each value in JSON files that differs from the written one."""
    return [
        (file, key)
        for file, values in written.items()
        for key, value in json.loads(json.dumps(values)).items()
        if found.get(file, {}).get(key, value) != value
    ]


class MatchedArrays(NamedTuple):
    """How the arrays in a file correspond to the parameters of a model."""

    params: Params  # abstract parameters
    rules: name_map.Resolved  # the name map, with the names in the file
    ignored: list[str]  # names of arrays that do not belong to the model


def match_arrays(
    form: Format[Any], parsed: ParsedCheckpoint[Any], arrays: Mapping[str, LazyArray]
) -> MatchedArrays:
    """Compares the names and shapes of the arrays in a file with the model.

    Raises:
      UserError: If arrays are missing, unknown or have another shape; the message names them.
    """
    params = abstract_params(parsed.config)
    ours = tree_names.named_leaves(params)
    rules = name_map.resolve(
        form.rules(parsed.config, parsed.layout),
        parsed.config,
        ours,
        format=form.name,
        zeros=parsed.layout.zeros,
    )
    constants = form.constants(parsed.config)
    for name, value in constants.items():
        # Files of 16-bit arrays round these.
        is_equal = name in arrays and np.allclose(arrays[name].read(), value, rtol=1e-2)
        require(is_equal, f'{name}: missing or different; expected {value}')
    variables = {name: array for name, array in arrays.items() if name not in constants}
    ignored = name_map.check_names(rules, variables, parsed.ignored)
    for rule, names_in_file in rules.items():
        expected = rule.shape_in_file(ours)
        for name in names_in_file:
            stored = arrays[name].shape
            require(stored == expected, f'{name}: got shape {stored}; expected {expected}')
    return MatchedArrays(params=params, rules=rules, ignored=ignored)
