"""Fields of training matter: with another value there is another program or batch.

A program is compared by its jaxpr and by the places of its arrays, a batch by its bytes. The tests
of models, data and optimizers cover the fields of their records.
"""

import ast
import functools
import hashlib
import itertools
import re
import typing

import jax
import numpy as np
import pytest

from tests import tiny
from tests.pages import ROOT
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.checkpoints.card import Hints
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.data.augmentation import Augmentation, RandAugment
from vit_jax.data.image_preprocessing import InceptionCrop, Preprocessing, RandomCrop
from vit_jax.data.loading import abstract_batch, training_batches
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import Regularization, ViTConfig
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.masked_patches import MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig
from vit_jax.training.sharpness import Sam


def base(**changes):
    model = tiny.model(num_classes=None, depth=2)
    return tiny.experiment(**({'model': model} | changes))


def with_mesh(**values):
    return base(mesh=MeshConfig(**({'fsdp': 8, 'fsdp_min_mb': 0.0001} | values)))


MIXED = Augmentation(randaugment=RandAugment(layers=1))
# The field, another value for it, and the experiment in which it matters.
CHANGES = [
    ('train_split', 'train[:100]', base()),
    ('eval_split', 'test[:8]', base()),
    ('classes', ('3', '5'), base()),
    ('augmentation.shift_pixels', 1, base()),
    ('augmentation.flip', True, base()),
    ('augmentation.three_augment', True, base()),
    ('augmentation.color_jitter', 0.3, base()),
    ('augmentation.randaugment.layers', 1, base()),
    ('augmentation.randaugment.magnitude', 15.0, base(augmentation=MIXED)),
    ('augmentation.randaugment.contrast', 'pixel_count', base(augmentation=MIXED)),
    ('augmentation.erasing', 0.5, base()),
    ('augmentation.mixup', 0.5, base()),
    ('augmentation.cutmix', 0.5, base()),
    ('total', Duration(steps=20), base()),
    *((f'total.{unit}', 50, base()) for unit in ('steps', 'epochs', 'examples')),
    ('schedule.warmup.fraction', 0.5, base()),
    ('batch_size', 24, base()),
    ('accumulation_steps', 2, base()),
    ('objective', MaskedPatches(), base()),
    ('loss.kind', 'sigmoid', base()),
    ('loss.label_smoothing', 0.1, base()),
    ('loss.binary_targets', True, base(loss=LossConfig(kind='sigmoid'))),
    # tests/training/ covers the other fields of these records.
    ('optimizer.kind', 'sgd', base()),
    ('optimizer.sharpness', Sam(), base()),
    ('optimizer.decay_pattern', '.*', base()),
    ('schedule.learning_rate', 0.5, base()),
    ('regularization.dropout', 0.1, base()),
    ('regularization.stochastic_depth', 0.1, base()),
    (
        'regularization.stochastic_depth_kind',
        'constant',
        base(regularization=Regularization(stochastic_depth=0.1)),
    ),
    ('regularization.patch_dropout', 0.25, base()),
    (
        'patch_dropout_until',
        Duration(steps=5),
        base(regularization=Regularization(patch_dropout=0.25)),
    ),
    ('ema_decay', 0.9, base()),
    ('seed', 1, base()),
    ('eval_batch_size', 24, base()),
    ('patch_sizes', (2, 8), base()),
    ('loader.repeats', 2, base()),
    ('loader.balance', 1.0, base()),
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


def fields(cls):
    """The fields of a record and of the records that it may hold."""
    for name, hint in records.field_types(cls).items():
        yield name
        for option in records.union_members(hint):
            for kind in (option, *typing.get_args(option)):
                if isinstance(kind, type) and issubclass(kind, Record):
                    yield from fields(kind)


def test_every_field_is_read_somewhere():
    trees = [ast.parse(path.read_text()) for path in (ROOT / 'vit_jax').rglob('*.py')]
    nodes = [*itertools.chain(*map(ast.walk, trees))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant)}  # for getattr
    assert not {*fields(TrainConfig)} - read


