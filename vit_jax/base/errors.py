"""Errors that the user can fix: one sentence, which programs print without a traceback.

They are about the user's values, files, directories and hosts. Every other exception is a fault of
the program and is shown with its traceback.
"""

import re
from collections.abc import Sequence


class UserError(ValueError):
    """An input that cannot be used: where, what is wrong, and what is expected."""


class MissingFile(UserError, FileNotFoundError):
    """A file or directory that does not exist."""


class UnusableDisk(UserError, OSError):
    """A place that cannot be read or written: a full disk, a read-only directory."""


def lacks_memory(error: BaseException) -> bool:
    """Returns whether jax raises the error for a device or a program that lacks memory."""
    return isinstance(error, RuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)


def shown_url(url: str) -> str:
    """Returns a URL without user, password and query, which may be secrets; other text as it is."""
    return re.sub(r'^([A-Za-z][A-Za-z0-9+.-]*:/+)[^/?#]*@', r'\1', url.partition('?')[0])


def one_line(error: BaseException, limit: int = 400) -> str:
    """Returns the error's message on one line, without URL secrets, or its type if it is empty.

    Cuts a long message in the middle, because the cause comes last.
    """
    text = ' '.join(str(error).split()) or type(error).__name__
    text = re.sub(r'[A-Za-z][A-Za-z0-9+.-]*://[^\s\'"<>]+', lambda match: shown_url(match[0]), text)
    half = limit // 2
    return text if len(text) <= limit else f'{text[:half]} ... {text[-half:]}'


def refuse(faults: Sequence[str], *, shown: int = 10) -> None:
    """Raises UserError with the first of these sentences and the number of the others, if any."""
    if faults:
        more = [f'and {len(faults) - shown:,} more'] if len(faults) > shown else []
        raise UserError('\n  '.join([*faults[:shown], *more]))


def counted(count: int, noun: str) -> str:
    """`1 image`, `2,000 images`; `1 class`, `2 classes`."""
    plural = f'{noun}es' if noun.endswith('s') else f'{noun}s'
    return f'{count:,} {noun if count == 1 else plural}'
