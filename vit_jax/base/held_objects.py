"""Objects on a bucket that one run at a time writes: the lease of a folder, and growing files.

Each write has a condition: the object is as this run has read or written it last. So one of several
runs gets a lease, and a run that was suspended and replaced overwrites nothing of its successor.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable

from vit_jax.base.errors import UserError
from vit_jax.base.storage import Path, bucket_and_name, usable

UPLOAD = 30.0  # seconds, after which a line that was added is on the bucket at the latest
LEASE = 60.0  # seconds without a renewal, after which a lease is free


class HeldObject:
    """An object, and the generation of it that this run has read or written last.

    Its metadata name the writer. This tells a write of this run whose answer was lost from one of
    another run.
    """

    def __init__(self, path: Path):
        self._bucket, self._name = bucket_and_name(path)
        self._writer = str(uuid.uuid4())
        self.generation = 0  # there is no object

    def read(self) -> str | None:
        """Returns the text, or None if there is no object; the next write may replace it."""
        from google.api_core.exceptions import NotFound

        blob, text, self.generation = self._bucket.blob(self._name), None, 0
        with contextlib.suppress(NotFound):
            text = str(blob.download_as_bytes(), errors='replace')
            self.generation = int(blob.generation)
        return text

    def write(self, text: str) -> bool:
        """Replaces the text; returns False, and changes nothing, if another run has written."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._name)
        blob.metadata = {'writer': self._writer}
        try:
            blob.upload_from_string(text, if_generation_match=self.generation)
        except PreconditionFailed:
            found = self._bucket.get_blob(self._name)
            if found is None or (found.metadata or {}).get('writer') != self._writer:
                return False
            blob.upload_from_string(text, if_generation_match=found.generation)
        self.generation = int(blob.generation)
        return True

    def remove(self) -> None:
        """Removes the object, unless another run has written it."""
        self._bucket.blob(self._name).delete(if_generation_match=self.generation)


class Lease:
    """Holds an object that names this run, and renews it four times in LEASE seconds.

    A lease that is not renewed for LEASE seconds is stale and is taken over. Raises UserError that
    names the other run if it is renewed.
    """

    def __init__(self, path: Path, holder: str):
        self._path, self._where = path, f'workdir {path.parent}'
        self._text, self._renewing = holder, threading.Lock()
        self._object = HeldObject(path)
        self._wait_until_stale()
        self._renew('is in use by')
        self._released = _repeat(self._renew, LEASE / 4)

    def check(self) -> None:
        """Raises UserError if another run might hold the lease, or if its object was removed.

        A lease that this run renewed lately is its own, even if the bucket does not answer now.
        """
        # The wall clock runs while a machine is suspended, but not while a hypervisor pauses it.
        if not 0 <= time.time() - self._renewed < LEASE * 3 / 4:
            self._renew()

    def _renew(self, otherwise: str = 'was lost to') -> None:
        with self._renewing, usable(self._path):
            began = time.time()
            if not self._object.write(self._text):
                self._renewed = 0.0  # the next check finds it lost, too
                raise UserError(f'{self._where} {otherwise} {self._holder()}')
            self._renewed = began

    def release(self) -> None:
        """Removes the object, unless it was lost."""
        self._released.set()
        with self._renewing, contextlib.suppress(Exception):  # the next run will wait for it
            self._object.remove()

    def _wait_until_stale(self) -> None:
        if self._object.read() is None:
            return
        logging.warning('%s: of %s; waits %g s for a renewal', self._where, self._holder(), LEASE)
        generation, end = self._object.generation, time.monotonic() + LEASE
        while time.monotonic() < end and self._object.read() is not None:
            if self._object.generation != generation:
                raise UserError(f'{self._where} is in use by {self._holder()}')
            time.sleep(LEASE / 20)

    def _holder(self) -> str:
        return (HeldObject(self._path).read() or 'nobody: its lock was removed').strip()


class GrowingObject:
    """A text on a bucket to which lines are added; it is uploaded whole, in the background.

    A line is there UPLOAD seconds after it was written, and when `flush` has returned.
    """

    def __init__(self, path: Path):
        self.name, self._uploading = str(path), threading.Lock()
        self._object = HeldObject(path)
        self._text = self._object.read() or ''
        self._uploaded: str | None = None
        self.flush()  # from now on no earlier run can write it
        self._closed = _repeat(self.flush, UPLOAD)

    def write(self, line: str) -> None:
        """Adds a line."""
        self._text += line

    def flush(self) -> None:
        """Returns when all lines are on the bucket. Raises UserError if another run writes it."""
        with self._uploading, usable(self.name):
            text = self._text
            if text != self._uploaded and not self._object.write(text):
                raise UserError(f'{self.name}: another run writes it by now; this one stops')
            self._uploaded = text

    def close(self) -> None:
        """Uploads the last lines, and warns if that fails: a run that succeeds calls `flush`."""
        self._closed.set()
        try:
            self.flush()
        except UserError as error:
            logging.warning('%s', error)


def _repeat(act: Callable[[], None], seconds: float) -> threading.Event:
    """Acts every `seconds` in a thread, until the event is set. Ignores errors, and tries again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            with contextlib.suppress(Exception):
                act()

    threading.Thread(target=run, daemon=True).start()
    return stop
