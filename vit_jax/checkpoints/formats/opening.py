"""Checkpoints of any origin: found out, read, and written back.

What is read is always the same: our parameters, and the values of a card. What differs between
the layouts stands in one module for each.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import records, tree_names
from vit_jax.base.array_types import Params
from vit_jax.base.atomic_files import write_json
from vit_jax.base.errors import UserError, usable
from vit_jax.checkpoints import store
from vit_jax.checkpoints.formats import array_files, google, huggingface, name_map, timm
from vit_jax.checkpoints.formats.array_files import Contents
from vit_jax.checkpoints.formats.inference import Evidence, Hints, filled
from vit_jax.models import ModelConfig, ResNetConfig, ViTConfig, build
from vit_jax.models.positions import sincos2d

FORMATS = 'google', 'bigvision', 'timm', 'huggingface', 'vit_jax'
OURS = 'vit_jax'
CARD = 'vit_jax.card'  # in a safetensors file's metadata: the card, as JSON
Layout = google.Layout | timm.Layout | huggingface.Layout

_MODULES: dict[str, Any] = {
    'google': google,
    'bigvision': google,
    'timm': timm,
    'huggingface': huggingface,
}
_WEIGHTS = 'model.safetensors', 'pytorch_model.bin', 'open_clip_model.safetensors'


class Found(NamedTuple):
    """A checkpoint that was recognised; its arrays are read when they are asked for."""

    format: str  # one of FORMATS
    layout: Layout | None  # how its arrays are named; None: as ours
    card: dict[str, Any]
    ignored: list[str]  # names of what the file holds beside the network
    read: Callable[[], Params]


def find(path: str, hints: Hints, *, image_size: tuple[int, int] | None = None) -> Found:
    """The checkpoint at a path: a file or directory of any of FORMATS, or `FILE.npz:SUBTREE`.

    `image_size` is that of the images it is wanted for; it settles a grid that the file leaves
    open. Raises UserError or MissingFile, in one sentence, for anything else.
    """
    place, subtree = _split(path)
    parts = _weights(place) if place.is_dir() else [place]
    if not parts:
        values, _ = store.load_card(path)
        if given := [name for name, value in records.to_dict(hints).items() if value is not None]:
            raise UserError(f'{path}: a checkpoint of ours says all of itself; drop {given[0]}')
        return Found(OURS, None, values, [], lambda: store.load_params(path))
    beside = place if place.is_dir() else place.parent
    with array_files.explained(path):
        contents = array_files.merged(array_files.read_contents(part) for part in parts)
        evidence = Evidence(
            contents.arrays,
            hints,
            image_size,
            subtree,
            _read_json(beside / 'config.json'),
            _read_json(beside / 'preprocessor_config.json'),
        )
        return _recognised(path, evidence, contents)


def write(
    path: str,
    format: str,
    *,
    config: ModelConfig,
    params: Params,
    card: dict[str, Any],
    layout: Layout | None,
) -> list[str]:
    """Writes a checkpoint in a format, and says what a reader of it has to know.

    `layout` is the one that was read, to be kept, or None for the format's usual one. `card` has
    JSON values. Raises UserError where the format cannot hold the network.
    """
    place = pathlib.Path(path)
    if format == OURS:
        store.save_alone(place, params, card)
        return []
    if isinstance(config, ResNetConfig) and format not in ('google', 'bigvision'):
        raise UserError(f'the {format} layout has no such ResNet: write google or bigvision')
    target = place / 'model.safetensors' if format == 'huggingface' else place
    ending = '.npz' if _MODULES[format] is google else '.safetensors'
    if target.suffix != ending:
        raise UserError(f'{target}: this format is a file whose name ends with {ending}')
    params, config, notes = _with_learned_positions(params, config, format)
    module = _MODULES[format]
    layout = layout or module.usual_layout(format, config)
    beside = module.beside(config, card) if format == 'huggingface' else {}
    named = _folded(params, layout)
    entries = name_map.expanded(module.table(config, layout), config, named, layout=format)
    arrays, said = _in_type(name_map.write(entries, named), layout.dtype)
    with usable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    if module is google:
        array_files.write_npz(target, arrays)
    else:
        array_files.write_safetensors(target, arrays, {CARD: json.dumps(card)})
    for name, content in beside.items():
        write_json(place / name, content)
    return notes + said + module.notes(config, layout, card)


def _recognised(path: str, evidence: Evidence, contents: Contents) -> Found:
    """The network, the layout and the card of arrays in some layout."""
    arrays, given = evidence.arrays, evidence.hints
    own = json.loads(contents.metadata.get(CARD, '{}'))
    hints = filled(given, own.get('model', {}) | {'grid': own.get('grid')})
    found = _module(list(arrays)).recognise(evidence._replace(hints=hints))
    config, layout = found.config, found.layout
    _check_hints(given, config)
    expected = jax.eval_shape(build(config).init, jax.random.key(0))
    shapes = {name: leaf.shape for name, leaf in tree_names.named_leaves(expected).items()}
    rules = _MODULES[layout.name].table(config, layout)
    entries = name_map.expanded(rules, config, shapes, layout=layout.name)
    skipped = name_map.check_names(entries, arrays, found.ignored)
    types = {arrays[name].dtype.name for entry in entries for name in entry.theirs}
    layout = dataclasses.replace(layout, dtype=types.pop() if len(types) == 1 else 'float32')

    def read() -> Params:
        with array_files.explained(path):
            values = name_map.read(entries, arrays, shapes)
            return tree_names.map_named(lambda name, _: values[name], expected)

    card = {
        'step': 0,
        'model': _plain(config),
        'grid': list(config.grid),
        'preprocessing': own.get('preprocessing', found.preprocessing),
        'class_names': list(own.get('class_names', found.class_names)),
    }
    return Found(layout.name, layout, card, [*skipped, *contents.ignored], read)


def _module(names: list[str]) -> Any:
    """The module whose layout has such names."""
    for module in (huggingface, timm, google):
        if module.matches(names):
            return module
    if any('root_block/' in name for name in names):
        raise UserError("of BiT's pre-activation ResNet, which is not the one of the paper")
    raise UserError(f'its {len(names)} arrays are those of no known ViT: {names[:3]} ...')


def _plain(config: ModelConfig) -> dict[str, Any]:
    """The model as a card has it."""
    return {'kind': type(config).__name__} | records.to_dict(config)


def _check_hints(hints: Hints, config: ModelConfig) -> None:
    """Raises UserError for a hint that contradicts the arrays."""
    for name, value in records.to_dict(hints).items():
        found = getattr(config, name, None)
        found = list(found) if isinstance(found, tuple) else found
        if value not in (None, found):
            raise UserError(f'{name}={value} was given, but the arrays have {found}')


def _folded(params: Params, layout: Layout) -> dict[str, np.ndarray]:
    """The same network, with the class token's position added to the token where it has no row."""
    named = {name: np.asarray(leaf) for name, leaf in tree_names.named_leaves(params).items()}
    if getattr(layout, 'class_row', True) or not {'cls', 'pos_embedding'} <= set(named):
        return named
    row = named['pos_embedding'][:, :1]
    # Where it is zero, exactly the same array is written.
    return named | ({'cls': named['cls'] + row} if row.any() else {})


