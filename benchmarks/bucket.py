"""Reads shards from a server on this machine that answers like Google Cloud Storage.

python -m benchmarks.bucket write FOLDER SHARDS     writes the images of a folder as tar shards,
                                                    sorted by class
python -m benchmarks.bucket speed SHARDS            images per CPU second from the disk and from
                                                    gs://bucket, in turns, without the server's;
                                                    and how long training waits for images if each
                                                    reply takes 50 ms
python -m benchmarks.bucket run SHARDS COMMAND ...  runs a command for which gs://bucket/shards has
                                                    the files of SHARDS

The server is another process on this machine, without TLS and without the delay of a network.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks.input_speed import SIMULATED_SECONDS, SimulatedDecoder
from tests.servers import gcs
from vit_jax.base import Batch
from vit_jax.data import loading
from vit_jax.data.image_preprocessing import InceptionCrop
from vit_jax.data.loading import ImageReader, LoaderConfig
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed import meshes
from vit_jax.training.loop import Clock

_PER_SHARD = 1000
_ROUNDS = 3
_BATCH = 128
_WINDOW_GB = 1.0
_DELAY = 0.05  # seconds, of a reply
_CORES = 64
_STEP = 0.01  # seconds, of a training step
_DATA = 'gs://bucket/shards'


def write_shards(data: str, folder: pathlib.Path) -> None:
    """Writes tar shards of 1,000 images in the layout of WebDataset, and the names of classes."""
    folder.mkdir(parents=True)
    for split in 'train', 'test':
        source = make_opener()(data, split)
        order = np.argsort(source.labels, kind='stable').tolist()
        for number, first in enumerate(range(0, len(order), _PER_SHARD)):
            with tarfile.open(folder / f'{split}-{number:04}.tar', 'w') as tar:
                for index in order[first : first + _PER_SHARD]:
                    image, label = source.read(index)
                    assert isinstance(image, bytes)
                    for kind, content in (('jpg', image), ('cls', str(label).encode())):
                        info = tarfile.TarInfo(f'{index:08}.{kind}')
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
        (folder / 'classnames.txt').write_text('\n'.join(source.class_names))


def serve(folder: str, delay: float) -> None:
    """Serves the files of a folder until stdin is closed; prints the environment of clients."""
    with gcs.serving() as bucket:

        def answer(name: str, body: bytes) -> bytes:
            time.sleep(delay)
            return body

        bucket.change = answer
        root = pathlib.Path(folder)
        for path in sorted(root.rglob('*')):
            if path.is_file():
                bucket.put(f'shards/{path.relative_to(root)}', path.read_bytes(), {})
        print(json.dumps(bucket.environment()), flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def serving(folder: str, delay: float = 0.0) -> Iterator[dict[str, str]]:
    """Serves a folder in a process, with a delay of each reply; yields the clients' environment."""
    command = [sys.executable, '-m', 'benchmarks.bucket', 'serve', folder, f'--delay={delay}']
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        yield os.environ | json.loads(server.stdout.readline())
    finally:
        server.stdin.close()
        server.wait()


def make_batches(data: str, config: LoaderConfig) -> tuple[int, Iterator[Batch]]:
    """Returns the steps per window, and batches of random crops of 224 pixels."""
    reader = ImageReader(make_opener()(data, 'train'), InceptionCrop(), (224, 224), True)
    sharding = meshes.batch_sharding(meshes.make_mesh(meshes.MeshConfig()))
    loader = loading.make_loader(reader, config, sharding)
    sampler = loading.training_sampler(loader.source, loader.config, batch_size=_BATCH, seed=0)
    batches = loading.host_batches(
        loader, sampler, steps=range(10**9), batch_size=_BATCH, rows=np.arange(_BATCH)
    )
    return sampler.steps_per_window, batches


