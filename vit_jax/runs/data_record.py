"""What a run learns from and is tested on, kept in its work directory: other data is noticed."""

import contextlib
import dataclasses
import functools
import io
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import (
    DAMAGED_NPZ,
    MissingFile,
    Path,
    UserError,
    atomic_write,
    records,
    require_regular,
    storage,
    usable,
)
from vit_jax.checkpoints import digests
from vit_jax.checkpoints.store import FOLDER, load_card
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.data.reading import ImageReader
from vit_jax.data.sources import listing
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.listing import Listing
from vit_jax.parallel.processes import Job
from vit_jax.runs.probing import Probes
from vit_jax.runs.workdirs import DATA, Workdir

LAST = 5.0  # seconds, for which the end of a run waits: a look at a disk may stall
_UNKNOWN = (
    'an earlier version began this run: images that changed before now are not noticed, and of '
    'data without splits others are held out for testing'
)
_ADVICE = (
    'put the data back; train again from this network (--config.start_from=%s --workdir=ANOTHER); '
    'or go on with --accept_data_changes'
)


class Split(NamedTuple):
    """A split that a run uses, its images, and the fields that ask for it (JSON values)."""

    source: Source
    listing: Listing
    asked: list[Any]  # where they are others than before, other images are no surprise


def agreed_splits(
    config: TrainConfig, readers: dict[str, ImageReader], probes: Probes | None, job: Job
) -> dict[str, Split]:
    """The splits of `readers`, `train` and the evaluations, and of the few-shot evaluation.

    Raises Differs where the processes have other images, classes or labels.
    """
    splits = _splits(config, readers, probes)
    if job.count > 1:
        listings = {name: split.listing for name, split in splits.items()}
        facts = {name: one.facts() for name, one in listings.items()}
        describe = functools.partial(listing.host_differences, ours=listings)
        job.require_same('the data', facts, describe)
    return splits


def _splits(
    config: TrainConfig, readers: dict[str, ImageReader], probes: Probes | None
) -> dict[str, Split]:
    wanted: dict[str, tuple[ImageReader, Any, list[Any]]] = {}
    for name, reader in readers.items():
        one = config.evaluations.get(name, EvalConfig(split=config.train_split))
        wanted[name] = reader, one.data or config.data, [one.split, one.labels, _text(one.data)]
    for name, probe in probes.found.items() if probes else ():
        of, data = probe.splits, _text(probe.splits.data)
        wanted[f'few-shot {name} train'] = probe.train, probe.data, [of.train_split, None, data]
        wanted[f'few-shot {name} test'] = probe.test, probe.data, [of.test_split, None, data]
    listings: dict[int, Listing] = {}  # by source: several evaluations may use one
    for reader, data, _ in wanted.values():
        if id(reader.source) not in listings:
            listings[id(reader.source)] = listing.listed(reader.source, records.text_of(data))
    held_out = records.to_dict(config.held_out)
    return {
        name: Split(reader.source, listings[id(reader.source)], [*asked, held_out])
        for name, (reader, _, asked) in wanted.items()
    }


def _text(data: Any) -> str | None:
    return None if data is None else records.text_of(data)


def compared(workdir: Workdir, splits: dict[str, Split], job: Job, *, accept: bool) -> 'DataRecord':
    """The record of a work directory; process 0 compares the splits with it, and keeps it."""
    record = DataRecord(workdir, splits if job.index == 0 else {}, accept=accept)
    record.compare()
    return record


