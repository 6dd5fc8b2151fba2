"""Pre-trains a ViT without labels as a masked autoencoder.

Paper: "Masked Autoencoders Are Scalable Vision Learners" (He et al. 2021), section 4 and tables 1
and 8: AdamW, batches of 4096, learning rate 2.4e-3, 40 epochs of warm-up, cosine decay, 1600
epochs of ImageNet. 75 % of the patches are removed. A decoder of 8 blocks predicts the normalized
pixels of each removed patch. The paper's position embeddings have the same form as sincos2d, with
slightly other frequencies.
Result: The paper reaches 83.6 % (B/16), 85.9 % (L/16) and 86.9 % (H/14) on ImageNet after
fine-tuning. Not run here at this size.
Cost: 120 (B/16), 255 (L/16) and 597 (H/14) exaFLOPs, counted with the decoder.
Command: python -m vit_jax.train --config=configs/pretrain/mae.py:B/16 --workdir=DIR \
             --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.models import Compute, variant
from vit_jax.training.duration import Duration
from vit_jax.training.objectives import MaskedAutoencoder
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = 'B/16', 'L/16', 'H/14'


def get_config(name: str = 'B/16') -> TrainConfig:
    """Returns the experiment of a variant."""
    return TrainConfig(
        data='tfds:imagenet2012',
        eval_split='validation',
        model=variant(name, positions='sincos2d', gelu='exact'),
        objective=MaskedAutoencoder(),
        preprocessing=Preprocessing(crop=CentralCrop()),
        augmentation=Augmentation(crop=InceptionCrop(area=(0.2, 1.0)), flip=True),
        total=Duration(epochs=1600.0),
        batch_size=4096,
        optimizer=OptimizerConfig(b2=0.95, weight_decay=0.05),
        schedule=ScheduleConfig(learning_rate=2.4e-3, warmup=Duration(epochs=40.0)),
        eval_every_steps=10_000,
        checkpoint_every_steps=5_000,
        compute=Compute(dtype='bfloat16'),
    )