def changed(config, field, value):
    """A copy with another value, as the command line assigns it."""
    config = records.validated(config, where='config')
    *parents, name = field.split('.')
    functools.reduce(getattr, parents, config).override(name, value)
    return config


def effects(config):
    """Yields the arrays and their places, the programs, and the first batches, as text."""
    experiment = build_experiment(config)
    state = training_run.abstract_state(experiment)
    evaluated = {name: len(one.source) for name, one in experiment.eval_readers.items()}
    yield f'{state} {evaluated} {experiment.length}'
    yield program(experiment.init)
    digest = hashlib.sha256()
    for batch in training_batches(
        experiment.batches.make_loader(experiment.train_reader),
        steps=range(2),
        batch_size=experiment.config.batch_size,
        seed=config.seed,
    ):
        for array in jax.tree.leaves(batch):
            digest.update(np.asarray(array).tobytes())
    yield digest.hexdigest()
    size = experiment.model.config.image_size
    batch = abstract_batch(experiment.mesh, config.batch_size, size)
    for kind, update in experiment.updates.items():
        yield f'{kind} {program(update, state, batch)}'
    for name, evaluator in experiment.evaluators.items():
        batch = experiment.batches.abstract(experiment.eval_readers[name])
        yield program(evaluator.step, state.eval_params, batch)


def program(function, *arguments):
    """The jaxpr and its constants as text, without addresses in memory."""
    closed = jax.make_jaxpr(function)(*arguments)
    return re.sub(r'0x[0-9a-f]+', '', f'{closed} {[str(c) for c in closed.consts]}')


_BEFORE = {}


def before(config):
    """The effects of an experiment, computed once for all that are written alike."""
    name = repr(config)
    if name not in _BEFORE:
        _BEFORE[name] = [*effects(records.validated(config, where='config'))]
    return _BEFORE[name]


# Every third field in the gate, and all at night: each takes two seconds.
ROWS = [
    pytest.param(*row, marks=pytest.mark.nightly if n % 3 else pytest.mark.gate)
    for n, row in enumerate(CHANGES)
]


@pytest.mark.parametrize(
    'field, value, config', ROWS, ids=lambda value: value if isinstance(value, str) else ''
)
def test_another_value_is_another_program_or_batch(field, value, config):
    after = effects(changed(config, field, value))
    assert any(one != other for one, other in itertools.zip_longest(after, before(config)))


@pytest.mark.gate
def test_the_same_values_are_the_same_programs_and_batches():
    """Of what is compared above: nothing in it is new each time."""
    assert [*effects(base())] == [*effects(base())]
    assert [*effects(changed(base(), 'optimizer.sharpness', Sam(rho=0.0)))] == before(base())


@pytest.mark.parametrize(
    'kind, values, name',
    [
        (FewshotConfig, {'crop': RandomCrop()}, 'crop'),
        (Preprocessing, {'crop': InceptionCrop()}, 'augmentation.crop'),
        (FewshotConfig, {'seeds': (0, 0)}, 'seeds'),
        (FewshotConfig, {'shots': ()}, 'shots'),
        (Hints, {'num_heads': -7}, 'num_heads=-7'),
        (Hints, {'grid': (0, -3)}, 'grid'),
        (tiny.experiment, {'seed': 2**70}, 'seed'),
        (ViTConfig, {'head_bias': float('nan')}, 'head_bias=nan'),
        (OptimizerConfig, {'frozen': ('(',)}, r"'\('"),
        (Sam, {'rho_min': 1.0}, 'rho_min=1'),
        (Sam, {'rho': 0.0, 'alpha': 0.6}, 'alpha=0.6'),
        (MeshConfig, {'rules': (('(', ('data',)),)}, r"'\('"),
    ],
)
def test_a_value_without_sense_is_rejected_by_its_field(kind, values, name):
    with pytest.raises(UserError, match=name):
        kind(**values)


def test_an_array_is_no_choice():
    assigned = tiny.assigned(ViTConfig(), pool=np.array(['cls', 'gap']))
    with pytest.raises(UserError, match='model.pool'):
        records.validated(assigned, where='model')
