"""Digests of the files of a checkpoint: orbax would restore a flipped bit as a wrong number.

`digests.json` holds the size and CRC-32C of each other file. Google's buckets state both for each
object: verifying a checkpoint there reads nothing, and a run can be copied from a disk to a bucket
and back. The file is written last: a folder that has it is a checkpoint.
"""

import base64
import contextlib
import json
import logging
import pathlib
import time

import google_crc32c
from etils import epath

from vit_jax.base import Path, StorageError, UserError, storage, sync, usable, write_json

FILE, CARD = 'digests.json', 'card.json'
DAMAGED = 'damaged'  # the folder to which damaged checkpoints are moved
PARTIAL = '.partial-'  # starts the name of a checkpoint on a disk while it is written or removed


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not as they were written."""


def list_steps(folder: Path) -> list[int]:
    """Lists the steps with a checkpoint, the newest first."""
    with usable(folder):
        # On a bucket an incomplete checkpoint has its name already.
        paths = [p for p in _numbered(folder) if not storage.is_remote(p) or is_complete(p)]
    return sorted((int(path.name) for path in paths), reverse=True)


def _numbered(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [path for path in folder.iterdir() if path.name.isdecimal()]
    return []


def is_complete(folder: Path) -> bool:
    """Returns whether all files of a checkpoint were written."""
    with usable(folder):
        return (folder / FILE).exists()


def write_digests(folder: Path) -> None:
    """Completes a checkpoint, after its files are on the disk.

    Raises StorageError if orbax has lost the arrays of an item, which its manifest lists.
    """
    if not storage.is_remote(folder):
        with usable(folder):
            for path in folder.rglob('*'):
                sync(path)
    files = _digests(folder)
    for name in files:
        manifest = name.replace('/_METADATA', '/manifest.ocdbt')
        if manifest not in files:
            raise StorageError(f'{folder}: {manifest} is missing: arrays cannot be read')
    write_json(folder / FILE, files)


def verify_digests(folder: Path) -> None:
    """Checks that all files of a checkpoint are as they were written.

    Raises:
      Damaged: If a file has changed; the message names up to three.
      StorageError: If a file cannot be read, which is no damage.
    """
    with usable(folder / FILE):
        text = (folder / FILE).read_bytes() if is_complete(folder) else b''
    try:
        written = dict(json.loads(text))
    except (ValueError, TypeError):
        written = {}
    found = _digests(folder)
    wrong = sorted(name for name in written if written[name] != found.get(name))
    if wrong or not written:
        names = ', '.join(wrong[:3]) or FILE
        raise DamagedCheckpoint(f'checkpoint {folder}: damaged since it was written: {names}')


def _digests(folder: Path) -> dict[str, str]:
    """Computes the digests of the files in a folder; a bucket states them."""
    if storage.is_remote(folder):
        return storage.read_digests(folder)
    with usable(folder):
        return {
            str(path.relative_to(folder)): storage.format_digest(path.stat().st_size, crc32c(path))
            for path in sorted(folder.rglob('*'))
            if path.is_file()
        }


def crc32c(path: pathlib.Path) -> str:
    """Returns the CRC-32C of a file in Google's notation."""
    checksum = google_crc32c.Checksum()
    with path.open('rb') as file:
        while block := file.read(2**20):
            checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint, which is none from the first moment on; warns if that fails."""
    try:
        if storage.is_remote(folder):
            (folder / FILE).unlink(missing_ok=True)
        elif not folder.name.startswith(PARTIAL):
            # The time makes the name unique: a killed removal may have left another folder.
            folder = folder.rename(folder.with_name(f'{PARTIAL}{folder.name}-{time.time_ns()}'))
            sync(folder.parent)
        epath.Path(folder).rmtree()
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
        remove_checkpoint(path)


def quarantine(folder: Path) -> Path:
    """Moves a damaged checkpoint to the folder `damaged` next to it; returns its new path."""
    place = folder.parent / DAMAGED / f'{folder.name}-{time.time_ns()}'
    with usable(place):
        if storage.is_remote(folder):
            storage.move_bucket_folder(folder, place)
        else:
            place.parent.mkdir(exist_ok=True)
            folder.rename(place)
    return place
