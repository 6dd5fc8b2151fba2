"""Evaluates a checkpoint with kNN and the linear probe of DINOv2, on ImageNet or other images.

Paper: "DINOv2: Learning Robust Visual Features without Supervision", section 7.1: the defaults of
`dinov2/eval/knn.py` and `linear.py`. Two values differ: the head is chosen on a tenth of the
training images, not on the test images, and random crops are resized without antialiasing. DINOv3
trains only the heads with the mean of the patches of the last block:
--config.fewshot.linear_probe.blocks=1 --config.fewshot.linear_probe.mean_of_patches=true
Result: docs/training.md has an example on a small data set; ImageNet was not run here.
Cost: The linear probe is 12,500 forward passes of 1,024 images. The others are one forward pass of
all images.
Command: python -m vit_jax.fewshot --config=configs/fewshot/dinov2.py --workdir=DIR \
             --config.start_from=CHECKPOINT --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.data.image_preprocessing import CentralCrop
from vit_jax.evaluation.linear_probe import LinearProbeConfig
from vit_jax.evaluation.probing import FewshotConfig


def get_config() -> TrainConfig:
    """Returns the experiment; the command line sets checkpoint and data."""
    return TrainConfig(
        data='digits',
        fewshot=FewshotConfig(
            crop=CentralCrop(scale=256 / 224, resize='bicubic_antialias', rounding='timm'),
            neighbors=(10, 20, 100, 200),
            linear_probe=LinearProbeConfig(),
        ),
        batch_size=256,
        image_size=(224, 224),
    )
