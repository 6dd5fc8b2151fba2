"""What must be the same on every host before they compute: settings, code, packages."""

import hashlib
import pathlib
import platform
from importlib import metadata
from typing import Any

from vit_jax.base import records, storage
from vit_jax.config import TrainConfig

_HERE = pathlib.Path(__file__).parent.parent
_PACKAGES = 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy'


def of_run(config: TrainConfig, path: str) -> dict[str, Any]:
    """Returns settings, code and packages of a run in the work directory `path`."""
    where = str(storage.folder(path))
    return {'config': records.to_dict(config), 'workdir': where} | installed()


def installed() -> dict[str, Any]:
    """Returns versions of packages, and a digest of each file of this one."""
    code = {
        str(file.relative_to(_HERE)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in sorted(_HERE.rglob('*.py'))
        if not file.is_relative_to(_HERE / 'configs')  # whose values are compared
    }
    return {'code': code, 'packages': packages()}


def packages() -> dict[str, str]:
    """Returns versions, by name, of the packages that compute."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {'python': platform.python_version()} | versions
