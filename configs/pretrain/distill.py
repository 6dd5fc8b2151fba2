"""Distills a teacher on ImageNet with the recipes of big_vision.

Paper: "Knowledge distillation: A good teacher is patient and consistent", table 1 (`bit_i1k`: from
BiT-R152x2 to R50x1), and FlexiViT, section 3.1 (`deit3_S`, `deit3_B`: from DeiT III at 384 pixels
to a student at 240 pixels, which is initialized with the teacher). The values are from bit_i1k.py
and i1k_deit3_distill.py in big_vision. These differ: weight decay is multiplied by the learning
rate here, so it is divided by the learning rate; MixUp draws a weight for each image; the teacher
of `deit3` gets the crop of the student, enlarged, and its own normalization; the patches of the
student have 16 pixels, where FlexiViT draws one of ten sizes for each batch.
Result: big_vision's README reports 82.8 % validation accuracy for the best R50x1 of the paper. The
results of 1,200 epochs and of `deit3` are not known here. Nothing was run at this size.
Cost: big_vision's README: 300 epochs of `bit_i1k` take about 15 hours on a TPUv3-32.
Command: python -m vit_jax.train --config=configs/pretrain/distill.py:bit_i1k --workdir=DIR \
             --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.models import variant
from vit_jax.training.duration import Duration
from vit_jax.training.objectives import Distillation
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

ARGUMENTS = 'bit_i1k', 'deit3_S', 'deit3_B'
BIT = 'https://storage.googleapis.com/bit_models/distill/R152x2_T_224.npz'
DEIT = {
    'deit3_S': 'hf:timm/deit3_small_patch16_384.fb_in1k',
    'deit3_B': 'hf:timm/deit3_base_patch16_384.fb_in1k',
}


def get_config(name: str = 'bit_i1k') -> TrainConfig:
    """Returns the experiment by its name."""
    rate, decay = (0.03, 0.0003) if name == 'bit_i1k' else (1e-4, 1e-5)
    config = TrainConfig(
        data='tfds:imagenet2012',
        train_split='train[:98%]',
        eval_split='validation',
        augmentation=Augmentation(crop=InceptionCrop(), flip=True, mixup=1.0),
        distillation=Distillation(teacher=DEIT.get(name, BIT), task_weight=0.0),
        total=Duration(epochs=1200.0),
        batch_size=4096,
        optimizer=OptimizerConfig(
            weight_decay=decay / rate, clip_norm=1.0, moment_dtype='bfloat16'
        ),
        schedule=ScheduleConfig(learning_rate=rate, warmup=Duration(steps=5_000)),
        eval_every_steps=1_000,
        checkpoint_every_steps=1_000,
    )
    if name == 'bit_i1k':
        config.model = variant('R50x1')
        config.preprocessing = Preprocessing(crop=CentralCrop())
        return config
    config.train_split = 'train[:99%]'
    config.start_from = DEIT[name]
    config.reuse_head = True
    config.image_size = (240, 240)
    config.total = Duration(epochs=90.0)
    config.batch_size = 1024
    return config
