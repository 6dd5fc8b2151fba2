"""Opens the checkpoint of any system: finds its format, parses it, and compares all its arrays.

A format is a record in its own file; to add one, write that file and name it in FORMATS.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax

from vit_jax.base import Params, UserError, plural, records, require, tree_names, usable
from vit_jax.base.storage import is_remote
from vit_jax.checkpoints import published, remote, store, transfer
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import array_files, google, inference, name_map, stablehlo
from vit_jax.checkpoints.formats.array_files import FileContents, LazyArray
from vit_jax.checkpoints.formats.base import Format, Layout, ParsedCheckpoint
from vit_jax.checkpoints.formats.google import BIGVISION, GOOGLE
from vit_jax.checkpoints.formats.huggingface import HUGGINGFACE, PREFIXES
from vit_jax.checkpoints.formats.open_clip import OPEN_CLIP
from vit_jax.checkpoints.formats.timm import TIMM
from vit_jax.checkpoints.formats.wrappers import unwrap
from vit_jax.data import imagenet_classes
from vit_jax.models import abstract_params

# The first that matches a file's names parses it; bigvision takes what is not as google writes it.
FORMATS: tuple[Format[Any], ...] = GOOGLE, BIGVISION, TIMM, HUGGINGFACE, OPEN_CLIP
# In front of the names of a model's body.
OWN_PREFIXES = 'visual.', 'visual.trunk.', *sorted(PREFIXES)
OURS = 'vit_jax'  # a directory that orbax wrote (checkpoints/store.py)
NAMES = (*(format.name for format in FORMATS), OURS, stablehlo.NAME)
# In the metadata of a safetensors file of ours, as JSON: the card, and the layout of the arrays.
CARD, LAYOUT = 'vit_jax.card', 'vit_jax.layout'
_PART = re.compile(rf'(.+(?:{"|".join(map(re.escape, array_files.ENDINGS))})):(.+)')


class Checkpoint(NamedTuple):
    """A checkpoint that was opened; its arrays are not read yet."""

    path: str
    format: str  # one of NAMES
    layout: Layout | None  # how its arrays are named; None: as ours
    card: Card
    report: list[str]  # what it is, for people
    ignored: tuple[str, ...]  # names of arrays that do not belong to the model
    read: Callable[[], Params]  # the parameters, float32, in host memory; raises UserError
    origin: tuple[str, ...] = ()  # where it was downloaded from, and what exactly


def open_checkpoint(
    path: str, hints: Hints, *, image_size: tuple[int, int] | Literal['stored'] | None = None
) -> Checkpoint:
    """Opens a checkpoint without reading its arrays.

    Args:
      path: A file or directory of any format, `FILE:KEY` for a part of a file, or the name of a
        remote checkpoint (checkpoints/remote.py), which is downloaded unless it was before.
      hints: What the file may leave open.
      image_size: The size of images that the caller wants, or `stored` to keep the size. If it
        is None, positions are resized to the size that the checkpoint's own processor makes.

    Raises:
      UserError: In one sentence that begins with the path; MissingFile if nothing is there,
        NeedsHint if the file leaves open what model it is.
    """
    local, origin = remote.local(path)
    is_of_paper, path = path in published.FILES, remote.shown(path)
    if is_of_paper:  # the paper's code has this GELU and epsilon, whoever converted the file
        hints = inference.with_defaults(hints, google.HINTS)
    place, key = pathlib.Path(local), ''
    with usable(path):
        if not place.exists() and (match := _PART.fullmatch(local)):
            place, key = pathlib.Path(match[1]), match[2].strip('/')
        files = [] if is_remote(local) else _find_weights(place)
    if not files:
        return _open_own(path, local, hints)
    opened = [array_files.read_array_file(file) for file in files]
    contents = FileContents(
        arrays={name: array for each in opened for name, array in each.arrays.items()},
        metadata=opened[0].metadata,
        descriptions=array_files.read_descriptions(place if place.is_dir() else place.parent),
        key=key,
    )
    with array_files.error_prefix(path):
        checkpoint = _parse(path, contents, hints, resized=image_size is None)
    card, said = checkpoint.card, ' '.join([path, *origin])
    if is_of_paper:
        card = google.as_published(card)
    report = [*origin, *checkpoint.report]
    nameless = CARD not in contents.metadata and not card.class_names
    if nameless and card.model.num_classes == 1000 and imagenet_classes.is_in_name(said):
        card = dataclasses.replace(card, class_names=imagenet_classes.names())
        report.append("classes: ImageNet's 1,000, as its name says")
    return checkpoint._replace(card=card, report=report, origin=origin)


def _find_weights(place: pathlib.Path) -> list[pathlib.Path]:
    """Returns the file, or the files of weights in a directory of another system."""
    if not place.is_dir():
        return [place]
    for name in array_files.WEIGHTS:  # transformers prefers one file to shards too
        if os.path.lexists(place / name):
            return [place / name]
        index = place / f'{name}{array_files.INDEX}'
        if os.path.lexists(index):
            shards = {*array_files.read_json(index).part('weight_map').values()}
            return sorted(place / pathlib.PurePath(str(shard)).name for shard in shards)
    found = sorted(p for p in place.iterdir() if p.suffix in array_files.ENDINGS and p.is_file())
    listed = ', '.join(file.name for file in found)
    require(len(found) < 2, f'{place}: holds several files of weights; name one of {listed}')
    return found


def _open_own(path: str, local: str, hints: Hints) -> Checkpoint:
    """Opens the newest checkpoint of a work directory, or the one of a step."""
    if given := [name for name, value in vars(hints).items() if value is not None]:
        raise UserError(f'{path}: a checkpoint of ours needs no {given[0]}; leave it out')
    values, folder = store.load_card(local)
    card = records.from_dict(Card, values, where=f'{path}: card')
    summary = inference.summarize(card.model, store.count_params(folder), projects=card.projects)
    report = [f'{OURS} layout, step {card.step}: {summary}']

    read = functools.partial(store.load_params, str(folder))
    return Checkpoint(path, OURS, None, card, report, (), read)


def _parse(path: str, contents: FileContents, hints: Hints, *, resized: bool) -> Checkpoint:
    """Returns the checkpoint of a foreign file; a file of ours has a card, which counts."""
    own = CARD in contents.metadata and not contents.key
    contents = contents if own else unwrap(contents, OWN_PREFIXES)
    arrays = contents.arrays
    form = next((form for form in FORMATS if form.matches(arrays)), None)
    if form is None:
        raise UserError(f'{len(arrays)} arrays, none of a known ViT: {[*arrays][:3]} ...')
    parsed = _parse_own(form, contents) if own else form.parse(contents, hints)
    config = parsed.config
    for name, hint in vars(hints).items():
        stored = getattr(config, name, None)
        require(hint in (None, stored), f'{name}={hint} was given, but the file has {stored}')
    expected, resolved, skipped = match_arrays(form, parsed, arrays)
    shapes = {name: leaf.shape for name, leaf in tree_names.named_leaves(expected).items()}
    count = sum(map(math.prod, shapes.values()))
    types = {arrays[name].dtype.name for names in resolved.values() for name in names}
    layout = dataclasses.replace(parsed.layout, dtype=types.pop() if len(types) == 1 else 'float32')
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
        with array_files.error_prefix(path):
            values = name_map.to_ours(resolved, arrays, shapes)
        params = tree_names.map_named(lambda name, _: values[name], expected)
        return transfer.adapt(params, old=config, new=new).params

    summary = inference.summarize(config, count, projects=card.projects)
    report = [*contents.remarks, f'{form.name} layout: {summary}', *parsed.remarks]
    ignored = *skipped, *contents.ignored
    if ignored:
        some = f'{plural(len(ignored), "array")}, such as {ignored[0]}'
        report.append(f'ignored, as not of the model: {some}')
    if size != config.image_size:
        report.append(f'images of {size[0]}x{size[1]}, as its own processor makes them')
    return Checkpoint(path, form.name, layout, card, report, ignored, read)


def _parse_own(form: Format[Any], contents: FileContents) -> ParsedCheckpoint[Any]:
    """Reads the card in a safetensors file that vit_jax wrote; ignores files next to it."""
    card = records.from_dict(Card, json.loads(contents.metadata[CARD]), where='card')
    usual = form.usual_layout(card.model)
    stored = json.loads(contents.metadata.get(LAYOUT, '{}'))
    layout = records.from_dict(type(usual), vars(usual) | stored, where='layout')
    return ParsedCheckpoint(
        card.model, layout, card.preprocessing, card.class_names, loss=card.loss
    )


def match_arrays(
    form: Format[Any], parsed: ParsedCheckpoint[Any], arrays: Mapping[str, LazyArray]
) -> tuple[Params, name_map.Resolved, list[str]]:
    """Compares the names and shapes of arrays with the model.

    Returns:
      The parameters as shapes, the names in the file for each, and the names that are ignored.

    Raises:
      UserError: That names the arrays that are missing, not known, or of another shape.
    """
    expected = abstract_params(parsed.config)
    ours, layout = tree_names.named_leaves(expected), parsed.layout
    rules = form.rules(parsed.config, layout)
    resolved = name_map.resolve(rules, parsed.config, ours, format=form.name, zeros=layout.zeros)
    skipped = name_map.check_names(resolved, arrays, parsed.ignored)
    for rule, names_in_file in resolved.items():
        function = rule.transform.to_theirs
        function = jax.vmap(function) if rule.per_layer else function
        shapes = [jax.eval_shape(function, ours[n]).shape[rule.per_layer :] for n in rule.ours]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:]) if shapes[0] else ()
        for name in names_in_file:
            stored = arrays[name].shape
            require(stored == shape, f'{name}: shape {stored}; the model has {shape}')
    return expected, resolved, skipped
