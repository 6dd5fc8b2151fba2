"""Objects on a bucket with a single writer: the lease of a folder, and append-only files.

A write succeeds only if the object is still as this run last read or wrote it. So only one of
several runs gets a lease, and a run that was suspended and replaced cannot overwrite its
successor's files.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable

from vit_jax.base.errors import UserError
from vit_jax.base.storage import Path, bucket_and_name, usable

UPLOAD = 30.0  # seconds from one upload of added lines to the next
LEASE = 60.0  # seconds without a renewal, after which a lease is free


class ConditionalObject:
    """An object that is written only if it is unchanged since this run last read or wrote it.

    The bucket gives each version of an object a new `generation`. The object's metadata name its
    writer: if the answer to a write is lost, they show whether this run has written the object.
    """

    def __init__(self, path: Path):
        self._bucket, self._name = bucket_and_name(path)
        self._writer = str(uuid.uuid4())
        self.generation = 0  # 0: the object does not exist

    def read(self) -> str | None:
        """Returns the text, or None if the object does not exist; the next write may replace it."""
        from google.api_core.exceptions import NotFound

        self.generation = 0
        blob = self._bucket.blob(self._name)
        try:
            text = str(blob.download_as_bytes(), errors='replace')
        except NotFound:
            return None
        self.generation = int(blob.generation)
        return text

    def write(self, text: str) -> bool:
        """Replaces the text. Returns False and changes nothing if another run has written it."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._name)
        blob.metadata = {'writer': self._writer}
        try:
            blob.upload_from_string(text, if_generation_match=self.generation)
        except PreconditionFailed:
            current = self._bucket.get_blob(self._name)
            if current is None or (current.metadata or {}).get('writer') != self._writer:
                return False
            blob.upload_from_string(text, if_generation_match=current.generation)
        self.generation = int(blob.generation)
        return True

    def remove(self) -> None:
        """Deletes the object, unless another run has written it."""
        self._bucket.blob(self._name).delete(if_generation_match=self.generation)


class Lease:
    """A lease on a folder: an object that names this run, renewed four times in LEASE seconds.

    A lease that is not renewed for LEASE seconds is stale and is taken over.

    Raises:
      UserError: If another run renews the lease; the message names that run.
    """

    def __init__(self, path: Path, holder: str):
        self._path = path
        self._where = f'workdir {path.parent}'
        self._text = holder
        self._renewing = threading.Lock()
        self._object = ConditionalObject(path)
        self._wait_until_stale()
        self._renew('is used by')
        self._released = _run_periodically(self._renew, LEASE / 4)

    def check(self) -> None:
        """Raises UserError if another run may hold the lease, or if its object was removed.

        A lease that this run renewed recently is valid, even if the bucket does not answer now.
        """
        # The wall clock runs while a machine is suspended, but not while a hypervisor pauses it.
        if not 0 <= time.time() - self._renewed < LEASE * 3 / 4:
            self._renew()

    def _renew(self, problem: str = 'is no longer locked by this run, but by') -> None:
        with self._renewing, usable(self._path):
            start = time.time()
            if not self._object.write(self._text):
                self._renewed = 0.0  # so that the next check fails, too
                raise UserError(f'{self._where} {problem} {self._holder()}')
            self._renewed = start

    def release(self) -> None:
        """Deletes the object, unless another run has taken the lease."""
        self._released.set()
        with self._renewing, contextlib.suppress(Exception):  # else the next run waits LEASE
            self._object.remove()

    def _wait_until_stale(self) -> None:
        if self._object.read() is None:
            return
        logging.warning('%s: locked by %s; waiting %g s', self._where, self._holder(), LEASE)
        generation = self._object.generation
        end = time.monotonic() + LEASE
        while time.monotonic() < end and self._object.read() is not None:
            if self._object.generation != generation:
                raise UserError(f'{self._where} is used by {self._holder()}; use another --workdir')
            time.sleep(LEASE / 20)

    def _holder(self) -> str:
        return (ConditionalObject(self._path).read() or 'nobody (.lock was removed)').strip()


class GrowingObject:
    """A text file on a bucket that lines are appended to; a thread uploads the whole text.

    A line is uploaded within UPLOAD seconds, or when `flush` is called.
    """

    def __init__(self, path: Path):
        self.name = str(path)
        self._uploading = threading.Lock()
        self._object = ConditionalObject(path)
        self._text = self._object.read() or ''
        self._uploaded: str | None = None
        self.flush()  # a new generation, so that earlier runs can no longer write
        self._closed = _run_periodically(self.flush, UPLOAD)

    def write(self, line: str) -> None:
        """Appends a line."""
        self._text += line

    def flush(self) -> None:
        """Uploads all lines. Raises UserError if another run has written the object."""
        with self._uploading, usable(self.name):
            text = self._text
            if text != self._uploaded and not self._object.write(text):
                raise UserError(f'{self.name}: another run writes it; start one run per --workdir')
            self._uploaded = text

    def close(self) -> None:
        """Uploads the last lines; warns if that fails. A run that succeeds calls `flush` first."""
        self._closed.set()
        try:
            self.flush()
        except UserError as error:
            logging.warning('%s', error)


def _run_periodically(act: Callable[[], None], seconds: float) -> threading.Event:
    """Calls `act` every `seconds` in a thread until the returned event is set; ignores errors."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            with contextlib.suppress(Exception):
                act()

    threading.Thread(target=run, daemon=True).start()
    return stop
