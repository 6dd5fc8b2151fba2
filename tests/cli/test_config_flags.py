"""Configurations on the command line: which spellings are understood, and what wrong ones say."""

import dataclasses
from collections.abc import Callable

import pytest

from tests import tiny
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.cli import config_help
from vit_jax.cli.config_flags import apply_overrides, load, split
from vit_jax.config import EvalConfig, TrainConfig
from vit_jax.data.image_preprocessing import InceptionCrop
from vit_jax.studies.config import Study
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
    config = load(TINY, made)
    assert config.fewshot.shots == (1,) and config.model is None
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
    with pytest.raises(UserError, match=r"whole.parts.frst: no such field.* 'first'"):
        found('parts.frst.weight=2')


@pytest.mark.parametrize(
    'override, message',
    [
        ('modle.depth=2', "config.modle: no such field; did you mean 'model'?"),
        ('model.dept=2', "config.model.dept: no such field; did you mean 'depth'?"),
        ('seed.x=2', 'config.seed.x: no such field'),
        ('preprocessing.qqq=2', 'config.preprocessing.qqq: no such field; known: crop, '),
        (
            'preprocessing.scal=2',
            "config.preprocessing.scal: no such field; did you mean '--config.preprocessing.crop",
        ),
        ('preprocessing.crop=none', 'config.preprocessing is none: --config.preprocessing=Pre'),
        ('seed=none', 'config.seed=none: this field needs a value'),
        ('seed=1e3', 'config.seed=1000.0: expected int'),
        ('model.pool=max', "config.model.pool='max': expected one of cls, gap, map, none"),
        ('mesh.fsdp=0', 'config.mesh.data=-1 x fsdp=0 x tensor=1: expected sizes of 1 or more'),
        ('fewshot.shot=1', "config.fewshot.shot: no such field; did you mean 'shots'?"),
        ('shots=1', "config.shots: no such field; did you mean '--config.fewshot.shots'?"),
        (
            'learning_rate=1',
            "config.learning_rate: no such field; did you mean '--config.schedule.lea",
        ),
        ('lr=1', "config.lr: no such field; did you mean '--config.schedule.learning_rate'?"),
        (
            'lerning_rate=1',
            "config.lerning_rate: no such field; did you mean '--config.schedule.le",
        ),
        ('batchsize=1', "config.batchsize: no such field; did you mean 'batch_size'?"),
        ('image_size=24x16', 'config.image_size=24x16: expected 24,16'),
        (
            'evals.val.split=x',
            """config.evals.val: no such field; there is none; --config.evals="{'v""",
        ),
        ('seed=-1', 'config.seed=-1: expected at least 0 and less than 4294967296'),
        ('total=Duration', 'config.total: a duration has one of steps, epochs, examples, fraction'),
    ],
)
def test_what_is_wrong_is_named(override, message):
    with pytest.raises(UserError) as error:
        load(TINY, [override])
    assert str(error.value).startswith(message)


HINTS = {  # another program's name: the field, or words of the sentence that says what to do
    'drop_path': 'regularization.stochastic_depth',
    'model.drop_path_rate': 'regularization.stochastic_depth',
    'freeze_backbone': 'optimizer.trained_blocks=0',
    'ema': 'polyak_decay',
    'num_workers': 'loader.threads',
    'schedule.decay_type': 'schedule.kind',
    'optimizer.lr': 'schedule.learning_rate',
    'evaluation_strategy': 'eval_every_steps',
    'mixed_precision': 'compute.dtype=bfloat16',
    'max_epochs': 'total.epochs',
    'epochs': 'total.epochs',
    'weight_decay': 'optimizer.weight_decay',
    'label_smoothing': 'loss.label_smoothing',
    'warmup_ratio': 'schedule.warmup.fraction',
    'grad_clip': 'optimizer.clip_norm',
    'Gradient-Accumulation-Steps': 'accumulation_steps',
    'img_size': 'image_size',
    'mixup': 'augmentation.mixup',
    'layer_lr_decay': 'optimizer.layer_decay',
    'pretrained': 'start_from',
    'hidden_size': 'model.width',
    'validation_split': 'held_out.fraction',
    'num_classes': 'leave it out',
    'resume': 'same command',
    'class_weights': 'loss',
    'early_stopping': 'no best checkpoint',
    'save_best': 'no best checkpoint',
    'wandb': 'tensorboard',
    'gpus': 'CUDA_VISIBLE_DEVICES',
}


