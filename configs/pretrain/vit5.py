"""Pre-trains ViT-5 of the sizes S, B or L on ImageNet, and fine-tunes B and L at 224 pixels.

Paper: "ViT-5: Vision Transformers for the Mid-2020s" (arXiv:2602.08071) and the commands of its
repository: RMSNorm, also of queries and keys, no bias of queries, keys and values, LayerScale,
learned positions and RoPE, and four registers with their own RoPE. The recipe is DeiT III's with
other stochastic depth. B and L train at 192 pixels, and then for 20 epochs at 224, from the moving
average of parameters. Differences: the repository decays learning rates to 1e-5 and draws one
weight of MixUp and CutMix per batch; this recipe decays them to 0 and draws one per example.
Result: The paper reaches 82.2 % (S), 84.2 % (B) and 84.9 % (L) on the validation images at 224
pixels. It was not run here.
Cost: 29 exaFLOPs (S), 81 exaFLOPs (B) and 142 exaFLOPs (L), without fine-tuning.
Command: python -m vit_jax.train --config=configs/pretrain/vit5.py:B/16 --workdir=DIR \
             --config.data=DATA
         python -m vit_jax.finetune --config=configs/pretrain/vit5.py:B/16,224 --workdir=DIR2 \
             --config.data=DATA --config.start_from=DIR
"""

import dataclasses

from vit_jax.config import TrainConfig
from vit_jax.configs.pretrain import deit3
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration

ARGUMENTS = deit3.ARGUMENTS
EPOCHS = {'S/16': 800.0, 'B/16': 800.0, 'L/16': 400.0}
# Stochastic depth of each run.
DEPTHS = {'S/16': 0.05, 'B/16': 0.2, 'L/16': 0.35, 'B/16,224': 0.25, 'L/16,224': 0.5}


def get_config(run: str = 'B/16') -> TrainConfig:
    """Returns the pre-training of a model, or its fine-tuning if an image size follows."""
    config = deit3.get_config(run)
    config.regularization.stochastic_depth = DEPTHS[run]
    config.ema_decay = 0.99996
    if config.model is None:  # fine-tuning
        return config
    assert isinstance(config.model, ViTConfig)
    config.total = Duration(epochs=EPOCHS[run])
    config.model = dataclasses.replace(
        config.model,
        positions='learned_rope',
        registers=4,
        norm='rms',
        qk_norm=True,
        qkv_bias=False,
    )
    return config
