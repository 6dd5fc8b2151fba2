"""Checkpoints of other systems with the logits that the original code gives for them.

Those beside this file are committed, with one image each; all of them are in ../shared/reference,
or in the directory that VIT_JAX_REFERENCES names, where that is present.
"""

import gzip
import json
import os
import pathlib

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
SHARED = pathlib.Path(
    os.environ.get('VIT_JAX_REFERENCES', HERE.parents[2] / 'shared' / 'reference')
)

# What each file does not say of itself.
HINTS = {
    'google_vit_token': {},
    'google_vit_token_prelogits': {},
    'google_vit_gap': {},
    'google_hybrid_r50style': {},
    'google_hybrid_4stage': {},
    'google_hybrid_stemonly': {},
    'bigvision_tok': {},
    'bigvision_tok_scan': {},
    'bigvision_gap_sincos_rep': {'grid': (4, 4)},
    'bigvision_map': {},
    'bigvision_gap_nonsquare': {'grid': (3, 5)},
    'timm_token': {'num_heads': 3},
    'timm_gap_fcnorm': {'num_heads': 3},
    'timm_map': {'num_heads': 3},
    'timm_token_nonsquare': {'num_heads': 3, 'grid': (4, 6)},
    'hf_vit': {},
}
FAMILY_HINTS = {
    'clip_timm_openai': {'gelu': 'exact'},
    'dinov2_orig': {'num_heads': 4, 'grid': (4, 4)},
}
_ENDINGS = '', '.npz', '.safetensors'
COMMITTED = sorted(path.name.removesuffix('.io.npz') for path in HERE.glob('*.io.npz'))


def find(name: str) -> pathlib.Path | None:
    """The checkpoint, if it is there."""
    places = (folder / f'{name}{end}' for folder in (SHARED, HERE) for end in _ENDINGS)
    return next((place for place in places if place.exists()), None)


def path(name: str) -> str:
    """The checkpoint; the test is skipped where it is not there."""
    place = find(name)
    if place is None:
        pytest.skip(f'{name} is neither committed nor in {SHARED}')
    return str(place)


def images_and_logits(name: str) -> tuple[np.ndarray, np.ndarray]:
    """What the original code was given, and what it gave."""
    folder = SHARED if (SHARED / f'{name}.io.npz').exists() else HERE
    with np.load(folder / f'{name}.io.npz') as file:
        return file['images'], file['logits']


FAMILIES = 'families'  # the folder of the ViTs that people use, each a folder or a file
COMMITTED_FAMILIES = sorted({p.name.split('.')[0] for p in (HERE / FAMILIES).glob('*.io.npz')})


def by_tier(rows, quick, committed):
    """Marks the rows (name, ...) by name: quick, in the gate if they are committed, or nightly."""
    for name, *more in rows:
        mark = pytest.mark.gate if name in committed else pytest.mark.nightly
        yield pytest.param(name, *more, marks=[] if name in quick else mark)


def timm_names() -> dict[str, dict]:
    """What timm 1.0.31 says of each network that it publishes, by name."""
    return json.loads(gzip.decompress((HERE / 'timm_names.json.gz').read_bytes()))


def families() -> list[tuple[str, str | None]]:
    """The names of all that are there, and the sizes beside the network's own: None, or `48x40`."""
    paths = [*(SHARED / FAMILIES).glob('*.io.npz'), *(HERE / FAMILIES).glob('*.io.npz')]
    parts = {tuple(path.name.removesuffix('.io.npz').split('.')) for path in paths}
    return sorted(((p[0], p[1] if len(p) > 1 else None) for p in parts), key=str)


def family(name: str) -> str:
    """The path of one of them; the test is skipped where it is not there."""
    return path(f'{FAMILIES}/{name}')


def family_io(name: str, size: str | None) -> dict[str, np.ndarray]:
    """What the library was given, and what it gave."""
    file = f'{FAMILIES}/{name}{f".{size}" if size else ""}.io.npz'
    place = next((folder / file for folder in (SHARED, HERE) if (folder / file).exists()), None)
    if place is None:
        pytest.skip(f'{file} is neither committed nor in {SHARED}')
    with np.load(place) as arrays:
        return dict(arrays)
