"""The command that a training names at its end works when it is pasted."""

import dataclasses
import re
import shlex

import pytest

from tests import tiny
from vit_jax import evaluate
from vit_jax.cli import config_flags
from vit_jax.config import EvalConfig
from vit_jax.data.loading import LoaderConfig
from vit_jax.data.sources.opening import HeldOut
from vit_jax.train import describe_test_selection, next_command
from vit_jax.training.losses import LossConfig

EXPERIMENTS = {
    'digits': {'data': 'digits', 'eval_split': 'train[90%:]'},
    'a folder': {
        'data': 'my photos & "more"',
        'held_out': HeldOut(fraction=0.3, seed=2),
        'loader': LoaderConfig(on_unreadable='skip', max_pixels=10**6),
        'train_split': 'train[:90%]',
        'classes': ('cat', 'a dog'),
    },
    'several classes': {'data': 'table.csv', 'loss': LossConfig(kind='sigmoid')},
}


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_fine_tuning_reads_the_same_images_with_the_same_labels(name):
    config = tiny.experiment(**EXPERIMENTS[name])
    python, option, module, *words = shlex.split(next_command(config, 'a work dir', 'a/best 6'))
    assert (python, option, module) == ('python', '-m', 'vit_jax.finetune')
    overrides, (file, run) = config_flags.split(words)
    tuned = config_flags.load(file.removeprefix('--config='), overrides)
    assert (tuned.start_from, run) == ('a/best 6', '--workdir=a work dir-finetune')
    for field in 'data', 'train_split', 'eval_split', 'held_out', 'classes', 'loss':
        assert getattr(tuned, field) == getattr(config, field), field
    for field in 'on_unreadable', 'max_pixels':
        assert getattr(tuned.loader, field) == getattr(config.loader, field)


SELECTED = {'eval_split': 'train[90%:]', 'keep_best': 'test/loss'}


@pytest.mark.parametrize('changes, split', [({}, None), (SELECTED, 'test')])
def test_a_fine_tuned_model_is_evaluated_on_images_that_did_not_select_it(changes, split):
    config = dataclasses.replace(tiny.experiment(), start_from='another', **changes)
    words = shlex.split(next_command(config, 'a work dir', 'a/best 6'))
    assert words[:3] == ['python', '-m', 'vit_jax.evaluate']
    parsed = evaluate.make_parser().parse_args(words[3:])
    assert (parsed.checkpoint, parsed.data, parsed.split) == ('a/best 6', 'digits', split)


def test_data_that_no_command_line_can_name_are_not_proposed():
    config = tiny.experiment(data=tiny.watched(lambda index: None))
    assert next_command(config, 'run', 'run') is None


def test_images_without_classes_are_no_data_for_fine_tuning():
    command = next_command(tiny.experiment(data='photos'), 'run', 'run', has_classes=False)
    assert '--config.data=DATA' in command and 'photos' not in command


def test_a_model_of_images_with_several_classes_is_tuned_with_their_loss():
    command = next_command(tiny.experiment(), 'run', 'run', multi_label=True)
    assert '--config.loss.kind=sigmoid' in command


def test_other_data_of_an_evaluation_are_not_replaced_by_training_images():
    evals = {'dev': EvalConfig(data='others', split='test')}
    config = tiny.experiment(evals=evals, eval_split='test', keep_best='dev/loss')
    assert 'train[' not in describe_test_selection(config)


@pytest.mark.parametrize('evals', [{}, {'dev': EvalConfig(), 'test': EvalConfig()}])
def test_a_selection_on_test_images_names_the_flags_that_hold_out_others(evals):
    best = f'{[*evals, "test"][0]}/loss'
    config = tiny.experiment(eval_split='test', evals=evals, keep_best=best)
    flags = re.findall(r"--config[.]([\w.]+=)'(.*?)'", describe_test_selection(config))
    changed = config_flags.apply_overrides(config, [*map(''.join, flags)], where='config')
    assert describe_test_selection(changed) is None and changed.train_split == 'train[:90%]'
