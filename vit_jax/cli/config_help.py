"""Help texts about the fields of a configuration, and hints in messages about wrong ones."""

import dataclasses
import difflib
import inspect
import re
import textwrap
import typing
from collections.abc import Collection, Sequence
from typing import Any

from vit_jax.base import records
from vit_jax.base.records import Record
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration

_WIDTH = 96
# Names in other libraries (timm, transformers, keras) that do not resemble the field's name.
SYNONYMS = {
    'start_from': 'pretrained finetune init_from',
    'image_size': 'resolution',
    'held_out.fraction': 'validation_split',
    'accumulation_steps': 'grad_accum',
    'loss': 'criterion',
    'optimizer.b1': 'betas',
    'optimizer.clip_norm': 'grad_clip max_grad_norm',
    'schedule.learning_rate': 'lr',
    'regularization.stochastic_depth': 'drop_path drop_path_rate',
    'ema_decay': 'ema polyak_decay',
    'eval_every_steps': 'evaluation_strategy',
    'keep_best': 'load_best_model_at_end metric_for_best_model',
    'patience': 'early_stopping_patience',
    'writers': 'wandb mlflow report_to',
    'compute.dtype': 'amp mixed_precision',
    'compute.remat': 'gradient_checkpointing',
    'loader.threads': 'num_workers',
    'model.width': 'embed_dim hidden_size',
}


def describe_fields(cls: type[Record]) -> str:
    """Describes type, default and meaning of all fields, with a section for each record."""
    return '\n\n'.join(_describe_record(kind, paths) for kind, paths in record_paths(cls).items())


def field_comments(cls: type[Record]) -> dict[str, str]:
    """Returns the comments of a record's fields by name, including inherited fields."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        name = ''  # the field that a line belongs to
        for line in inspect.getsource(owner).splitlines():
            if field := re.match(r' {4}(\w+): ', line):
                name = field[1]
            elif re.match(r' {4}[^ )]', line):
                name = ''
            comment = line.partition('  # ')[2]
            if name and comment:
                texts[name] = f'{texts.get(name, "")} {comment}'.strip()
    return texts


def field_paths(cls: type[Record]) -> list[str]:
    """Returns the paths of all fields within a record, such as `config.model.depth`."""
    holders = [(path, kind) for kind, owned in record_paths(cls).items() for path in owned]
    return [f'{path}.{name}' for path, kind in holders for name in records.field_types(kind)]


def suggest(cls: type[Record] | None, name: str, known: Collection[str]) -> str:
    """Returns the end of an error message about a name that is not among the `known` names.

    Suggests a field of the record `cls` if the name is another library's name for it, its name
    without its path, or misspelled.
    """
    if cls is None:
        return records.closest(name, known)
    # Prefers the first of several fields with the same name, and a known name to any field.
    flags = {path.rpartition('.')[2]: f'--{path}' for path in reversed(field_paths(cls))}
    for field, words in SYNONYMS.items():
        flag = next((f'--{path}' for path in field_paths(cls) if path.endswith(f'.{field}')), None)
        flags |= dict.fromkeys(words.split(), flag) if flag else {}
    flags |= {one: one for one in known}
    close = difflib.get_close_matches(name, flags, n=1)
    return f"did you mean '{flags[close[0]]}'?" if close else records.closest(name, known)


def suggest_field(value: Any, kinds: Sequence[type[Record]], where: str) -> str:
    """Returns the end of an error message about a number or word where a record is expected."""
    if len(kinds) > 1:
        choices = ' or '.join(f'--{where}={kind.__name__}' for kind in kinds)
        variant = '; in a file, model=vit_jax.models.variant(NAME) sets the architecture'
        return f': {choices}{variant if ViTConfig in kinds else ""}'
    fields = ', '.join(records.field_types(kinds[0]))
    if kinds[0] is Duration:
        unit = 'fraction' if str(value).startswith('0.') else 'epochs'
        return f', for example --{where}.{unit}={value}; its units: {fields}'
    return f'; its fields, as in --{where}.FIELD=VALUE: {fields}'


def record_paths(cls: type[Record]) -> dict[type[Record], list[str]]:
    """Returns the record classes within this one, itself first, and the paths of each."""
    by_kind = {cls: ['config']}
    waiting = [cls]
    for holder in waiting:  # the loop appends to it
        for name, options in records.field_options(holder).items():
            for option in options:
                of_many = typing.get_origin(option) is dict
                kinds = records.record_types(typing.get_args(option) if of_many else [option])
                for kind in kinds.values():
                    if kind not in by_kind:
                        waiting.append(kind)
                    place = f'{by_kind[holder][0]}.{name}{".NAME" if of_many else ""}'
                    if place not in by_kind.setdefault(kind, []):
                        by_kind[kind].append(place)
    return by_kind


def _describe_record(kind: Any, paths: list[str]) -> str:
    """Describes the fields of a record: type, default and comment."""
    lines = [textwrap.fill(', '.join(f'--{path}.FIELD' for path in paths), _WIDTH)]
    owners = [owner for owner in kind.__mro__ if issubclass(owner, Record) and owner is not Record]
    meaning = '\n\n'.join(inspect.cleandoc(owner.__doc__ or '') for owner in owners)
    lines += [textwrap.indent(f'{kind.__name__}: {meaning}', '  ')]
    meant = field_comments(kind)
    hints = records.field_types(kind)
    for field in dataclasses.fields(kind):
        text = f'    {field.name}: {records.format_type(hints[field.name])}{_format_default(field)}'
        lines.append(f'{text:<44}  {meant.get(field.name, "")}'.rstrip())
    return '\n'.join(lines)


def _format_default(field: 'dataclasses.Field[Any]') -> str:
    if field.default is not dataclasses.MISSING:
        return f' = {"none" if field.default is None else field.default}'
    return '' if field.default_factory is not dataclasses.MISSING else ', required'
