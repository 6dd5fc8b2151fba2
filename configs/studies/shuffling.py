"""Compares shuffling all images with shuffling blocks of images that are stored by class.

Images of a bucket are shuffled in blocks and windows (`sampling.shuffle_blocks`). Here the training
images of CIFAR-10 are stored sorted by class, the worst order for blocks. Each window has 512
blocks, the fewest with batches of 64 images.
Source: "Stochastic Gradient Descent without Full Data Shuffle" (Xu et al. 2022) shuffles blocks and
a buffer of several blocks, with a similar accuracy as with all images.
Result: docs/studies.md has the results.
Cost: 12 training runs of 3 minutes on one CPU core.
Command: python -m benchmarks.bucket write cifar10 SHARDS
         python -m benchmarks.bucket run SHARDS \
             python -m vit_jax.study --config=configs/studies/shuffling.py --workdir=DIR
"""

from typing import Any

from vit_jax.configs.studies import base
from vit_jax.studies.config import Grid, PlotConfig, Study

MEAN_BYTES = 924  # of the JPEG files of CIFAR-10


def get_config() -> Study:
    """Returns a study of three sizes of blocks and windows, and of shuffling all images."""
    orders: dict[str, dict[str, Any]] = {'all': {'data': 'cifar10'}}
    for images in 4, 16, 64:
        gb = 512 * images * MEAN_BYTES / 2**30
        orders[f'{images}x512'] = {'loader.shuffle_gb': gb}
    config = base.get_config('small')
    config.data = 'gs://bucket/shards'
    return Study(
        title='Shuffling in blocks',
        base=config,
        grids={'train': Grid(axes={'order': orders}, measures=('test/accuracy',))},
        seeds=(0, 1, 2),
        draw=PlotConfig(x='order', y='test/accuracy'),
    )
