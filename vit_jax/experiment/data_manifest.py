"""The data manifest of a run: its images, whether they changed, and whether it was trained on them.

WORKDIR/data_manifest.json.gz lists the images of each split in order: class names, image names,
labels and sizes. A run that starts or resumes compares its data with the manifest
(`compare_data`), to detect changed data and data that differs between hosts. Sizes of files beyond
the first 16,384 of a split are compared in the background.

If the training data or its split changes, the images that the run was trained on before stay in the
manifest. `vit_jax.evaluate` compares them with the images that it evaluates (`find_source_run`).
"""

import contextlib
import gzip
import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Literal, NamedTuple

from vit_jax.base import Path, UserError, plural, records, usable, write_bytes
from vit_jax.base.files import Limit, read_file
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.remote import is_remote_name
from vit_jax.checkpoints.store import FOLDER, checkpoint_folder
from vit_jax.config import read_config
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import Source, make_names_relative
from vit_jax.data.sources.opening import HeldOut
from vit_jax.distributed.processes import Job
from vit_jax.evaluation.probing import Probes
from vit_jax.experiment.workdirs import CONFIG, MANIFEST, Workdir

_MAX_SIZES = 16_384  # sizes of a split that are read before training, not in the background
_BLOCK = 1024  # sizes that the background check reads before it tests whether to stop


class SplitKey(NamedTuple):
    """The use of a split in a run, and its name: SPLIT, or `SPLIT of DATA` for further data."""

    role: Literal['train', 'eval']
    name: str
    until_step: int | None = None  # images that were replaced: their last step; None: in use

    def __str__(self) -> str:
        return f'trained on {self.name}' if self.role == 'train' else self.name


class SplitManifest(NamedTuple):
    """The images of a split in order, as JSON values.

    A label is a class name, or comma-separated class names. A size is the size of the image's file,
    or another number that changes with the image (see `Source.size_of`). If labels are not in
    memory, each label is a question mark, and the size also changes with the label. The sizes of
    the last images may be missing.
    """

    class_names: list[str]
    names: list[str]
    labels: list[str]
    sizes: list[int]


Manifest = dict[SplitKey, SplitManifest]


def name_sources(
    train: ImageReader | None, evals: Iterable[ImageReader], probes: Probes | None
) -> dict[SplitKey, Source]:
    """Returns the sources of a run by role and name. Training data is listed once."""
    readers = [*evals]
    for probe in probes.by_name.values() if probes else ():
        readers += [probe.train, probe.test]
    sources = dict[SplitKey, Source]()
    if train is not None:
        sources[SplitKey('train', train.source.split)] = train.source
    for source in (reader.source for reader in readers):
        if train is not None and source is train.source:
            continue
        is_training_data = train is not None and source.data == train.source.data
        name = source.split if is_training_data else f'{source.split} of {source.data}'
        sources[SplitKey('eval', name)] = source
    return sources


def make_split_manifest(source: Source, *, max_sizes: int) -> SplitManifest:
    """Lists the images of a split. If file sizes are not in memory, reads at most `max_sizes`."""
    indices = range(len(source))
    class_names = [*source.class_names]
    if not class_names or not source.labels_in_memory:
        labels = ['?'] * len(source)
    elif source.multi_label:
        labels = [', '.join(class_names[i] for i in row.nonzero()[0]) for row in source.labels]
    else:
        labels = [class_names[label] for label in source.labels.tolist()]
    names = make_names_relative(source.read_names(indices), source.data)
    sizes = source.read_sizes(indices if source.sizes_in_memory else indices[:max_sizes])
    return SplitManifest(class_names, names, labels, sizes.tolist())


