"""Configurations on the command line: which spellings are understood, and what wrong ones say."""

import dataclasses
from collections.abc import Callable

import pytest

from tests import tiny
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.cli import config_help
from vit_jax.cli.config_flags import apply_overrides, load, split
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.data.image_preprocessing import InceptionCrop
from vit_jax.experiment.build import build_experiment
from vit_jax.training.duration import Duration

TINY = 'tests/tiny_config.py'


@pytest.mark.parametrize(
    'arguments',
    [
        ['--config.mesh.data=-1', '--config.tensorboard=true', '--config.data=a=b c'],
        ['--config.mesh.data', '-1', '--config.tensorboard', '--config.data', 'a=b c'],
    ],
)
def test_a_value_follows_an_equals_sign_or_is_the_next_argument(arguments):
    overrides, others = split(['--config=FILE', *arguments, '--workdir', 'DIR'])
    assert overrides == ['mesh.data=-1', 'tensorboard=true', 'data=a=b c']
    assert others == ['--config=FILE', '--workdir', 'DIR']


def test_a_field_takes_what_its_type_says_and_the_last_of_several_wins():
    config = load(
        TINY,
        [
            'data=2012',
            'seed=1',
            'seed=0x10',
            'image_size=24,16',
            'compute.remat=none',
            'checkpoint_every_steps=none',
            'optimizer.clip_norm=2',
            'optimizer.lr_multipliers=(("head/.*", 10.0),)',
            'tensorboard=1',
        ],
    )
    assert (config.data, config.seed, config.image_size) == ('2012', 16, (24, 16))
    assert load(TINY, ['image_size=24', 'model.patch_size=8']).image_size == (24, 24)
    assert config.compute.remat == 'none' and config.checkpoint_every_steps is None
    assert config.optimizer.clip_norm == 2.0 and isinstance(config.optimizer.clip_norm, float)
    assert config.optimizer.lr_multipliers == (('head/.*', 10.0),) and config.tensorboard is True


@pytest.mark.parametrize(
    'text, expected',
    [
        ('cat,emu', ('cat', 'emu')),
        ('3, 5', ('3', '5')),
        ('cat', ('cat',)),
        ("('a, b', 'c')", ('a, b', 'c')),
        ('', ()),
    ],
)
def test_names_are_separated_by_commas_or_a_tuple(text, expected):
    assert load(TINY, [f'classes={text}']).classes == expected


def test_a_record_is_made_by_its_name_and_one_among_others_by_its_own():
    made = 'fewshot=none', 'fewshot=FewshotConfig', 'fewshot.shots=1', 'model=none'
    probe = 'fewshot.linear_probe=LinearProbeConfig', 'fewshot.linear_probe.mean_of_patches=true'
    config = load(TINY, [*made, *probe])
    assert config.fewshot.shots == (1,) and config.model is None
    assert config.fewshot.linear_probe.mean_of_patches == (True,)
    config = load(TINY, ['augmentation.crop=InceptionCrop'])
    assert config.augmentation.crop == InceptionCrop()


@dataclasses.dataclass(kw_only=True)
class Part(Record):
    weight: float = 1.0


@dataclasses.dataclass(kw_only=True)
class Whole(Record):
    loss: str | Callable[..., float] = 'softmax'
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)


def test_fields_of_a_name_or_a_function_and_of_records_by_name_can_be_set():
    def found(*overrides):
        record = Whole(loss=max, parts={'first': Part()})
        return apply_overrides(record, overrides, where='whole')

    assert found() == Whole(loss=max, parts={'first': Part()})
    assert found('loss=2', 'parts.first.weight=2') == Whole(
        loss='2', parts={'first': Part(weight=2)}
    )
    assert found("parts={'other': {'weight': 3.0}}").parts == {'other': Part(weight=3.0)}
    with pytest.raises(UserError, match="whole.parts.frst: .*'first'"):
        found('parts.frst.weight=2')


