"""Evaluates any checkpoint on the data sets of big_vision with few-shot, kNN and logistic probes.

Paper: "An Image is Worth 16x16 Words", section 4.1: few-shot accuracy. Data sets, splits, crop and
l2 penalty match big_vision's `common_fewshot`: images are resized to 256 x 256 pixels, and the
central 224 x 224 pixels are used. A missing data set is skipped with a warning.
Result: not run here, because the data sets need downloads.
Cost: The evaluation is one forward pass of all images of the data sets.
Command: python -m vit_jax.fewshot --config=configs/fewshot/suite.py --workdir=DIR \
             --config.start_from=CHECKPOINT
"""

from vit_jax.config import TrainConfig
from vit_jax.data.image_preprocessing import CentralCrop
from vit_jax.evaluation.probes import LogisticConfig
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet


def get_config() -> TrainConfig:
    """Returns the experiment; the command line sets the checkpoint."""
    return TrainConfig(
        data='tfds:imagenet2012',
        fewshot=FewshotConfig(
            sets={
                'caltech': ProbeSet(data='tfds:caltech101'),
                'cars': ProbeSet(data='tfds:cars196:2.1.0'),
                'cifar': ProbeSet(data='tfds:cifar100'),
                'dtd': ProbeSet(data='tfds:dtd'),
                'pets': ProbeSet(data='tfds:oxford_iiit_pet'),
                'uc_merced': ProbeSet(
                    data='tfds:uc_merced', train_split='train[:1000]', test_split='train[1000:]'
                ),
                'imagenet': ProbeSet(train_split='train[:65000]', test_split='validation'),
            },
            crop=CentralCrop(scale=256 / 224, keep_aspect=False),
            neighbors=(20,),
            logistic=LogisticConfig(),
        ),
        batch_size=256,
    )
