"""Loads damaged copies of a checkpoint: each is refused in one sentence, or gives the same values.

A safetensors file has no checksum, so a byte that flips within its numbers cannot be seen: there,
the numbers that hold a flipped byte may differ, and no others. A copy that we wrote ourselves has
digests, and is held to the whole promise.
"""

import json
import pathlib
import resource
import shutil
import sys

import jax
import numpy as np

import vit_jax
from tests import reference

MEGABYTES = 1024


def main(folder: str, copies: str) -> None:
    found = {name: reference.find(name) for name in reference.HINTS}
    counts = {
        name: outcomes(path, reference.HINTS[name], pathlib.Path(folder), int(copies))
        for name, path in found.items()
        if path is not None
    }
    print(json.dumps(counts))


def outcomes(whole, options, folder, copies):
    """How many damaged copies were refused, gave the same values, or others where they must."""
    rng = np.random.default_rng(0)
    original = vit_jax.load(str(whole), **options)
    digested = folder / f'digested{whole.suffix}'
    shutil.rmtree(digested, ignore_errors=True)
    vit_jax.save(original, str(digested), overwrite=True)
    used = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 2**20, resource.RLIM_INFINITY))
    counts = {'refused': 0, 'same': 0, 'flipped numbers': 0}
    for copy in range(copies):
        chosen = (whole, digested)[copy % 2]
        place, flips = damaged(chosen, folder / f'copy{whole.suffix}', rng, copy)
        try:
            params = vit_jax.load(str(place), **options).params
        except ValueError as error:
            assert '\n' not in str(error) and str(error).startswith(str(place)), error
            counts['refused'] += 1
            continue
        differing = sum(
            np.count_nonzero(one.view(np.uint32) != other.view(np.uint32))
            for one, other in zip(leaves(params), leaves(original.params), strict=True)
        )
        has_checksums = whole.suffix == '.npz' or chosen == digested
        assert differing <= (0 if has_checksums else flips), (copy, differing, flips)
        counts['flipped numbers' if differing else 'same'] += 1
    return counts


def leaves(params):
    return [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(params)]


def damaged(whole, place, rng, copy):
    """A copy with a few flipped bytes, or cut short; and how many bytes were flipped."""
    if whole.is_dir():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        file = place / 'model.safetensors'
    else:
        shutil.copy(whole, place)
        file = place
    data = bytearray(file.read_bytes())
    if copy % 5 == 4:
        file.write_bytes(data[: rng.integers(len(data))])
        return place, 0
    flips = int(rng.integers(1, 5))
    # Half of them where the structure is: the beginning and the end.
    edge = rng.integers(0, 6000, flips) if copy % 3 else rng.integers(0, len(data), flips)
    if copy % 3 == 2 and file.suffix == '.npz':
        edge = len(data) - 1 - edge
    for position in edge:
        data[position] ^= 1 << rng.integers(8)
    file.write_bytes(data)
    return place, flips


if __name__ == '__main__':
    main(*sys.argv[1:])
