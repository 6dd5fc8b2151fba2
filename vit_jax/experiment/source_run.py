"""The run that wrote a checkpoint: what it held out, and which images it was trained on."""

import os
from typing import NamedTuple

from vit_jax.base import Path, UserError, counted, parsing, records
from vit_jax.checkpoints import names
from vit_jax.checkpoints.store import FOLDER, checkpoint_folder
from vit_jax.config import read_config
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import Source, relative_names
from vit_jax.data.sources.opening import HeldOut
from vit_jax.experiment.data_record import read_training_images
from vit_jax.experiment.workdirs import CONFIG, DATA


class SourceRun(NamedTuple):
    """The run that wrote a checkpoint, and what it and the runs before it were trained on."""

    data: str
    held_out: HeldOut  # of data without splits
    split: str  # that the run was tested on
    trained_on: set[tuple[str, int]]  # names of training images within the data, and their sizes
    gaps: tuple[str, ...]  # why `trained_on` may lack images

    def split_of(self, data: str) -> str:
        """Returns the split that the run was tested on, or `test` for other data."""
        return self.split if os.path.realpath(self.data) == os.path.realpath(data) else 'test'

    def count_trained(self, source: Source) -> int:
        """Counts the images in the source that the model was trained on.

        Two images count as the same if their files have the same name within the data and the same
        number of bytes. Arrays are compared by their checksums.
        """
        known = {name for name, _ in self.trained_on}
        images = relative_names(source.read_names(range(len(source))), source.data)
        named = [index for index, name in enumerate(images) if name in known]
        sizes = zip(named, source.read_sizes(named).tolist(), strict=True)
        return sum((images[index], size) in self.trained_on for index, size in sizes)

    def describe_gaps(self) -> list[str]:
        """Returns a warning for each reason why `count_trained` may count too few images."""
        return [f'warning: {gap}: not all training images are known' for gap in self.gaps]


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
    images, gaps = read_training_images(workdir), list[str]()
    if len(images.sizes) < max(1, len(images.names)):
        gaps.append(f'{workdir / DATA}: missing, damaged or incomplete')
    sizes = zip(images.names, images.sizes, strict=False)
    trained_on = {(name, size) for name, size in sizes if size != -1}
    if start and (earlier := find_source_run(start, later | {workdir})):
        trained_on |= earlier.trained_on
        gaps += earlier.gaps
    elif start and not names.is_elsewhere(start) and not os.path.exists(start):
        gaps.append(f'{start}, the start_from of {workdir}, is missing')
    return SourceRun(str(config['data']), held_out, split, trained_on, tuple(gaps))


def trained_before(evals: dict[str, ImageReader], start: str) -> list[str]:
    """Returns a warning for each evaluation on images that `start_from` was trained on."""
    lines = list[str]()
    if run := find_source_run(start):
        for name, reader in evals.items():
            if count := run.count_trained(reader.source):
                text = f'the start_from model was already trained on {count:,} of these'
                lines.append(f'warning: {name}: {text} {counted(len(reader.source), "image")}')
        lines += run.describe_gaps()
    return lines