def measure_wait(data: str, seconds: float) -> None:
    """Prints the share of time that a training with many simulated cores waits for images.

    The first window is not counted. A window has half of all images.
    """
    source = make_opener()(data, 'train')
    assert source.places is not None
    window_gb = source.places.num_bytes / 2**30 / 2
    with SimulatedDecoder(SIMULATED_SECONDS).installed():
        steps, batches = make_batches(data, LoaderConfig(shuffle_gb=window_gb, threads=_CORES))
        clock = Clock()
        with clock('first window'):
            next(batches)
        first = clock.seconds.pop('first window')
        end = time.perf_counter() + max(seconds, 3 * steps * _STEP)
        while time.perf_counter() < end:
            with clock('data wait'):
                next(batches)
            with clock('step'):
                time.sleep(_STEP)
    share = clock.seconds['data wait'] / sum(clock.seconds.values())
    print(
        f'replies after {_DELAY * 1000:.0f} ms, {_CORES} simulated cores, windows of {steps} steps '
        f'of {_STEP * 1000:.0f} ms and {_BATCH} images: first window {first:.1f} s, then data wait '
        f'{share:.1%}'
    )


def measure(data: str, seconds: float) -> dict[str, float]:
    """Measures batches of random crops of 224 pixels, after the first window."""
    _, batches = make_batches(data, LoaderConfig(shuffle_gb=_WINDOW_GB))
    next(batches)  # waits for the first window
    wall = time.perf_counter()
    core = time.process_time()
    count = 0
    while time.perf_counter() - wall < seconds:
        next(batches)
        count += _BATCH
    rates = {
        'wall': count / (time.perf_counter() - wall),
        'core': count / (time.process_time() - core),
    }
    batches.close()  # type: ignore[attr-defined]
    return rates


def compare(folder: str, seconds: float) -> None:
    """Prints images per second and per CPU second from the disk and from the bucket."""
    rates: dict[str, list[dict[str, float]]] = {folder: [], _DATA: []}
    with serving(folder) as environment:
        for number in range(_ROUNDS):
            for data in [*rates][:: -1 if number % 2 else 1]:
                command = [sys.executable, '-m', 'benchmarks.bucket', 'measure', data]
                done = subprocess.run(
                    [*command, f'--seconds={seconds}'],
                    env=environment | {'JAX_PLATFORMS': 'cpu'},
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                rates[data].append(json.loads(done.stdout))
    for data, measured in rates.items():
        wall, core = (statistics.median(m[kind] for m in measured) for kind in ('wall', 'core'))
        print(f'{data:<30} {wall:>8,.0f} images/s {core:>8,.0f} per CPU second')
    ratios = sorted(b['core'] / a['core'] for a, b in zip(*rates.values(), strict=True))
    print(f'bucket / disk, per CPU second: {", ".join(f"{ratio:.2f}" for ratio in ratios)}')
    command = [sys.executable, '-m', 'benchmarks.bucket', 'wait', _DATA, f'--seconds={seconds}']
    with serving(folder, _DELAY) as environment:
        subprocess.run(command, env=environment | {'JAX_PLATFORMS': 'cpu'}, check=True)


def main() -> int:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest='command', required=True)
    for name in 'write', 'speed', 'run', 'serve', 'measure', 'wait':
        command = commands.add_parser(name)
        command.add_argument('folder')
        command.add_argument('--seconds', type=float, default=10.0)
    commands.choices['serve'].add_argument('--delay', type=float, default=0.0)
    commands.choices['write'].add_argument('shards', type=pathlib.Path)
    commands.choices['run'].add_argument('program', nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.command == 'write':
        write_shards(arguments.folder, arguments.shards)
    elif arguments.command == 'serve':
        serve(arguments.folder, arguments.delay)
    elif arguments.command == 'measure':
        jax.config.update('jax_platforms', 'cpu')
        print(json.dumps(measure(arguments.folder, arguments.seconds)))
    elif arguments.command == 'wait':
        jax.config.update('jax_platforms', 'cpu')
        measure_wait(arguments.folder, arguments.seconds)
    elif arguments.command == 'speed':
        compare(arguments.folder, arguments.seconds)
    else:
        program = [sys.executable if word == 'python' else word for word in arguments.program]
        with serving(arguments.folder) as environment:
            return subprocess.run(program, env=environment, check=False).returncode
    return 0


if __name__ == '__main__':
    sys.exit(main())
