"""Trains the model of the quickstart with random patch sizes, to classify digits with any of them.

Paper: FlexiViT (arXiv 2212.08013), at a small scale: 2, 4 or 8 pixels, drawn for each step. `fixed`
trains with 4 pixels and is also evaluated with the others.
Result: 98.3, 98.9, 98.9 % test accuracy with patches of 2, 4, 8 pixels (359 images, seed 0,
2026-11-28); `fixed` has 30.6, 98.6, 17.0 %.
Cost: 5 and 10 minutes (`fixed`, `flexible`) on a busy machine with 2 CPU cores.
Command: python -m vit_jax.train --config=configs/pretrain/digits_flexivit.py:flexible --workdir=DIR
"""

from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.configs import quickstart

ARGUMENTS = 'flexible', 'fixed'
SIZES = 2, 4, 8


def get_config(patches: str = 'flexible') -> TrainConfig:
    """Returns the experiment with random patch sizes, or with the model's patch size."""
    config = quickstart.get_config()
    config.patch_sizes = SIZES if patches == 'flexible' else ()
    config.evals = {f'patch_{size}': EvalConfig(patch_size=size) for size in SIZES}
    config.fewshot = None
    return config
