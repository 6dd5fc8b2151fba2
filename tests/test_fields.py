"""Every field of a configuration matters: with another value there is another program or batch.

A program is seen in its jaxpr and in where its arrays are, a batch in its bytes. What changes
neither is named in ELSEWHERE. Values that make no sense are rejected by their field.
"""

import functools
import hashlib
import itertools
import re
import typing

import jax
import numpy as np
import pytest

from tests import tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.checkpoints.card import Hints
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.image_preprocessing import (
    CentralCrop,
    InceptionCrop,
    Preprocessing,
    RandomCrop,
    Resize,
)
from vit_jax.data.loading import abstract_batch, training_batches
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import Backbone, ResNetConfig, ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.masked_patches import MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig


def base(**changes):
    model = tiny.model(num_classes=None, depth=2)
    return tiny.experiment(**({'model': model} | changes))


def with_model(**values):
    return base(model=tiny.model(num_classes=None, depth=2, **values))


def with_optimizer(**values):
    return base(optimizer=OptimizerConfig(**values))


def prepared(crop):
    return base(image_size=(16, 8), preprocessing=Preprocessing(crop=crop))


def with_augmentation(**values):
    return base(image_size=(16, 8), augmentation=Augmentation(**values))


def with_objective():
    return base(objective=MaskedPatches())


def with_mesh(**values):
    return base(mesh=MeshConfig(**({'fsdp': 8, 'fsdp_min_mb': 0.0001} | values)))


