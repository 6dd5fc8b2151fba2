"""Pre-trains a ViT with random patch sizes on ImageNet-21k.

Paper: FlexiViT, "One Model for All Patch Sizes" (arXiv 2212.08013), with the values of i21k_sup.py
in big_vision: images of 240 pixels, patches of 8 to 48 pixels, drawn for each step, parameters for
patches of 32 pixels and 7x7 positions. These differ: weight decay is multiplied by the learning
rate here, so it is divided by the learning rate; MixUp draws a weight for each image; positions are
reduced to 5x5 and 6x6 without antialiasing; the evaluations are only on ImageNet-21k.
Result: Not known. Nothing was run at this size.
Cost: B takes 90 x 14.1 M x 6 x 26.1 G multiply-adds (the mean of all sizes) = 199 exaFLOPs.
Memory: patches of 8 pixels, 901 tokens, need the most.
Command: python -m vit_jax.train --config=configs/pretrain/flexivit.py:B --workdir=DIR \
             --config.data=DATA
"""

from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.configs.pretrain import augreg
from vit_jax.models import variant
from vit_jax.training.duration import Duration

ARGUMENTS = 'S', 'B', 'L'
SIZES = 48, 40, 30, 24, 20, 16, 15, 12, 10, 8


def get_config(size: str = 'B') -> TrainConfig:
    """Returns AugReg's experiment for a model size, with random patch sizes."""
    config = augreg.get_config(f'i21k,{size}/32,light2')
    config.model = variant(
        f'{size}/32', image_size=(240, 240), head_bias=-10.0, position_resize='bilinear_edges'
    )
    config.train_split = 'full[51200:]'
    config.eval_split = 'test'
    config.evals = {f'patch_{n}': EvalConfig(split='full[:25600]', patch_size=n) for n in SIZES}
    config.patch_sizes = SIZES
    config.total = Duration(epochs=90.0)
    config.eval_every_steps = 5_000
    config.checkpoint_every_steps = 1_000
    return config
