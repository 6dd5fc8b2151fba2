"""Saves and restores the training state of a run with orbax, while training continues.

    WORKDIR/checkpoints/STEP/params         the parameters to use: the EMA if there is one
                            /training       the rest of the training state
                            /card.json      metadata of the parameters (checkpoints/card.py)
                            /progress.json  recent metrics and counters, for a resumed run
                            /digests.json   checksums of all these files (checkpoints/digests.py)

Parameters are a separate orbax item, so that they can be loaded without the optimizer. While it is
written or removed, a checkpoint on a disk has a temporary name: a folder named STEP is always
complete.
"""

import contextlib
import functools
import math
import os
import pathlib
import shutil
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.base import MissingFile, Params, StorageError, UserError, require, storage, tree_names
from vit_jax.base.errors import format_error
from vit_jax.base.files import read_json, try_lock, write_json
from vit_jax.base.storage import Path, make_folder, sync, usable
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.digests import CARD, DamagedCheckpoint, is_complete
from vit_jax.distributed.sharding_rules import abstract_arrays

FOLDER = 'checkpoints'
PROGRESS = 'progress.json'
Json = dict[str, Any]


class Restored(NamedTuple):
    """The contents of a checkpoint of a run."""

    params: Params
    training: Any  # the rest of the training state
    progress: Json  # the JSON values that were saved