@pytest.mark.parametrize('name, meant', HINTS.items())
def test_the_names_of_other_programs_lead_to_the_field_that_does_it(name, meant):
    with pytest.raises(UserError) as error:
        load(TINY, [f'{name}=1'])
    is_field = ' ' not in meant and '.' in meant or meant in records.hints(TrainConfig)
    said = f"did you mean '--config.{meant}'?" if is_field else meant
    assert str(error.value).startswith(f'config.{name}: no such field; ')
    assert said in str(error.value)


@pytest.mark.parametrize('kind, base', [(TrainConfig, 'config'), (Study, 'config.base')])
def test_what_a_synonym_leads_to_is_a_field_with_that_value(kind, base):
    paths = config_help.paths(kind)
    words = [word for texts in config_help.SYNONYMS.values() for word in texts.split()]
    for target, texts in config_help.SYNONYMS.items():
        for word in texts.split():
            assert f'{base}.{target}' in config_help.suggest(kind, word, [])
        field, _, value = target.partition('=')
        assert f'{base}.{field}' in paths
        if value:
            load(TINY, [target])
    assert len({*words}) == len(words)
    fields = {path.rpartition('.')[2] for path in paths}
    assert not fields & {*words}  # which would be understood as they are


@pytest.mark.parametrize(
    'override, example',
    [
        ('total=3', '.epochs=3'),
        ('total=0.5', '.fraction=0.5'),
        ('schedule.warmup=500', 'its units: steps, epochs'),
        ('optimizer=adam', 'its fields, as in --config.optimizer.FIELD=VALUE: weight_decay, '),
        ('loss=bce', 'kind, label_smoothing'),
        ('model=B/16', 'model=vit_jax.models.variant(NAME)'),
        ('model=vit', '--config.model=ViTConfig or --config.model=ResNetConfig'),
        ('augmentation.crop=inception', '--config.augmentation.crop=InceptionCrop'),
        ('fewshot=5', 'shots'),
        ('held_out=0.2', 'fraction'),
    ],
)
def test_a_record_given_as_one_value_says_which_field_to_set(override, example):
    with pytest.raises(UserError) as error:
        load(TINY, [override])
    name = override.partition('=')[0]
    said = f'for example --config.{name}{example}' if example[0] == '.' else example
    assert str(error.value).startswith(f'config.{name}=') and said in str(error.value)


def test_one_unit_of_a_duration_is_given():
    """The last would win, and the run be a hundred times as long as was meant."""
    assert load(TINY, ['total.epochs=1', 'total.epochs=2']).total == Duration(epochs=2.0)
    assert load(TINY, ['total=none', 'total.epochs=3']).total == Duration(epochs=3.0)
    with pytest.raises(UserError, match='^config.total.epochs: config.total.steps is given too$'):
        load(TINY, ['total.steps=5', 'total.epochs=1'])


def test_an_evaluation_that_was_made_on_the_command_line_has_fields():
    evals = load(TINY, ["evals={'val': {}}", 'eval_split=test', 'evals.val.split=train']).evals
    assert evals == {'val': EvalConfig(split='train')}


def test_an_override_leaves_the_records_of_the_file_alone():
    model = tiny.model(num_classes=None)
    config = tiny.experiment(model=model)
    assert apply_overrides(config, ['model.depth=7'], where='config').model.depth == 7
    assert model.depth != 7
