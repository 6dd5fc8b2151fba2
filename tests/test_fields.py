"""Each field is a value, structure, or on the host (`vit_jax.experiment.values`).

Another value of the field changes the arguments of the programs, the programs, or neither. A
program is compared by its jaxpr and by the places of its arrays.
"""

import ast
import functools
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
from vit_jax.data.image_preprocessing import CentralCrop, InceptionCrop, Preprocessing, RandomCrop
from vit_jax.data.loading import LoaderConfig, abstract_batch
from vit_jax.data.sources.opening import HeldOut
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment import training_run, values
from vit_jax.experiment.build import build_experiment
from vit_jax.models import Regularization, ViTConfig
from vit_jax.models.config import Backbone
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.objectives import MaskedAutoencoder, MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig
from vit_jax.training.sharpness import Sam

DEVICES = 8


def base(**changes):
    model = tiny.model(num_classes=None, depth=2)
    return tiny.experiment(**({'model': model} | changes))


def with_mesh(**values):
    return base(mesh=MeshConfig(**({'fsdp': 8, 'fsdp_min_mb': 0.0001} | values)))


def with_model(**changes):
    return base(model=tiny.model(num_classes=None, depth=2, **changes))


AUGMENTED = base(
    augmentation=Augmentation(
        color_jitter=0.1, erasing=0.1, mixup=0.1, cutmix=0.1, randaugment=RandAugment(layers=1)
    )
)
REGULARIZED = base(
    regularization=Regularization(dropout=0.1, stochastic_depth=0.1, patch_dropout=0.25),
    loss=LossConfig(label_smoothing=0.1),
    ema_decay=0.5,
)
ADAM = base(
    optimizer=OptimizerConfig(
        weight_decay=0.1,
        head_weight_decay=0.2,
        clip_norm=1.0,
        b1=0.8,
        b2=0.8,
        epsilon=1e-3,
        layer_decay=0.5,
        lr_multipliers=(('head/bias', 2.0),),
        sharpness=Sam(rho=0.1, rho_min=0.05, alpha=0.1),
    )
)
SGD = base(optimizer=OptimizerConfig(kind='sgd', momentum=0.5))
LONG, RSQRT = base(total=Duration(steps=1000)), base(schedule=ScheduleConfig(kind='rsqrt'))
MASKED = base(objective=MaskedPatches())
REMOVED = base(objective=MaskedAutoencoder(decoder_depth=2, decoder_width=16, decoder_heads=2))
# The field, another value, and the experiment. The programs stay the same.
VALUES = [
    *((f'augmentation.{name}', 0.7, AUGMENTED) for name in ('color_jitter', 'erasing')),
    *((f'augmentation.{name}', 0.7, AUGMENTED) for name in ('mixup', 'cutmix')),
    *((f'regularization.{name}', 0.7, REGULARIZED) for name in ('dropout', 'stochastic_depth')),
    ('loss.label_smoothing', 0.7, REGULARIZED),
    ('ema_decay', 0.7, REGULARIZED),
    ('seed', 7, REGULARIZED),
    ('objective.masked', 0.7, MASKED),
    ('objective.replaced', 0.05, MASKED),
    *((f'optimizer.{name}', 0.7, ADAM) for name in ('weight_decay', 'head_weight_decay')),
    *((f'optimizer.{name}', 0.7, ADAM) for name in ('b1', 'b2', 'epsilon', 'clip_norm')),
    ('optimizer.layer_decay', 0.7, ADAM),
    ('optimizer.momentum', 0.7, SGD),
    ('optimizer.lr_multipliers', (('.*bias', 3.0),), ADAM),
    *((f'optimizer.sharpness.{name}', 0.07, ADAM) for name in ('rho', 'rho_min', 'alpha')),
    ('schedule.kind', 'linear', base()),
    ('schedule.learning_rate', 0.7, base()),
    ('schedule.linear_end', 0.7, base(schedule=ScheduleConfig(kind='linear'))),
    *((f'total.{unit}', 5000, LONG) for unit in ('steps', 'epochs', 'examples')),
    *((f'schedule.{part}.steps', 40, LONG) for part in ('warmup', 'cooldown')),
    *((f'schedule.{part}.epochs', 1.0, LONG) for part in ('warmup', 'cooldown')),
    *((f'schedule.{part}.examples', 640, LONG) for part in ('warmup', 'cooldown')),
    *((f'schedule.{part}.fraction', 0.3, LONG) for part in ('warmup', 'cooldown')),
    *((f'schedule.rsqrt_timescale.{unit}', 40, RSQRT) for unit in ('steps', 'epochs', 'examples')),
    ('schedule.rsqrt_timescale.fraction', 0.5, RSQRT),
]