class Checkpoints:
    """Checkpoints of the run in a work directory.

    Every process of a job creates one and calls the same methods in the same order; each process
    writes the arrays that it holds. `save` returns once these are copied from the devices. A thread
    then writes the files, renames the checkpoint to its final name and removes old checkpoints.
    The next `save`, `check` or `wait` raises errors of that thread, as StorageError (an OSError).

    Args:
      workdir: The work directory.
      keep: How many of the newest checkpoints are kept (see also `save`).
      sync_first: Files, such as metrics, that are synced to the disk before a checkpoint is
        completed, so that their contents survive a power failure together with the checkpoint.
      check_lease: A function that raises UserError if another run has taken over the work
        directory; called before a checkpoint is completed.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        keep: int,
        sync_first: Sequence[Path] = (),
        check_lease: Callable[[], None] = lambda: None,
    ):
        self._folder = storage.resolve_folder(workdir) / FOLDER
        self._keep = keep
        self._sync_first = sync_first
        self._check_lease = check_lease
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None
        make_folder(self._folder)
        if jax.process_index() == 0:
            sync(self._folder.parent)
            digests.remove_partial(self._folder)
        self._resources = contextlib.ExitStack()
        self._plain = self._resources.enter_context(storage.orbax_safe_path(self._folder))
        self._writer = ocp.AsyncCheckpointer(_composite())
        self._resources.callback(self._writer.close)
        #: The step of the newest checkpoint, or None. Until `wait` returns, it may not be complete.
        self.latest_step = max(digests.list_steps(self._folder), default=None)

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of a step."""
        return self._folder / str(step)

    def save(
        self,
        step: int,
        params: Params,
        training: Any,
        card: Json,
        progress: Json,
        *,
        best: int | None = None,
    ) -> None:
        """Starts to save a step; does nothing if it is the latest saved step.

        Args:
          step: The step.
          params: The parameters to use, which `load_params` reads.
          training: The rest of the training state, a tree of arrays (see `TrainState.split`).
          card: A `Card` as JSON values.
          progress: JSON values that `restore` returns.
          best: A step whose checkpoint is kept in addition to the newest ones.
        """
        if step == self.latest_step:
            return self.check()
        self.wait()
        self._check_lease()  # a partial checkpoint would obstruct the run that has taken over
        arrays = ocp.args.Composite(
            params=ocp.args.PyTreeSave(params),
            training=ocp.args.PyTreeSave(tree_names.named_leaves(training)),
        )
        finish = functools.partial(self._finish, step, best, {CARD: card, PROGRESS: progress})
        thread = threading.Thread(target=finish, daemon=True)
        try:
            self._writer.save(self._plain / self._partial(step).name, args=arrays)
            thread.start()
        except Exception as error:
            raise self._explained(error) from error
        self.latest_step = step
        self._thread = thread

    def _partial(self, step: int) -> Path:
        """Returns the folder to write: on buckets, which cannot rename, the final one."""
        final = self.path(step)
        if storage.is_remote(final):
            return final
        return final.with_name(digests.PARTIAL + final.name)

    def _finish(self, step: int, best: int | None, texts: dict[str, Json]) -> None:
        """Waits for the arrays of all processes; process 0 then completes the checkpoint."""
        try:
            self._writer.wait_until_finished()
            if jax.process_index() == 0:
                for path in self._sync_first:
                    sync(path)
                self._check_lease()
                _seal(self._partial(step), self.path(step), texts)
                for old in digests.list_steps(self._folder)[self._keep :]:
                    if old != best:
                        digests.remove_checkpoint(self.path(old))
        except Exception as error:
            self._error = self._explained(error)

    def _explained(self, error: Exception) -> UserError:
        """Returns a one-line error, because messages of orbax and tensorstore have many lines."""
        if isinstance(error, UserError) and not isinstance(error, OSError):
            return error
        return StorageError(f'{self._folder}: cannot write a checkpoint: {format_error(error)}')

    def restore(self, step: int, like: tuple[Params, Any], shardings: tuple[Any, Any]) -> Restored:
        """Restores a step.

        Args:
          step: A step with a complete checkpoint.
          like: Arrays or shapes of (params, training).
          shardings: The sharding of each array in `like`.

        Raises:
          UserError: If a name, shape or type differs from the saved one; the message names it.
          DamagedCheckpoint: If a file has changed since it was written.
        """
        params, training = abstract_arrays(like, shardings)
        targets = {'params': params, 'training': tree_names.named_leaves(training)}
        reader = _array_handler()
        restored = {}
        with _readable(self.path(step)) as folder:
            for item, target in targets.items():
                tree_names.compare_leaves(
                    tree_names.named_leaves(reader.metadata(folder / item).tree),
                    tree_names.named_leaves(target),
                    where=f'checkpoint {self.path(step)}/{item}',
                )
                restore_args = ocp.checkpoint_utils.construct_restore_args(target)
                arguments = ocp.args.PyTreeRestore(target, restore_args)
                restored[item] = reader.restore(folder / item, args=arguments)
        leaves = [restored['training'][name] for name in targets['training']]
        return Restored(
            params=restored['params'],
            training=jax.tree.unflatten(jax.tree.structure(training), leaves),
            progress=_read_json(self.path(step), PROGRESS),
        )

    def check(self) -> None:
        """Raises the error of the background thread, if there is any."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Waits until the last checkpoint is complete; raises errors of the background thread."""
        self._join()
        self.check()

    def close(self, seconds: float | None = None) -> None:
        """Waits for the last checkpoint, at most `seconds` if given, then stops the threads."""
        if self._join(seconds):
            self._resources.close()

    def _join(self, seconds: float | None = None) -> bool:
        """Waits for the background thread; returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()


def _seal(partial: Path, final: Path, texts: dict[str, Json]) -> None:
    """Writes JSON files and digests, and renames the folder; replaces a checkpoint at `final`."""
    for name, values in texts.items():
        write_json(partial / name, values)
    digests.write_digests(partial)
    if partial != final:
        if is_complete(final):
            digests.remove_checkpoint(final)
        partial.rename(final)
        sync(final.parent)


def _composite() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(params=_array_handler(), training=_array_handler())


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns the orbax handler for the arrays of an item.

    Replicas of an array each write a slice of at least 1 MiB. Training waits while arrays are
    sliced, and slicing a smaller array takes longer than writing it whole.
    """
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
    kinds = (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    registry = ocp.type_handlers.create_type_handler_registry(*kinds)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def quarantine_damaged(workdir: Path) -> list[str]:
    """Moves damaged checkpoints to checkpoints/damaged, until the newest one is undamaged.

    Returns:
      A line about each checkpoint that was moved.

    Raises:
      UserError: If every checkpoint is damaged, so that a run does not silently start again.
    """
    lines: list[str] = []
    for step in digests.list_steps(workdir / FOLDER):
        folder = workdir / FOLDER / str(step)
        try:
            digests.verify_digests(folder)
            return lines
        except DamagedCheckpoint as error:
            lines.append(f'{error}; moved to {digests.quarantine(folder)}')
    damaged = workdir / FOLDER / digests.DAMAGED
    with usable(damaged):
        has_damaged = damaged.is_dir()
    if has_damaged:
        advice = f'to train again from step 0, remove {damaged}, or choose another --workdir'
        first = f'workdir {workdir}: every checkpoint is damaged; {advice}'
        raise UserError('\n  '.join([first, *lines]))
    return lines


def checkpoint_folder(path: str) -> Path:
    """Returns the path if it is a checkpoint, else the newest checkpoint of a work directory.

    Raises:
      MissingFile: If there is no complete checkpoint.
    """
    root = storage.resolve_folder(path)
    candidates = [root]
    for parent in (root / FOLDER, root):
        candidates += [parent / str(step) for step in digests.list_steps(parent)]
    for folder in candidates:
        if is_complete(folder):
            return folder
    raise MissingFile(f'{path}: neither a complete checkpoint nor a work directory with one')


def load_card(path: str) -> tuple[dict[str, Any], Path]:
    """Returns the card as JSON values, and the folder of the checkpoint (see `load_params`)."""
    folder = checkpoint_folder(path)
    return _read_json(folder, CARD), folder


def _read_json(folder: Path, name: str) -> Json:
    with _readable(folder):
        return dict(read_json(folder / name))


def count_params(folder: Path) -> int:
    """Counts the parameters of a checkpoint, including the head, without reading arrays."""
    with _readable(folder) as plain:
        structure = _array_handler().metadata(plain / 'params').tree
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structure))


