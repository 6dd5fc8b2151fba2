"""Errors that the user can fix: one sentence, which programs print without a traceback.

They are about the user's values, files, directories and hosts. Every other exception is a fault of
the program and is shown with its traceback.
"""

import contextlib
import difflib
import os
import pathlib
import re
import stat
from collections.abc import Iterator, Sequence


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
    text = re.sub(r'^([A-Za-z][A-Za-z0-9+.-]*:/+)[^/?#]*@', r'\1', url.partition('?')[0])
    no_port = r'(?<=[^/:]):(?![0-9]*(?:[/#]|$))[^/#]*'  # but a password, cut at its question mark
    return re.sub(rf'^([A-Za-z][A-Za-z0-9+.-]*:/+[^/#:\[]*){no_port}', r'\1', text)


def one_line(error: BaseException, limit: int = 400) -> str:
    """Returns what a library says, in one line without secrets of URLs, or the error's type.

    The middle of a long text is left out: a library ends it with the cause.
    """
    text = ' '.join(str(error).split()) or type(error).__name__
    text = re.sub(r'[A-Za-z][A-Za-z0-9+.-]*://[^\s\'"<>]+', lambda match: shown_url(match[0]), text)
    half = limit // 2
    return text if len(text) <= limit else f'{text[:half]} ... {text[-half:]}'


def close_by(path: str | pathlib.Path) -> str:
    """Ends an error message about a missing path with the similar name next to it, or ''.

    If folders above it are missing too, the name is next to the first of them.
    """
    missing = pathlib.Path(path)
    with contextlib.suppress(OSError):
        while not missing.parent.exists():
            missing = missing.parent
        names = [other.name for other in missing.parent.iterdir() if other.exists()]
        close = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.75)
        if close and not missing.exists():
            return f'; did you mean {str(missing.with_name(close[0]))!r}?'
    return ''


def refuse(faults: Sequence[str], *, shown: int = 10) -> None:
    """Raises UserError with the first of these sentences and the number of the others, if any."""
    if faults:
        more = [f'and {len(faults) - shown:,} more'] if len(faults) > shown else []
        raise UserError('\n  '.join([*faults[:shown], *more]))


def counted(count: int, noun: str) -> str:
    """`1 image`, `2,000 images`; `1 class`, `2 classes`."""
    plural = f'{noun}es' if noun.endswith('s') else f'{noun}s'
    return f'{count:,} {noun if count == 1 else plural}'


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raises UserError if a path is a folder, a pipe or a device: reading it may never end.

    A missing path passes; opening it reports the error.
    """
    kinds = {stat.S_IFDIR: 'a folder', stat.S_IFIFO: 'a pipe', stat.S_IFSOCK: 'a socket'}
    with contextlib.suppress(OSError):
        mode = pathlib.Path(path).stat().st_mode
        if not stat.S_ISREG(mode):
            kind = kinds.get(stat.S_IFMT(mode), 'a device')
            raise UserError(f'{path}: {kind}; expected a file')


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


@contextlib.contextmanager
def parsing(path: object, expected: str) -> Iterator[None]:
    """Around the parsing of a user's file: any exception of a parser becomes a UserError."""
    require_regular(str(path))
    try:
        with usable(path):
            yield
    except UserError:
        raise
    except Exception as error:  # parsers raise many kinds for damaged bytes
        kind, why = type(error).__name__, one_line(error)
        why = why if why == kind else f'{kind}: {why}'
        raise UserError(f'{path}: cannot be read ({why}); expected {expected}') from error