HYBRID = with_model(
    backbone=Backbone(blocks=(1,), width=32), image_size=(16, 16), patch_size=(1, 1)
)
PATCHED = base(patch_sizes=(2, 8))
MIXED = base(augmentation=Augmentation(randaugment=RandAugment(layers=1)))
SCALED = base(preprocessing=Preprocessing())
STOCHASTIC = base(regularization=Regularization(stochastic_depth=0.1))
# The field, another value, and the experiment. Programs change, or shapes of their arguments.
STRUCTURE = [
    ('model.image_size', (8, 12), base()),
    ('model.head', 'cosine', base()),
    ('model.head_bias', 0.5, base()),
    ('model.patch_size', (2, 2), base()),
    ('model.backbone.blocks', (), HYBRID),
    ('model.backbone.width', 64, HYBRID),
    ('model.width', 32, base()),
    ('model.depth', 3, base()),
    ('model.mlp_dim', 64, base()),
    ('model.num_heads', 4, base()),
    ('model.class_tokens', 2, base()),
    ('model.registers', 1, base()),
    ('model.positions', 'none', base()),
    ('model.positions_at', 'every_layer', base()),
    ('model.position_resize', 'bicubic', PATCHED),
    ('model.pre_norm', True, base()),
    ('model.gelu', 'exact', base()),
    ('model.layer_scale', 0.1, base()),
    ('model.norm', 'rms', base()),
    ('model.layer_norm_epsilon', 1e-3, base()),
    ('model.qkv_bias', False, base()),
    ('model.qk_norm', True, base()),
    ('model.parallel', True, base()),
    ('model.pool', 'gap', base()),
    ('model.final_norm', 'after_pool', base()),
    ('model.representation_size', 8, base()),
    ('model.blocks_without_skips', (0,), base()),
    ('image_size', (8, 12), base()),
    ('head', 'cosine', base()),
    ('preprocessing.mean', (1.0, 2.0, 3.0), SCALED),
    ('preprocessing.std', (1.0, 2.0, 3.0), SCALED),
    ('augmentation.shift_pixels', 1, base()),
    ('augmentation.flip', True, base()),
    ('augmentation.three_augment', True, base()),
    *((f'augmentation.{name}', 0.3, base()) for name in ('color_jitter', 'erasing')),
    *((f'augmentation.{name}', 0.3, base()) for name in ('mixup', 'cutmix')),
    ('augmentation.randaugment.layers', 1, base()),
    ('augmentation.randaugment.magnitude', 15.0, MIXED),
    ('augmentation.randaugment.contrast', 'pixel_count', MIXED),
    ('batch_size', 24, base()),
    ('accumulation_steps', 2, base()),
    ('patch_sizes', (2, 8), base()),
    ('objective', MaskedPatches(), base()),
    ('objective.fraction', 0.75, MASKED),
    ('objective.target', 'pixels', MASKED),
    ('objective.decoder_depth', 1, REMOVED),
    ('objective.decoder_width', 24, REMOVED),
    ('objective.decoder_heads', 4, REMOVED),
    ('objective.normalize_targets', False, REMOVED),
    ('loss.kind', 'sigmoid', base()),
    ('loss.label_smoothing', 0.1, base()),
    ('loss.binary_targets', True, base(loss=LossConfig(kind='sigmoid'))),
    ('optimizer.kind', 'sgd', base()),
    ('optimizer.moment_dtype', 'bfloat16', base()),
    ('optimizer.sharpness', Sam(), base()),
    ('optimizer.decay_pattern', '.*', base()),
    ('optimizer.trained_blocks', 1, base()),
    ('optimizer.frozen', ('head/bias',), base()),
    ('optimizer.lr_multipliers', (('head/bias', 0.0), ('head/bias', 3.0)), ADAM),
    ('optimizer.weight_decay', 0.0, base()),
    *((f'regularization.{name}', 0.1, base()) for name in ('dropout', 'stochastic_depth')),
    ('regularization.stochastic_depth_kind', 'constant', STOCHASTIC),
    ('regularization.patch_dropout', 0.25, base()),
    ('ema_decay', 0.9, base()),
    ('compute.dtype', 'bfloat16', base()),
    ('compute.remat', 'block', base()),  # dots is what a CPU has anyway
    ('compute.unroll', 2, base()),
    ('compute.attention', 'blockwise', base()),
    ('compute.layout', 'batched', base()),
    ('compute.last_block', 'whole', base()),
    ('mesh.data', 8, with_mesh(data=4, fsdp=-1)),
    ('mesh.fsdp', 4, with_mesh(fsdp=2)),
    ('mesh.tensor', 2, base(mesh=MeshConfig(max_replicated_fraction=1.0))),
    ('mesh.fsdp_min_mb', 0.001, with_mesh(max_replicated_fraction=1.0)),
    ('mesh.rules', (('encoder/block/mlp/dense1/bias', (None, None)),), with_mesh()),
]
BEST = base(keep_best='test/accuracy', eval_every_steps=2)
DROPPED = Regularization(patch_dropout=0.25)
LATE = base(regularization=DROPPED, patch_dropout_until=Duration(steps=3))
# The field, another value, and the experiment. Programs and their constant arguments stay the same.
HOST = [
    ('data', tiny.watched(lambda index: None), base()),
    ('train_split', 'train[:100]', base()),
    ('eval_split', 'test[:8]', base()),
    ('held_out', HeldOut(seed=1), base()),
    ('classes', ('3', '5'), base(classes=('2', '4'))),
    ('loader', LoaderConfig(repeats=2, balance=1.0, placement='host'), base()),
    ('augmentation.crop', InceptionCrop(), base()),
    ('preprocessing.crop', CentralCrop(), SCALED),
    ('preprocessing.exif_rotation', False, SCALED),
    ('hints', Hints(num_heads=2), base()),
    (
        'patch_dropout_until',
        Duration(steps=5),
        LATE,
    ),
    ('spike_deviations', 6.0, base(spike_deviations=5.0)),
    ('max_skipped_steps', 2, base()),
    ('patience', 2, BEST),
    *((f'{name}_every_steps', 3, base()) for name in ('log', 'eval', 'checkpoint')),
    ('keep_checkpoints', 1, base()),
    ('keep_best', 'test/loss', BEST),
    ('tensorboard', True, base()),
    ('writers', (print,), base()),
    ('evals', {'other': EvalConfig(split='train[:9]')}, base(eval_split='test')),
    ('eval_batch_size', 24, base()),
    ('metrics', ('macro_f1',), base()),  # needs no further outputs of the programs
    ('fewshot', FewshotConfig(shots=(1,)), base()),
    ('mesh.max_replicated_fraction', 1.0, with_mesh()),
]
# Other tests change these fields: they need a teacher or a checkpoint (test_distillation, below),
# or have one possible value here.
ELSEWHERE = 'distillation', 'start_from', 'reuse_head', 'init_head'
FIXED = 'total.fraction', 'model.num_classes', 'model.patch_outputs', 'model.channels'


