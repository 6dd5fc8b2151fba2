"""Files that are written whole or not at all."""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from vit_jax.base.errors import usable


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The file to write; it takes the place of `path` when nothing went wrong.

    Raises UnusableDisk or MissingFile where it cannot be written.
    """
    partial = path.with_name(path.name + '.partial')
    with usable(path):
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors makes files that only their owner can read
        partial.replace(path)


def write_json(path: pathlib.Path, values: Any) -> None:
    """Writes JSON, to be read by people too."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + '\n')
