"""benchmarks.device on a CPU: what is measured there says nothing, but all of it runs."""

import json
import os
import subprocess
import sys
import time

import cv2
import numpy as np
import pytest

from benchmarks import device, step_program
from benchmarks.device import LIMITS, Results
from tests.hosts import ROOT, environment


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_images(folder):
    rng = np.random.default_rng(0)
    for split, count in {'train': 12, 'test': 4}.items():
        for name in 'cat', 'dog':
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                cv2.imwrite(str(folder / split / name / f'{i}.jpg'), image)
    return folder


@pytest.mark.parametrize(
    'program, flag, said',
    [
        *((device, f'--minutes={text}', text) for text in ('-1', '0', 'nan', 'inf', 'x')),
        (step_program, '--xla=foo', 'expected OPTION=VALUE'),
        (step_program, '--xla==x', 'expected OPTION=VALUE'),
        (step_program, '--batch=0', 'at least 1'),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_sentence(program, flag, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['program', flag])
    with pytest.raises(SystemExit, match='2'):
        program.main()
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.full
def test_every_part_measures_something(tmp_path):
    images = make_images(tmp_path / 'images')
    command = [sys.executable, '-m', 'benchmarks.device', f'--out={tmp_path}/lines.jsonl']
    command += [f'--cifar10={images}', f'--photos={images}', '--minutes=12']
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    lines = read(tmp_path / 'lines.jsonl')
    assert not [line['text'] for line in lines if 'error' in line or 'stopped' in line]
    assert {line['part'] for line in lines} == {'device', *LIMITS}
    parts = {part: [line for line in lines if line['part'] == part] for part in LIMITS}
    assert {line['name'] for line in parts['compile']} >= {'hybrid', 'ResNet', 'ViT, xla'}
    assert all(np.isfinite(line['loss']) for line in parts['compile'])
    assert parts['peers'][0]['seconds'] > 0
    assert 0.5 < sum(line['share'] for line in parts['profile'] if 'share' in line) <= 1
    assert [line['name'] for line in parts['files'][1:]] == ['threads']
    assert [line['step'] for line in parts['cifar10']] == [3, 6]
    assert all(0 < error < 0.02 for line in parts['attention'] for error in line['errors'])


@pytest.mark.full
def test_a_part_that_fails_or_takes_too_long_is_said(tmp_path, capsys):
    results = Results(tmp_path / 'lines.jsonl')
    options = {'photos': str(tmp_path)}
    device.run_part('compile', options, 0.2, results)
    device.run_part('nonsense', options, 100, results)
    slow, wrong = read(tmp_path / 'lines.jsonl')
    assert slow['stopped']
    assert 'part_nonsense' in wrong['error']
    assert capsys.readouterr().out.count('\n') == 2
    assert not parts_of(results)


@pytest.mark.full
def test_a_measurement_that_is_ended_leaves_no_process(tmp_path):
    results = Results(tmp_path / 'lines.jsonl')
    command = [sys.executable, '-m', 'benchmarks.device', '--only=compile']
    command += [f'--out={tmp_path}/lines.jsonl', f'--photos={tmp_path}']
    parent = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not results.path.read_text() and time.monotonic() < deadline:  # the first part has ended
        time.sleep(0.1)
    time.sleep(1)
    assert parts_of(results)
    parent.terminate()
    assert parent.wait(timeout=20) == 143
    assert not parts_of(results)


def parts_of(results):
    """Processes that measure for these results: the folder of the file is in their options."""
    folder = str(results.path.parent)
    lines = map(command_line, filter(str.isdecimal, os.listdir('/proc')))
    return [line for line in lines if 'device_parts' in line and folder in line]


def command_line(pid):
    try:
        return open(f'/proc/{pid}/cmdline').read()
    except OSError:
        return ''
