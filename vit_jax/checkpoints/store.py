"""Checkpoints of a run: the state of a step, written by orbax while training goes on.

    WORKDIR/checkpoints/STEP/params     the parameters to use: the average where there is one
                            /training   the rest of the state
                            /card       JSON: what belongs to the parameters (checkpoints/card.py)
                            /progress   JSON: what the next report of the run begins with
                            /digests.json   of all these files (checkpoints/digests.py)

Parameters are an item of their own, so that using them needs no optimizer.
"""

import contextlib
import functools
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.base import (
    MissingFile,
    Params,
    Path,
    UnusableDisk,
    UserError,
    storage,
    sync,
    tree_names,
    usable,
)
from vit_jax.checkpoints import digests, orbax_parts
from vit_jax.checkpoints.digests import Damaged
from vit_jax.parallel.sharding_rules import abstract

FOLDER = digests.CHECKPOINTS
Json = dict[str, Any]
_MOST_COMPARED = 2**33  # bytes of parameters
_TRASH = '.trash'  # what is renamed to there, and then removed


class Checkpoints:
    """The checkpoints of the run in a work directory; the newest `keep` of them are kept.

    All processes of a job make one and call the same methods in the same order: each writes the
    arrays that it holds. `save` returns once these are copied from the devices, and the files are
    written in the background; what goes wrong there is raised by the next `save`, `check` or
    `wait`. A checkpoint is complete when it is on the disk, where a failure of power leaves it,
    and with it what the files `along` held when it was saved. Raises UnusableDisk (an OSError), and
    what `check` raises where the work directory is held no more.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        keep: int,
        along: Sequence[Path] = (),
        check: Callable[[], None] = lambda: None,
    ):
        self._folder = storage.folder(workdir) / FOLDER
        self._finishing: threading.Thread | None = None
        self._compared, self._error = False, list[Exception]()
        self._along, self._check = along, check
        remote = storage.is_remote(workdir)
        if remote:
            kind: Any = type('_Held', (orbax_parts.Committed,), {'check': staticmethod(check)})
        else:
            kind = orbax_parts.Sealed
        if jax.process_index() == 0:
            self._empty_trash()  # of a run that was killed
            for step in digests.steps(self._folder) if remote else ():
                if not storage.is_committed(self.path(step)):  # it was copied there from a disk
                    storage.commit(self.path(step))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            # Removed by renaming first: a kill in between leaves no listed, half-empty step.
            todelete_subdir=_TRASH,
            temporary_path_class=kind,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._sync_along),
        )
        handlers = {
            'params': orbax_parts.array_handler(),
            'training': orbax_parts.array_handler(),
            'card': ocp.JsonCheckpointHandler(),
            'progress': ocp.JsonCheckpointHandler(),
        }
        self._resources = contextlib.ExitStack()
        with storage.reaching(self._folder):
            if not remote:
                self._folder.mkdir(parents=True, exist_ok=True)
            plain = self._resources.enter_context(storage.named_plainly(self._folder))
            self._manager = ocp.CheckpointManager(plain, options=options, item_handlers=handlers)
        if jax.process_index() == 0:
            sync(self._folder.parent)

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint; it may still be being written, until `wait`."""
        return self._manager.latest_step()

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self._folder / str(step)

    def save(self, step: int, params: Params, training: Any, card: Json, progress: Json) -> None:
        """Begins to save a step, unless that step was the last to be saved.

        The first one is read again and compared, in the background, before `wait` returns: by
        process 0, with the parts of arrays that it holds. Of more than 8 GiB, which a host may not
        have room for twice, only the manifests are looked at, as of later checkpoints.
        """
        self._check()
        if step == self.latest_step:
            return
        self._finish()
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave(params),
            training=ocp.args.PyTreeSave(tree_names.named_leaves(training)),
            card=ocp.args.JsonSave(card),
            progress=ocp.args.JsonSave(progress),
        )
        with orbax_parts.writing(self._folder, self._along):
            self._manager.save(step, args=items)
        if jax.process_index() == 0:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            compared = self._compared or size > _MOST_COMPARED
            expected = None if compared else orbax_parts.pieces(params)
            self._compared = True
            follow = functools.partial(self._follow, step, expected)
            self._finishing = threading.Thread(target=follow, daemon=True)
            self._finishing.start()

    def _sync_along(self) -> None:
        for path in self._along:
            sync(path)

    def _follow(self, step: int, expected: orbax_parts.Pieces | None) -> None:
        """Checks that the saved parameters match `expected`, then deletes the older checkpoints."""
        while self._manager.is_saving_in_progress():  # orbax renames the old ones last
            time.sleep(0.05)
        try:
            if expected is not None and is_complete(self.path(step)):  # else the save has failed
                _compare(self.path(step), expected)
        except UnusableDisk as error:  # raised by `check`
            self._error.append(error)
        except Exception as error:  # of a disk that may be read later
            logging.warning('%s: not compared with what was saved: %s', self.path(step), error)
        self._empty_trash()

    def _finish(self) -> None:
        """Returns when what follows the last save is done."""
        if self._finishing is not None:
            self._finishing.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error:
            raise self._error[0]

    def _empty_trash(self) -> None:
        """Frees the disk of old checkpoints, which orbax renames; on a store it removes them."""
        if storage.is_remote(self._folder):
            return
        old = list((self._folder / _TRASH).glob('*'))
        if old:
            sync(self._folder)  # they are listed no more, whatever happens
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                logging.warning('%s: could not be removed', path)

    def restore(self, step: int, like: tuple[Params, Any], shardings: tuple[Any, Any]) -> Any:
        """(params, training, progress) of a step: as `like` and placed by `shardings`, and JSON.

        Raises UserError with the names of arrays that were not saved so, and Damaged.
        """
        params, training = abstract(like, shardings)
        wanted = {'params': params, 'training': tree_names.named_leaves(training)}
        with _readable(self.path(step)):
            metadata = self._manager.item_metadata(step)
            saved = {item: tree_names.named_leaves(metadata[item].tree) for item in wanted}
        for item, target in wanted.items():
            where = f'checkpoint {self.path(step)}/{item}'
            tree_names.compare_names(saved[item], tree_names.named_leaves(target), where=where)
        arguments = {
            item: ocp.args.PyTreeRestore(value, ocp.checkpoint_utils.construct_restore_args(value))
            for item, value in wanted.items()
        }
        with _readable(self.path(step)):
            restored = self._manager.restore(step, args=ocp.args.Composite(**arguments))
        progress = self._progress(step)
        if jax.process_index() == 0 and not digests.is_sealed(self.path(step)):
            digests.write_digests(self.path(step))  # of an earlier version
        leaves = [restored['training'][name] for name in wanted['training']]
        training = jax.tree.unflatten(jax.tree.structure(training), leaves)
        return restored['params'], training, progress

    def _progress(self, step: int) -> Json:
        """What was saved of the run's reports with a step; {} of an earlier version."""
        with _readable(self.path(step)) as folder:
            there = (folder / 'progress').exists()
            return ocp.JsonCheckpointHandler().restore(folder / 'progress') if there else {}

    def check(self) -> None:
        """Raises what went wrong in the background, if anything did."""
        with orbax_parts.writing(self._folder, self._along):
            self._manager.check_for_errors()
        self._raise_error()

    def wait(self) -> None:
        """Returns when everything is on disk."""
        with orbax_parts.writing(self._folder, self._along):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self._finish()

    def close(self) -> None:
        """Waits, and ends the threads."""
        with orbax_parts.writing(self._folder, self._along):
            self._manager.close()
        self._resources.close()


