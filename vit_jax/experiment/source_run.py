"""The run that wrote a checkpoint: what it held out, and which images it was trained on."""

import os
from typing import Any, NamedTuple

from vit_jax.base import Path, UserError, counted, parsing, records
from vit_jax.checkpoints import names
from vit_jax.checkpoints.store import FOLDER, checkpoint_folder
from vit_jax.config import read_config
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import Source, relative_names
from vit_jax.data.sources.folders import SPLIT_NAMES
from vit_jax.data.sources.opening import HeldOut
from vit_jax.experiment.data_record import read_training_images
from vit_jax.experiment.workdirs import CONFIG, DATA


class SourceRun(NamedTuple):
    """The run that wrote a checkpoint, and what it and the runs before it were trained on."""

    data: str
    held_out: HeldOut  # of data without splits
    split: str  # that the run was tested on
    trained_on: dict[str, set[int]]  # sizes of training images by their names within the data
    unknown: list[str]  # why training images may be missing

    def split_of(self, data: str) -> str:
        """Returns the split that the run was tested on, or `test` for other data."""
        return self.split if _real(self.data) == _real(data) else 'test'

    def count_trained(self, source: Source) -> int:
        """Counts the images in the source that the model was trained on.

        Two images count as the same if their files have the same number of bytes and the same name
        within the data. If only one of them is in the folder of a split (such as train/), that
        folder is ignored. Arrays are compared by their checksums.
        """
        inner: dict[str, set[int]] = {}
        for name, sizes in self.trained_on.items():
            inner.setdefault(_without_split(name), set()).update(sizes)
        candidates: list[set[int]] = []
        for name in relative_names(source.read_names(range(len(source))), source.data):
            moved = self.trained_on.get(_without_split(name), set())
            candidates.append(self.trained_on.get(name, moved) | inner.get(name, set()))
        named = [index for index, sizes in enumerate(candidates) if sizes]
        now = source.read_sizes(named).tolist()
        return sum(size in candidates[i] for i, size in zip(named, now, strict=True))


def find_source_run(checkpoint: str, later: frozenset[Path] = frozenset()) -> SourceRun | None:
    """Returns the run that wrote a checkpoint, or None if it is not in a work directory.

    Also follows `start_from` back through earlier runs. Skips the work directories in `later`,
    which were visited already: a run may have been replaced by one that started from it.
    """
    try:
        folder = checkpoint_folder(checkpoint)
    except UserError:
        return None
    workdir = folder.parent.parent
    path = workdir / CONFIG
    if folder.parent.name != FOLDER or not path.exists() or workdir in later:
        return None
    with parsing(path, 'the configuration of a run'):
        config = read_config(path)
        held_out = records.from_dict(HeldOut, config['held_out'], where='config.held_out')
        own = [one['split'] for one in config['evals'].values() if one['data'] is None]
        split, start = own[0] if own else config['eval_split'], config['start_from']
    run = SourceRun(str(config['data']), held_out, split, trained_on={}, unknown=[])
    if images := read_training_images(workdir):
        known = zip(images.names, images.sizes, strict=False)
        run.trained_on.update({name: {size} for name, size in known if size != -1})
    else:
        run.unknown.append(f'{workdir / DATA} is missing')
    if start and (earlier := find_source_run(start, later | {workdir})):
        for name, sizes in earlier.trained_on.items():
            run.trained_on.setdefault(name, set()).update(sizes)
        run.unknown.extend(earlier.unknown)
    elif start and not names.is_elsewhere(start) and not os.path.exists(start):
        run.unknown.append(f'cannot find {start}, the start_from of {workdir}')
    return run


def trained_before(evals: dict[str, ImageReader], start: str) -> list[str]:
    """Returns a warning for each evaluation on images that `start_from` was trained on."""
    lines = list[str]()
    if run := find_source_run(start):
        for name, reader in evals.items():
            if count := run.count_trained(reader.source):
                text = f'the start_from model was already trained on {count:,} of these'
                lines.append(f'warning: {name}: {text} {counted(len(reader.source), "image")}')
    return lines


def _real(data: Any) -> str:
    return os.path.realpath(data) if os.path.exists(str(data)) else str(data)


def _without_split(name: str) -> str:
    """Returns the name of an image without the folder of its split."""
    first, _, rest = name.partition(os.sep)
    return rest if rest and first.casefold() in SPLIT_NAMES else name