def paths(cls, prefix=''):
    """The paths of the fields of a record and of the records that it may hold."""
    for name, hint in records.field_types(cls).items():
        options = itertools.chain(*((o, *typing.get_args(o)) for o in records.union_members(hint)))
        kinds = [kind for kind in options if isinstance(kind, type) and issubclass(kind, Record)]
        if not kinds:
            yield f'{prefix}{name}'
        for kind in kinds:
            yield from paths(kind, f'{prefix}{name}.')


def is_below(path, fields):
    return any(f'{path}.'.startswith(f'{field}.') for field in fields)


def test_each_field_has_a_row_in_one_table():
    for path in paths(TrainConfig):
        if is_below(path, (*ELSEWHERE, *FIXED)):
            continue
        if is_below(path, (*values.VALUES, *values.DERIVED)):
            assert path in [field for field, *_ in VALUES], f'{path}: add a row to VALUES'
        elif is_below(path, values.ON_HOST):
            assert is_below(path, [field for field, *_ in HOST]), f'{path}: add a row to HOST'
        else:
            wrong = f'{path}: add a row to STRUCTURE, or a path to vit_jax.experiment.values'
            assert path in [field for field, *_ in STRUCTURE], wrong


def test_each_path_of_experiment_values_is_a_field_or_a_record():
    fields = [*paths(TrainConfig)]
    for path in (*values.VALUES, *values.DERIVED, *values.ON_HOST):
        assert any(is_below(field, [path]) for field in fields), f'{path}: no such field'


def test_a_misspelled_path_is_an_error(monkeypatch):
    monkeypatch.setattr(values, 'VALUES', ('optimizer.beta1',))
    with pytest.raises(AttributeError, match='beta1'):
        values.remove_values(ADAM)


def test_every_field_is_read_somewhere():
    trees = [ast.parse(path.read_text()) for path in (ROOT / 'vit_jax').rglob('*.py')]
    nodes = [*itertools.chain(*map(ast.walk, trees))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant)}  # for getattr
    assert not {path.rpartition('.')[2] for path in paths(TrainConfig)} - read


def changed(config, field, value):
    """A copy with another value, as the command line assigns it."""
    config = records.validate_copy(config, where='config')
    *parents, name = field.split('.')
    functools.reduce(getattr, parents, config).override(name, value)
    return config


