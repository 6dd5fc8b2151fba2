"""What a run says of steps that went wrong."""

import contextlib
import datetime
import functools
import json
import math
import pathlib

import numpy as np
import pytest
from rich.console import Console

from tests import tiny
from vit_jax.base import UnusableDisk
from vit_jax.experiment import reporter as reporting
from vit_jax.experiment.build import build_experiment
from vit_jax.experiment.reporter import Reporter, eval_summary, peak_of
from vit_jax.training.duration import TrainLength
from vit_jax.training.loop import Clock
from vit_jax.training.losses import StepMetrics


@functools.cache
def experiment():
    config = tiny.experiment(batch_size=8, log_every_steps=20, tensorboard=True)  # numbers only
    return build_experiment(config)


def report(folder, losses, skipped=()):
    """The lines of the metrics file of these losses, those steps skipped."""
    reporter = Reporter(
        experiment()._replace(length=TrainLength(8, num_images=100, total_steps=len(losses))),
        folder,
        steps=range(len(losses)),
        progress={},
        clock=Clock(),
        console=Console(),
    )
    with contextlib.closing(reporter):
        for step, loss in enumerate(losses, start=1):
            scalars = {'gradient_norm': 1.0, 'skipped': float(step in skipped)}
            sums = {'loss': 8 * loss, 'accuracy': 4.0}
            reporter.step(step, StepMetrics(sums, 8.0, scalars))
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.mark.parametrize(
    'mean, deviation, loss, is_spike',
    [
        (2.0, 0.1, 4.0, True),
        (2.0, 0.1, 2.5, False),  # five deviations
        (0.5031, 0.004, 0.5292, False),  # the digits of the README, learned by then
        (0.5031, 0.004, 0.62, True),
        (7.0, 0.001, 8.3, False),  # at the start of a large vocabulary of classes
        (7.0, 0.001, 8.5, True),
        (-3.0, 0.01, -2.5, False),  # a loss of one's own
        (-3.0, 0.01, -2.0, True),
    ],
)
def test_a_spike_is_far_and_a_fifth_above_the_losses_before(
    tmp_path, mean, deviation, loss, is_spike
):
    losses = list(mean + deviation * np.random.default_rng(0).normal(size=200))
    losses[150] = loss
    found = [line['step'] for line in report(tmp_path, losses) if line['kind'] == 'spike']
    assert found == [151] * is_spike


def test_a_spike_of_the_loss_is_said_and_noise_is_not(tmp_path, capsys):
    losses = list(2.0 + 0.1 * np.random.default_rng(0).normal(size=200))
    losses[150] = 4.0
    spikes = [line for line in report(tmp_path, losses) if line['kind'] == 'spike']
    assert [(line['step'], line['loss']) for line in spikes] == [(151, 4.0)]
    assert abs(spikes[0]['mean_before'] - 2.0) < 0.05
    assert 'step 151: loss 4.0000, after 2.0' in capsys.readouterr().out


def test_a_full_disk_is_one_sentence_with_the_file(tmp_path, monkeypatch):
    """/dev/full takes every byte into the buffer, and none to the disk: at the close again."""
    open_as = pathlib.Path.open

    def opened(path, mode='r', **how):
        return open_as(pathlib.Path('/dev/full') if mode == 'a' else path, mode, **how)

    monkeypatch.setattr(pathlib.Path, 'open', opened)
    with pytest.raises(UnusableDisk, match='metrics.jsonl: No space left on device'):
        report(tmp_path, [1.0] * 20)


def test_lines_have_the_wall_clock_in_utc_and_the_number_of_the_start(tmp_path):
    began = datetime.datetime.now(datetime.UTC)
    (line,) = report(tmp_path, [1.0] * 20)
    assert (line['run'], line['seconds'] < 60) == (1, True)
    written = datetime.datetime.fromisoformat(line['time'])
    assert began.replace(microsecond=0) <= written <= datetime.datetime.now(datetime.UTC)


def test_the_share_of_the_peak_is_said_where_that_is_known(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as here:
        here.setattr(reporting, 'images_at_peak', lambda experiment: 1e12)
        (line,) = report(tmp_path, [1.0] * 20)
    assert line['mfu'] == line['images_per_second'] / 1e12
    assert 'images/s, MFU ' in capsys.readouterr().out
    (line,) = report(tmp_path, [1.0] * 20)
    assert 'mfu' not in line and 'MFU' not in capsys.readouterr().out


def test_skipped_updates_are_counted_said_and_part_of_no_mean(tmp_path, capsys):
    losses = [1.0] * 40
    losses[24] = losses[30] = float('nan')
    lines = report(tmp_path, losses, skipped=(25, 31))
    assert [line['step'] for line in lines if line['kind'] == 'skipped'] == [25, 31]
    assert [(line['loss'], line['skipped']) for line in lines if line['kind'] == 'train'] == [
        (1.0, 0),
        (1.0, 2),
    ]
    assert 'step 25: update skipped: loss nan, gradient_norm 1.0' in capsys.readouterr().out


def test_steps_that_were_all_skipped_have_no_loss(tmp_path):
    report(tmp_path, [math.nan] * 20 + [2.0] * 20, skipped=range(1, 21))
    texts = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert not [text for text in texts if 'NaN' in text]  # which is not JSON
    first, second = (line for line in map(json.loads, texts) if line['kind'] == 'train')
    assert (first['loss'], first['accuracy'], first['skipped']) == (None, None, 20)
    assert (second['loss'], second['skipped']) == (2.0, 0)


def test_what_is_not_right_or_wrong_has_its_loss_alone():
    with_accuracy = {'loss': 2.0, 'accuracy': 0.5}
    evaluated = {'test': with_accuracy, 'pixels': {'loss': 0.25}}
    assert eval_summary(evaluated) == 'test accuracy 50.00%; pixels loss 0.2500'


@pytest.mark.parametrize(
    ('kind', 'peak'),
    [
        ('TPU v5 lite', 197e12),
        ('TPU v5', 459e12),
        ('TPU v5p', 459e12),
        ('NVIDIA A100-SXM4-40GB MIG 1g.5gb', None),
        ('NVIDIA A100-SXM4-80GB', 312e12),
        ('NVIDIA A100 80GB PCIe', 312e12),
        ('NVIDIA A10', 125e12),
        ('NVIDIA H100 80GB HBM3', 989e12),
        ('NVIDIA H200', 989e12),
        ('NVIDIA H200 NVL', None),
        ('NVIDIA L40S', 362e12),
        ('NVIDIA GeForce RTX 4090 Laptop GPU', None),
        ('cpu', None),
    ],
)
def test_a_name_is_that_of_one_device(kind, peak):
    assert peak_of(kind) == peak