RESNET = ResNetConfig(image_size=(8, 8), backbone=Backbone(blocks=(1,), width=32))
ONE = RandAugment(layers=1)
# The field, another value for it, and the experiment in which it matters.
CHANGES = [
    ('train_split', 'train[:100]', base()),
    ('eval_split', 'test[:8]', base()),
    ('classes', ('3', '5'), base()),
    ('model', RESNET, base()),
    ('model.image_size', (16, 8), base()),
    ('model.patch_size', (2, 4), base()),
    ('model.width', 32, base()),
    ('model.depth', 3, base()),
    ('model.mlp_dim', 64, base()),
    ('model.num_heads', 4, base()),
    ('model.pool', 'gap', base()),
    ('model.final_norm', 'after_pool', base()),
    ('model.representation_size', 8, base()),
    ('model.positions', 'sincos2d', base()),
    ('model.positions_at', 'every_layer', base()),
    ('model.class_tokens', 2, base()),
    ('model.registers', 2, base()),
    ('model.pre_norm', True, base()),
    ('model.layer_scale', 0.1, base()),
    ('model.gelu', None, base()),
    ('model.blocks_without_skips', (1,), base()),
    ('model.gelu', 'exact', base()),
    ('model.layer_norm_epsilon', 1e-3, base()),
    ('model.norm', 'rms', base()),
    ('model.qkv_bias', False, base()),
    ('model.qk_norm', True, base()),
    ('model.parallel', True, base()),
    ('model.head_bias', -10.0, base()),
    ('model.backbone', Backbone(blocks=(), width=32), with_model(patch_size=(1, 1))),
    ('model.backbone.blocks', (2,), base(model=RESNET)),
    ('model.backbone.width', 64, base(model=RESNET)),
    ('image_size', (16, 8), base()),
    ('preprocessing', Preprocessing(crop=CentralCrop(scale=2.0)), base()),
    ('preprocessing.mean', (1.0, 2.0, 3.0), base(preprocessing=Preprocessing())),
    ('preprocessing.std', (1.0, 2.0, 3.0), base(preprocessing=Preprocessing())),
    ('preprocessing.crop.scale', 2.0, prepared(CentralCrop(scale=1.5))),
    ('preprocessing.crop.keep_aspect', False, prepared(CentralCrop(scale=1.5))),
    ('preprocessing.crop.rounding', 'timm', prepared(CentralCrop(scale=1.45))),
    ('preprocessing.crop.resize', 'bicubic_antialias', prepared(Resize())),
    ('preprocessing.crop.resize', 'bicubic_antialias', prepared(CentralCrop())),
    ('model.head_bias', -10.0, base(model=RESNET)),
    ('model.image_size', (16, 8), base(model=RESNET)),
    ('augmentation.crop', InceptionCrop(), base()),
    ('augmentation.crop.area', (0.9, 1.0), with_augmentation(crop=InceptionCrop())),
    ('augmentation.crop.aspect', (1.0, 1.0), with_augmentation(crop=InceptionCrop())),
    ('augmentation.crop.scale', 2.0, with_augmentation(crop=RandomCrop())),
    ('augmentation.crop.keep_aspect', False, with_augmentation(crop=RandomCrop())),
    ('augmentation.shift_pixels', 1, base()),
    ('augmentation.flip', True, base()),
    ('augmentation.randaugment.layers', 1, base()),
    ('augmentation.randaugment.magnitude', 15.0, with_augmentation(randaugment=ONE)),
    ('augmentation.randaugment.contrast', 'pixel_count', with_augmentation(randaugment=ONE)),
    ('augmentation.erasing', 0.5, base()),
    ('augmentation.mixup', 0.5, base()),
    ('augmentation.cutmix', 0.5, base()),
    ('total', Duration(steps=20), base()),
    *((f'total.{unit}', 50, base()) for unit in ('steps', 'epochs', 'examples')),
    ('schedule.warmup.fraction', 0.5, base()),
    ('batch_size', 24, base()),
    ('accumulation_steps', 2, base()),
    ('objective', MaskedPatches(), base()),
    ('objective.fraction', 0.25, with_objective()),
    ('objective.masked', 0.5, with_objective()),
    ('objective.replaced', 0.2, with_objective()),
    ('objective.target', 'pixels', with_objective()),
    ('loss.kind', 'sigmoid', base()),
    ('loss.label_smoothing', 0.1, base()),
    ('optimizer.kind', 'sgd', base()),
    ('optimizer.b1', 0.5, base()),
    ('optimizer.b2', 0.5, base()),
    ('optimizer.epsilon', 1e-3, base()),
    ('optimizer.momentum', 0.5, with_optimizer(kind='sgd')),
    ('optimizer.clip_norm', 0.1, base()),
    ('optimizer.moment_dtype', 'bfloat16', base()),
    ('optimizer.weight_decay', 0.2, base()),
    ('optimizer.head_weight_decay', 3.0, base()),
    ('optimizer.decay_pattern', '.*', base()),
    ('optimizer.layer_decay', 0.5, base()),
    ('optimizer.lr_multipliers', (('head/.*', 10.0),), base()),
    ('optimizer.trained_blocks', 1, base()),
    ('optimizer.frozen', ('pos_embedding',), base()),
    ('schedule.kind', 'constant', base()),
    ('schedule.learning_rate', 0.5, base()),
    ('schedule.warmup', Duration(steps=1), base()),
    ('schedule.linear_end', 1e-3, base(schedule=ScheduleConfig(kind='linear'))),
    ('schedule.rsqrt_timescale', Duration(steps=7), base(schedule=ScheduleConfig(kind='rsqrt'))),
    ('schedule.cooldown', Duration(steps=3), base()),
    ('regularization.dropout', 0.1, base()),
    ('regularization.stochastic_depth', 0.1, base()),
    ('polyak_decay', 0.9, base()),
    ('seed', 1, base()),
    ('eval_batch_size', 24, base()),
    ('evals', {'other': EvalConfig(split='train[:9]')}, base(eval_split='test')),
    ('compute.dtype', 'bfloat16', base()),
    ('compute.remat', 'block', base()),  # dots is what a CPU has anyway
    ('compute.unroll', 2, base()),
    ('compute.layout', 'batched', base()),
    ('compute.last_block', 'whole', base()),
    ('mesh.data', 8, with_mesh(data=4, fsdp=-1)),
    ('mesh.fsdp', 4, with_mesh(fsdp=2)),
    ('mesh.tensor', 2, base(mesh=MeshConfig(max_replicated_fraction=1.0))),
    ('mesh.fsdp_min_mb', 0.001, with_mesh(max_replicated_fraction=1.0)),
    ('mesh.rules', (('encoder/block/mlp/dense1/bias', (None, None)),), with_mesh()),
]

