"""Checksums of a checkpoint's files, because orbax does not detect flipped bits.

`digests.json` holds the size and CRC-32C of every other file. Google Cloud Storage provides both
for each object, so verifying a checkpoint in a bucket reads only this file, and a run can be copied
between disks and buckets. It is written last: a folder that contains it is a complete checkpoint.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import logging
import pathlib
import time

import google_crc32c
import numpy as np
from etils import epath

from vit_jax.base import Params, StorageError, UserError, records, storage, tree_names
from vit_jax.base.files import Limit, open_file, parse_json, read_file, require_file, write_json
from vit_jax.base.storage import Path, sync, usable
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.models import ModelConfig

FILE = 'digests.json'
CARD = 'card.json'
DAMAGED = 'damaged'  # the folder to which damaged checkpoints are moved
PARTIAL = '.partial-'  # prefix of a checkpoint on a disk while it is written or removed


class DamagedCheckpoint(UserError):
    """A file of a checkpoint has changed since it was written."""


def list_steps(folder: Path) -> list[int]:
    """Lists the steps that have a checkpoint, newest first."""
    with usable(folder):
        # On a bucket, which cannot rename, incomplete checkpoints have their final name.
        paths = [p for p in _numbered(folder) if not storage.is_remote(p) or is_complete(p)]
    return sorted((int(path.name) for path in paths), reverse=True)


def _numbered(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [path for path in folder.iterdir() if path.name.isdecimal()]
    return []


def is_complete(folder: Path) -> bool:
    """Returns whether a folder is a complete checkpoint."""
    with usable(folder):
        return (folder / FILE).exists()


def write_digests(folder: Path) -> None:
    """Syncs the files of a checkpoint to the disk and writes their digests, which completes it.

    Raises:
      StorageError: If orbax did not write the manifest of an item, which lists its arrays.
    """
    if not storage.is_remote(folder):
        with usable(folder):
            for path in folder.rglob('*'):
                sync(path)
    files = _digests(folder)
    for name in files:
        manifest = name.replace('/_METADATA', '/manifest.ocdbt')
        if manifest not in files:
            raise StorageError(f'{folder}: arrays cannot be read, as {manifest} is missing')
    write_json(folder / FILE, files)


def verify_digests(folder: Path) -> None:
    """Compares the files of a checkpoint with their digests.

    Raises:
      DamagedCheckpoint: If files have changed or are missing; the message names up to three.
      StorageError: If a file cannot be read; the checkpoint may be undamaged.
    """
    with usable(folder / FILE):
        digests_json = read_file(folder / FILE, Limit.JSON_BYTES) if is_complete(folder) else b''
    try:
        written = dict(parse_json(digests_json))
    except (ValueError, TypeError):
        written = {}
    actual = _digests(folder)
    changed = sorted(name for name in written if written[name] != actual.get(name))
    if changed or not written:
        names = ', '.join(changed[:3]) or FILE
        raise DamagedCheckpoint(f'checkpoint {folder}: damaged since it was written: {names}')


def _digests(folder: Path) -> dict[str, str]:
    """Computes the digests of the files in a folder; for buckets, queries them."""
    if storage.is_remote(folder):
        return storage.read_digests(folder)
    with usable(folder):
        return {
            str(path.relative_to(folder)): storage.format_digest(path.stat().st_size, crc32c(path))
            for path in sorted(folder.rglob('*'))
            if path.is_file()
        }


def require_regular_files(folder: Path) -> None:
    """Raises StorageError if a checkpoint on a disk contains pipes, devices or links to them."""
    if not storage.is_remote(folder):
        with usable(folder):
            for path in folder.rglob('*'):
                if not path.is_dir():
                    require_file(path)


def crc32c(path: pathlib.Path) -> str:
    """Returns the CRC-32C of a file in base64, as Google Cloud Storage writes it."""
    checksum = google_crc32c.Checksum()
    with open_file(path) as file:
        while block := file.read(2**20):
            checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint, or logs a warning. A partially removed one is not a checkpoint."""
    try:
        if storage.is_remote(folder):
            (folder / FILE).unlink(missing_ok=True)
        elif not folder.name.startswith(PARTIAL):
            # The time makes the name unique: a killed process may have left another folder.
            folder = folder.rename(folder.with_name(f'{PARTIAL}{folder.name}-{time.time_ns()}'))
            sync(folder.parent)
        epath.Path(folder).rmtree()
    except Exception as error:  # bucket clients raise many types
        logging.warning('%s: cannot be removed: %s', folder, error)


def remove_partial(folder: Path) -> None:
    """Removes checkpoints that a killed process left partially written or removed."""
    with usable(folder):
        if storage.is_remote(folder):
            partial = [path for path in _numbered(folder) if not is_complete(path)]
        else:
            partial = list(folder.glob(f'{PARTIAL}*'))
    for path in partial:
        remove_checkpoint(path)


def quarantine(folder: Path) -> Path:
    """Moves a damaged checkpoint to the sibling folder `damaged`; returns its new path."""
    target = folder.parent / DAMAGED / f'{folder.name}-{time.time_ns()}'
    with usable(target):
        if storage.is_remote(folder):
            storage.move_bucket_folder(folder, target)
        else:
            target.parent.mkdir(exist_ok=True)
            folder.rename(target)
    return target


def digest_model(config: ModelConfig, params: Params, preprocessing: Preprocessing) -> str:
    """Returns a SHA-256 digest of architecture, parameters and pixel normalization."""
    architecture = json.dumps(records.to_dict(config))
    normalization = repr((preprocessing.mean, preprocessing.std, 'float32'))
    names_and_arrays = itertools.chain.from_iterable(tree_names.named_leaves(params).items())
    digest = hashlib.sha256()
    for value in (architecture, normalization, *names_and_arrays):
        data = np.asarray(value).tobytes()
        digest.update(len(data).to_bytes(8, 'little') + data)
    return digest.hexdigest()
