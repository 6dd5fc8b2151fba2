"""Digests of the files of a checkpoint: orbax would restore a flipped bit as a wrong number.

`digests.json` in a checkpoint's folder has the size and CRC-32C of every other file in it. Google's
buckets state both of each object, so that a run can be copied from a disk to a bucket and back.
It is written last, before the folder gets its name. Those of earlier versions may have none.
"""

import base64
import json
import logging
import pathlib
import re
import socket
import time

import google_crc32c

from vit_jax.base import Path, UnusableDisk, UserError, storage, sync, usable, write_json

FILE = 'digests.json'
CHECKPOINTS = 'checkpoints'  # the folder of a run with all of them
DAMAGED = 'damaged'  # the folder to which damaged checkpoints are moved
_BLOCK = 2**20  # bytes
_WAITS = 1.0, 5.0  # seconds, before a file that could not be read is tried again


class Damaged(UserError):
    """A checkpoint that cannot be read, or not as it was written."""


def write_digests(folder: Path) -> None:
    """Writes the digests of a complete checkpoint, when all its files are on the disk.

    Raises UnusableDisk where orbax has lost the arrays of an item, which its manifest lists.
    """
    if not storage.is_remote(folder):
        with usable(folder):
            for path in folder.rglob('*'):
                sync(path)
    found = _digests(folder)
    for name in found:
        item, _, file = name.rpartition('/')
        if file == '_METADATA' and f'{item}/manifest.ocdbt' not in found:
            raise UnusableDisk(f'{folder}: {item} has no manifest.ocdbt: its arrays cannot be read')
    write_json(folder / FILE, found)


def is_sealed(folder: Path) -> bool:
    """Has it digests? Until then its files are trusted as they are."""
    with storage.reaching(folder):
        return (folder / FILE).exists()


def is_whole(folder: Path) -> bool:
    """Was all of it written? On a store, one that was copied there has only its digests."""
    return is_sealed(folder) or storage.is_committed(folder)


def verify_digests(folder: Path) -> None:
    """Raises Damaged with the names of files that are not as they were written.

    A checkpoint without digests passes. Hidden files that came later (`.DS_Store`) are warned of. A
    disk that cannot be read is no damage: UnusableDisk, after some attempts.
    """
    require_regular_files(folder)
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
    if all(re.fullmatch('[0-9a-f]{64}', str(digest)) for digest in written.values()):
        text = 'written by an earlier version of vit_jax; expected one that this version wrote'
        raise UserError(f'checkpoint {folder}: {text}')
    found = _digests(folder)
    for name in found.keys() ^ written.keys():
        path = folder / name  # of a checkpoint that was copied to a bucket, or back to a disk
        if path.name == storage.COMMITTED and path.parent.is_dir():
            found.pop(name, None)
            written.pop(name, None)
    for name in [name for name in found.keys() - written.keys() if '/.' in f'/{name}']:
        del found[name]  # of another program: orbax hides no file
        logging.warning('checkpoint %s: not written with it: %s', folder, name)
    wrong = [n for n in sorted({*written, *found}) if written.get(n) != found.get(n)]
    if wrong:
        more = f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''
        names = f'{", ".join(wrong[:3])}{more}'
        raise Damaged(f'checkpoint {folder}: damaged since it was written: {names}')


def require_regular_files(folder: Path) -> None:
    """Raises Damaged where a pipe or a device is among the files: reading it might never end."""
    if storage.is_remote(folder):
        return
    for path in folder.rglob('*'):
        if not (path.is_file() or path.is_dir()):
            name = path.relative_to(folder)
            raise Damaged(f'checkpoint {folder}: damaged since it was written: {name} is no file')


def _digests(folder: Path) -> dict[str, str]:
    if storage.is_remote(folder):
        found = storage.checksums(folder)
    else:
        paths = (path for path in sorted(folder.rglob('*')) if path.is_file())
        found = {str(path.relative_to(folder)): _digest(path) for path in paths}
    return {name: one for name, one in found.items() if name != FILE}


def crc32c(path: pathlib.Path) -> str:
    """The CRC-32C of a file, as Google's stores write it."""
    checksum = google_crc32c.Checksum()
    with path.open('rb') as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


def _digest(path: pathlib.Path) -> str:
    waits = list(_WAITS)
    while True:
        try:
            return storage.digest_of(path.stat().st_size, crc32c(path))
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
    names = [p.name for p in found if not storage.is_remote(p) or is_whole(p)]
    return sorted((int(name) for name in names if name == str(int(name))), reverse=True)


def quarantine(folder: Path) -> Path:
    """Moves a damaged checkpoint to the folder `damaged` beside it; returns its new path.

    On a store that is beside its folder: orbax removes from there what is not complete.
    """
    parent = damaged_folder(folder.parent)
    name = f'{folder.name}-{time.time_ns()}-{socket.gethostname()}'
    if storage.is_remote(folder):
        storage.move(folder, parent / name)
        return parent / name
    with usable(parent):
        parent.mkdir(exist_ok=True)
        return folder.rename(parent / name)


def damaged_folder(checkpoints: Path) -> Path:
    """Where the damaged checkpoints of a folder are moved to."""
    return (checkpoints.parent if storage.is_remote(checkpoints) else checkpoints) / DAMAGED
