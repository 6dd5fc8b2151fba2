"""Pre-trains the models of the ViT paper: every row of its table 3.

Paper: "An Image is Worth 16x16 Words", table 3 and appendix B.1: batches of 4096, 10,000 steps of
warm-up, Adam, 224 pixels. The paper does not state the loss. The authors reported sigmoid for JFT
and ImageNet-21k; softmax for ImageNet, Inception crops and flips are our choice.
Result: Tables 5 and 6 have these ImageNet accuracies after fine-tuning at 384 pixels. From JFT:
B/32 80.7, B/16 84.2, L/32 84.4, L/16 86.3 (7 epochs) and 87.1 (14), H/14 88.1 %; R50x1 77.5, R152x2
85.0, R50+B/16 85.6, R50+L/16 86.6 and 87.1 %. From ImageNet-21k: B/32 81.3, B/16 84.0, L/32 81.0,
L/16 85.2 %. From ImageNet: B/32 73.4, B/16 77.9, L/32 71.2, L/16 76.5 %.
Cost: Table 6 has these exaFLOPs: B/16 224, L/16 783 (7 epochs), H/14 4262, R50x1 50, R50+L/16 859.
Table 2 has these TPUv3-core-days: L/16 230 from ImageNet-21k and 680 from JFT, H/14 2500.
Command: python -m vit_jax.train --config=configs/pretrain/vit.py:imagenet,B/16 --workdir=DIR \
             --config.data=DATA
"""

from vit_jax.config import TrainConfig
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing
from vit_jax.models import Compute, Regularization, ViTConfig, variant
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig, LossKind
from vit_jax.training.optimizer import Decay, OptimizerConfig, ScheduleConfig

# Data, test split, loss, initial bias of the head, clipping, schedule, weight decay, dropout.
DATA: dict[str, tuple[str, str, LossKind, float, float | None, Decay, float, float]] = {
    'jft': ('JFT-300M', 'test', 'sigmoid', -10.0, None, 'linear', 0.1, 0.0),
    'imagenet21k': ('tfds:imagenet21k', 'test', 'sigmoid', -10.0, None, 'linear', 0.03, 0.1),
    'imagenet': ('tfds:imagenet2012', 'validation', 'softmax', 0.0, 1.0, 'cosine', 0.3, 0.1),
}
# Epochs and learning rate by data and model; the key has the epochs if the paper has two runs.
ROWS = {
    'jft,B/16': (7, 8e-4),
    'jft,B/32': (7, 8e-4),
    'jft,L/32': (7, 6e-4),
    'jft,L/16,7': (7, 4e-4),
    'jft,L/16,14': (14, 4e-4),
    'jft,H/14': (14, 3e-4),
    'jft,R50x1': (7, 1e-3),
    'jft,R50x2': (7, 1e-3),
    'jft,R101x1': (7, 8e-4),
    'jft,R152x1': (7, 6e-4),
    'jft,R152x2': (7, 6e-4),
    'jft,R50+B/16': (7, 8e-4),
    'jft,R50+B/32': (7, 8e-4),
    'jft,R50+L/32': (7, 2e-4),
    'jft,R50+L/16,7': (7, 4e-4),
    'jft,R50+L/16,14': (14, 4e-4),
    'imagenet21k,B/16': (90, 1e-3),
    'imagenet21k,B/32': (90, 1e-3),
    'imagenet21k,L/16,30': (30, 1e-3),
    'imagenet21k,L/16,90': (90, 1e-3),
    'imagenet21k,L/32,30': (30, 1e-3),
    'imagenet21k,L/32,90': (90, 1e-3),
    'imagenet,B/16': (300, 3e-3),
    'imagenet,B/32': (300, 3e-3),
    'imagenet,L/16': (300, 3e-3),
    'imagenet,L/32': (300, 3e-3),
}
ARGUMENTS = tuple(ROWS)


def get_config(row: str = 'imagenet,B/16') -> TrainConfig:
    """Returns the experiment of one row."""
    epochs, learning_rate = ROWS[row]
    data_name, model_name = row.split(',')[:2]
    data, eval_split, loss, head_bias, clip_norm, decay, weight_decay, dropout = DATA[data_name]
    model = variant(model_name, head_bias=head_bias)
    if isinstance(model, ViTConfig):
        model.representation_size = model.width
    return TrainConfig(
        data=data,
        eval_split=eval_split,
        model=model,
        preprocessing=Preprocessing(crop=CentralCrop()),
        augmentation=Augmentation(crop=InceptionCrop(), flip=True),
        total=Duration(epochs=float(epochs)),
        batch_size=4096,
        loss=LossConfig(kind=loss),
        optimizer=OptimizerConfig(weight_decay=weight_decay, clip_norm=clip_norm),
        schedule=ScheduleConfig(
            kind=decay, learning_rate=learning_rate, warmup=Duration(steps=10_000)
        ),
        regularization=Regularization(dropout=dropout),
        eval_every_steps=10_000,
        checkpoint_every_steps=5_000,
        compute=Compute(dtype='bfloat16'),
    )
