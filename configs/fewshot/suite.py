"""Probes any checkpoint on big_vision's list of data sets, and adds other probes.

Paper: section 4.1, "few-shot" accuracy, with the sets, splits, crops and strength of big_vision's
`common_fewshot`: squeezed to 256, the middle 224 pixels. A set that is
not there is left out with a warning.
Command: python -m vit_jax.fewshot --config=configs/fewshot/suite.py --workdir=DIR \
             --config.start_from=CHECKPOINT --config.fewshot.feature_cache=CACHE
"""

from vit_jax.config import TrainConfig
from vit_jax.data.image_preprocessing import CentralCrop
from vit_jax.evaluation.probes import LogisticConfig
from vit_jax.evaluation.probing import FewshotConfig, ProbeSet


def get_config() -> TrainConfig:
    """The experiment; the command line says of what."""
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
            neighbours=20,
            logistic=LogisticConfig(),
        ),
        batch_size=256,
    )
