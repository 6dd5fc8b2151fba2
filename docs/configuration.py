"""Writes configuration.md from the configuration records: python -m docs.configuration."""

import dataclasses
import inspect
import pathlib
import re
import textwrap
from typing import Any

from docs.readers import PROGRAMS, readers
from vit_jax.base import records
from vit_jax.base.records import Record
from vit_jax.cli import config_help
from vit_jax.config import TrainConfig
from vit_jax.studies.config import Study

PAGE = pathlib.Path(__file__).with_suffix('.md')
_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m docs.configuration`: change the records, not this page. -->

Look up every field of an experiment, with its type, default and meaning. A file in
[configs/](../configs) returns a [TrainConfig](#trainconfig) (one experiment) or a [Study](#study)
(several). The command line sets any field:

```sh
python -m vit_jax.train --config=configs/quickstart.py --workdir=/tmp/vit/changed \\
  --config.model.depth=2 --config.total.epochs=3 --config.fewshot=none
```

- `none` unsets a field whose type allows `none`.
- Select a record by its name before you set its fields: `--config.fewshot=FewshotConfig`.
- Separate the values of a tuple by commas: `--config.image_size=384,384`, or one number for both.
- A [Duration](#duration) has one unit: `--config.total.steps=1000`, `--config.total.epochs=3`.

`--helpfull` of any program with `--config` prints the same. Names in *italics* are the programs
that use a field, if not all do. *training* stands for `train`, `finetune` and the runs of `study`.
`doctor` and `plan` resolve the options as training does, `inspect_data` reads its data, and
`fewshot` evaluates a checkpoint.
"""


def page() -> str:
    """Renders the whole page."""
    places = config_help.record_paths(TrainConfig)
    places |= {k: p for k, p in config_help.record_paths(Study).items() if k not in places}
    read = readers()
    sections = [_section(kind, paths, read) for kind, paths in places.items()]
    return '\n'.join([_INTRODUCTION, *sections])


def _section(kind: type[Record], paths: list[str], read: dict[str, list[str]]) -> str:
    """Renders a record: its flags and programs, its docstring and its fields."""
    rows = ['| field | value | meaning |', '| --- | --- | --- |']
    meant, hints = config_help.field_comments(kind), records.field_types(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        meaning = _markdown(meant[field.name])
        if kind is TrainConfig and (programs := _programs(read[field.name])) != 'all':
            meaning += f'{"<br>" if meaning else ""}*{programs}*'
        hint = hints[field.name]
        rows.append(f'| `{field.name}` | {_type(hint)}{_default(field, hint)} | {meaning} |')
    owners = [o for o in kind.__mro__ if issubclass(o, Record) and o is not Record]
    said = [_markdown(inspect.cleandoc(owner.__doc__ or '')) for owner in owners]
    parts = [f'## {kind.__name__}', _where(kind, paths, read), *said, '\n'.join(rows)]
    return '\n\n'.join(parts) + '\n'


def _where(kind: type[Record], paths: list[str], read: dict[str, list[str]]) -> str:
    """Returns which flags set a record, and which programs use it."""
    if kind is TrainConfig:
        return 'The experiment that `--config=FILE` returns.'
    if kind is Study:
        return 'The study that `--config=FILE` returns; only `python -m vit_jax.study` uses it.'
    flags = ', '.join(f'`--{path}`' for path in paths)
    fields = {path.split('.')[1] for path in paths}
    programs = [p for p in PROGRAMS if any(p in read.get(field, ()) for field in fields)]
    by = _programs(programs) if programs else 'study'
    return '\n'.join(textwrap.wrap(f'{flags}. Used by *{by}*.', 110, break_on_hyphens=False))


def _programs(names: list[str]) -> str:
    if names == [*PROGRAMS]:
        return 'all'
    training = names[:2] == ['train', 'finetune']
    return ', '.join(['training', *names[2:]] if training else names)


def _type(hint: Any) -> str:
    """Renders a type in command-line syntax; records link to their sections."""
    kinds = [kind.__name__ for kind in _records(hint)]
    texts = []
    for text in records.format_type(hint).split(' or '):
        inner = next((kind for kind in kinds if kind in text and kind != text), None)
        code = f'`{text}`'.replace('|', '\\|')
        texts.append(f'[{text}](#{text.lower()})' if text in kinds else code)
        texts[-1] += f' of [{inner}](#{inner.lower()})' if inner else ''
    return ' or '.join(texts)


def _records(hint: Any) -> list[type[Record]]:
    inner = [i for option in records.union_members(hint) for i in getattr(option, '__args__', ())]
    return [*records.record_types([*records.union_members(hint), *inner]).values()]


def _default(field: 'dataclasses.Field[Any]', hint: Any) -> str:
    """Renders a default; omits a record whose fields all have their own defaults."""
    if field.default is not dataclasses.MISSING:
        return f' = `{"none" if field.default is None else field.default}`'
    if field.default_factory is dataclasses.MISSING:
        return ', required'
    value = field.default_factory()
    if not isinstance(value, Record):
        return f' = `{value!r}`'
    values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
    plain = {f.name: f.default for f in dataclasses.fields(value)}  # type: ignore[arg-type]
    given = [f'{n}={v!r}' for n, v in values.items() if plain[n] not in (v, dataclasses.MISSING)]
    several = len(_records(hint)) > 1
    name = type(value).__name__
    return f' = `{name}({", ".join(given)})`' if given or several else ''


def _markdown(text: str) -> str:
    """Escapes Markdown in a docstring or comment."""
    return re.sub(r'([*<|])', r'\\\1', text)


if __name__ == '__main__':
    PAGE.write_text(page())
