"""The command that a training names at its end works when it is pasted."""

import dataclasses
import shlex
import subprocess
import sys

import cv2
import numpy as np
import pytest

from tests import tiny
from vit_jax import evaluate, predict
from vit_jax.cli import config_flags
from vit_jax.config import EvalConfig
from vit_jax.data.loading import LoaderConfig
from vit_jax.data.sources.opening import HeldOut, make_opener
from vit_jax.experiment.build import build_experiment
from vit_jax.experiment.following import next_command
from vit_jax.training.losses import LossConfig


def photos(folder, names=('cat', 'dog'), count=12):
    """A folder of classes with a space in its name, of which one image cannot be read."""
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / name / f'{index}.png'), image)
    return str(folder)


def several(folder):
    """A table in which an image may have several classes."""
    root = photos(folder)
    lines = [f'{root}/cat/{i}.png,{"cat;dog" if i % 2 else "cat"}\n' for i in range(12)]
    lines += [f'{root}/dog/{i}.png,dog\n' for i in range(12)]
    (folder / 'several.csv').write_text('path,labels\n' + ''.join(lines))
    return str(folder / 'several.csv')


def experiment(**changes):
    model = tiny.model(num_classes=None, depth=1)
    return tiny.experiment(model=model, **({'eval_split': 'test'} | changes))


EXPERIMENTS = {
    'digits': lambda folder: experiment(
        data='digits', evals={'minival': EvalConfig(split='train[90%:]')}
    ),
    'a folder': lambda folder: experiment(
        data=photos(folder),
        held_out=HeldOut(fraction=0.3, seed=2),
        loader=LoaderConfig(on_unreadable='skip'),
        train_split='train[:90%]',
        eval_split='test[:2]',
    ),
    'several classes': lambda folder: experiment(
        data=several(folder), loss=LossConfig(kind='sigmoid')
    ),
    'a loss of its own': lambda folder: experiment(
        data=several(folder), loss=lambda logits, targets: ((logits - targets) ** 2).sum(-1)
    ),
}


def fine_tuned(experiment):
    """The same experiment, as if it had started from a checkpoint."""
    return experiment._replace(config=dataclasses.replace(experiment.config, start_from='another'))


def words(command, program):
    python, option, module, *rest = shlex.split(command)
    assert (python, option, module) == ('python', '-m', f'vit_jax.{program}')
    return rest


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_what_is_named_next_is_of_the_same_images_with_the_same_labels(name, tmp_path):
    """Read as the programs read it; the data opened, its labels and losses agreed."""
    config, workdir = EXPERIMENTS[name](tmp_path / 'my photos & "more"'), 'a work dir'
    trained = build_experiment(config)
    overrides, (file, run) = config_flags.split(words(next_command(trained, workdir), 'finetune'))
    tuned = config_flags.load(file.removeprefix('--config='), overrides)
    assert (tuned.start_from, run) == (workdir, f'--workdir={workdir}-finetune')
    opened = make_opener(tuned.held_out)
    (tested,) = trained.evals.values()
    for reader, split in (trained.train, tuned.train_split), (tested, tuned.eval_split):
        old, new = reader.source, opened(tuned.data, split)
        assert (len(old), old.class_names) == (len(new), new.class_names)
        assert [*map(old.name_of, range(len(old)))] == [*map(new.name_of, range(len(new)))]
        assert tuned.loss.kind == ('sigmoid' if new.multi_label else 'softmax')
    assert tuned.loader.on_unreadable == config.loader.on_unreadable
    command = next_command(fine_tuned(trained), workdir)
    if name == 'digits':  # there is no file of an image
        asked = evaluate.make_parser().parse_args(words(command, 'evaluate'))
        assert (asked.data, asked.split) == ('digits', 'train[90%:]')
    else:
        asked = predict.make_parser().parse_args(words(command, 'predict'))
        assert asked.images == [tested.source.name_of(0)]
    assert asked.checkpoint == workdir


def test_data_that_no_command_line_can_name_are_not_proposed():
    experiment = build_experiment(tiny.experiment(data=tiny.watched(lambda index: None)))
    assert next_command(experiment, 'run') is next_command(fine_tuned(experiment), 'run') is None


@pytest.mark.full
def test_each_command_that_is_named_runs_when_it_is_pasted(tmp_path):
    """Pre-training names fine-tuning, and that predicts a test image, which may have several."""
    given = several(tmp_path / 'my photos')
    flags = ['--config=tests/tiny_config.py', '--config.total.steps=2', '--config.model.depth=1']
    flags += ['--config.eval_split=test', f'--config.data={given}', f'--workdir={tmp_path}/a run']
    flags += ['--config.batch_size=8', '--config.loss.kind=sigmoid']
    line, programs = shlex.join([sys.executable, '-m', 'vit_jax.train', *flags]), []
    while line:
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        named = [text for text in done.stdout.splitlines() if text.startswith('next ')]
        line = named[0].removeprefix('next').strip() if named else ''
        programs += line.split()[2:3]
        line = line.replace('python', sys.executable, 1)
        # The same command in less time.
        line += ' --config.total.steps=2' * ('vit_jax.finetune' in line)
        line += ' --config.schedule.warmup.steps=1' * ('vit_jax.finetune' in line)
    assert programs == ['vit_jax.finetune', 'vit_jax.predict']
    assert done.stdout.startswith(str(tmp_path / 'my photos'))