@pytest.mark.parametrize(
    'override, where, name',
    [
        ('modle.depth=2', 'config.modle: ', "'model'"),
        ('model.dept=2', 'config.model.dept: ', "'depth'"),
        ('seed.x=2', 'config.seed.x: ', ''),
        ('preprocessing.qqq=2', 'config.preprocessing.qqq: ', ' crop, '),
        ('preprocessing.scal=2', 'config.preprocessing.scal: ', '--config.preprocessing.crop'),
        ('preprocessing.crop=none', 'config.preprocessing: ', '--config.preprocessing=Pre'),
        ('seed=none', 'config.seed=none', ''),
        ('start_from=', "config.start_from='': ", 'value'),
        ('seed=1e3', 'config.seed=1000.0: ', 'int'),
        ('seed=-1', 'config.seed=-1: ', '4294967296'),
        ('model.pool=max', "config.model.pool='max': ", 'cls|gap|map'),
        ('mesh.fsdp=0', 'config.mesh.data=-1 x fsdp=0 x tensor=1: ', ''),
        ('image_size=24x16', 'config.image_size=24x16: ', '24,16'),
        ('evals.val.split=x', 'config.evals.val: ', """--config.evals="{'v"""),
        ('total=Duration', 'config.total: ', 'steps, epochs, examples, fraction'),
        ('shots=1', 'config.shots: ', "'--config.fewshot.shots'"),
        ('lerning_rate=1', 'config.lerning_rate: ', "'--config.schedule.learning_rate'"),
        ('lr=1', 'config.lr: ', "'--config.schedule.learning_rate'"),
        ('model.drop_path=1', 'config.model.drop_path: ', '.regularization.stochastic_depth'),
        ('batchsize=1', 'config.batchsize: ', "'batch_size'"),
        # A record given as one value: the field to set.
        ('total=3', 'config.total=', '--config.total.epochs=3'),
        ('total=0.5', 'config.total=', '--config.total.fraction=0.5'),
        ('optimizer=adam', 'config.optimizer=', ' weight_decay, '),
        ('model=B/16', 'config.model=', 'vit_jax.models.variant(NAME)'),
        ('model=vit', 'config.model=', '--config.model=ResNetConfig'),
    ],
)
def test_a_wrong_field_or_value_is_named_with_what_would_be_right(override, where, name):
    with pytest.raises(UserError) as error:
        load(TINY, [override])
    assert str(error.value).startswith(where) and name in str(error.value)


def test_what_a_synonym_leads_to_is_a_field():
    paths = config_help.field_paths(TrainConfig)
    for field, words in config_help.SYNONYMS.items():
        assert f'config.{field}' in paths
        for word in words.split():
            assert f'config.{field}' in config_help.suggest(TrainConfig, word, [])
            assert not any(path.endswith(f'.{word}') for path in paths), word


def test_one_unit_of_a_duration_is_given():
    """The last would win, and the run be a hundred times as long as was meant."""
    assert load(TINY, ['total.epochs=1', 'total.epochs=2']).total == Duration(epochs=2.0)
    assert load(TINY, ['total=none', 'total.epochs=3']).total == Duration(epochs=3.0)
    with pytest.raises(UserError, match='config.total.epochs, config.total.steps: '):
        load(TINY, ['total.steps=5', 'total.epochs=1'])


def test_an_evaluation_that_was_made_on_the_command_line_has_fields():
    evals = load(TINY, ["evals={'val': {}}", 'eval_split=test', 'evals.val.split=train']).evals
    assert evals == {'val': EvalConfig(split='train')}


def test_a_configuration_is_validated_once_per_source(monkeypatch):
    """When it is made; when its file was read; when flags were applied; when it is used."""
    checks = []
    original = TrainConfig.check
    monkeypatch.setattr(TrainConfig, 'check', lambda self: checks.append(original(self)))
    config = load(TINY, [])
    assert len(checks) == 2
    load(TINY, ['seed=1', 'batch_size=16'])
    assert len(checks) == 2 + 3
    config.batch_size = '16'
    with pytest.raises(UserError, match="^config.batch_size='16': expected int"):
        build_experiment(config)
    config.batch_size = 16
    build_experiment(config)
    assert len(checks) == 2 + 3 + 1


def test_an_override_changes_no_record_of_the_file():
    model = tiny.model(num_classes=None)
    config = tiny.experiment(model=model)
    assert apply_overrides(config, ['model.depth=7'], where='config').model.depth == 7
    assert model.depth != 7
