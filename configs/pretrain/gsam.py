"""Pre-trains B/32 on ImageNet with GSAM, without strong augmentation.

Paper: "Surrogate Gap Minimization Improves Sharpness-Aware Training". All values are from
configs/proj/gsam/vit_i1k_gsam_no_aug.py in big_vision. Its weight decay of 0.001 per step is 1/3
here, because weight decay is multiplied by the learning rate. big_vision perturbs the parameters
on each device by the gradient of the images on this device; vit_jax computes one perturbation
for the whole batch.
Result: The paper reports 5.4 % more than AdamW and 3.2 % more than SAM for ViT-B/32 (abstract).
Cost: 300 epochs are 20 exaFLOPs, two passes per step.
Command: python -m vit_jax.train --config=configs/pretrain/gsam.py --workdir=DIR \
             --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.models import Compute, variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig
from vit_jax.training.sharpness import Sam


def get_config() -> TrainConfig:
    """Returns the experiment."""
    return TrainConfig(
        data='tfds:imagenet2012',
        train_split='train[:99%]',
        eval_split='validation',
        model=variant('B/32', pool='gap', head_bias=-10.0),
        preprocessing=Preprocessing(crop=CentralCrop()),
        augmentation=Augmentation(crop=InceptionCrop(), flip=True),
        total=Duration(epochs=300.0),
        batch_size=4096,
        loss=LossConfig(kind='sigmoid'),
        optimizer=OptimizerConfig(
            weight_decay=1 / 3, clip_norm=1.0, sharpness=Sam(rho=0.6, rho_min=0.1, alpha=0.6)
        ),
        schedule=ScheduleConfig(
            kind='linear', learning_rate=3e-3, linear_end=3e-5, warmup=Duration(steps=10_000)
        ),
        eval_every_steps=2_500,
        checkpoint_every_steps=1_000,
        compute=Compute(dtype='bfloat16'),
    )
