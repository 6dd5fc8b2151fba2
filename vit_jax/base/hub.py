"""Lists data sets of the Hugging Face Hub: hf:OWNER/NAME or hf:OWNER/NAME@REVISION.

A name is resolved to one commit, with the URL hf://OWNER/NAME@COMMIT.
"""

import functools
import re
from typing import Any

from vit_jax.base.errors import MissingFile, StorageError, TransientError, UserError, format_error

NAME = re.compile(r'hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@?\s]+))?')
_URL = re.compile(r'hf://(?P<repository>[^/]+/[^/@]+)@(?P<commit>[0-9a-f]+)/?(?P<path>.*)')


def pin(name: str) -> str:
    """Returns the URL of the present commit of a data set hf:OWNER/NAME[@REVISION].

    Raises UserError if it does not exist, or if its access is restricted.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise UserError(f'{name}: expected hf:OWNER/NAME or hf:OWNER/NAME@REVISION')
    repository, revision = match['repository'], match['revision']
    return f'hf://{repository}@{_describe(repository, revision).sha}'


@functools.cache
def _describe(repository: str, revision: str | None) -> Any:
    """Asks the Hub for the commit and the files of a data set."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise UserError(
            f"hf:{repository}: huggingface_hub is not installed; run pip install 'vit_jax[hub]'"
        ) from error
    name = f'hf:{repository}' + (f'@{revision}' if revision else '')
    api = huggingface_hub.HfApi()
    try:
        return api.dataset_info(repository, revision=revision, files_metadata=True)
    except errors.RepositoryNotFoundError as error:
        raise MissingFile(
            f'{name}: no such data set, or no access; HF_TOKEN gives access to private ones, and '
            'models belong to --config.start_from'
        ) from error
    except (errors.RevisionNotFoundError, errors.GatedRepoError) as error:
        raise StorageError(f'{name}: {format_error(error)}') from error
    except Exception as error:  # the client raises many types
        raise TransientError(f'{name}: {format_error(error)}') from error


def list_folder(url: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Returns the URLs and sizes of the files in a folder, and the URLs of its subfolders."""
    match = _URL.fullmatch(url)
    assert match is not None
    prefix = f'{match["path"]}/' if match['path'] else ''
    root = f'hf://{match["repository"]}@{match["commit"]}'
    files = []
    folders = set()
    for file in _describe(match['repository'], match['commit']).siblings:
        folder, _, rest = file.rfilename.removeprefix(prefix).partition('/')
        if not file.rfilename.startswith(prefix):
            continue
        if rest:
            folders.add(f'{root}/{prefix}{folder}')
        else:
            files.append((f'{root}/{file.rfilename}', file.size))
    return files, [*folders]


def split_url(url: str) -> tuple[str, str]:
    """Splits hf://OWNER/NAME@COMMIT/PATH into its data set and its path."""
    owner, name, *path = url.removeprefix('hf://').split('/', 2)
    return f'{owner}/{name}', path[0] if path else ''


def address(url: str) -> tuple[str, dict[str, str]]:
    """Returns the https address of the folder of all files, and the headers of requests."""
    from huggingface_hub import constants, get_token

    match = _URL.fullmatch(url)
    assert match is not None
    token = get_token()
    headers = {'authorization': f'Bearer {token}'} if token else {}
    place = f'{constants.ENDPOINT}/datasets/{match["repository"]}/resolve/{match["commit"]}'
    return place, headers
