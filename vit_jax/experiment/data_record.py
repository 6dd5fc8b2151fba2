"""Records the images of a run in its work directory, to notice data that changed or differ by host.

The record of a split holds class names, image names, labels and sizes, in order. It is compared at
each start and between the hosts of a job; the sizes of all files but the first `LOOKS` in the
background. Whatever the run was trained on stays in the record, under a name that starts with
`TRAINED`, also after the data or the split have changed.
"""

import contextlib
import gzip
import hashlib
import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NamedTuple

from vit_jax.base import (
    DAMAGED_NPZ,
    Path,
    UserError,
    atomic_write,
    counted,
    records,
    require_regular,
    usable,
)
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER
from vit_jax.config import TrainConfig
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import Source, relative_names
from vit_jax.distributed.processes import Job
from vit_jax.evaluation.probing import Probes
from vit_jax.experiment.workdirs import DATA, Workdir

LOOKS = 16_384  # files of a split whose sizes are read before training starts
PATIENCE = 5.0  # seconds that the end of a run waits for the background
TRAINED = 'trained on '
_BLOCK = 1024  # sizes that are read between two looks at whether to stop
_ADVICE = (
    'put the data back; train again from this model (--config.start_from=%s --workdir=ANOTHER); '
    'or, with as many classes as before, resume with --accept_data_changes'
)


class SplitRecord(NamedTuple):
    """The images of a split in order, as JSON values.

    A label is a class name, or several names in one text; a question mark if the sizes change with
    the labels. A size is that of a file, or a checksum (see `Source.read_sizes`). The sizes of the
    last images may be missing.
    """

    class_names: list[str]
    names: list[str]
    labels: list[str]
    sizes: list[int]


Splits = dict[str, SplitRecord]


def find_sources(
    config: TrainConfig, readers: dict[str, ImageReader], probes: Probes | None
) -> dict[str, Source]:
    """Names the sources of a run by split and data; `train` is the reader of training images."""
    own = f' of {records.text_of(config.data)}'
    probed = [(one.train, one.test) for one in probes.by_name.values()] if probes else []
    trained = [readers['train'].source] if 'train' in readers else []
    sources = [reader.source for reader in itertools.chain(readers.values(), *probed)]
    return {
        TRAINED * (one in trained) + f'{one.split} of {one.data}'.removesuffix(own): one
        for one in sources
    }


def record_split(source: Source) -> SplitRecord:
    """Records a split, with the sizes of all images, or of the first `LOOKS` files."""
    indices, classes = range(len(source)), source.class_names
    looks = indices if source.sizes_in_memory else indices[:LOOKS]
    if not source.labels_in_memory:
        labels = ['?'] * len(source)
    elif source.multi_label:
        labels = [', '.join(classes[i] for i in row.nonzero()[0]) for row in source.labels]
    else:
        labels = [classes[label] for label in source.labels.tolist()]
    names = relative_names(source.read_names(indices), source.data)
    return SplitRecord([*classes], names, labels, sizes=source.read_sizes(looks).tolist())


def describe_differences(old: SplitRecord, new: SplitRecord) -> list[str]:
    """Returns a line for each kind of difference: a count, and up to three examples.

    An image with another label counts as removed and added.
    """
    size_of = dict(zip(old.names, old.sizes, strict=False))
    new_sizes = zip(new.names, new.sizes, strict=False)
    replaced = [repr(name) for name, size in new_sizes if size_of.get(name, size) != size]
    examples = {'replaced image': replaced}
    if old[:3] != new[:3]:
        before, after = (Counter(map('{!r} ({})'.format, x.names, x.labels)) for x in (old, new))
        classes = itertools.zip_longest(old.class_names, new.class_names)
        examples |= {
            'changed class': [f'{a!r} to {b!r}' for a, b in classes if a != b],
            'removed image': [*(before - after).elements()],
            'added image': [*(after - before).elements()],
        }
        if not any(examples.values()):
            return ['the images have another order']
    shown = {kind: ', '.join(found[:3]) for kind, found in examples.items() if found}
    return [f'{counted(len(examples[kind]), kind)}: {text}' for kind, text in shown.items()]


