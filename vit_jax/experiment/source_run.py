"""The run that wrote a checkpoint: what it held out, and which images it was trained on."""

import os
from typing import Any, NamedTuple

from vit_jax.base import Path, UserError, counted, parsing, records
from vit_jax.checkpoints import names
from vit_jax.checkpoints.store import FOLDER, checkpoint_folder
from vit_jax.config import read_config
from vit_jax.data.reading import ImageReader
from vit_jax.data.sources.base import Source, relative_names
from vit_jax.data.sources.folders import SPLIT_NAMES
from vit_jax.data.sources.opening import HeldOut
from vit_jax.experiment.data_record import SplitRecord, read_training_images
from vit_jax.experiment.workdirs import CONFIG, DATA


class SourceRun(NamedTuple):
    """The run that wrote a checkpoint, and what it and the runs before it were trained on."""

    data: str
    held_out: HeldOut  # of data without splits
    split: str  # that the run was tested on
    trained_on: list[tuple[str, SplitRecord]]  # data, and the images of the training split
    unknown: list[str]  # why images that were trained on may not be counted

    def split_of(self, data: str) -> str:
        """Returns the split that the run was tested on, or `test` for other data."""
        return self.split if _place(self.data) == _place(data) else 'test'

    def count_trained(self, source: Source) -> int:
        """Counts the images in the source that the model was trained on.

        Two images count as the same if their files have the same number of bytes, and either the
        same path or the same name within the data. If only one of them is in the folder of a split
        (such as train/), that folder is ignored. Arrays are compared by their checksums. Images
        without a known size are not counted.
        """
        trained: dict[str, set[int]] = {}
        whole = set[str]()
        for place, images in self.trained_on:
            whole.update(images.names)
            for name, size in zip(images.names, images.sizes, strict=False):
                for key in {name, _without_split(name), _absolute(name, place)}:
                    trained.setdefault(key, set()).add(size)
        trained_sizes = []
        for name in relative_names(source.read_names(range(len(source))), source.data):
            without = {_without_split(name)} & whole  # a name of data that had no splits yet
            keys = {name, _absolute(name, source.data), *without}
            trained_sizes.append(set[int]().union(*(trained.get(key, ()) for key in keys)) - {-1})
        known = [index for index, found in enumerate(trained_sizes) if found]
        now = source.read_sizes(known).tolist()
        return sum(size in trained_sizes[i] for i, size in zip(known, now, strict=True))


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
        place = str(config['data'])
    images = read_training_images(workdir)
    trained_on = [(place, images)] if images else []
    unknown = [] if images else [f'{workdir / DATA} is missing']
    earlier = find_source_run(start, later | {workdir}) if start else None
    if earlier:
        trained_on, unknown = trained_on + earlier.trained_on, unknown + earlier.unknown
    elif start and not names.is_elsewhere(start) and not os.path.exists(start):
        unknown.append(f'cannot find {start}, the start_from of {workdir}')
    return SourceRun(place, held_out, split, trained_on, unknown)


def trained_before(evals: dict[str, ImageReader], start: str) -> list[str]:
    """Returns a line for each evaluation with images that the network at the start has learned."""
    lines = list[str]()
    if (run := find_source_run(start)) is None:
        return lines
    for name, reader in evals.items():
        if count := run.count_trained(reader.source):
            total = counted(len(reader.source), 'image')
            text = 'the start_from model was already trained on'
            lines.append(f'warning: {name}: {text} {count:,} of these {total}')
    return lines


def _place(data: Any) -> str:
    return os.path.realpath(data) if os.path.exists(str(data)) else str(data)


def _without_split(name: str) -> str:
    """Returns the name of an image without the folder of its split."""
    first, _, rest = name.partition(os.sep)
    return rest if rest and first.casefold() in SPLIT_NAMES else name


def _absolute(name: str, data: str) -> str:
    """Returns the path of an image within the data; one key for all arrays."""
    if data.endswith('.npz'):
        return ''
    root = _place(data)
    folder = root if os.path.isdir(root) else os.path.dirname(root)
    return os.path.normpath(os.path.join(folder, name))
