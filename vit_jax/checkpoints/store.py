"""Checkpoints of a run: the state of a step, written by orbax while training goes on.

    WORKDIR/checkpoints/STEP/params     the parameters to use: averaged where there is an average
                            /training   what else the next step needs
                            /card       JSON: model, pre-processing, class names, position grid
                            /digests.json   of all these files (checkpoints/digests.py)

`params` stands alone, so that using a checkpoint needs no optimizer.
"""

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.base import tree_names
from vit_jax.base.array_types import Params
from vit_jax.base.errors import MissingFile, UnusableDisk, UserError
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.digests import Damaged
from vit_jax.parallel.sharding_rules import abstract

FOLDER = 'checkpoints'


class Checkpoints:
    """The checkpoints of one work directory. Saving returns once the arrays are copied."""

    def __init__(self, workdir: str | pathlib.Path, *, keep: int):
        self._folder = pathlib.Path(workdir).absolute() / FOLDER
        self._sealing: threading.Thread | None = None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=True,
            # Removed by renaming first: a kill in between leaves no listed, half-empty step.
            todelete_subdir='.trash',
        )
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=options,
            item_names=('params', 'training', 'card'),
            item_handlers={
                'params': ocp.StandardCheckpointHandler(),
                'training': ocp.StandardCheckpointHandler(),
                'card': ocp.JsonCheckpointHandler(),
            },
        )

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint, complete or being written; complete after `wait`."""
        return self._manager.latest_step()

    def path(self, step: int) -> pathlib.Path:
        """Where the checkpoint of a step lies."""
        return self._folder / str(step)

    def save(self, step: int, params: Params, training: Any, card: dict[str, Any]) -> None:
        """Begins to save; the disk is written in the background. Saves no step twice.

        Raises OSError that names what went wrong with this checkpoint or the one before.
        """
        if step == self.latest_step:
            return
        with _written(self._folder):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    training=ocp.args.StandardSave(tree_names.named_leaves(training)),
                    card=ocp.args.JsonSave(card),
                ),
            )
        if jax.process_index() == 0:
            self._sealing = threading.Thread(target=self._seal, args=(step,), daemon=True)
            self._sealing.start()

    def _seal(self, step: int) -> None:
        """Writes the digests of a checkpoint as soon as it is complete."""
        while not self.path(step).exists() and self._manager.is_saving_in_progress():
            time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):  # never written, or removed for newer ones
            digests.write_digests(self.path(step))

    def restore(self, step: int, like: tuple[Params, Any], shardings: tuple[Any, Any]) -> Any:
        """(params, training) of a step, each array where `shardings` says.

        Raises UserError with the names where the saved arrays are not those of `like`.
        """
        params, training = abstract(like, shardings)
        wanted = {'params': params, 'training': tree_names.named_leaves(training)}
        with _readable(self.path(step)):
            metadata = self._manager.item_metadata(step)
            saved = {item: tree_names.named_leaves(metadata[item].tree) for item in wanted}
        for item, target in wanted.items():
            where = f'checkpoint {self.path(step)}/{item}'
            tree_names.compare_names(saved[item], tree_names.named_leaves(target), where=where)
        arguments = {item: ocp.args.StandardRestore(value) for item, value in wanted.items()}
        with _readable(self.path(step)):
            restored = self._manager.restore(step, args=ocp.args.Composite(**arguments))
        leaves = [restored['training'][name] for name in wanted['training']]
        return restored['params'], jax.tree.unflatten(jax.tree.structure(training), leaves)

    def check(self) -> None:
        """Raises OSError that says what went wrong in the background, if anything did."""
        with _written(self._folder):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Returns when all that was saved is on disk; raises OSError for what went wrong."""
        with _written(self._folder):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        if self._sealing is not None:
            self._sealing.join()

    def close(self) -> None:
        """Waits, and ends the background work."""
        self._manager.close()


def quarantine_damaged(workdir: pathlib.Path) -> list[str]:
    """Looks at the newest checkpoint, where it is damaged at the one before, until one is sound.

    Damaged ones are moved to checkpoints/damaged; a line about each.
    """
    said = []
    for step in digests.steps(workdir / FOLDER):
        folder = workdir / FOLDER / str(step)
        try:
            if not _is_whole(folder):
                raise Damaged(f'checkpoint {folder}: not complete')
            digests.verify_digests(folder)
        except Damaged as error:
            said.append(f'{error}; moved to {digests.quarantine(folder)}')
        else:
            break
    return said


def _is_whole(folder: pathlib.Path) -> bool:
    return (folder / 'card').is_dir() and (folder / 'params').is_dir()


def find(path: str) -> pathlib.Path:
    """The checkpoint that a path means: a step's own folder, or the newest of a work directory.

    Raises MissingFile that says what is there instead.
    """
    given = pathlib.Path(path).absolute()
    if _is_whole(given):
        return given
    if not given.exists():
        raise MissingFile(f'checkpoint {path}: no such folder')
    if 'orbax-checkpoint-tmp' in given.name:
        raise MissingFile(f'checkpoint {path}: half-written; its run did not finish saving it')
    for folder in (given / FOLDER, given):
        for step in digests.steps(folder):
            if _is_whole(folder / str(step)):
                return folder / str(step)
    raise MissingFile(
        f'checkpoint {path}: neither a checkpoint (params/, card/) nor a work directory with a '
        f'complete one under {FOLDER}/'
    )


def load_card(path: str) -> tuple[dict[str, Any], pathlib.Path]:
    """The card as JSON values, and the folder of the checkpoint that a path means."""
    folder = find(path)
    with _readable(folder):
        return ocp.JsonCheckpointHandler().restore(folder / 'card'), folder


def load_params(path: str) -> Params:
    """The parameters, in host memory, of the checkpoint that a path means.

    Raises Damaged where its files are not as they were written.
    """
    folder = find(path)
    digests.verify_digests(folder)
    with _readable(folder):
        reader = ocp.PyTreeCheckpointHandler()
        structure = reader.metadata(folder / 'params').tree
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)
        restored: Params = reader.restore(
            folder / 'params', args=ocp.args.PyTreeRestore(restore_args=to_host)
        )
        return restored


def save_alone(folder: pathlib.Path, params: Params, card: dict[str, Any]) -> None:
    """Writes a checkpoint that belongs to no run: parameters and card.

    Raises UserError where the folder exists.
    """
    if folder.exists():
        raise UserError(f'{folder}: exists already')
    handler = ocp.CompositeCheckpointHandler(
        params=ocp.StandardCheckpointHandler(), card=ocp.JsonCheckpointHandler()
    )
    with ocp.Checkpointer(handler) as writer:
        items = {'params': ocp.args.StandardSave(params), 'card': ocp.args.JsonSave(card)}
        writer.save(folder.absolute(), args=ocp.args.Composite(**items))
    digests.write_digests(folder.absolute())


@contextlib.contextmanager
def _readable(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # orbax and tensorstore raise many kinds for damaged files
        reason = str(error).strip().splitlines()[0][:300]
        raise Damaged(f'checkpoint {folder}: cannot be read: {reason}') from error


@contextlib.contextmanager
def _written(folder: pathlib.Path) -> Iterator[None]:
    """An error of writing in few words: orbax and tensorstore raise many kinds, in many lines."""
    try:
        yield
    except Exception as error:
        reason = ' '.join(str(error).split()) or type(error).__name__
        if len(reason) > 500:  # of tensorstore: paths in the middle, the system's word at the end
            reason = f'{reason[:200]} ... {reason[-200:]}'
        raise UnusableDisk(f'{folder}: a checkpoint could not be written: {reason}') from error
