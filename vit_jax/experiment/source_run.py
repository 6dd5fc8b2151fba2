"""The run that wrote a checkpoint: what it held out, and which images it was trained on."""

import filecmp
import os
from collections import Counter
from typing import NamedTuple, Optional

from vit_jax.base import Path, UserError, counted, parsing, records
from vit_jax.checkpoints import remote
from vit_jax.checkpoints.store import FOLDER, checkpoint_folder
from vit_jax.config import read_config
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import Source, relative_names
from vit_jax.data.sources.opening import HeldOut
from vit_jax.experiment.data_record import TRAINED, read_record
from vit_jax.experiment.workdirs import CONFIG, DATA


class SourceRun(NamedTuple):
    """The run that wrote a checkpoint: its data, and the images that it was trained on."""

    data: str
    held_out: HeldOut  # of data without splits
    split: str  # that the run was tested on
    trained_on: set[tuple[str, int]]  # names of training images within the data, and their sizes
    earlier: Optional['SourceRun']  # the run that it started from
    gaps: list[str]  # why `find_trained` may miss images

    def has_data(self, data: str) -> bool:
        """Returns whether these are the data of the run."""
        return os.path.realpath(self.data) == os.path.realpath(data)

    def split_of(self, data: str) -> str:
        """Returns the split that the run was tested on, or `test` for other data."""
        return self.split if self.has_data(data) else 'test'

    def find_trained(self, source: Source) -> set[int]:
        """Returns the indices of the images that this run or an earlier one was trained on.

        An image is recognized by its name within the data, and by its size or checksum. If the
        training image still exists, its bytes must equal those of this image. A file of the run's
        own data is also recognized after it was moved to another split (see `_original_names`).
        """
        paths = source.read_names(range(len(source)))
        own = os.path.join(self.data, '')
        images = relative_names([path.removeprefix(own) for path in paths], source.data)
        recorded = {name for name, _ in self.trained_on}
        if self.has_data(source.data):
            images = _original_names(images, recorded, self.data)
        named = [index for index, image in enumerate(images) if image in recorded]
        trained = self.earlier.find_trained(source) if self.earlier else set[int]()
        for index, size in zip(named, source.read_sizes(named).tolist(), strict=True):
            original = os.path.join(self.data, images[index])
            if (images[index], size) in self.trained_on and not _differ(original, paths[index]):
                trained.add(index)
        return trained

    def describe_gaps(self) -> list[str]:
        """Returns a warning for each reason why `find_trained` may miss images."""
        return [f'warning: {gap}: not all training images are known' for gap in self.gaps]


def _original_names(images: list[str], recorded: set[str], data: str) -> list[str]:
    """Gives files that were moved to another split their recorded names.

    A file was moved if a recorded name ends in its FOLDER/NAME, and no other file in the folder of
    the data has the same FOLDER/NAME.
    """
    originals = {_end(name): name for name in recorded}
    if originals.keys().isdisjoint(_end(image) for image in images if image not in recorded):
        return images
    paths = (os.path.join(folder, file) for folder, _, files in os.walk(data) for file in files)
    count = Counter(map(_end, paths))
    moved = {end: name for end, name in originals.items() if count[end] == 1}
    return [name if name in recorded else moved.get(_end(name), name) for name in images]


def _end(image: str) -> str:
    """Returns the name of a file with the name of its folder, which often is the class."""
    return os.sep.join(image.split(os.sep)[-2:])


def _differ(original: str, path: str) -> bool:
    """Returns whether the original file still exists with other bytes."""
    exists = os.path.isfile(original) and not os.path.samefile(original, path)
    return exists and not filecmp.cmp(original, path, shallow=False)


def find_source_run(checkpoint: str, later: frozenset[Path] = frozenset()) -> SourceRun | None:
    """Returns the run that wrote a checkpoint, or None if it is not in a work directory.

    Also follows `start_from` back through earlier runs, and warns of one that is missing. Skips the
    work directories in `later`, which were visited already: a run may have been replaced by one
    that started from it.
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
    trained_on, gaps = set[tuple[str, int]](), list[str]()
    splits = read_record(workdir / DATA).items()
    learned = [images for name, images in splits if name.startswith(TRAINED)]
    for images in learned:
        sizes = zip(images.names, images.sizes, strict=False)
        trained_on |= {(image, size) for image, size in sizes if size != -1}
    if not learned or any(len(one.sizes) < max(1, len(one.names)) for one in learned):
        gaps.append(f'{workdir / DATA}: missing, damaged or incomplete')
    earlier = find_source_run(start, later | {workdir}) if start else None
    if earlier:
        gaps += earlier.gaps
    elif start and not remote.is_remote_name(start) and not os.path.exists(start):
        gaps.append(f'{start}, the start_from of {workdir}, is missing')
    return SourceRun(str(config['data']), held_out, split, trained_on, earlier, gaps)


def trained_before(evals: dict[str, ImageReader], start: str) -> list[str]:
    """Returns a warning for each evaluation on images that `start_from` was trained on."""
    lines = list[str]()
    if run := find_source_run(start):
        for name, reader in evals.items():
            if count := len(run.find_trained(reader.source)):
                text = f'the start_from model was already trained on {count:,} of these'
                lines.append(f'warning: {name}: {text} {counted(len(reader.source), "image")}')
        lines += run.describe_gaps()
    return lines
