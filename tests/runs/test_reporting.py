"""What a run says of steps that went wrong."""

import json
import math

import numpy as np
from rich.console import Console

from vit_jax.runs.reporting import Reporter
from vit_jax.training.loop import Clock
from vit_jax.training.metrics import StepMetrics


def report(folder, losses, skipped=()):
    """The lines of the metrics file of these losses, those steps skipped."""
    reporter = Reporter(
        folder,
        steps=range(0, len(losses)),
        log_every_steps=20,
        batch_size=4,
        clock=Clock(),
        tensorboard=True,  # which takes numbers only
        console=Console(quiet=False),
        progress={},
        evaluations=(),
    )
    with reporter:
        for step, loss in enumerate(losses, start=1):
            scalars = {'gradient_norm': 1.0, 'skipped': float(step in skipped)}
            sums = {'loss': 4 * loss, 'accuracy': 2.0}
            reporter.step(step, StepMetrics(sums, 4.0, scalars))
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def test_a_spike_of_the_loss_is_said_and_noise_is_not(tmp_path, capsys):
    losses = list(2.0 + 0.1 * np.random.default_rng(0).normal(size=200))
    losses[150] = 4.0
    spikes = [line for line in report(tmp_path, losses) if line['kind'] == 'spike']
    assert [(line['step'], line['loss']) for line in spikes] == [(151, 4.0)]
    assert abs(spikes[0]['mean_before'] - 2.0) < 0.05
    assert 'step 151: loss 4.0000, after 2.0' in capsys.readouterr().out


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
