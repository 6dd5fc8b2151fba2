"""Finds the programs that use each field of an experiment, from their source code.

Starting from the functions of a program, all referenced functions and classes are followed. A
program uses the fields that they read from a variable or attribute named `config`.
"""

import ast
import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.base import records
from vit_jax.config import TrainConfig

PACKAGE = pathlib.Path(__file__).parent.parent / 'vit_jax'
PROGRAMS = 'train', 'finetune', 'fewshot', 'inspect_data', 'plan', 'doctor'
# Fields that a property or method of TrainConfig reads.
_READ_BY = {
    'evaluations': ('evals', 'eval_split'),
    'step_variants': ('patch_sizes', 'patch_dropout_until'),
}
# These have other configurations, or take the whole TrainConfig.
_OTHERS = 'vit_jax.models', 'vit_jax.figures', 'vit_jax.cli', 'vit_jax.config'


class Definition(NamedTuple):
    """A function or class, and its module."""

    module: str
    node: ast.FunctionDef | ast.ClassDef


class Module(NamedTuple):
    """The definitions and imports of a module."""

    definitions: dict[str, Definition]
    imports: dict[str, str]


def readers() -> dict[str, list[str]]:
    """Returns the programs that use each field of TrainConfig."""
    read = {program: _read_by(program) for program in PROGRAMS}
    for fields in read.values():
        for name, used in _READ_BY.items():
            fields.update(used if name in fields else ())
    return {
        field: [program for program in PROGRAMS if field in read[program]]
        for field in records.field_types(TrainConfig)
    }


def _read_by(program: str) -> set[str]:
    waiting = [*_modules()[f'vit_jax.{program}'].definitions.values()]
    seen, fields = set(), set[str]()
    while waiting:
        one = waiting.pop()
        if one.node in seen or one.module.startswith(_OTHERS):
            continue
        seen.add(one.node)
        fields |= _fields(one.node)
        waiting += _named(one)
    return fields


def _fields(node: ast.AST) -> set[str]:
    """Returns the attributes of `X.config`, and of `config` unless it has another type."""
    arguments = [a for f in ast.walk(node) if isinstance(f, ast.arguments) for a in f.args]
    kinds = {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation}
    own = kinds.get('config', 'TrainConfig') == 'TrainConfig'
    attributes = [x for x in ast.walk(node) if isinstance(x, ast.Attribute)]
    return {
        x.attr
        for x in attributes
        if (isinstance(x.value, ast.Name) and x.value.id == 'config' and own)
        or (isinstance(x.value, ast.Attribute) and x.value.attr == 'config')
    }


def _named(one: Definition) -> Iterator[Definition]:
    """Yields the functions and classes that a definition references: NAME, or MODULE.NAME."""
    module = _modules()[one.module]
    for node in ast.walk(one.node):
        if isinstance(node, ast.Name):
            name = f'{one.module}.{node.id}'
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f'{module.imports.get(node.value.id, "")}.{node.attr}'
        else:
            continue
        if (found := _found(name)) is not None:
            yield found


def _found(name: str) -> Definition | None:
    """Returns the definition of MODULE.NAME, following imports."""
    path, _, last = name.rpartition('.')
    if (module := _modules().get(path)) is None:
        return None
    if last in module.imports:
        return _found(module.imports[last])
    return module.definitions.get(last)


@functools.cache
def _modules() -> dict[str, Module]:
    found = {}
    for file in sorted(PACKAGE.rglob('*.py')):
        parts = file.relative_to(PACKAGE.parent).with_suffix('').parts
        name = '.'.join(parts).removesuffix('.__init__')
        tree = ast.parse(file.read_text())
        found[name] = Module(
            {
                node.name: Definition(name, node)
                for node in tree.body
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            },
            {
                alias.asname or alias.name: f'{node.module}.{alias.name}'
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            },
        )
    return found
