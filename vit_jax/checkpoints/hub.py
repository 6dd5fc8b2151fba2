"""Repositories of the Hugging Face Hub: its client, its cache, and digests compared."""

import contextlib
import functools
import hashlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.base import MissingFile, UserError, usable
from vit_jax.base.errors import one_line, shown_url
from vit_jax.checkpoints.formats.array_files import DESCRIPTIONS, INDEX, WEIGHTS


class Snapshot(NamedTuple):
    """The needed files of a repository at one commit, in the hub's cache."""

    folder: pathlib.Path
    url: str  # of the repository
    commit: str
    weights: dict[str, str]  # the SHA-256 of each file of weights


def snapshot(repository: str, revision: str | None) -> Snapshot:
    """Downloads the weights of a repository and their descriptions.

    Cached files are not downloaded again; if the hub cannot be reached, they are enough.

    Args:
      repository: OWNER/NAME.
      revision: A branch, tag or commit; None: main.

    Raises:
      UserError: In one sentence. Files with another digest than the hub declares are removed.
    """
    if importlib.util.find_spec('huggingface_hub') is None:
        raise UserError("this needs the hub's client: pip install 'vit_jax[hub]'")
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import tqdm

    url = shown_url(f'{constants.ENDPOINT}/{repository}')
    bar = tqdm if sys.stderr.isatty() else functools.partial(tqdm, disable=True)
    for file in WEIGHTS:  # the first that the repository has
        stem, dot, ending = file.partition('.')
        kind = [file, f'{file}{INDEX}', f'{stem}-*-of-*{dot}{ending}']
        with _errors_in_one_sentence(url, revision):
            place = snapshot_download(
                repository, revision=revision, allow_patterns=[*DESCRIPTIONS, *kind], tqdm_class=bar
            )
        folder = pathlib.Path(place)
        revision = folder.name  # the same commit for all kinds: main may move
        if paths := sorted(path for pattern in kind for path in folder.glob(pattern)):
            weights = {path.name: _compare_digest(path, url) for path in paths}
            return Snapshot(folder, url, revision, weights)
    with _errors_in_one_sentence(url, revision):  # the cache may hold a part of the files
        files = HfApi().list_repo_files(repository, revision=revision)
    text = f'no weights at commit {revision}: expected one of {", ".join(WEIGHTS)}'
    raise MissingFile(f'{url}: {text}; it holds {", ".join(files[:5])}')


def _compare_digest(path: pathlib.Path, url: str) -> str:
    """Returns the SHA-256 of a file. Raises UserError if the hub declares another one.

    The client compares lengths only. It links the file to one that is named by the declared digest.
    """
    blob = path.resolve()
    with usable(path), blob.open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
    if path.is_symlink() and re.fullmatch('[0-9a-f]{64}', blob.name) and digest != blob.name:
        with usable(path):
            blob.unlink()
            path.unlink()
        text = 'not the digest that the hub declares; removed, the same command downloads it again'
        raise UserError(f'{url}: {path.name}: {text}')
    return digest


@contextlib.contextmanager
def _errors_in_one_sentence(url: str, revision: str | None) -> Iterator[None]:
    """Turns any exception of the hub's client into a UserError that says what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except Exception as error:  # the client raises many kinds for unusable answers
        login = '`hf auth login`, or HF_TOKEN=...'
        answers = (getattr(one, 'response', None) for one in (error, error.__cause__))
        status = next((answer.status_code for answer in answers if answer is not None), None)
        why = f'the hub answers HTTP {status}' if status else 'the hub cannot be reached'
        if status in (401, 403):
            why += f': not public: {login}'
        if constants.HF_HUB_OFFLINE:
            why = 'HF_HUB_OFFLINE forbids to download it'
        cache = constants.HF_HUB_CACHE
        missing = {
            errors.GatedRepoError: f'gated: accept its terms on that page, then {login}',
            errors.RepositoryNotFoundError: f'no such repository, or a private one: {login}',
            errors.RevisionNotFoundError: f'no such branch, tag or commit: {revision!r}',
            errors.LocalEntryNotFoundError: f'not whole in the cache ({cache}), and {why}',
            errors.HfHubHTTPError: why,
        }
        for kind, text in missing.items():
            if isinstance(error, kind):
                raise MissingFile(f'{url}: {text}') from error
        raise UserError(f'{url}: {one_line(error)}') from error
