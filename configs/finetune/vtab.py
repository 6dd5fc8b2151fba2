"""Fine-tunes a checkpoint on a task of VTAB-1k, and evaluates on all of its test images.

Paper: "An Image is Worth 16x16 Words", table 4 and appendix B.1.1: one recipe for all 19 tasks, on
their 1,000 images, at 384 pixels. The preprocessing follows Kolesnikov et al. 2020, "Big Transfer
(BiT)", section 3.3 and appendix F: images are resized to 448 x 448 pixels, cropped and flipped,
unless that changes the label.
Result: The means of the 19 tasks in table 9 are 77.6 % for H/14 from JFT, 76.3 % for L/16 from JFT
and 72.7 % for L/16 from ImageNet-21k. docs/vtab.md has the whole table.
Cost: 2,500 steps at 384 pixels are 0.43 exaFLOPs per task for B/16, and 1.5 for L/16.
Command: python -m vit_jax.finetune --config=configs/finetune/vtab.py:clevr_count --workdir=DIR \
             --config.start_from=vit:L/16-in21k
    --config.train_split=train[:800] --config.eval_split=validation[:200] evaluates on the 200
    images with which the paper selected its recipe.
"""

from vit_jax.config import TrainConfig
from vit_jax.configs.finetune import vit
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import RandomCrop
from vit_jax.data.sources.vtab import TASKS, VTAB_1K_SPLIT

ARGUMENTS = tuple(TASKS)


def get_config(name: str = 'caltech101') -> TrainConfig:
    """Returns the experiment of one task."""
    task = TASKS[name]
    config = vit.transfer(f'vtab:{name}', 'test', steps=2500, warmup=500, learning_rate=0.01)
    crop = RandomCrop(keep_aspect=False) if task.crop else None
    config.augmentation = Augmentation(crop=crop, flip=task.flip)
    config.train_split = VTAB_1K_SPLIT
    # The paper evaluates the test images once, at the end.
    config.eval_every_steps = 2500
    config.checkpoint_every_steps = 500
    return config
