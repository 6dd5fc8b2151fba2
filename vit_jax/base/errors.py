"""Errors that programs print on one line, without a traceback.

A `UserError` is about the user's values, files, directories or hosts, and the user can fix it. A
`TransientError` says that the machine or the network failed. Every other exception is a bug and is
shown with its traceback.
"""

import re
from collections.abc import Sequence


class UserError(ValueError):
    """An input that cannot be used. The message says where, what is wrong and what is expected."""


class MissingFile(UserError, FileNotFoundError):
    """A file or directory that does not exist."""


class StorageError(UserError, OSError):
    """A path that cannot be read or written, such as on a full disk or in a read-only directory."""


class TransientError(Exception):
    """The machine or the network failed. The same command may succeed later."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether this is jax's error for a device that ran out of memory."""
    return isinstance(error, RuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)


def redact_url(url: str) -> str:
    """Removes user, password and query from a URL, because they may be secrets."""
    return re.sub(r'^([A-Za-z][A-Za-z0-9+.-]*:/+)[^/?#]*@', r'\1', url.partition('?')[0])


def format_error(error: BaseException, limit: int = 400) -> str:
    """Returns the error's message on one line, without secrets in URLs.

    Returns the error's type if the message is empty. Cuts a message longer than `limit` characters
    in the middle, because the cause comes last.
    """
    text = ' '.join(str(error).split()) or type(error).__name__
    text = re.sub(r'[A-Za-z][A-Za-z0-9+.-]*://[^\s\'"<>]+', lambda url: redact_url(url[0]), text)
    half = limit // 2
    return text if len(text) <= limit else f'{text[:half]} ... {text[-half:]}'


def raise_all(faults: Sequence[str], *, shown: int = 10, kind: type[UserError] = UserError) -> None:
    """Raises one error with the first `shown` messages and the number of the others, if any."""
    if faults:
        more = [f'and {len(faults) - shown:,} more'] if len(faults) > shown else []
        raise kind('\n  '.join([*faults[:shown], *more]))


def plural(count: int, noun: str) -> str:
    """Formats a count with its noun: `1 image`, `2,000 images`, `2 classes`."""
    plural = f'{noun}es' if noun.endswith('s') else f'{noun}s'
    return f'{count:,} {noun if count == 1 else plural}'