def load_params(path: str) -> Params:
    """Loads parameters as float32 into host memory.

    Args:
      path: A checkpoint, or a work directory, whose newest checkpoint is loaded.

    Raises:
      MissingFile: If there is no complete checkpoint.
      DamagedCheckpoint: If a file has changed since it was written.
    """
    folder = checkpoint_folder(path)
    reader = _array_handler()
    digests.verify_digests(folder)
    with _readable(folder) as plain:
        structure = reader.metadata(plain / 'params').tree
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)
        arguments = ocp.args.PyTreeRestore(restore_args=to_host)
        params = reader.restore(plain / 'params', args=arguments)
    return jax.tree.map(lambda leaf: leaf.astype(np.float32, copy=False), params)


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[Any]:
    """Yields the folder under a name that orbax accepts, and converts errors of reading."""
    try:
        digests.require_regular_files(folder)  # orbax would read a link to /dev/zero forever
        with storage.orbax_safe_path(folder) as plain:
            yield plain
    except UserError:
        raise
    except Exception as error:  # orbax and tensorstore raise many types for damaged files
        digests.verify_digests(folder)
        raise StorageError(f'checkpoint {folder}: cannot be read: {format_error(error)}') from error


def write_standalone(folder: Path, params: Params, card: Json) -> None:
    """Writes parameters and card as a checkpoint that belongs to no run.

    An existing checkpoint is replaced once the new one is complete. `card` is a `Card` as JSON
    values.

    Raises:
      UserError: If the path holds anything except a checkpoint or an empty folder.
      StorageError: If the checkpoint cannot be written; nothing is left then.
    """
    with usable(folder):
        final = pathlib.Path(os.path.realpath(folder))
    require(
        not (final / 'training').exists(),
        f'{folder}: a checkpoint of a run; expected another path',
    )
    if final.is_dir() and not any(final.iterdir()):
        final.rmdir()
    require(
        is_complete(final) or not final.exists(),
        f'{folder}: not a vit_jax checkpoint; remove it or choose another path',
    )
    make_folder(final.parent)
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    free = shutil.disk_usage(final.parent).free
    if needed > free:  # orbax would fail with many messages
        raise StorageError(f'{folder}: needs {needed:,} bytes; the disk has {free:,} bytes free')
    partial = final.with_name(f'{_partial_stem(final)}-{uuid.uuid4().hex}')
    arrays = ocp.args.Composite(params=ocp.args.PyTreeSave(params))
    with _only_writer(final):
        try:
            with storage.orbax_safe_path(final.parent) as parent:
                with ocp.Checkpointer(_composite()) as writer:
                    writer.save(parent / partial.name, args=arrays)
            _seal(partial, final, {CARD: card})
        except BaseException as error:
            _remove_folders(final.parent, f'{partial.name}*')  # orbax appends to the name
            if isinstance(error, UserError) or not isinstance(error, Exception):
                raise
            raise StorageError(f'{folder}: cannot be written: {format_error(error)}') from error


@contextlib.contextmanager
def _only_writer(final: Path) -> Iterator[None]:
    """Waits for other writers of a checkpoint, and removes what killed ones left.

    Does neither on file systems without locks.
    """
    lock = final.with_name(f'{_partial_stem(final)}.lock')
    with contextlib.ExitStack() as stack:
        while True:
            with usable(final):
                file = stack.enter_context(lock.open('a'))
            while (is_locked := try_lock(file)) is False:
                time.sleep(0.1)
            if os.fstat(file.fileno()).st_nlink:  # else the last writer has removed the lock
                break
        stack.callback(lock.unlink)
        if is_locked:
            _remove_folders(final.parent, f'{_partial_stem(final)}-*')
        yield


def _partial_stem(final: Path) -> str:
    """Returns the start of the names of partial folders, which orbax does not misread."""
    return f'{digests.PARTIAL}{zlib.crc32(os.fsencode(final.name)):08x}'


def _remove_folders(parent: Path, pattern: str) -> None:
    for _ in range(20):  # threads of tensorstore may still write after an error
        folders = list(parent.glob(pattern))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not folders:
            break
        time.sleep(0.05)