def _in_type(arrays: dict[str, np.ndarray], dtype: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays (float32) in the type that was read, where that loses nothing."""
    if dtype == 'float32':
        return arrays, []
    cast = {name: array.astype(np.dtype(dtype)) for name, array in arrays.items()}
    exact = all(np.array_equal(cast[name].astype(np.float32), arrays[name]) for name in cast)
    if exact:
        return cast, []
    return arrays, [f'written as float32: {dtype} would not hold the values']


def _with_learned_positions(
    params: Params, config: ModelConfig, format: str
) -> tuple[Params, ModelConfig, list[str]]:
    """The same network with its fixed positions as an array, for layouts that have no others."""
    if not isinstance(config, ViTConfig) or config.positions == 'learned' or format == 'bigvision':
        return params, config, []
    fixed = np.zeros((1, config.num_tokens, config.width), np.float32)
    if config.positions == 'sincos2d':
        fixed[:, config.num_tokens - config.grid[0] * config.grid[1] :] = sincos2d(
            config.grid, config.width
        )
    config = dataclasses.replace(config, positions='learned')
    return params | {'pos_embedding': fixed}, config, ['positions: written as an array']


def _split(path: str) -> tuple[pathlib.Path, str]:
    """The file or directory, and what follows `.npz:`."""
    match = re.fullmatch(r'(.+\.npz):(.+)', path)
    if match and not pathlib.Path(path).exists():
        return pathlib.Path(match[1]), match[2].strip('/')
    return pathlib.Path(path), ''


def _weights(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of weights in a directory, as other systems lay them out."""
    for name in _WEIGHTS:
        index = folder / f'{name}.index.json'
        if index.is_file():
            shards = set(_read_json(index).get('weight_map', {}).values())
            if any(pathlib.PurePath(str(s)).name != s for s in shards) or not shards:
                raise UserError(f'{index}: names files outside of its directory, or none')
            return sorted(folder / shard for shard in shards)
        if (folder / name).is_file():
            return [folder / name]
    endings = '.safetensors', '.npz', '.bin', '.pth', '.pt'
    found = sorted(p for p in folder.iterdir() if p.suffix in endings and p.is_file())
    if len(found) > 1:
        names = ', '.join(p.name for p in found)
        raise UserError(f'{folder}: holds several files of weights; name one of {names}')
    return found


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with array_files.explained(path):
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise UserError('expected a JSON object')
        return values
