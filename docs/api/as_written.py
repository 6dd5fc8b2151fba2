"""A Sphinx extension that shows docstrings as plain text, and signatures and fields as written.

By default Sphinx shows evaluated annotations, with aliases and unions of shapes expanded, and no
fields of records.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

from sphinx.application import Sphinx

# Literals, or characters outside them that reStructuredText would interpret as markup.
_MARKUP = re.compile(r'(`[^`]+`)|([*|\\]|(?<=\w)_(?!\w))')


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension; called by Sphinx."""
    app.connect('autodoc-process-signature', _signature)
    app.connect('autodoc-process-docstring', _docstring)
    app.connect('autodoc-skip-member', _skipped)
    return {'parallel_read_safe': True}


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, given: str, returns: str
) -> tuple[str, str]:
    """Returns the arguments and the result as written in the source."""
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
    """Escapes markup characters, and adds the fields of a record with their comments.

    An indented block after a line that ends with a colon is code.
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
    """Skips fields, which are shown already, and `check` of records, which only records call."""
    is_field = type(obj).__name__ == '_tuplegetter'
    is_of_record = name == 'check' and obj.__qualname__ != 'Checkpoints.check'
    return True if is_field or is_of_record else None


def _has_fields(obj: Any) -> bool:
    return dataclasses.is_dataclass(obj) or hasattr(obj, '_fields')


def _fields(cls: type) -> list[str]:
    """Returns the source lines that declare the fields, starting with the base classes."""
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
    """Returns the first line of a field, including the comments above it."""
    start = node.lineno - 1
    while source[start - 1].lstrip().startswith('#'):
        start -= 1
    return start


def _node(obj: Any) -> Any:
    """Returns the syntax tree of a function or class."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj)))).body[0]
