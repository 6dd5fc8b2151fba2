"""Measures what it costs to detect changed training data, at the start of a run and later.

Command: python -m benchmarks.data_manifest [--images=1281167] [--folder=DIR]

Without --folder, the program makes a folder of empty files in 1,000 classes.
"""

import argparse
import pathlib
import sys
import tempfile
import time

from vit_jax.cli import app
from vit_jax.data.image_preprocessing import Resize
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed.processes import Job
from vit_jax.experiment import data_manifest, workdirs
from vit_jax.experiment.workdirs import Workdir


def make_folder(root: pathlib.Path, images: int) -> None:
    """Makes empty files root/train/CLASS/NAME."""
    for label in range(1000):
        folder = root / 'train' / f'n{label:08}'
        folder.mkdir(parents=True)
        for i in range(label, images, 1000):
            (folder / f'{folder.name}_{i}.JPEG').touch()


class Clock:
    """Prints the wall and CPU seconds since the last call."""

    def __init__(self) -> None:
        self._since = time.perf_counter(), time.process_time()

    def __call__(self, label: str) -> None:
        now = time.perf_counter(), time.process_time()
        wall, cpu = (a - b for a, b in zip(now, self._since, strict=True))
        print(f'  {label:<50} {wall:6.2f} s, CPU {cpu:6.2f} s', flush=True)
        self._since = time.perf_counter(), time.process_time()


def measure(data: str, workdir: pathlib.Path) -> None:
    """Prints the seconds of the first and the second start of a run."""
    for start in 'first start', 'second start':
        print(start)
        clock = Clock()
        source = make_opener()(data, 'train')
        clock(f'{len(source):,} files found')
        reader = ImageReader(source, Resize(), (224, 224), exif_rotation=False)
        sources = data_manifest.name_sources(reader, [], None)
        with data_manifest.compare_data(Workdir(workdir), sources, Job()) as check:
            clock('names, labels and some sizes listed or compared')
            check(3600.0)
        clock('in the background: all sizes, manifest written')
        (workdir / 'checkpoints' / '1').mkdir(parents=True, exist_ok=True)
    print(f'the manifest has {(workdir / workdirs.MANIFEST).stat().st_size / 1e6:.1f} MB')


def main() -> None:
    """Measures with the given folder, or with one that it makes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--images', type=app.positive_int, default=1_281_167)
    parser.add_argument('--folder')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        if arguments.folder is None:
            make_folder(root / 'data', arguments.images)
        (root / 'run').mkdir()
        measure(arguments.folder or str(root / 'data'), root / 'run')
    print(f'Python {sys.version.split()[0]}')


if __name__ == '__main__':
    main()
