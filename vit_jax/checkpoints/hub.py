"""Repositories of the Hugging Face Hub: its own client and its cache, and digests compared."""

import contextlib
import functools
import hashlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from vit_jax.base import MissingFile, UserError, usable
from vit_jax.base.errors import shown_text, shown_url
from vit_jax.checkpoints.formats.array_files import DESCRIPTIONS, INDEX, WEIGHTS


class Snapshot(NamedTuple):
    """What is needed of a repository at one commit, in the hub's cache."""

    folder: pathlib.Path
    url: str  # of the repository
    commit: str
    weights: dict[str, str]  # the SHA-256 of each file of weights


def snapshot(repository: str, revision: str | None) -> Snapshot:
    """A repository OWNER/NAME at a branch, tag or commit; None: main.

    What is in the cache is not downloaded again; where the hub cannot be reached that is all there
    is. The client compares lengths only: here the digests that the hub declares are compared, and
    what has others is removed. Raises UserError in one sentence.
    """
    if importlib.util.find_spec('huggingface_hub') is None:
        raise UserError("this needs the hub's client: pip install 'vit_jax[hub]'")
    from huggingface_hub import HfApi, constants, snapshot_download

    url = shown_url(f'{constants.ENDPOINT}/{repository}')
    for file in WEIGHTS:  # the first that the repository has
        stem, dot, ending = file.partition('.')
        kind = file, f'{file}{INDEX}', f'{stem}-*-of-*{dot}{ending}'
        with _in_one_sentence(url, revision):
            wanted = [*DESCRIPTIONS, *kind]
            place = snapshot_download(
                repository, revision=revision, allow_patterns=wanted, tqdm_class=_bar()
            )
        folder = pathlib.Path(place)
        revision = folder.name  # that commit, which may be main no more
        if weights := _of_kind(folder, kind):
            found = {path: _digests(path) for path in [*weights, *_of_kind(folder, DESCRIPTIONS)]}
            _refuse_damaged([path for path, (_, right) in found.items() if not right], url)
            return Snapshot(folder, url, revision, {path.name: found[path][0] for path in weights})
    with _in_one_sentence(url, revision):  # the cache may hold a part, and the hub be out of reach
        there = HfApi().list_repo_files(repository, revision=revision)
    text = f'no weights at commit {revision}: expected one of {", ".join(WEIGHTS)}'
    raise MissingFile(f'{url}: {text}; it holds {", ".join(there[:5])}')


def _bar() -> Any:
    """The client's bar on a terminal, elsewhere one that is not seen."""
    from huggingface_hub.utils import tqdm

    return tqdm if sys.stderr.isatty() else functools.partial(tqdm, disable=True)


def _of_kind(folder: pathlib.Path, patterns: tuple[str, ...]) -> list[pathlib.Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def _digests(path: pathlib.Path) -> tuple[str, bool]:
    """The SHA-256 of a file, and whether it has the digest that the hub declared, if any.

    The file is a link to one that the hub's client named so: by the SHA-256 of what is in LFS,
    else by git's SHA-1. Where links cannot be made, or a mirror has other names, none is declared.
    """
    blob = path.resolve()
    declared = path.is_symlink() and re.fullmatch('[0-9a-f]{40}|[0-9a-f]{64}', blob.name)
    with usable(path), blob.open('rb') as file:
        sha256 = found = hashlib.file_digest(file, 'sha256').hexdigest()
        if len(blob.name) == 40:
            file.seek(0)
            header = b'blob %d\0' % blob.stat().st_size
            found = hashlib.file_digest(file, lambda: hashlib.sha1(header)).hexdigest()
    return sha256, not declared or found == blob.name


def _refuse_damaged(paths: list[pathlib.Path], url: str) -> None:
    """Removes these files from the cache. Raises UserError where there are any."""
    for path in paths:
        with usable(path):
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    if paths:
        text = 'not the digest that the hub declares; removed, the same command downloads it again'
        raise UserError(f'{url}: {", ".join(path.name for path in paths)}: {text}')


@contextlib.contextmanager
def _in_one_sentence(url: str, revision: str | None) -> Iterator[None]:
    """What went wrong, and what to do."""
    from huggingface_hub import constants, errors

    login = '`hf auth login`, or HF_TOKEN=...'
    try:
        yield
    except errors.GatedRepoError as error:
        text = f'gated: accept its terms on that page, then {login}'
        raise UserError(f'{url}: {text}') from error
    except errors.RepositoryNotFoundError as error:
        raise MissingFile(f'{url}: no such repository, or a private one: {login}') from error
    except errors.RevisionNotFoundError as error:
        text = f'no revision {revision!r}: expected a branch, a tag or a commit, as in'
        raise MissingFile(f'{url}: {text} {url}/commits') from error
    except errors.LocalEntryNotFoundError as error:
        why = f'the hub cannot be reached: {_reason(error.__cause__ or error)}'
        if constants.HF_HUB_OFFLINE:
            why = 'HF_HUB_OFFLINE forbids to download it'
        absent = f'not whole in the cache ({constants.HF_HUB_CACHE})'
        raise MissingFile(f'{url}: {absent}, and {why}') from error
    except Exception as error:  # a hub may answer anything, for which its client raises many kinds
        raise UserError(f'{url}: {_reason(error)}') from error


def _reason(error: BaseException) -> str:
    """Why nothing came, as a part of a sentence."""
    from huggingface_hub import constants

    status = getattr(getattr(error, 'response', None), 'status_code', None)
    if status in (401, 403):
        return f'HTTP {status}: not for everybody: `hf auth login`, or HF_TOKEN=...'
    if status is not None:
        return f'the hub answers HTTP {status}'
    if isinstance(error, OSError) and error.strerror:
        where = error.filename or constants.HF_HUB_CACHE
        return f'{where}: {error.strerror}; HF_HOME=DIR is another place'
    text = shown_text(re.sub(r'^\[Errno [-\d]+\]', '', str(error)))
    text = ' '.join(text.split())[:300]
    unfit = 'what came cannot be used: ' if isinstance(error, ValueError | TypeError) else ''
    return unfit + (text or type(error).__name__)
