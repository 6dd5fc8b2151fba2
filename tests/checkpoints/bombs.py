"""Small files that declare much: each is refused, in a process whose memory is bounded."""

import json
import pathlib
import resource
import sys
import zipfile

import vit_jax
from tests import reference

MEGABYTES = 160


def main(folder: str) -> None:
    files = written(pathlib.Path(folder))
    vit_jax.load(reference.path('timm_gap_fcnorm'), num_heads=4)  # everything is imported
    used = int(pathlib.Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 2**20, resource.RLIM_INFINITY))
    for path in files:
        try:
            vit_jax.load(path)
        except ValueError as error:
            assert str(error).startswith(str(path)) and 'allocate' not in str(error), error
        else:
            raise AssertionError(f'{path} was read')


def written(folder):
    """A path for each bomb."""
    files = [folder / 'header.npz', folder / 'zeros.npz', folder / 'empty.safetensors']
    header = b'\x93NUMPY\x02\x00' + (25 * 10**7).to_bytes(4, 'little')
    for file, start, repeats in (files[0], header, 25), (files[1], b'', 50):
        with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            with archive.open('cls.npy', 'w') as member:
                member.write(start)
                for _ in range(repeats):
                    member.write(b' ' * 10**7)
    tensor = {'dtype': 'F32', 'shape': [0], 'data_offsets': [0, 0]}
    text = json.dumps({str(i): tensor for i in range(400_000)}).encode()
    files[2].write_bytes(len(text).to_bytes(8, 'little') + text)
    for name, key in {'shards': 'weight_map', 'labels': 'id2label'}.items():
        (folder / name).mkdir()
        text = json.dumps({key: {str(i): f'{i}.safetensors' for i in range(300_000)}})
        (folder / name / 'model.safetensors.index.json').write_text(text)
        files.append(folder / name)
    return files


if __name__ == '__main__':
    main(*sys.argv[1:])
