"""Writes checkpoints in any format; rejects models that would be read back differently."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from vit_jax.base import Params, UserError, make_folder, records, require, tree_names
from vit_jax.base.files import atomic_write, format_json, would_replace
from vit_jax.checkpoints import digests, store
from vit_jax.checkpoints.card import Card, Hints
from vit_jax.checkpoints.formats import array_files, name_map, stablehlo
from vit_jax.checkpoints.formats.array_files import FileContents, JsonObject, LazyArray
from vit_jax.checkpoints.formats.base import Format, Layout
from vit_jax.checkpoints.formats.opening import CARD, FORMATS, LAYOUT, NAMES, OURS, match_arrays
from vit_jax.data.image_preprocessing import CentralCrop
from vit_jax.models import ResNetConfig, ViTConfig
from vit_jax.models.masked_patches import MASKED
from vit_jax.models.model import compute_position_table, position_table_axes
from vit_jax.models.positions import ROTARY

# The file ending of each format; formats without one are directories.
_SUFFIXES = {format.name: str(format.suffix) for format in FORMATS if not format.file_name}
_SUFFIXES |= {stablehlo.NAME: stablehlo.SUFFIX}
# Fields that other formats do not store: they do not change outputs at the same image size.
_NOT_STORED = 'head_bias', 'layer_scale', 'position_resize'


def format_for(path: str | os.PathLike[str], named: str | None, own: str) -> str:
    """Returns the format in which a checkpoint is written to a path.

    Args:
      path: The output path.
      named: The requested format; None: chosen by the ending of the path (.safetensors: timm).
      own: The format in which the model was read; preferred if its ending fits.

    Raises:
      UserError: If the format is unknown, or the path does not have its ending.
    """
    require(named in (None, *NAMES), f'no format {named!r}; {records.closest(str(named), NAMES)}')
    ending = pathlib.Path(path).suffix
    is_file = ending in {*array_files.ENDINGS, *_SUFFIXES.values()}
    fitting = [name for name in NAMES if _SUFFIXES.get(name, '') == (ending if is_file else '')]
    usual = {'.safetensors': 'timm', stablehlo.SUFFIX: stablehlo.NAME}.get(ending, own)
    format = named or (own if own in fitting else usual)
    known = ', '.join(f'{name} ({_SUFFIXES.get(name, "a directory")})' for name in NAMES)
    require(format in fitting, f'{path}: wrong ending for {format}; endings by format: {known}')
    return format


def is_free(path: str | os.PathLike[str]) -> bool:
    """Returns whether the path does not exist or is an empty directory."""
    path = pathlib.Path(path)
    return not any(path.iterdir()) if path.is_dir() else not would_replace(path)


def write_checkpoint(
    path: str,
    format: str,
    *,
    card: Card,
    params: Params,
    layout: Layout | None,
    dtype: Literal['float32', 'bfloat16'] | None = None,
) -> list[str]:
    """Writes a checkpoint.

    Args:
      path: Output path with the ending of the format (`format_for`).
      format: One of `opening.NAMES`.
      card: Model and metadata.
      params: The parameters, float32.
      layout: The layout that was read; None for the usual layout of the format.
      dtype: Type to which parameters are rounded; None: the type of the layout.

    Returns:
      Notes for the users of the file.

    Raises:
      UserError: If the format cannot hold the model.
    """
    target = pathlib.Path(path)
    model = card.model
    notes: list[str] = []
    require(
        dtype != 'bfloat16' or target.suffix != '.npz',
        f'dtype={dtype}: not supported by npz; use format=timm or huggingface',
    )
    if format != OURS and isinstance(model, ViTConfig) and MASKED in params:
        card = dataclasses.replace(card, model=dataclasses.replace(model, patch_outputs=None))
        params = {name: subtree for name, subtree in params.items() if name != MASKED}
        notes.append('mask token and patch head: not written, as only format=vit_jax stores them')
    make_folder(target.parent)
    if format in (OURS, stablehlo.NAME):
        params, rounded = _cast(params, dtype or 'float32', rounding=True)
        if format == stablehlo.NAME:
            return notes + rounded + stablehlo.write(target, card, params)
        store.write_standalone(target, params, records.to_dict(card))
        return notes + rounded
    form = next(form for form in FORMATS if form.name == format)
    return notes + _write_arrays(target, form, card, params, layout, dtype)


def _write_arrays(
    target: pathlib.Path,
    form: Format[Any],
    card: Card,
    params: Params,
    layout: Layout | None,
    dtype: str | None,
) -> list[str]:
    """Implements `write_checkpoint` for the formats of other libraries."""
    config = card.model
    notes: list[str] = []
    require(
        form.resnets or isinstance(config, ViTConfig),
        f'the {form.name} format has no plain ResNets; use format=google or bigvision',
    )
    require(
        config.num_classes is None or config.head == 'linear',
        f'head={records.text_of(config.head)}: the {form.name} format stores only linear heads; '
        'use format=vit_jax, or pass --drop_head',
    )
    if isinstance(config, ViTConfig) and config.positions not in form.positions:
        config, params = _with_learned_positions(form, config, params)
        card = dataclasses.replace(card, model=config)
        notes.append('positions: written as learned position embeddings')
    layout = layout or form.usual_layout(config)
    ours = _without_class_row(params, layout)
    ours, rounded = _cast(ours, dtype or layout.dtype, rounding=dtype is not None)
    # Arrays that the layout leaves out stay absent while they are zero.
    zeros = tuple(
        rule.theirs
        for rule in form.rules(config, layout)
        if rule.theirs in layout.zeros and not any(np.any(ours.get(name, 0)) for name in rule.ours)
    )
    dtype = next(iter(ours.values())).dtype.name
    layout = dataclasses.replace(layout, zeros=zeros, dtype=dtype)
    notes += [*rounded, *form.notes(config, card, layout)]
    rules = form.rules(config, layout)
    resolved = name_map.resolve(rules, config, ours, format=form.name, zeros=layout.zeros)
    arrays = name_map.to_theirs(resolved, ours)
    arrays |= {name: array.astype(dtype) for name, array in form.constants(config).items()}
    files = form.descriptions(config, card, layout)
    if form.is_complete:
        notes += _check_round_trip(form, card, arrays, files)
    if form.suffix == '.npz':
        array_files.write_npz(target, arrays)
        return notes
    metadata = {
        CARD: json.dumps(records.to_dict(card)),
        LAYOUT: json.dumps(dataclasses.asdict(layout)),
    }
    json_files: dict[pathlib.Path, bytes] = {}
    if form.file_name:
        _require_usable_folder(target, form.file_name)
        make_folder(target)
        json_files = {target / name: format_json(content) for name, content in files.items()}
        target = target / form.file_name
    _write_together(target, arrays, metadata, json_files)
    return notes


def _write_together(
    target: pathlib.Path,
    arrays: Mapping[str, np.ndarray],
    metadata: dict[str, str],
    json_files: Mapping[pathlib.Path, bytes],
) -> None:
    """Writes a safetensors file and JSON files; if the disk is full, none of them appears."""
    with contextlib.ExitStack() as stack:
        for path, content in json_files.items():
            file = stack.enter_context(atomic_write(path))
            file.write(content)
            file.flush()  # here, a full disk leaves none of the files
        array_files.write_safetensors(stack.enter_context(atomic_write(target)), arrays, metadata)


def _require_usable_folder(folder: pathlib.Path, file_name: str) -> None:
    """Raises UserError if a folder is a work directory or has other files of weights."""
    endings = *array_files.ENDINGS, array_files.INDEX, digests.FILE
    others = {file.name for file in folder.glob('*') if file.name.endswith(endings)} - {file_name}
    require(not others, f'{folder}: contains {", ".join(sorted(others)[:3])}; remove it first')
    is_run = (folder / 'events.jsonl').exists() or digests.list_steps(folder / store.FOLDER)
    require(not is_run, f'{folder}: a work directory; choose another folder')


def _with_learned_positions(
    form: Format[Any], config: ViTConfig, params: Params
) -> tuple[ViTConfig, Params]:
    """Returns an equivalent model with learned positions; rejects kinds with RoPE."""
    require(
        config.positions not in ROTARY,
        f'the {form.name} format cannot hold positions={config.positions}; use format=vit_jax',
    )
    table = compute_position_table(config, params)
    old_tables = position_table_axes(config)
    others = {name: leaf for name, leaf in params.items() if name not in old_tables}
    return dataclasses.replace(config, positions='learned'), others | {'pos_embedding': table}


def _check_round_trip(
    form: Format[Any],
    card: Card,
    arrays: Mapping[str, np.ndarray],
    files: Mapping[str, dict[str, Any]],
) -> list[str]:
    """Parses what is going to be written, and compares it with the model.

    Arrays do not determine a model: they are the same for pool=none and pool=gap, for example.

    Returns:
      A note if readers of the files would prepare images differently.

    Raises:
      UserError: If readers would build another model, or would reject the files.
    """
    config = card.model
    stored = {n: LazyArray(array.shape, array.dtype, array.copy) for n, array in arrays.items()}
    descriptions = {name: JsonObject(content, name) for name, content in files.items()}
    hints = Hints(**{name: getattr(config, name, None) for name in vars(Hints())})
    names = (*_NOT_STORED, 'image_size') if isinstance(config, ResNetConfig) else _NOT_STORED
    same = {name: getattr(config, name) for name in names if hasattr(config, name)}
    try:
        parsed = form.parse(FileContents(stored, descriptions=descriptions), hints)
        again = records.to_dict(dataclasses.replace(parsed.config, **same))
        lost = records.differences(records.to_dict(config), again)
        require(not lost, f'reading it back changes {"".join(lost[:1])}')
        match_arrays(form, parsed, stored)
    except UserError as error:
        raise UserError(
            f'the {form.name} format cannot hold this model: {error}; use format=vit_jax'
        ) from error
    ours = card.preprocessing.crop
    theirs = parsed.preprocessing.crop
    if isinstance(ours, CentralCrop) and isinstance(theirs, CentralCrop):
        theirs = dataclasses.replace(theirs, rounding=ours.rounding)  # differs by a pixel at most
    if not form.file_name or ours == theirs:
        return []
    return [f'other programs preprocess images with {theirs}, not {ours}']


def _without_class_row(params: Params, layout: Layout) -> dict[str, np.ndarray]:
    """Returns arrays by name; without a class row, its position is added to the class token."""
    named = {name: np.asarray(leaf) for name, leaf in tree_names.named_leaves(params).items()}
    if layout.class_row or not {'cls', 'pos_embedding'} <= set(named):
        return named
    row = named['pos_embedding'][:, :1]
    if row.any():  # otherwise the token stays bit-exact
        named['cls'] = named['cls'] + row
    return named


def _cast(arrays: Params, dtype: str, *, rounding: bool) -> tuple[Params, list[str]]:
    """Casts float32 arrays and returns notes; if not `rounding`, only if no value changes."""
    cast = jax.tree.map(lambda array: np.asarray(array).astype(dtype), arrays)
    if all(jax.tree.leaves(jax.tree.map(np.array_equal, cast, arrays))):
        return cast, []
    if rounding:
        return cast, [f'parameters: rounded to {dtype}']
    return arrays, [f'parameters: written as float32, because {dtype} would round them']