@contextlib.contextmanager
def compare_data(
    workdir: Workdir, sources: dict[SplitKey, Source], job: Job, *, accept: bool = False
) -> Iterator[Callable[[float], None]]:
    """Compares the splits of a run with its manifest, which process 0 then updates.

    Args:
      workdir: The work directory.
      sources: The splits by role and name (see `name_sources`).
      job: This process of a job.
      accept: Whether to accept changed data, unless classes have other numbers.

    Yields:
      A function that waits up to the given number of seconds for the comparison of the remaining
      sizes, and raises its UserError if there is one.

    Raises:
      UserError: If the data of a run with checkpoints changed and is not accepted, or if the data
        differs between processes.
    """
    path = workdir.folder / MANIFEST
    manifest = {
        key: make_split_manifest(source, max_sizes=_MAX_SIZES) for key, source in sources.items()
    }
    recorded = Manifest()
    if job.index == 0:
        if digests.list_steps(workdir.folder / FOLDER):  # otherwise nothing was learned yet
            recorded = read_manifest(path)
            if not recorded:
                logging.warning('%s: missing or damaged; data changes are not detected', path)
        recorded = _update(workdir, recorded, manifest, accept=accept)
    if job.count > 1:

        def describe() -> list[str]:
            changes = describe_changes(read_manifest(path), manifest)
            return [*changes.values()] or ['the names of the splits']

        facts = {'digest': hashlib.sha256(_to_json(manifest).encode()).hexdigest()}
        job.require_equal('the data', facts, describe)
    if job.index > 0:  # process 0 compares the remaining sizes
        yield lambda _: None
        return
    stop = threading.Event()

    def compare_sizes() -> None:
        complete = {
            key: _read_remaining_sizes(split, sources[key], stop) for key, split in manifest.items()
        }
        _update(workdir, recorded, complete, accept=accept)

    with futures.ThreadPoolExecutor(1) as pool:
        comparison = pool.submit(compare_sizes)

        def check(wait_seconds: int | float) -> None:
            if futures.wait([comparison], wait_seconds).done:
                comparison.result()

        try:
            yield check
        finally:
            stop.set()


def _read_remaining_sizes(
    split: SplitManifest, source: Source, stop: threading.Event
) -> SplitManifest:
    """Reads the sizes that a manifest lacks, until `stop` is set."""
    sizes = [*split.sizes]
    indices = range(len(split.names))
    while len(sizes) < len(indices) and not stop.is_set():
        block = indices[len(sizes) :][:_BLOCK]
        sizes += source.read_sizes(block).tolist()
    return split._replace(sizes=sizes)


def _update(workdir: Workdir, recorded: Manifest, manifest: Manifest, *, accept: bool) -> Manifest:
    """Updates the manifest of a run, and returns it.

    Raises UserError for changes that are not accepted.
    """
    changes = describe_changes(recorded, manifest)
    if changes:
        text = '\n  '.join(
            [f'{workdir.folder}: the data has changed since the run started:', *changes.values()]
        )
        is_acceptable = all(
            keeps_class_numbers(recorded[key], manifest[key])
            for key in changes
            if key.role == 'train'
        )
        if not (accept and is_acceptable):
            again = f'train in another --workdir with --config.start_from={workdir.folder}'
            advice = 'or resume with --accept_data_changes'
            if not is_acceptable:
                advice = '--accept_data_changes cannot be used, because class indices changed'
            raise UserError(f'{text}\nrestore the data; or {again}; {advice}')
        logging.warning('%s', text)
    step = max(digests.list_steps(workdir.folder / FOLDER), default=0)
    updated = dict(manifest)
    for key, old in recorded.items():
        if key not in changes:  # keeps sizes that an earlier start has read
            updated[key] = max(manifest.get(key, old), old, key=lambda split: len(split.sizes))
        elif key.role == 'train':
            updated[key._replace(until_step=step)] = old
    if updated != recorded:
        workdir.check_held()
        text = _to_json(updated)
        data = gzip.compress(text.encode(), compresslevel=1, mtime=0)
        write_bytes(workdir.folder / MANIFEST, data)
    return updated


