"""Files that one process at a time holds; the system frees them when it is gone."""

import errno
import logging
from typing import IO, Any


def locked(file: IO[Any], *, wait: bool = False) -> bool:
    """Was the file locked, until it is closed? True, with a warning, where that is not possible."""
    try:
        import fcntl  # not on Windows
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            raise
        logging.warning('%s: no locks here; see that no other run writes there', file.name)
    return True
