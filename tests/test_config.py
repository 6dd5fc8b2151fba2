"""Values that make no sense, refused by the record that has them, with its field."""

import numpy as np
import pytest

from tests import tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.card import Hints
from vit_jax.data.image_preprocessing import InceptionCrop, Preprocessing, RandomCrop
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.models import ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

NONSENSE = {
    'random crops of test images': (FewshotConfig, {'crop': RandomCrop()}, 'crop: a random crop'),
    'random crops of all images': (Preprocessing, {'crop': InceptionCrop()}, 'augmentation.crop'),
    'a draw that counts twice': (FewshotConfig, {'seeds': (0, 0)}, r'seeds=\(0, 0\): .* once'),
    'shots that count twice': (FewshotConfig, {'shots': (5, 5)}, r'shots=\(5, 5\): .* once'),
    'no shots': (FewshotConfig, {'shots': ()}, r'shots=\(\): expected at least one'),
    'negative heads': (Hints, {'num_heads': -7}, 'num_heads=-7: expected at least 1'),
    'a negative epsilon': (Hints, {'layer_norm_epsilon': -1.0}, 'layer_norm_epsilon=-1.0'),
    'a negative grid': (Hints, {'grid': (0, -3)}, 'grid='),
    'a seed that jax does not take': (tiny.experiment, {'seed': 2**70}, 'seed=.*less than'),
    'no timescale': (
        ScheduleConfig,
        {'kind': 'rsqrt', 'rsqrt_timescale': Duration(steps=0)},
        'rsqrt_timescale is 0',
    ),
    'a bias that is no number': (ViTConfig, {'head_bias': float('nan')}, 'head_bias=nan'),
    'a half pattern': (OptimizerConfig, {'frozen': ('(',)}, "'\\(' is no regular expression"),
    'a half rule': (MeshConfig, {'rules': (('(', ('data',)),)}, "'\\(' is no regular expression"),
}


@pytest.mark.parametrize('what', NONSENSE)
def test_nonsense_is_refused_where_it_is_written(what):
    made, values, message = NONSENSE[what]
    with pytest.raises(UserError, match=message):
        made(**values)


def test_an_array_is_no_choice():
    assigned = tiny.assigned(ViTConfig(), pool=np.array(['cls', 'gap']))
    with pytest.raises(UserError, match=r'model.pool=array\(.*expected one of cls, gap'):
        records.checked(assigned, where='model')
