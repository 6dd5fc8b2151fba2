"""Objects on a store that one run alone may write: the lease of a folder, texts that grow.

Each write is on the condition that the object is as this process last saw it. So one of several
runs has a lease, and one that was away and has lost it writes over nothing of its successor's.
"""

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import IO

from vit_jax.base.errors import UnusableDisk, UserError
from vit_jax.base.storage import Path, is_remote, reaching

UPLOAD = 30.0  # seconds, after which a line that was added is on the store at the latest
HEARTBEAT, LEASE = 15.0, 60.0  # seconds: a lease that was not renewed for so long is free


class _Object:
    """An object on a store, and its generation when it was last seen."""

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None):
        import tensorstore

        self._name, self._check = path.name, check
        with reaching(path):
            bucket, _, folder = os.fspath(path.parent).removeprefix('gs://').partition('/')
            # Not as a URL, which would decode a %.
            spec = {'driver': 'gcs', 'bucket': bucket, 'path': f'{folder}/'}
            self._store = tensorstore.KvStore.open(spec).result()
        self.generation = b''
        self._unanswered = set[bytes]()  # digests of what was sent, and may or may not have come

    def look(self) -> bytes | None:
        """What it holds now; None: it is not there."""
        found = self._store.read(self._name).result()
        self.generation = found.stamp.generation
        return found.value if found.state == 'value' else None

    def write(self, data: bytes) -> bool:
        """Writes it, unless another has changed it since it was seen. Was it written?

        Where what is there may be its own, `check` is asked: a successor has written it once more.
        """
        self._unanswered.add(hashlib.sha256(data).digest())
        written = self._put(data)
        if not written:  # or one was, whose answer was lost
            found = self._store.read(self._name).result()
            sent = found.state == 'value' and hashlib.sha256(found.value).digest()
            if sent in self._unanswered:
                self._check()
                self.generation = found.stamp.generation
                written = found.value == data or self._put(data)
        self._unanswered.clear()
        return written

    def _put(self, data: bytes) -> bool:
        new = self._store.write(self._name, data, if_equal=self.generation).result().generation
        self.generation = new or self.generation
        return bool(new)

    def remove(self) -> None:
        """Removes it, unless it has changed since it was seen."""
        self._store.write(self._name, None, if_equal=self.generation).result()


class Lease:
    """Holds an object that says who does, and renews it every HEARTBEAT seconds.

    What was not renewed for LEASE seconds is of a run that is gone, and is taken over. Raises
    UserError with what another holder says of itself.
    """

    def __init__(self, path: Path, text: str):
        self._folder, self._text, self._lost = path.parent, text.encode(), ''
        self._renewing = threading.Lock()
        with reaching(path):
            self._object = _Object(path)
            self._wait_for_holder()
            self._renewed = _now()
            if not self._object.write(self._text):
                raise UserError(f'workdir {self._folder} is in use by {self._holder()}')
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def check(self, *, known: bool = False) -> None:
        """Raises UserError where another run has taken it over, or somebody has removed it.

        It looks, and waits for the store, where a renewal is overdue, as this process may have been
        stopped for long; `known`: only what is known is said.
        """
        if not known and _now() - self._renewed > LEASE / 2:
            with reaching(self._folder):
                self._renew()
        if self._lost:
            text = f'was lost to {self._lost}, as this run did not reach it for {LEASE:g} s or more'
            raise UserError(f'workdir {self._folder}: {text}; this one ends')

    def release(self) -> None:
        """Removes the object, unless it was lost."""
        self._ended.set()
        self._thread.join()
        if not self._lost:
            with contextlib.suppress(Exception):  # the next run will wait for it
                self._object.remove()
            self._lost = 'nobody: this run has given it up'  # should something still write

    def _wait_for_holder(self) -> None:
        """Returns when nobody renews the object; raises UserError where somebody does."""
        if (text := self._object.look()) is None:
            return
        waiting = 'workdir %s: of %s; waiting %g s for a sign of life, as it may be gone'
        logging.warning(waiting, self._folder, _said(text), LEASE)
        seen, end = self._object.generation, time.monotonic() + LEASE
        while time.monotonic() < end:
            time.sleep(HEARTBEAT / 5)
            if (text := self._object.look()) is None:
                return
            if self._object.generation != seen:
                raise UserError(f'workdir {self._folder} is in use by {_said(text)}')

    def _keep(self) -> None:
        while not (self._lost or self._ended.wait(HEARTBEAT)):
            with contextlib.suppress(Exception):  # no connection: a later one will tell
                self._renew()

    def _renew(self) -> None:
        with self._renewing:
            began = _now()
            if not self._lost and not self._object.write(self._text):
                self._lost = self._holder()
            self._renewed = began

    def _holder(self) -> str:
        text = self._object.look()
        return 'nobody: its lock was removed' if text is None else _said(text)


def _now() -> float:
    """Seconds; on Linux those in which the machine was suspended count too."""
    clock = getattr(time, 'CLOCK_BOOTTIME', None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _said(text: bytes) -> str:
    return text.decode(errors='replace').strip() or 'another run'


def appending(path: Path, check: Callable[[], None] = lambda: None) -> 'IO[str] | GrowingObject':
    """A file to which lines are added: there at once, or on a store when GrowingObject says.

    `check` raises where the folder is held no more.
    """
    return GrowingObject(path, check) if is_remote(path) else path.open('a', buffering=1)


class GrowingObject:
    """A text on a store to which lines are added; it is put there whole, in the background.

    A line is there UPLOAD seconds after it was written, and when `flush` has returned.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None):
        self.name = str(path)
        with reaching(path):
            self._object = _Object(path, check)
            there = self._object.look() or b''
            while not self._object.write(there):  # from here on no earlier run can write it
                there = self._object.look() or b''
        self._text = self._there = there.decode(errors='replace')
        self._uploading, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._upload, daemon=True).start()

    def write(self, line: str) -> None:
        """Adds a line."""
        self._text += line

    def flush(self) -> None:
        """Returns when all lines are on the store. Raises UserError where another run writes it."""
        with self._uploading, reaching(self.name):
            text = self._text
            if text != self._there:
                if not self._object.write(text.encode()):
                    raise UserError(f'{self.name}: another run writes it by now; this one ends')
                self._there = text

    def close(self) -> None:
        """Ends the thread. Lines that it could not write are warned of, as a run ends then that has
        called `flush`, or fails, and says why."""
        self._closed.set()
        try:
            self.flush()
        except UserError as error:
            logging.warning('%s', error)

    def _upload(self) -> None:
        while not self._closed.wait(UPLOAD):
            try:
                self.flush()
            except UnusableDisk as error:
                logging.warning('%s; tried again in %g s', error, UPLOAD)
            except UserError:  # which the run will be told
                return
