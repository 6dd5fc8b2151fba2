"""Opens the work directory of an experiment, which one run at a time may use.

All processes of a run must have the same configuration, code and packages (`collect_settings`).
"""

import contextlib
import datetime
import hashlib
import logging
import os
import pathlib
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from vit_jax.base import Path, UserError, records, storage, sync, usable
from vit_jax.base.files import open_file, try_lock
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.card import package_versions
from vit_jax.checkpoints.store import FOLDER
from vit_jax.config import FORMAT, TrainConfig, config_differences, read_config, write_config
from vit_jax.distributed.processes import Job

CONFIG = 'config.json'
METRICS = 'metrics.jsonl'
FEWSHOT = 'fewshot.json'
EVENTS = 'events.jsonl'
LOCK = '.lock'
MANIFEST = 'data_manifest.json.gz'
_PACKAGE = pathlib.Path(__file__).parent.parent


class Workdir(NamedTuple):
    """The directory of a run. `check_held` raises UserError if another run has taken it over."""

    folder: Path
    check_held: Callable[[], None] = lambda: None  # a file lock cannot be lost
    changes: tuple[str, ...] = ()  # accepted changes of the configuration, `field: old -> new`


@contextlib.contextmanager
def open_workdir(
    path: str, config: dict[str, Any], job: Job, *, accept_changes: bool = False
) -> Iterator[Workdir]:
    """Locks the directory of an experiment, and creates it if necessary.

    Args:
      path: The directory, a local path or gs://BUCKET/FOLDER.
      config: The configuration of the experiment, as JSON values.
      job: This process of a job. Process 0 holds the lock.
      accept_changes: Whether the directory may have a run with another configuration.

    Raises:
      UserError: If the directory cannot be written, is in use by another run, was written by
        another version of vit_jax, has checkpoints of another configuration (unless
        `accept_changes` is True), or is not shared by all processes of the job.
    """
    folder = storage.resolve_folder(path)
    workdir = Workdir(folder)
    with contextlib.ExitStack() as stack:
        if job.index == 0:
            with usable(folder):
                hold = _lease_workdir if storage.is_remote(folder) else lock_workdir
                workdir = stack.enter_context(hold(folder))
                changes = _check_and_write_config(folder, config, accept_changes=accept_changes)
                workdir = workdir._replace(changes=tuple(changes))
        job.barrier('workdir is created')
        lock = folder / LOCK
        with usable(lock):
            holder = lock.read_text() if lock.exists() else 'absent'
        job.require_equal('the workdir, which all processes must share', {'lock': holder})
        yield workdir


def _check_and_write_config(
    folder: Path, config: dict[str, Any], *, accept_changes: bool
) -> list[str]:
    """Writes config.json, unless the configuration changed. `TrainingRun` writes accepted ones.

    Returns:
      A line per accepted change.

    Raises:
      UserError: If there are checkpoints of a configuration that differs in fields that are not in
        `vit_jax.config.MAY_CHANGE_ON_RESUME`, unless `accept_changes` is True.
    """
    recorded = _read_config(folder)
    changes = [] if recorded is None else config_differences(recorded, config)
    if changes and not accept_changes:
        listed = '\n  '.join(changes)
        raise UserError(
            f'workdir {folder} has a run with another configuration:\n  {listed}\n'
            'use another --workdir, or resume this run with --accept_config_changes'
        )
    if not changes:
        write_config(folder / CONFIG, config)
    return changes


def _read_config(folder: Path) -> dict[str, Any] | None:
    """Reads the configuration of the run in a directory; None if there are no checkpoints.

    Raises UserError if it is unreadable, or if another version of vit_jax wrote it.
    """
    if not digests.list_steps(folder / FOLDER):
        return None
    with usable(folder / CONFIG, 'the configuration of the run that has checkpoints here'):
        return read_config(folder / CONFIG, formats=(FORMAT,))


def read_dtype(path: str) -> str:
    """Reads the `compute.dtype` of the run in a work directory; `auto` if there is no run."""
    folder = storage.resolve_folder(path)
    recorded = _read_config(folder)
    if recorded is None:
        return 'auto'
    with usable(folder / CONFIG, 'the configuration of a run'):
        return str(recorded['compute']['dtype'])


@contextlib.contextmanager
def lock_workdir(folder: pathlib.Path) -> Iterator[Workdir]:
    """Locks a local directory by its lock file, which describes the process.

    The operating system releases the lock when the process exits. Raises UserError if another
    process has the lock.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for new_folder in new_folders:
        sync(new_folder.parent)
    with _open_lock(folder / LOCK) as file:
        is_locked = try_lock(file)
        if is_locked is None:
            logging.warning(
                '%s: file system without locks; start only one run per workdir', file.name
            )
        if is_locked is False:
            raise UserError(
                f'workdir {folder} is used by {_read_holder(file)}; wait, or use another --workdir'
            )
        file.truncate(0)
        file.write(_describe_process())
        file.flush()
        yield Workdir(folder)


def find_holder(folder: Path) -> str | None:
    """Describes the process that holds a local work directory; None if it is free."""
    if not (folder / LOCK).exists():
        return None
    with _open_lock(folder / LOCK) as file:
        return _read_holder(file) if try_lock(file) is False else None


def _open_lock(path: pathlib.Path) -> IO[str]:
    path.touch()
    return open_file(path, 'a+', encoding='utf-8')


def _read_holder(file: IO[str]) -> str:
    """Reads the description of the process that has the lock."""
    file.seek(0)
    description = file.read(500).strip()
    return description if description and description.isprintable() else 'another run'


@contextlib.contextmanager
def _lease_workdir(folder: Path) -> Iterator[Workdir]:
    """Leases a folder on a bucket, after a test of all permissions that a run needs."""
    storage.require_writable_bucket(folder)
    from vit_jax.base.bucket_lease import Lease

    lease = Lease(folder / LOCK, _describe_process())
    try:
        yield Workdir(folder, lease.check)
    finally:
        lease.release()


def _describe_process() -> str:
    now = datetime.datetime.now().isoformat(' ', 'seconds')
    host = socket.gethostname()
    return f'process {os.getpid()} on {host} since {now}, run {uuid.uuid4()}\n'


def collect_settings(config: TrainConfig, path: str) -> dict[str, Any]:
    """Returns the values that all processes must share: configuration, workdir, code, packages."""
    return {
        'config': records.to_dict(config),
        'workdir': str(storage.resolve_folder(path)),
        **describe_software(),
    }


def describe_software() -> dict[str, Any]:
    """Returns package versions, and a digest of each file of vit_jax."""
    code = {
        str(file.relative_to(_PACKAGE)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in sorted(_PACKAGE.rglob('*.py'))
        if not file.is_relative_to(_PACKAGE / 'configs')  # compared as values of the configuration
    }
    return {'code': code, 'packages': package_versions()}
