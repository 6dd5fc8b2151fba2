"""What the user can mend: errors of one sentence, which programs print without a traceback.

They are raised where something of the user's is looked at: a value, a file, a directory, another
host. Every other exception is a fault of the program, and is shown with its traceback.
"""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """An input that cannot be used: what is wrong, where, and what would be right."""


class MissingFile(UserError, FileNotFoundError):
    """A file or directory that is not there."""


class UnusableDisk(UserError, OSError):
    """A place that cannot be read or written: a full disk, a read-only directory."""


@contextlib.contextmanager
def usable(path: object) -> Iterator[None]:
    """Around the use of a file or directory that the user named: OSError becomes a UserError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        kind = MissingFile if isinstance(error, FileNotFoundError) else UnusableDisk
        raise kind(f'{error.filename or path}: {error.strerror or error}') from error
