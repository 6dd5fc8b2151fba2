"""What orbax is given: when a checkpoint gets its name, how arrays are written, short errors."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.base import Params, Path, UnusableDisk, UserError, require_kept, sync, tree_names
from vit_jax.checkpoints import digests

Pieces = dict[str, list[tuple[Any, np.ndarray]]]  # of each array parts, and where they lie in it


class Sealed(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A checkpoint that gets its name when its files and their digests are on the disk.

    Orbax makes one of each item too; those have theirs within a checkpoint without a name.
    """

    def __init__(self, temporary_path: Any, final_path: Any, **options: Any):
        self._final = final_path
        self._is_item = ocp.path.atomicity_types.TMP_DIR_SUFFIX in final_path.parent.name
        if not self._is_item:
            # Orbax renames when it has written its last file: to a name that still is not listed.
            final_path = temporary_path.with_name(f'{temporary_path.name}-written')
        super().__init__(temporary_path, final_path, **options)

    def get_final(self) -> Any:
        """The folder that the checkpoint gets."""
        return self._final

    async def finalize(self) -> None:
        """Called by process 0 when all have written; what it raises is the error of the save."""
        await super().finalize()
        if not self._is_item:
            written = pathlib.Path(super().get_final())
            digests.write_digests(written)
            written.rename(self._final)
            sync(written.parent)


class Committed(ocp.path.atomicity.CommitFileTemporaryPath):
    """A checkpoint on a store, which has its name at once: it gets its digests when it is complete.

    One that was killed in between is trusted as it is, like those of earlier versions.
    """

    check: Callable[[], None]  # of the Checkpoints that write it

    async def finalize(self) -> None:
        """As that of Sealed."""
        self.check()
        await super().finalize()
        if self._final_path.parent.name == digests.CHECKPOINTS:  # not one of its items
            digests.write_digests(self._final_path)


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """What writes the arrays of a run.

    Of an array that several devices hold, each writes a piece, where the pieces have a megabyte:
    cutting smaller ones takes longer than writing them whole, while training waits.
    """
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
    kinds = (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    registry = ocp.type_handlers.create_type_handler_registry(*kinds)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


@contextlib.contextmanager
def writing(folder: Path, along: Sequence[Path]) -> Iterator[None]:
    """An error of writing in few words: orbax and tensorstore raise many kinds, in many lines."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) and not isinstance(error, OSError):
            raise  # the work directory is held no more
        for path in along:
            require_kept(path)
        reason = ' '.join(str(error).split()) or type(error).__name__
        if len(reason) > 500:  # of tensorstore, with the system's word anywhere in it
            words = (os.strerror(code) for code in errno.errorcode)
            reason = next((word for word in words if word in reason), f'{reason[:400]} ...')
        raise UnusableDisk(f'{folder}: a checkpoint could not be written: {reason}') from error


def pieces(params: Params) -> Pieces:
    """A copy of the arrays, or of the parts of them that this process holds."""
    return {
        name: [(index, np.array(data)) for index, data in _distinct(leaf)]
        if isinstance(leaf, jax.Array)
        else [(..., np.array(leaf))]
        for name, leaf in tree_names.named_leaves(params).items()
    }


def _distinct(leaf: jax.Array) -> list[tuple[Any, Any]]:
    """The parts of an array on this process, each once where several devices hold it."""
    parts = {str(part.index): (part.index, part.data) for part in leaf.addressable_shards}
    return list(parts.values())
