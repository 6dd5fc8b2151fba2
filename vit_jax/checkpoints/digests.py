"""Digests of the files of a checkpoint: orbax would restore a flipped bit as a wrong number.

`digests.json` in a checkpoint's folder has the SHA-256 of every other file in it. It is written
last, before the folder gets its name. Those of earlier versions may have none.
"""

import hashlib
import json
import logging
import pathlib
import socket
import time

from vit_jax.base import Path, UnusableDisk, UserError, storage, sync, usable, write_json

FILE = 'digests.json'
DAMAGED = 'damaged'  # the folder to which damaged checkpoints are moved
_WAITS = 1.0, 5.0  # seconds, before a file that could not be read is tried again


class Damaged(UserError):
    """A checkpoint that cannot be read, or not as it was written."""


def write_digests(folder: Path) -> None:
    """Writes the digests of a complete checkpoint, when all its files are on the disk."""
    if not storage.is_remote(folder):
        with usable(folder):
            for path in folder.rglob('*'):
                sync(path)
    write_json(folder / FILE, _digests(folder))


def is_sealed(folder: Path) -> bool:
    """Has it digests? Until then its files are trusted as they are."""
    with storage.reaching(folder):
        return (folder / FILE).exists()


def verify_digests(folder: Path) -> None:
    """Raises Damaged with the names of files that are not as they were written.

    A checkpoint without digests passes. Hidden files that came later (`.DS_Store`) are warned of. A
    disk that cannot be read is no damage: UnusableDisk, after some attempts.
    """
    if not is_sealed(folder):
        return
    try:
        with storage.reaching(folder):
            text = (folder / FILE).read_bytes()
        written = json.loads(text)
    except (ValueError, RecursionError, IsADirectoryError):
        written = None
    if not isinstance(written, dict) or not written:
        raise Damaged(f'checkpoint {folder}: damaged since it was written: {FILE}')
    found = _digests(folder)
    for name in [name for name in found.keys() - written.keys() if '/.' in f'/{name}']:
        del found[name]  # of another program: orbax hides no file
        logging.warning('checkpoint %s: not written with it: %s', folder, name)
    wrong = [n for n in sorted({*written, *found}) if written.get(n) != found.get(n)]
    if wrong:
        more = f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''
        names = f'{", ".join(wrong[:3])}{more}'
        raise Damaged(f'checkpoint {folder}: damaged since it was written: {names}')


def _digests(folder: Path) -> dict[str, str]:
    if storage.is_remote(folder):
        return {name: one for name, one in storage.checksums(folder).items() if name != FILE}
    files = (p for p in sorted(folder.rglob('*')) if p.is_file() and p != folder / FILE)
    return {str(path.relative_to(folder)): _digest(path) for path in files}


def _digest(path: pathlib.Path) -> str:
    waits = list(_WAITS)
    while True:
        try:
            with path.open('rb') as file:
                return hashlib.file_digest(file, 'sha256').hexdigest()
        except OSError as error:
            if not waits:
                raise UnusableDisk(f'{path}: cannot be read: {error.strerror}') from error
            logging.warning('%s: %s; tried again in %g s', path, error.strerror, waits[0])
            time.sleep(waits.pop(0))


def steps(folder: Path) -> list[int]:
    """The steps that have a folder, complete or not, the newest first; on a store the complete."""
    with storage.reaching(folder):
        try:
            found = [path for path in folder.iterdir() if path.name.isdecimal()]
        except (FileNotFoundError, NotADirectoryError):
            found = []
    names = [p.name for p in found if not storage.is_remote(p) or storage.is_committed(p)]
    return sorted((int(name) for name in names if name == str(int(name))), reverse=True)


def quarantine(folder: Path) -> Path:
    """Moves a damaged checkpoint to the folder `damaged` beside it; returns its new path.

    On a store that is beside its folder: orbax removes from there what is not complete.
    """
    parent = folder.parent / DAMAGED
    name = f'{folder.name}-{time.time_ns()}-{socket.gethostname()}'
    if storage.is_remote(folder):
        target = folder.parent.parent / DAMAGED / name
        storage.move(folder, target)
        return target
    with usable(parent):
        parent.mkdir(exist_ok=True)
        return folder.rename(parent / name)