class DataRecord:
    """The splits of a run beside those that it began with, which are kept in its work directory.

    `compare` looks at all names, labels and classes. The sizes of more than `listing.LOOKS` files
    are looked at in the background, within `begun`; `check` raises what is found there.
    """

    def __init__(self, workdir: Workdir, splits: dict[str, Split], *, accept: bool):
        self._path, self._check_held = workdir.folder / DATA, workdir.check
        self._splits = splits
        self._accept = accept
        self._kept = _read(self._path) if splits else {}
        self._begun = bool(digests.steps(workdir.folder / FOLDER))
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._complete, daemon=True)

    def compare(self) -> None:
        """Raises UserError with what has changed since the run began, unless that is accepted."""
        if self._begun and self._splits:
            if not _exists(self._path):
                logging.warning('%s: no %s: %s', self._path.parent, DATA, _UNKNOWN)
            self._refuse_or_say(self._changes(self._splits, self._class_changes()))

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Within, what remains is looked at, and the record is written, in the background."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(LAST)

    def check(self, *, wait: float = 0.0) -> None:
        """Raises what was found in the background, if anything, after so many seconds at most."""
        if wait:
            self._thread.join(wait)
        if self._error is not None:
            raise self._error

    def _class_changes(self) -> list[str]:
        """How the card of the newest checkpoint names the classes, where it is otherwise."""
        new, workdir = self._splits['train'].listing.class_names, self._path.parent
        try:
            card, folder = load_card(str(workdir))
        except (digests.Damaged, MissingFile):  # which is said where it is restored
            return []
        lines = listing.class_differences(old := card.get('class_names') or new, new)
        if len(old) != len(new):
            raise UserError(
                f'checkpoint {folder} has {len(old):,} classes, the data {len(new):,}: {lines[0]}; '
                f'put the data back, or fine-tune it: --config.start_from={workdir} '
                f'--workdir=ANOTHER'
            )
        return lines

    def _changes(self, splits: dict[str, Split], of_classes: Sequence[str] = ()) -> list[str]:
        """A line about each kind of change since the record was made, after some about classes."""
        # Each once, where several evaluations use one split.
        changes = {line: f'train: {line}' for line in of_classes}
        for name in [name for name in splits if name in self._kept]:
            now, before = splits[name], self._kept[name]
            if before.asked == now.asked and not before.is_of(now.listing):
                lines = listing.differences(before.read(), now.listing)
                if lines == [listing.ORDER] and name != 'train':
                    continue  # which what is measured does not depend on
                for line in lines:
                    changes.setdefault(line, f'{name}: {line}')
        return list(changes.values())

    def _refuse_or_say(self, changes: list[str]) -> None:
        if not changes:
            return
        workdir, lines = self._path.parent, '\n  '.join(changes)
        if not self._accept:
            advice = _ADVICE % workdir
            raise UserError(f'workdir {workdir} holds a run on other data:\n  {lines}\n{advice}')
        logging.warning('%s goes on with other data:\n  %s', workdir, lines)

    def _complete(self) -> None:
        try:
            if self._splits and not self._kept:  # should the run end before the look does
                self._write(self._splits)
            listings = {}
            for split in self._splits.values():
                if id(split.listing) not in listings:
                    listings[id(split.listing)] = self._looked_at(split)
            if self._stop.is_set():
                return
            splits = {
                name: split._replace(listing=listings[id(split.listing)])
                for name, split in self._splits.items()
            }
            looked = any(s.listing is not splits[n].listing for n, s in self._splits.items())
            if self._begun and looked:
                self._refuse_or_say(self._changes(splits))
            if (looked or self._kept) and splits and not self._is_of(splits):
                self._write(splits)
        except Exception as error:  # raised by `check`
            self._error = error

    def _write(self, splits: dict[str, Split]) -> None:
        self._check_held()
        _write(self._path, splits)

    def _is_of(self, splits: dict[str, Split]) -> bool:
        """Is this what the record says?"""
        return self._kept.keys() == splits.keys() and all(
            self._kept[name].asked == one.asked
            and self._kept[name].digest == one.listing.digest
            and np.array_equal(self._kept[name].stamps, one.listing.stamps)
            for name, one in splits.items()
        )

    def _looked_at(self, split: Split) -> Listing:
        """The listing with all stamps, unless the run ends."""
        if split.source.stamps_at_hand or (count := len(split.source)) <= listing.LOOKS:
            return split.listing
        stamps = split.listing.stamps.copy()
        for start in range(0, count, listing.LOOKS):
            part = range(start, min(count, start + listing.LOOKS))
            if self._stop.is_set():
                break
            stamps[part] = split.source.read_stamps(part)
        return dataclasses.replace(split.listing, stamps=stamps)


def training_images(folder: Path) -> Listing | None:
    """Returns the training images of the run in a work directory; None without a record."""
    kept = _read(folder / DATA).get('train')
    return kept.read() if kept else None


class _Kept(NamedTuple):
    """A split as it was when the record was made."""

    asked: list[Any]
    digest: str
    stamps: np.ndarray
    read: Callable[[], Listing]

    def is_of(self, now: Listing) -> bool:
        """Whether names, labels, classes and the stamps that are known are those of now."""
        if self.digest != now.digest or self.stamps.shape != now.stamps.shape:
            return False
        return not listing.replaced(self.stamps, now.stamps).any()


def _write(path: Path, splits: dict[str, Split]) -> None:
    numbers: dict[int, int] = {}
    header, arrays = {}, {}
    for name, (_, one, asked) in splits.items():
        number = numbers.setdefault(id(one), len(numbers))
        arrays[f'{number}.names'] = np.frombuffer(listing.as_bytes(one.names), np.uint8)
        arrays[f'{number}.labels'], arrays[f'{number}.stamps'] = one.labels, one.stamps
        classes = {'class_names': one.class_names, 'multi_label': one.multi_label}
        header[name] = {'asked': asked, 'digest': one.digest, 'number': number} | classes
    arrays['splits'] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with atomic_write(path) as partial, partial.open('wb') as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _read(path: Path) -> dict[str, _Kept]:
    """The splits of the record by name; none where there is none, of an earlier version.

    None, with a warning, where it is damaged. Raises UserError where it cannot be read.
    """
    if not _exists(path):
        return {}
    try:
        with _opened(path) as file:
            header = json.loads(file['splits'].tobytes())
            stamps = {one['number']: file[f'{one["number"]}.stamps'] for one in header.values()}
        return {
            name: _Kept(
                one['asked'],
                one['digest'],
                stamps[one['number']],
                functools.partial(_read_listing, path, one),
            )
            for name, one in header.items()
        }
    except UserError:
        raise
    except DAMAGED_NPZ as error:
        text = '%s: cannot be read, so that data which changed is not noticed: %s'
        logging.warning(text, path, error)
        return {}


def _exists(path: Path) -> bool:
    with usable(path), storage.reaching(path):
        return path.exists()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The arrays of the record, which is read whole: an error of the disk is told from damage."""
    with usable(path), storage.reaching(path):
        require_regular(path)
        data = path.read_bytes()
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        yield file


def _read_listing(path: Path, one: dict[str, Any]) -> Listing:
    with _opened(path) as file:
        names, labels, stamps = (
            file[f'{one["number"]}.{array}'] for array in ('names', 'labels', 'stamps')
        )
    decoded = names.tobytes().decode(errors='surrogateescape').split('\0')[:-1]
    return Listing(tuple(one['class_names']), decoded, labels, stamps, one['multi_label'])