def _compare(folder: Path, expected: orbax_parts.Pieces) -> None:
    """Raises UnusableDisk where a checkpoint is not read as it was saved; it is moved away then."""
    try:
        load_card(str(folder))
        found = tree_names.named_leaves(load_params(str(folder)))
        wrong = sorted(found.keys() ^ expected.keys()) or [
            name
            for name, pieces in expected.items()
            if not all(np.array_equal(found[name][index], piece) for index, piece in pieces)
        ]
        reason = f'other arrays than were saved: {", ".join(wrong[:3])}' if wrong else ''
    except Damaged as error:
        reason = str(error)
    if reason:
        moved = digests.quarantine(folder)
        raise UnusableDisk(f'{folder}: read again after saving: {reason}; moved to {moved}')


def quarantine_damaged(workdir: Path) -> list[str]:
    """Moves damaged checkpoints away, from the newest back to the first sound one.

    Returns a line about each; they are then in checkpoints/damaged. Raises UserError where none is
    sound, so that nothing is trained again without a word, and where the first sound one has the
    name of another step.
    """
    lines = []
    for step in digests.steps(workdir / FOLDER):
        folder = workdir / FOLDER / str(step)
        try:
            if not is_complete(folder):
                raise Damaged(f'checkpoint {folder}: not complete')
            digests.verify_digests(folder)
            _check_step(folder)
        except Damaged as error:
            lines.append(f'{error}; moved to {digests.quarantine(folder)}')
        else:
            return lines
    aside = digests.damaged_folder(workdir / FOLDER)
    with storage.reaching(aside):
        none_sound = aside.is_dir() and any(aside.iterdir())
    if none_sound:
        text = f'workdir {workdir}: every checkpoint is damaged; they are in {aside}'
        advice = f'to train again from step 0, remove {aside}, or choose another --workdir'
        raise UserError('\n  '.join([text, *lines]) + f'\n{advice}')
    return lines


