"""Fine-tunes a checkpoint on a task of VTAB-1k, and tests on all of its test images.

Paper: "An Image is Worth 16x16 Words", table 4 and B.1.1: one recipe for all 19 tasks, on their
1,000 images, at 384 pixels; preprocessing as in Kolesnikov et al. 2020, "Big Transfer (BiT)", 3.3
and appendix F: resized to 448 x 448, cropped and flipped, unless that changes the task.
Result, table 9 (docs/vtab.md has all of it): means of the 19 tasks: H/14 from JFT 77.6, L/16 from
JFT 76.3, L/16 from ImageNet-21k 72.7 %.
Cost: 2,500 steps of B/16 at 384 pixels are 0.43 exaFLOPs a task, of L/16 1.5.
Command: python -m vit_jax.finetune --config=configs/finetune/vtab.py:clevr_count --workdir=DIR \
             --config.start_from=vit:L/16-in21k
    --config.train_split=train[:800] --config.eval_split=validation[:200] measures on the
    200 images by which the paper chose its recipe.
"""

from vit_jax.config import TrainConfig
from vit_jax.configs.finetune import vit
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import RandomCrop
from vit_jax.data.sources.vtab import TASKS, THOUSAND

ARGUMENTS = tuple(TASKS)


def get_config(name: str = 'caltech101') -> TrainConfig:
    """The experiment of one task."""
    task = TASKS[name]
    config = vit.transfer(f'vtab:{name}', 'test', steps=2500, warmup=500, learning_rate=0.01)
    crop = RandomCrop(keep_aspect=False) if task.crop else None
    config.augmentation = Augmentation(crop=crop, flip=task.flip)
    config.train_split = THOUSAND
    config.eval_every_steps, config.checkpoint_every_steps = None, 500
    return config
