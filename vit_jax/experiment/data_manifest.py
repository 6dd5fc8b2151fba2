"""Writes and compares the data manifest of a run, data_manifest.json.gz in its work directory.

The manifest has a `SplitManifest` for each split. A run that starts or resumes compares it with the
data, to detect changed data and data that differs between hosts. Sizes of files beyond the first
16,384 of a split are compared in the background.

If the data or the split changes, the images that the run was trained on before stay in the
manifest, under a split name that starts with `TRAINED_PREFIX`. `vit_jax.evaluate` compares them
with the images that it evaluates (studies/lineage.py).
"""

import contextlib
import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures

from vit_jax.base import UserError
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER
from vit_jax.data import manifest
from vit_jax.data.loading import ImageReader
from vit_jax.data.manifest import Manifest
from vit_jax.data.sources.base import Source
from vit_jax.distributed.processes import Job
from vit_jax.evaluation.probing import Probes
from vit_jax.experiment.workdirs import MANIFEST, Workdir

TRAINED_PREFIX = 'trained on '  # prefix of the names of training splits in the manifest
_MAX_SIZES = 16_384  # sizes of a split that are read before training, not in the background
_BLOCK = 1024  # sizes that the background check reads before it tests whether to stop


def name_sources(
    train: ImageReader | None, evals: Iterable[ImageReader], probes: Probes | None
) -> dict[str, Source]:
    """Names the sources of a run: SPLIT, or `SPLIT of DATA` if DATA is not the training data."""
    probed = [(one.train, one.test) for one in probes.by_name.values()] if probes else []
    readers = itertools.chain([train] if train else [], evals, *probed)
    main, names = train.source if train else None, dict[str, Source]()
    for one in (reader.source for reader in readers):
        name = one.split if main and one.data == main.data else f'{one.split} of {one.data}'
        names[TRAINED_PREFIX + name if one is main else name] = one
    return names


@contextlib.contextmanager
def compare_data(
    workdir: Workdir, sources: dict[str, Source], job: Job, *, accept: bool = False
) -> Iterator[Callable[[float], None]]:
    """Compares the splits of a run with its manifest, which process 0 then updates.

    Args:
      workdir: The work directory.
      sources: The splits by name (see `name_sources`).
      job: This process of a job.
      accept: Whether to accept changed data, unless classes have other numbers.

    Yields:
      A function that waits up to the given number of seconds for the comparison of the remaining
      sizes, and raises its UserError if there is one.

    Raises:
      UserError: If the data of a run with checkpoints changed and is not accepted, or if the data
        differs between processes.
    """
    path, recorded, stop = workdir.folder / MANIFEST, Manifest(), threading.Event()
    splits = {
        x: manifest.make_split_manifest(one, max_sizes=_MAX_SIZES) for x, one in sources.items()
    }
    if job.index == 0:
        if digests.list_steps(workdir.folder / FOLDER):  # otherwise nothing was learned yet
            recorded = manifest.read_manifest(path)
            if not recorded:
                logging.warning('%s: missing or damaged; data changes are not detected', path)
        recorded = _update(workdir, recorded, splits, accept=accept)
    if job.count > 1:
        ours = {'digest': hashlib.sha256(json.dumps(splits).encode()).hexdigest()}

        def describe() -> list[str]:
            changes = manifest.describe_changes(manifest.read_manifest(path), splits)
            return [*changes.values()] or ['the names of the splits']

        job.require_equal('the data', ours, describe)
    complete = dict(splits) if job.index == 0 else {}  # process 0 compares and writes

    def compare_sizes() -> None:
        for name, split in complete.items():
            sizes, count = [*split.sizes], len(split.names)
            while len(sizes) < count and not stop.is_set():
                block = range(count)[len(sizes) :][:_BLOCK]
                sizes += sources[name].read_sizes(block).tolist()
            complete[name] = split._replace(sizes=sizes)
        _update(workdir, recorded, complete, accept=accept)

    with futures.ThreadPoolExecutor(1) as pool:
        rest = pool.submit(compare_sizes)
        try:
            yield lambda wait: rest.result() if futures.wait([rest], wait).done else None
        finally:
            stop.set()


def _update(workdir: Workdir, recorded: Manifest, splits: Manifest, *, accept: bool) -> Manifest:
    """Updates the manifest of a run, and returns it.

    Raises UserError for changes that are not accepted.
    """
    changes = manifest.describe_changes(recorded, splits)
    if changes:
        text = f'{workdir.folder}: the data has changed since the run started:'
        text = '\n  '.join([text, *changes.values()])
        trained = [x for x in changes if x.startswith(TRAINED_PREFIX)]
        fits = all(manifest.keeps_class_numbers(recorded[x], splits[x]) for x in trained)
        if not (accept and fits):
            again = f'train in another --workdir with --config.start_from={workdir.folder}'
            accepted = 'or resume with --accept_data_changes'
            rejected = '--accept_data_changes cannot be used, because class indices changed'
            raise UserError(
                f'{text}\nrestore the data; or {again}; {accepted if fits else rejected}'
            )
        logging.warning('%s', text)
    updated, step = dict(splits), max(digests.list_steps(workdir.folder / FOLDER), default=0)
    for name, old in recorded.items():
        if name not in changes:  # keeps sizes that an earlier start has read
            updated[name] = max(splits.get(name, old), old, key=lambda one: len(one.sizes))
        elif name.startswith(TRAINED_PREFIX):
            updated[f'{name} until step {step}'] = old
    if updated != recorded:
        workdir.check_held()
        manifest.write_manifest(workdir.folder / MANIFEST, updated)
    return updated
