"""Digests of the files of a checkpoint: orbax would restore a flipped bit as a wrong number.

`digests.json` in a checkpoint's folder lists the SHA-256 of every other file in it. It is written
once the checkpoint is complete; one without it was complete when its run was killed.
"""

import hashlib
import json
import pathlib
import re
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
    """Reads a sealed checkpoint whole. Raises Damaged that names files that are not as written."""
    if not (folder / FILE).exists():
        return
    try:
        written = json.loads((folder / FILE).read_text())
        found = _digests(folder)
    except (OSError, ValueError) as error:
        raise Damaged(f'checkpoint {folder}: cannot be read: {error}') from error
    if written != found:
        names = sorted({*written, *found} if isinstance(written, dict) else found)
        wrong = [
            n for n in names if not isinstance(written, dict) or written.get(n) != found.get(n)
        ]
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
    """The steps of which there is something, the newest first."""
    return sorted(int(p.name) for p in folder.glob('*') if re.fullmatch(r'\d+', p.name))[::-1]


def quarantine(folder: pathlib.Path) -> pathlib.Path:
    """Moves a damaged checkpoint where it is neither listed nor in the way; where it is now."""
    parent = folder.parent / DAMAGED
    parent.mkdir(exist_ok=True)
    name = f'{folder.name}-{time.time_ns()}-{socket.gethostname()}'
    return folder.rename(parent / name)
