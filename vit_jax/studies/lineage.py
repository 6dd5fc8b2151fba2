"""Finds the run that wrote a checkpoint, and the images that the checkpoint was trained on."""

import os
from typing import NamedTuple

from vit_jax.base import Path, UserError, records, usable
from vit_jax.checkpoints.remote import is_remote_name
from vit_jax.checkpoints.store import FOLDER, checkpoint_folder
from vit_jax.config import read_config
from vit_jax.data.manifest import read_manifest
from vit_jax.data.sources.base import Source, make_names_relative
from vit_jax.data.sources.opening import HeldOut
from vit_jax.experiment.data_manifest import TRAINED_PREFIX
from vit_jax.experiment.workdirs import CONFIG, MANIFEST


class SourceRun(NamedTuple):
    """The run that wrote a checkpoint: its data, and its training images.

    Training images of earlier runs, through `start_from`, are included.
    """

    workdir: Path
    data: str
    held_out: HeldOut  # how data without splits was divided
    split: str  # the evaluated split
    training_images: set[tuple[str, int]]  # (image name within the data, size)
    gaps: list[str]  # reasons why `find_training_images` may miss images

    def find_split(self, data: str) -> str | None:
        """Returns the evaluated split if the run used the same data, else None."""
        return self.split if os.path.realpath(self.data) == os.path.realpath(data) else None

    def find_training_images(self, source: Source) -> set[int]:
        """Returns the indices of the images that this run or an earlier one was trained on.

        Images are compared by name within the data, and by size or checksum.
        """
        paths = source.read_names(range(len(source)))
        prefix = os.path.join(self.data, '')
        images = make_names_relative([path.removeprefix(prefix) for path in paths], source.data)
        recorded = {name for name, _ in self.training_images}
        named = [index for index, image in enumerate(images) if image in recorded]
        sizes = zip(named, source.read_sizes(named).tolist(), strict=True)
        return {i for i, size in sizes if (images[i], size) in self.training_images}


def find_source_run(checkpoint: str, later: frozenset[Path] = frozenset()) -> SourceRun | None:
    """Finds the run that wrote a checkpoint; None if it is not in a work directory.

    Follows `start_from` back through earlier runs. `later` are the work directories that were
    already visited. They prevent an endless loop if a run was replaced by one that started from it.
    """
    try:
        folder = checkpoint_folder(checkpoint)
    except UserError:
        return None
    workdir = folder.parent.parent
    path = workdir / CONFIG
    if folder.parent.name != FOLDER or not path.exists() or workdir in later:
        return None
    with usable(path, 'the configuration of a run'):
        config = read_config(path)
        held_out = records.from_dict(HeldOut, config['held_out'], where='config.held_out')
        splits = [one['split'] for one in config['evals'].values() if one['data'] is None]
        split, start = splits[0] if splits else config['eval_split'], config['start_from']
    trained_on, gaps = set[tuple[str, int]](), list[str]()
    recorded = read_manifest(workdir / MANIFEST).items()
    manifests = [one for name, one in recorded if name.startswith(TRAINED_PREFIX)]
    for manifest in manifests:
        sizes = zip(manifest.names, manifest.sizes, strict=False)
        trained_on |= {(image, size) for image, size in sizes if size != -1}  # -1: unknown
    if not manifests or any(len(one.sizes) < max(1, len(one.names)) for one in manifests):
        gaps.append(f'{workdir / MANIFEST}: missing, damaged or incomplete')
    if start and (earlier := find_source_run(start, later | {workdir})):
        trained_on |= earlier.training_images
        gaps += earlier.gaps
    elif start and not is_remote_name(start) and not os.path.exists(start):
        gaps.append(f'{start}: missing; {workdir} was started from it')
    return SourceRun(workdir, str(config['data']), held_out, split, trained_on, gaps)