def _to_json(manifest: Manifest) -> str:
    return json.dumps([key._asdict() | split._asdict() for key, split in manifest.items()])


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest; returns an empty one if it is missing or damaged."""
    with usable(path):
        data = read_file(path, Limit.TABLE_BYTES) if path.exists() else b''
    manifest = Manifest()
    try:
        for fields in json.loads(gzip.decompress(data)):
            key = SplitKey(**{name: fields.pop(name) for name in SplitKey._fields})
            manifest[key] = SplitManifest(**fields)
    except Exception:  # gzip, zlib and json raise many types for damaged files
        return {}
    return manifest


def describe_changes(old: Manifest, new: Manifest) -> dict[SplitKey, str]:
    """Describes the splits that are in both manifests and differ."""
    texts = dict[SplitKey, str]()
    for key in new:
        if key in old and (differences := describe_differences(old[key], new[key])):
            texts[key] = f'{key}: {"; ".join(differences)}'
    return texts


def describe_differences(old: SplitManifest, new: SplitManifest) -> list[str]:
    """Describes the differences by kind, each with a count and up to three examples.

    An image whose label changed counts as removed and added.
    """
    old_sizes = dict(zip(old.names, old.sizes, strict=False))
    new_sizes = zip(new.names, new.sizes, strict=False)
    examples = {
        'replaced image': [
            repr(name) for name, size in new_sizes if old_sizes.get(name, size) != size
        ]
    }
    if old._replace(sizes=[]) != new._replace(sizes=[]):
        old_classes = Counter(map(repr, old.class_names))
        new_classes = Counter(map(repr, new.class_names))
        old_images = Counter(map('{!r} ({})'.format, old.names, old.labels))
        new_images = Counter(map('{!r} ({})'.format, new.names, new.labels))
        examples['removed class'] = [*(old_classes - new_classes).elements()]
        examples['added class'] = [*(new_classes - old_classes).elements()]
        examples['renumbered class'] = _renumbered(old.class_names, new.class_names)
        examples['removed image'] = [*(old_images - new_images).elements()]
        examples['added image'] = [*(new_images - old_images).elements()]
        if not any(examples.values()):
            return ['the order of the images changed']
    return [
        f'{plural(len(texts), kind)}: {", ".join(texts[:3])}'
        for kind, texts in examples.items()
        if texts
    ]


def keeps_class_numbers(old: SplitManifest, new: SplitManifest) -> bool:
    """Returns whether each class has the same index as before. Names may have changed."""
    same_count = len(old.class_names) == len(new.class_names)
    return same_count and not _renumbered(old.class_names, new.class_names)


def _renumbered(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Describes the classes whose index changed. Several classes can have the same name."""
    old_numbers = {name: number for number, name in enumerate(old)}
    texts = list[str]()
    for number, name in enumerate(new):
        is_same = number < len(old) and old[number] == name
        if name in old_numbers and not is_same:
            texts.append(f'{name!r} from {old_numbers[name]} to {number}')
    return texts


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
        trained_names = {name for name, _ in self.training_images}
        named = [index for index, image in enumerate(images) if image in trained_names]
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
        split = splits[0] if splits else config['eval_split']
        start = config['start_from']
    images = set[tuple[str, int]]()
    gaps = list[str]()
    manifest = read_manifest(workdir / MANIFEST)
    trained = [listed for key, listed in manifest.items() if key.role == 'train']
    for listed in trained:
        sizes = zip(listed.names, listed.sizes, strict=False)
        images |= {(image, size) for image, size in sizes if size != -1}  # -1: unknown
    if not trained or any(len(listed.sizes) < max(1, len(listed.names)) for listed in trained):
        gaps.append(f'{workdir / MANIFEST}: missing, damaged or incomplete')
    if start and (earlier := find_source_run(start, later | {workdir})):
        images |= earlier.training_images
        gaps += earlier.gaps
    elif start and not is_remote_name(start) and not os.path.exists(start):
        gaps.append(f'{start}: missing; {workdir} was started from it')
    return SourceRun(workdir, str(config['data']), held_out, split, images, gaps)
