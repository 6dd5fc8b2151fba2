"""Loads damaged copies of npz files: each is rejected in one sentence, or gives the same values.

A safetensors file has no checksum: a flipped bit in its numbers is not noticed.
"""

import json
import pathlib
import sys

import jax
import numpy as np

import vit_jax
from tests import reference


def main(folder: str, copies: str) -> None:
    places = {name: reference.find(name) for name in reference.HINTS}
    found = [name for name, place in places.items() if place and place.suffix == '.npz']
    print(json.dumps({name: outcomes(name, pathlib.Path(folder), int(copies)) for name in found}))


def outcomes(name, folder, copies):
    """How many damaged copies of our own copy were rejected, or gave the same values."""
    original = pathlib.Path(reference.path(name))
    whole, path = vit_jax.load(original, **reference.HINTS[name]), folder / original.name
    vit_jax.save(whole, path, overwrite=True)
    data, expected = path.read_bytes(), jax.tree.leaves(whole.params)
    rng, counts = np.random.default_rng(0), {'rejected': 0, 'same': 0}
    for number in range(copies):
        copy = bytearray(data)
        ends = (0, 6000), (len(data) - 6000, len(data)), (0, len(data))
        for position in rng.integers(*ends[number % 3], 3):
            copy[position] ^= 1 << rng.integers(8)
        path.write_bytes(copy if number % 4 else copy[: len(copy) // 2])
        try:
            params = jax.tree.leaves(vit_jax.load(path, **reference.HINTS[name]).params)
        except ValueError as error:
            assert '\n' not in str(error) and str(error).startswith(str(path)), error
            counts['rejected'] += 1
            continue
        pairs = zip(params, expected, strict=True)
        assert all(np.asarray(one).tobytes() == other.tobytes() for one, other in pairs), number
        counts['same'] += 1
    return counts


if __name__ == '__main__':
    main(*sys.argv[1:])