def programs(config):
    """Yields the arrays of the state with their places, and the programs, as text."""
    experiment = build_experiment(config)
    state, functions = training_run.abstract_state(experiment), experiment.functions
    size, fixed = experiment.model.config.image_size, experiment.values
    train_batch = abstract_batch(experiment.mesh, config.batch_size, size)
    yield f'{state} {train_batch}'
    for name, evaluator in experiment.evaluators.items():
        batch = experiment.batches.abstract(experiment.eval_readers[name])
        yield program(evaluator.step, state.eval_params, batch, fixed)
    for kind in experiment.config.step_variants:
        yield f'{kind} {program(functions.update(kind), state, train_batch, fixed)}'
    yield program(functions.init, fixed)


def program(function, *arguments):
    """The jaxpr and its constants as text, without addresses in memory."""
    closed = jax.make_jaxpr(function)(*arguments)
    return re.sub(r'0x[0-9a-f]+', '', f'{closed} {[str(c) for c in closed.consts]}')


_BEFORE = {}


def before(config):
    """The programs of an experiment, computed once per configuration."""
    name = repr(config)
    if name not in _BEFORE:
        _BEFORE[name] = list(programs(records.validate_copy(config, where='config')))
    return _BEFORE[name]


_BUILT = {}


def built(config):
    """The experiment of a configuration, built once."""
    name = repr(config)
    if name not in _BUILT:
        _BUILT[name] = build_experiment(config)
    return _BUILT[name]


def name_of(value):
    return value if isinstance(value, str) else ''


def leaves(experiment):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(experiment.values)]


@pytest.mark.gate
@pytest.mark.parametrize('field, value, config', VALUES, ids=name_of)
def test_another_value_is_another_argument_of_the_same_programs(field, value, config):
    assert is_below(field, (*values.VALUES, *values.DERIVED))
    one, other = built(config), build_experiment(changed(config, field, value))
    assert other.functions is one.functions
    assert jax.tree.map(np.shape, other.values) == jax.tree.map(np.shape, one.values)
    assert any((a != b).any() for a, b in zip(leaves(one), leaves(other), strict=True))


@pytest.mark.gate
@pytest.mark.parametrize('field, value, config', HOST, ids=name_of)
def test_a_field_on_the_host_changes_no_program_and_no_argument(field, value, config):
    assert is_below(field, values.ON_HOST)
    one, other = built(config), build_experiment(changed(config, field, value))
    assert other.functions is one.functions
    assert all((a == b).all() for a, b in zip(leaves(one), leaves(other), strict=True))


# The gate tests only the first field of each part of the configuration; the nightly, the rest.
_, FIRST = np.unique([field.split('.')[0] for field, *_ in STRUCTURE], return_index=True)
ROWS = [
    pytest.param(*row, marks=pytest.mark.gate if n in FIRST else pytest.mark.nightly)
    for n, row in enumerate(STRUCTURE)
]


@pytest.mark.parametrize('field, value, config', ROWS, ids=name_of)
def test_another_structure_is_another_program(field, value, config):
    other = changed(config, field, value)
    assert build_experiment(other).functions is not build_experiment(config).functions
    pairs = itertools.zip_longest(programs(other), before(config))
    assert any(one != another for one, another in pairs)  # the rest is not traced


@pytest.mark.gate
def test_the_same_structure_is_the_same_program():
    """Two builds of one configuration give equal programs: the tests above find real changes."""
    assert list(programs(base())) == before(base())
    unperturbed = changed(base(), 'optimizer.sharpness', Sam(rho=0.0))
    assert list(programs(unperturbed)) == before(base())


@pytest.mark.gate
@pytest.mark.parametrize('config', [AUGMENTED, REGULARIZED, ADAM, SGD, MASKED])
def test_an_update_uses_each_of_its_arguments(config):
    experiment = build_experiment(config)
    state = training_run.abstract_state(experiment)
    batch = abstract_batch(experiment.mesh, 16, experiment.model.config.image_size)
    update = experiment.functions.update(experiment.config.step_variants[0])
    jaxpr = jax.make_jaxpr(update)(state, batch, experiment.values).jaxpr
    used = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(experiment.values)]
    arguments = jaxpr.invars[-len(paths) :]
    assert not [path for path, one in zip(paths, arguments, strict=True) if id(one) not in used]


@pytest.mark.parametrize(
    'kind, fields, name',
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
        (Regularization, {'dropout': 0.99999998}, 'dropout=0.99999998'),  # 1 in float32
        (Sam, {'rho': 0.0, 'alpha': 0.6}, 'alpha=0.6'),
        (MeshConfig, {'rules': (('(', ('data',)),)}, r"'\('"),
    ],
)
def test_a_value_without_sense_is_rejected_by_its_field(kind, fields, name):
    with pytest.raises(UserError, match=name):
        kind(**fields)


def test_an_array_is_no_choice():
    assigned = tiny.assigned(ViTConfig(), pool=np.array(['cls', 'gap']))
    with pytest.raises(UserError, match='model.pool'):
        records.validate_copy(assigned, where='model')
