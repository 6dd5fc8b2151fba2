"""Digests of the files of a checkpoint: orbax would restore a flipped bit as a wrong number.

`digests.json` in a checkpoint's folder has the SHA-256 of every other file in it. It is written
last, so that it may be absent: the run was killed between completing the checkpoint and this.
"""

import hashlib
import json
import pathlib
import socket
import time

from vit_jax.base.atomic_files import write_json
from vit_jax.base.errors import UserError

FILE = 'digests.json'
DAMAGED = 'damaged'  # the folder to which damaged checkpoints are moved


class Damaged(UserError):
    """A checkpoint that cannot be read, or not as it was written."""


def write_digests(folder: pathlib.Path) -> None:
    """Writes the digests of a complete checkpoint."""
    write_json(folder / FILE, _digests(folder))


def verify_digests(folder: pathlib.Path) -> None:
    """Raises Damaged with the names of files that are not as they were written.

    A checkpoint without digests passes.
    """
    if not (folder / FILE).exists():
        return
    try:
        read = json.loads((folder / FILE).read_text())
        found = _digests(folder)
    except (OSError, ValueError) as error:
        raise Damaged(f'checkpoint {folder}: cannot be read: {error}') from error
    written = read if isinstance(read, dict) else {}
    if written != found:
        wrong = [n for n in sorted({*written, *found}) if written.get(n) != found.get(n)]
        more = f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''
        raise Damaged(
            f'checkpoint {folder}: damaged since it was written: {", ".join(wrong[:3])}{more}'
        )


def _digests(folder: pathlib.Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob('*')) if p.is_file() and p.name != FILE)
    found = {}
    for path in files:
        with path.open('rb') as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, 'sha256').hexdigest()
    return found


def steps(folder: pathlib.Path) -> list[int]:
    """The steps that have a folder, complete or not, the newest first."""
    return sorted((int(p.name) for p in folder.glob('*') if p.name.isdecimal()), reverse=True)


def quarantine(folder: pathlib.Path) -> pathlib.Path:
    """Moves a damaged checkpoint to the folder `damaged` beside it; returns its new path."""
    parent = folder.parent / DAMAGED
    parent.mkdir(exist_ok=True)
    name = f'{folder.name}-{time.time_ns()}-{socket.gethostname()}'
    return folder.rename(parent / name)