# What these change is no program and no batch of a training here.
ELSEWHERE = {
    'TrainConfig': (
        'data start_from reuse_head fewshot log_every_steps eval_every_steps tensorboard head '
        'checkpoint_every_steps keep_checkpoints max_skipped_steps'
    ),
    'EvalConfig': 'data split labels every_steps',
    'ViTConfig': 'num_classes channels patch_outputs position_resize head',
    'ResNetConfig': 'num_classes channels head',
    'Compute': 'attention',
    'MeshConfig': 'max_replicated_fraction',
    'Preprocessing': 'exif_rotation',
    'HeldOut': 'fraction seed',
    'Hints': 'grid num_heads gelu layer_norm_epsilon',
    'LoaderConfig': 'placement device_mb threads on_unreadable max_pixels',
    'InceptionCrop': 'reduced',
    'FewshotConfig': (
        'shots seeds l2 every_steps sets neighbours logistic episodes crop feature_cache'
    ),
    'EpisodesConfig': 'ways shots queries episodes classes seed classifier',
    'ProbeSet': 'data train_split test_split',
    'LogisticConfig': 'l2 validation_fraction max_iterations tolerance',
}


def fields(cls):
    """(record, field) of a record and of those that it may hold; one that is a record is none."""
    for name, hint in records.hints(cls).items():
        options = [
            o for option in records.alternatives(hint) for o in (option, *typing.get_args(option))
        ]
        within = [o for o in options if isinstance(o, type) and issubclass(o, Record)]
        if not within or type(None) in options:
            yield cls.__name__, name
        for option in within:
            yield from fields(option)


def holder_of(config, field):
    *parents, name = field.split('.')
    return functools.reduce(getattr, parents, config), name


def changed(config, field, value):
    """A copy with another value, as the command line assigns it."""
    config = records.checked(config, where='config')
    holder, name = holder_of(config, field)
    holder.override(name, value)
    return config


def effects(config):
    """Yields the arrays and their places, the programs, and the first batches, as text."""
    experiment = build_experiment(config)
    state = training_run.abstract_state(experiment)
    evaluated = {name: len(one.source) for name, one in experiment.evals.items()}
    yield f'{state} {evaluated} {experiment.length}'
    yield program(experiment.init)
    digest = hashlib.sha256()
    for batch in training_batches(
        experiment.loader_of(experiment.train),
        steps=range(2),
        batch_size=experiment.config.batch_size,
        seed=config.seed,
    ):
        for array in jax.tree.leaves(batch):
            digest.update(np.asarray(array).tobytes())
    yield digest.hexdigest()
    size = experiment.model.config.image_size
    yield program(
        experiment.update, state, abstract_batch(experiment.mesh, config.batch_size, size)
    )
    evaluator = experiment.evaluator
    for reader in experiment.evals.values():
        yield program(evaluator.step, state.eval_params, evaluator.batches.abstract(reader))


def program(function, *arguments):
    """The jaxpr and its constants as text, without addresses in memory."""
    closed = jax.make_jaxpr(function)(*arguments)
    return re.sub(r'0x[0-9a-f]+', '', f'{closed} {[str(c) for c in closed.consts]}')


_BEFORE = {}


def before(config):
    """The effects of an experiment, computed once for all that are written alike."""
    name = repr(config)
    if name not in _BEFORE:
        _BEFORE[name] = [*effects(records.checked(config, where='config'))]
    return _BEFORE[name]


@pytest.mark.full
@pytest.mark.parametrize(
    'field, value, config', CHANGES, ids=lambda value: value if isinstance(value, str) else ''
)
def test_another_value_is_another_program_or_batch(field, value, config):
    after = effects(changed(config, field, value))
    assert any(one != other for one, other in itertools.zip_longest(after, before(config)))


def test_the_same_values_are_the_same_programs_and_batches():
    """Of what is compared above: nothing in it is new each time."""
    assert [*effects(base())] == [*effects(base())]


def test_every_field_changes_a_program_or_a_batch_unless_it_is_said_not_to():
    holders = (holder_of(config, field) for field, _, config in CHANGES)
    seen = {(type(holder).__name__, name) for holder, name in holders}
    seen |= {(kind, name) for kind, names in ELSEWHERE.items() for name in names.split()}
    assert not set(fields(TrainConfig)) - seen


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
    with pytest.raises(UserError, match=r'model.pool=array\(.*expected cls.gap'):
        records.checked(assigned, where='model')
