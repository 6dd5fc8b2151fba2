"""A Sphinx extension: docstrings as the plain text that they are, signatures and fields as written.

Sphinx would show what Python has made of an annotation: unions of shapes written out, aliases
replaced by what they stand for. And of records it would show no fields.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

from sphinx.application import Sphinx

# Between literals, what would be markup in reStructuredText and is none in a docstring.
_MARKUP = re.compile(r'(`[^`]+`)|([*|\\]|(?<=\w)_(?!\w))')


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx, which loads this for the name in `extensions`."""
    app.connect('autodoc-process-signature', _signature)
    app.connect('autodoc-process-docstring', _docstring)
    app.connect('autodoc-skip-member', _skipped)
    return {'parallel_read_safe': True}


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, given: str, returns: str
) -> tuple[str, str]:
    """The arguments and the result, in the words of the source."""
    if what == 'class':
        return ('', '') if _has_fields(obj) else (given, returns)
    if what not in ('function', 'method') or not given:
        return given, returns
    node: Any = _node(obj)
    arguments = node.args.posonlyargs or node.args.args
    if arguments and arguments[0].arg == 'self':
        del arguments[0]
    return f'({ast.unparse(node.args)})', ast.unparse(node.returns) if node.returns else ''


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escapes what is no markup, and adds the fields of a record, each with its comment.

    What is indented below a line that ends with a colon is code.
    """
    in_code = False
    for number, line in enumerate(lines):
        in_code &= not line or line.startswith('    ')
        if not in_code:
            lines[number] = _MARKUP.sub(lambda m: m[1] or f'\\{m[2]}', line)
        if line.endswith(':') and lines[number + 1 : number + 2] == ['']:
            lines[number], in_code = f'{line}:', True
    if what == 'class' and _has_fields(obj) and (fields := _fields(obj)):
        lines += ['', '.. code-block:: python', '', *(f'    {line}' for line in fields), '']


def _skipped(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Fields are shown already; `check` is called by the records themselves."""
    is_field = type(obj).__name__ == '_tuplegetter'
    return True if is_field or name == 'check' else None


def _has_fields(obj: Any) -> bool:
    return dataclasses.is_dataclass(obj) or hasattr(obj, '_fields')


def _fields(cls: type) -> list[str]:
    """The lines of the source that declare its fields, those of its bases first."""
    lines: list[str] = []
    for owner in reversed(cls.__mro__[:-1]):
        if owner.__module__.startswith('vit_jax'):
            source = textwrap.dedent(inspect.getsource(owner)).splitlines()
            for node in _node(owner).body:
                if isinstance(node, ast.AnnAssign):
                    declared = source[_start(node, source) : node.end_lineno]
                    lines += [line[4:] for line in declared]
    return lines


def _start(node: ast.AnnAssign, source: list[str]) -> int:
    """The line of a field, or of the comments above it."""
    start = node.lineno - 1
    while source[start - 1].lstrip().startswith('#'):
        start -= 1
    return start


def _node(obj: Any) -> Any:
    """The definition in the source of a function or class."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj)))).body[0]