def _describe_changes(recorded: Splits, splits: Splits) -> dict[str, str]:
    """Describes each split that is in both and differs."""
    both = {name: (recorded[name], split) for name, split in splits.items() if name in recorded}
    lines = {name: '; '.join(describe_differences(*pair)) for name, pair in both.items()}
    return {name: f'{name}: {text}' for name, text in lines.items() if text}


@contextlib.contextmanager
def compare_data(
    workdir: Workdir, sources: dict[str, Source], job: Job, *, accept: bool = False
) -> Iterator[Callable[[float], None]]:
    """Compares the splits of a run with its record, which process 0 updates.

    Yields a function that waits up to this many seconds for the sizes of the other files, and then
    raises what was found by then.

    Raises:
      UserError: If data changed that the run has learned from, unless `accept` is set.
      Differs: If the data differ between processes.
    """
    path, recorded, stop = workdir.folder / DATA, Splits(), threading.Event()
    splits = {name: record_split(source) for name, source in sources.items()}
    if job.index == 0:
        if digests.steps(workdir.folder / FOLDER):  # else nothing was learned yet
            recorded = read_record(path)
        recorded = _update(workdir, recorded, splits, accept=accept)
    if job.count > 1:
        _require_same(job, splits, path)
    if job.index != 0:
        splits = {}  # process 0 alone reads the other sizes, and writes

    def compare_sizes() -> None:
        complete = Splits()
        for name, split in splits.items():
            indices, sizes = range(len(split.names)), [*split.sizes]
            while len(sizes) < len(indices):
                if stop.is_set():
                    return
                sizes += sources[name].read_sizes(indices[len(sizes) :][:_BLOCK]).tolist()
            complete[name] = split._replace(sizes=sizes)
        _update(workdir, recorded, complete, accept=accept)

    with futures.ThreadPoolExecutor(1) as pool:
        rest = pool.submit(compare_sizes)
        try:
            yield lambda wait: rest.result() if futures.wait([rest], wait).done else None
        finally:
            stop.set()


def _update(workdir: Workdir, recorded: Splits, splits: Splits, *, accept: bool) -> Splits:
    """Rejects differences from the record, or records them; returns the new record."""
    changes = _describe_changes(recorded, splits)
    if changes:
        text = f'{workdir.folder}: the data have changed since the run started:'
        text = '\n  '.join([text, *changes.values()])
        counts = ({len(one[name].class_names) for one in (recorded, splits)} for name in changes)
        if not accept or any(len(count) > 1 for count in counts):
            raise UserError(f'{text}\n{_ADVICE % workdir.folder}')
        logging.warning('%s', text)
    updated, last = dict(splits), digests.steps(workdir.folder / FOLDER)[:1]
    for name, old in recorded.items():
        if name in changes:
            updated[f'{name} until step {last[0]}'] = old
        else:
            updated[name] = max(splits.get(name, old), old, key=lambda one: len(one.sizes))
    if [*updated.items()] != [*recorded.items()]:
        workdir.check()
        text = json.dumps({name: split._asdict() for name, split in updated.items()})
        with atomic_write(workdir.folder / DATA) as partial:
            partial.write_bytes(gzip.compress(text.encode(), compresslevel=1, mtime=0))
    return updated


def _require_same(job: Job, splits: Splits, path: Path) -> None:
    """Raises Differs if the data of process 0, which are recorded in `path`, are other ones."""
    ours = {'digest': hashlib.sha256(json.dumps(splits).encode()).hexdigest()}

    def describe(theirs: dict[str, str]) -> list[str]:
        if theirs == ours:
            return []
        return [*_describe_changes(read_record(path), splits).values()] or ['other splits']

    job.require_same('the data', ours, describe)


def read_record(path: Path) -> Splits:
    """Reads a record; returns an empty one, with a warning, if it is missing or damaged."""
    require_regular(path)
    with usable(path):
        data = path.read_bytes() if path.exists() else b''
    try:
        splits = json.loads(gzip.decompress(data))
        return {name: SplitRecord(**split) for name, split in splits.items()}
    except DAMAGED_NPZ:
        logging.warning('%s: missing or damaged: it is not known what the run was trained on', path)
        return {}
