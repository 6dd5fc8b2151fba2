"""Output that nobody reads any more: a closed pipe or terminal does not end a run."""

import contextlib
import errno
import io
import os
import sys


class _Outlasting(io.FileIO):
    """A file descriptor that becomes the null device when it cannot be written."""

    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # no reader that went away
                with contextlib.suppress(OSError):
                    os.write(2, f'error: output is lost: {error.strerror}\n'.encode())
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # for C++ code too
            os.close(null)
            return super().write(data)  # type: ignore[arg-type]


def replace_missing_streams() -> None:
    """What the program was started without, stdout or stderr, is the null device from here on."""
    for name in 'stdout', 'stderr':
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, 'w'))


def outlive_readers() -> None:
    """From here on stdout and stderr are dropped, each from the moment on when it breaks."""
    replace_missing_streams()
    for name in 'stdout', 'stderr':
        stream = getattr(sys, name)
        stream.flush()
        try:
            raw = _Outlasting(stream.fileno(), 'w', closefd=False)
        except io.UnsupportedOperation:  # kept in memory
            continue
        raw.replaced = stream  # type: ignore[attr-defined]  # which would close the descriptor
        buffer = io.BufferedWriter(raw)
        text = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
        setattr(sys, name, text)