def _check_step(folder: Path) -> None:
    step = load_card(str(folder))[0].get('step')
    if step not in (None, int(folder.name)):
        text = 'renamed or copied: name it so, or move it out of this folder'
        raise UserError(f'checkpoint {folder} is of step {step}; it was {text}')


def is_complete(folder: Path) -> bool:
    """Is it a checkpoint of ours? Orbax gives the folder its name when all items are written."""
    parts = folder, folder / 'card', folder / 'params'
    return digests.is_sealed(folder) or all(map(storage.is_committed, parts))


def checkpoint_folder(path: str) -> Path:
    """The folder of the checkpoint at a path: the path itself, or the newest in a work directory.

    Raises MissingFile that says what is there instead.
    """
    given = storage.folder(path)
    with storage.reaching(given):
        if is_complete(given):
            return given
        if not given.exists():
            raise MissingFile(f'checkpoint {path}: no such folder')
        if 'orbax-checkpoint-tmp' in given.name:
            raise MissingFile(f'checkpoint {path}: half-written; its run did not finish saving it')
        for folder in (given / FOLDER, given):
            for step in digests.steps(folder):
                if is_complete(folder / str(step)):
                    return folder / str(step)
    raise MissingFile(
        f'checkpoint {path}: neither a checkpoint (params/, card/) nor a work directory with a '
        f'complete one under {FOLDER}/'
    )


def load_card(path: str) -> tuple[dict[str, Any], Path]:
    """The card, as JSON values, and the folder of the checkpoint at a path."""
    folder = checkpoint_folder(path)
    with _readable(folder) as plain:
        card = ocp.JsonCheckpointHandler().restore(plain / 'card')
        if not isinstance(card, dict):
            raise ValueError(f'the card is {card!r}, not a JSON object')
        return card, folder


def count_params(folder: Path) -> int:
    """How many parameters a checkpoint has, whatever made its head; no array is read."""
    with _readable(folder) as plain:
        structure = ocp.PyTreeCheckpointHandler().metadata(plain / 'params').tree
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structure))


def load_params(path: str) -> Params:
    """The parameters of the checkpoint at a path, float32, in host memory.

    Raises Damaged where its files are not as they were written.
    """
    folder = checkpoint_folder(path)
    digests.verify_digests(folder)
    with _readable(folder) as plain:
        reader = ocp.PyTreeCheckpointHandler()
        structure = reader.metadata(plain / 'params').tree
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)
        wanted = ocp.args.PyTreeRestore(restore_args=to_host)
        params = reader.restore(plain / 'params', args=wanted)
    return jax.tree.map(lambda leaf: leaf.astype(np.float32, copy=False), params)


def save_alone(folder: Path, params: Params, card: dict[str, Any]) -> None:
    """Writes a checkpoint outside of a run: parameters and card.

    An empty folder may be there. Raises UserError where something else is.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists():
        raise UserError(f'{folder}: exists already, and is no checkpoint: name another place')
    handler = ocp.CompositeCheckpointHandler(
        params=ocp.StandardCheckpointHandler(), card=ocp.JsonCheckpointHandler()
    )
    items = {'params': ocp.args.StandardSave(params), 'card': ocp.args.JsonSave(card)}
    with usable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        storage.named_plainly(folder.parent.absolute()) as parent,
        ocp.Checkpointer(handler, temporary_path_class=orbax_parts.Sealed) as writer,
    ):
        saved = parent / f'.{uuid.uuid4()}'  # while the name may be one that orbax misreads
        writer.save(saved, args=ocp.args.Composite(**items))
        os.rename(saved, folder)
        sync(folder.parent)


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[Any]:
    """The folder as orbax can name it, to read a checkpoint in."""
    digests.require_regular_files(folder)
    try:
        with storage.named_plainly(folder) as plain:
            yield plain
    except Exception as error:  # orbax and tensorstore raise many kinds for damaged files
        digests.verify_digests(folder)
        # On a store it is whole when it is complete, before it is sealed.
        whole = storage.is_remote(folder) or digests.is_sealed(folder)
        kind = UnusableDisk if whole else Damaged
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise kind(f'checkpoint {folder}: cannot be read: {reason}') from error
