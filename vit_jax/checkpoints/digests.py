"""Digests of the files of a checkpoint: orbax would restore a flipped bit as a wrong number.

`digests.json` holds the size and CRC-32C of each other file. Google's buckets state both for each
object: verifying a checkpoint there reads nothing, and a run can be copied from a disk to a bucket
and back. The file is written last: a folder that has it is a checkpoint.
"""

import base64
import json
import logging
import pathlib
import socket
import time

import google_crc32c
from etils import epath

from vit_jax.base import Path, UnusableDisk, UserError, storage, sync, usable, write_json

CHECKPOINTS = 'checkpoints'  # the folder of a run with all of them
FILE, CARD = 'digests.json', 'card.json'
DAMAGED = 'damaged'  # the folder to which damaged checkpoints are moved
PARTIAL = '.partial-'  # starts the name of a checkpoint on a disk while it is written or removed
_BLOCK = 2**20  # bytes


class Damaged(UserError):
    """A checkpoint whose files are not as they were written."""


def steps(folder: Path) -> list[int]:
    """Lists the steps with a checkpoint, the newest first."""
    with usable(folder):
        paths = _numbered(folder)
        if storage.is_remote(folder):
            paths = [path for path in paths if is_complete(path)]
    return sorted((int(path.name) for path in paths), reverse=True)


def _numbered(folder: Path) -> list[Path]:
    try:
        return [p for p in folder.iterdir() if p.name.isdecimal() and p.name == str(int(p.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_complete(folder: Path) -> bool:
    """Whether all files of the checkpoint were written."""
    with usable(folder):
        return (folder / FILE).exists()


def write_digests(folder: Path) -> None:
    """Completes a checkpoint, after its files are on the disk.

    Raises UnusableDisk if orbax has lost the arrays of an item, which its manifest lists.
    """
    if not storage.is_remote(folder):
        with usable(folder):
            for path in folder.rglob('*'):
                sync(path)
    files = _digests(folder)
    for name in files:
        item, _, file = name.rpartition('/')
        if file == '_METADATA' and f'{item}/manifest.ocdbt' not in files:
            raise UnusableDisk(f'{folder}: {item} has no manifest.ocdbt: its arrays cannot be read')
    write_json(folder / FILE, files)


def verify_digests(folder: Path) -> None:
    """Checks that all files of a checkpoint are as they were written.

    Raises:
      Damaged: If a file has changed; the message names up to three.
      UnusableDisk: If a file cannot be read, which is no damage.
    """
    require_regular_files(folder)
    written, found = _read_digests(folder), _digests(folder)
    wrong = [n for n in sorted({*written, *found}) if written.get(n) != found.get(n)]
    if wrong:
        more = f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''
        raise _damage(folder, f'{", ".join(wrong[:3])}{more}')


def _read_digests(folder: Path) -> dict[str, str]:
    with usable(folder / FILE):
        text = (folder / FILE).read_bytes() if is_complete(folder) else b''
    try:
        digests = json.loads(text)
    except (ValueError, RecursionError):
        digests = None
    if not isinstance(digests, dict) or not digests:
        raise _damage(folder, FILE)
    return digests


def _damage(folder: Path, what: str) -> Damaged:
    return Damaged(f'checkpoint {folder}: damaged since it was written: {what}')


def require_regular_files(folder: Path) -> None:
    """Raises Damaged if a pipe or a device is among the files: reading it might never end."""
    if storage.is_remote(folder):
        return
    for path in folder.rglob('*'):
        if not (path.is_file() or path.is_dir()):
            raise _damage(folder, f'{path.relative_to(folder)} is no file')


def _digests(folder: Path) -> dict[str, str]:
    """Returns the digests of all files but hidden ones, such as `.DS_Store`: not orbax's."""
    if storage.is_remote(folder):
        found = storage.read_digests(folder)
    else:
        with usable(folder):
            paths = (path for path in sorted(folder.rglob('*')) if path.is_file())
            found = {
                str(path.relative_to(folder)): storage.digest_of(path.stat().st_size, crc32c(path))
                for path in paths
            }
    kept = {name for name in found if name != FILE and '/.' not in f'/{name}'}
    return {name: found[name] for name in kept}


def crc32c(path: pathlib.Path) -> str:
    """Returns the CRC-32C of a file in Google's notation."""
    checksum = google_crc32c.Checksum()
    with path.open('rb') as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


def remove(folder: Path) -> None:
    """Removes a checkpoint, which is none from the first moment on; warns if that fails."""
    try:
        if storage.is_remote(folder):
            (folder / FILE).unlink(missing_ok=True)
            partial = folder
        else:
            partial = folder.rename(folder.with_name(PARTIAL + folder.name.removeprefix(PARTIAL)))
            sync(folder.parent)
        epath.Path(partial).rmtree()
    except Exception as error:  # clients of a bucket raise many kinds
        logging.warning('%s: could not be removed: %s', folder, error)


def remove_partial(folder: Path) -> None:
    """Removes checkpoints that a killed process was writing or removing."""
    with usable(folder):
        if storage.is_remote(folder):
            partial = [path for path in _numbered(folder) if not is_complete(path)]
        else:
            partial = list(folder.glob(f'{PARTIAL}*'))
    for path in partial:
        remove(path)


def quarantine(folder: Path) -> Path:
    """Moves a damaged checkpoint to the folder `damaged` next to it; returns its new path."""
    name = f'{folder.name.removeprefix(PARTIAL)}-{time.time_ns()}-{socket.gethostname()}'
    place = folder.parent / DAMAGED / name
    if storage.is_remote(folder):
        storage.move(folder, place)
    else:
        with usable(place):
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
    return place
