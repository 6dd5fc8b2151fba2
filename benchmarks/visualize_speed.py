"""Measures time and memory of the ViT paper's figures and of CKA of all layers, for ViT-B/16.

python -m benchmarks.visualize_speed [--cka_images=10240]

The model has random parameters and the images are noise, which does not change the cost. Each
command runs in its own process, whose peak memory the system reports.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import cv2
import jax
import numpy as np

import vit_jax
from vit_jax.checkpoints.card import Card
from vit_jax.cli import app
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.models import build, variant
from vit_jax.pretrained import LoadedModel

VIT_PAPER = 'filters,positions,attention_distance,rollout,attention_maps'


def main() -> None:
    """Prints a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--cka_images', type=app.positive_int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        config = variant('B/16', num_classes=10)
        params = jax.device_get(jax.jit(build(config).init)(jax.random.key(0)))
        card = Card(model=config, grid=config.grid, preprocessing=Preprocessing())
        loaded = LoadedModel(card, params)
        vit_jax.save(loaded, folder / 'B_16', 'vit_jax')
        images = folder / 'images'
        rng = np.random.default_rng(0)
        images.mkdir()
        for index in range(arguments.cka_images):
            cv2.imwrite(f'{images}/{index}.jpg', rng.integers(0, 256, (256, 256, 3), np.uint8))
        cores = len(os.sched_getaffinity(0))
        for figures, count in ((VIT_PAPER, 32), ('cka', arguments.cka_images)):
            command = [sys.executable, '-m', 'vit_jax.visualize', str(folder / 'B_16')]
            command += [f'--images={images}', f'--out={folder / "out"}', f'--figures={figures}']
            start = time.monotonic()
            process = subprocess.Popen(
                [*command, f'--num_images={count}'], stdout=subprocess.DEVNULL
            )
            _, status, usage = os.wait4(process.pid, 0)
            if status != 0:
                raise SystemExit(f'{figures}: ended with {status}')
            seconds = time.monotonic() - start
            memory = usage.ru_maxrss / 2**20
            print(
                f'{figures}, {count} images, {cores} cores: {seconds:.0f} s, {memory:.2f} GiB peak'
            )


if __name__ == '__main__':
    main()
