"""Compares the batches of one data set in three formats: folder, TFDS ArrayRecord, TFDS TFRecord.

python -m benchmarks.data_formats FOLDER [--steps=400]

Prepares the folder as TFDS data sets with the same order of images, in a temporary directory.
Prints a digest of the training batches from each format: images, labels and augmented images.
"""

import argparse
import functools
import hashlib
import pathlib
import tempfile
import time

import jax
import numpy as np

from tests import tfds_sets
from vit_jax.cli import app
from vit_jax.data import loading
from vit_jax.data.augmentation import augment, augreg
from vit_jax.data.image_preprocessing import InceptionCrop
from vit_jax.data.sources.opening import make_opener
from vit_jax.training.losses import make_targets


def digest(data: str, steps: int) -> str:
    """Returns a digest of training batches of 128 images, before and after augmentation."""
    source = make_opener()(data, 'train')
    reader = loading.ImageReader(source, InceptionCrop(), (32, 32), exif_rotation=True)
    loader = loading.make_loader(reader)
    targets = functools.partial(make_targets, num_classes=len(source.class_names))
    augmented = jax.jit(functools.partial(augment, config=augreg('light2'), targets_of=targets))
    sha256 = hashlib.sha256()
    for batch in loading.training_batches(loader, steps=range(steps), batch_size=128, seed=0):
        for array in (batch['images'], *augmented(jax.random.key(0), batch).values()):
            sha256.update(np.asarray(array).tobytes())
    return sha256.hexdigest()[:16]


def main() -> None:
    """Prints the three digests, and whether they are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder')
    parser.add_argument('--steps', type=app.positive_int, default=400)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        splits = {}
        for split in ('train', 'test'):
            source = make_opener()(arguments.folder, split)
            splits[split] = [source.read(i) for i in range(len(source))]
        names = source.class_names
        records = tfds_sets.array_record(root / 'array_record', splits, names)
        formats = {
            'folder': arguments.folder,
            'TFDS, ArrayRecord': str(records),
            'TFDS, TFRecord': str(tfds_sets.tfrecord(records, root / 'tfrecord')),
        }
        digests = {}
        for name, data in formats.items():
            began = time.perf_counter()
            digests[name] = digest(data, arguments.steps)
            seconds = time.perf_counter() - began
            print(f'{name:<20}{digests[name]}  {arguments.steps} batches of 128 in {seconds:.1f} s')
    print('identical' if len(set(digests.values())) == 1 else 'different')


if __name__ == '__main__':
    main()
