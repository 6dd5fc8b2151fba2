"""The program that runs studies, as users type it."""

import argparse
import signal
import subprocess
import sys
import time

import pytest

from tests import tiny
from tests.hosts import ROOT, environment
from vit_jax import study
from vit_jax.base import UserError
from vit_jax.experiment import workdirs
from vit_jax.studies import results
from vit_jax.studies.config import Drawing, Grid, Study
from vit_jax.studies.results import Row

FILE = """
from tests import tiny
from tests.hosts import ROOT, environment
from vit_jax.studies.config import Drawing, Grid, Study

def get_config():
    return Study(
        title='Pooling',
        base=tiny.experiment(checkpoint_every_steps=5),
        grids={
            'train': Grid(
                axes={'pool': {'gap': {'model.pool': 'gap'}, 'no': {'data': 'nowhere'}}},
                measures=('test/accuracy', 'compute'),
            ),
            'tune': Grid(start_from='train', changes={'total.steps': 2}, axes={'on': {'a': {}}}),
        },
        draw=Drawing(x='pool'),
    )
"""


def program(folder, *flags, **how):
    file = folder / 'study.py'
    file.write_text(FILE)
    command = [sys.executable, '-m', 'vit_jax.study', f'--config={file}']
    command += [f'--workdir={folder / "out"}', *flags]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    return subprocess.Popen(command, env=environment(), cwd=ROOT, **pipes, **how)


def output(folder, *flags):
    process = program(folder, *flags)
    text, _ = process.communicate(timeout=600)
    return process.returncode, text.splitlines()


@pytest.mark.full
def test_a_run_that_fails_is_named_and_the_others_go_on_and_are_not_done_twice(tmp_path):
    code, lines = output(tmp_path, '--list')
    assert code == 0 and len(lines) == 4
    command = f'python -m vit_jax.train --config={tmp_path}/out/train/gap-seed0/config.json'
    assert lines[0] == f'{command} --workdir={tmp_path}/out/train/gap-seed0'
    assert lines[2] == '# tune/gap-a-seed0 starts from train/gap-seed0: list it again after that'
    code, lines = output(tmp_path)
    assert code == 1
    names = 'train/gap-seed0', 'train/no-seed0', 'tune/gap-a-seed0', 'tune/no-a-seed0'
    started = [f'{number} of 4  {name}  starts' for number, name in enumerate(names, 1)]
    assert [line for line in lines if line.endswith('starts')] == started
    lines = [line for line in lines if line not in started]
    assert lines[5].startswith('2 of 4 runs complete, after 0:0')
    assert lines[0] == 'Pooling: 4 runs, 0 complete'
    assert lines[1].startswith('1 of 4  train/gap-seed0  test/accuracy ')
    assert lines[2].startswith(
        "2 of 4  train/no-seed0  failed with code 1: data='nowhere': no such"
    )
    assert lines[3].startswith('3 of 4  tune/gap-a-seed0  test/accuracy ')
    assert lines[4].startswith('4 of 4  tune/no-a-seed0  cannot start: train/no-seed0 is not ')
    assert lines[-1] == 'failed: train/no-seed0, tune/no-a-seed0'
    assert {file.name for file in (tmp_path / 'out').glob('results.*')} == {
        'results.md',
        'results.csv',
        'results.png',
    }
    code, lines = output(tmp_path, '--only=gap')
    assert code == 0 and lines[0] == 'Pooling: 2 runs, 2 complete'
    code, lines = output(tmp_path, '--only=nothing')
    assert code == 1 and lines == [
        'error: --only=nothing: none of 4 runs, such as train/gap-seed0, train/no-seed0, '
        'tune/gap-a-seed0'
    ]


@pytest.mark.full
def test_who_stops_the_study_stops_the_training_which_is_saved(tmp_path):
    process = program(
        tmp_path, '--config.base.total.steps=100000', '--only=train/gap', start_new_session=True
    )
    metrics = tmp_path / 'out/train/gap-seed0/metrics.jsonl'
    until = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 130, text
    assert 'stopped; the same command goes on' in text
    steps = [*(metrics.parent / 'checkpoints').iterdir()]
    assert steps  # saved, and nobody trains any more
    assert 'stopped at step' in (metrics.parent / 'output.txt').read_text()


@pytest.mark.full
def test_a_training_ends_with_its_study_and_no_second_one_begins_beside_it(tmp_path):
    flags = '--config.base.total.steps=100000', '--only=train/gap'
    process = program(tmp_path, *flags)
    workdir = tmp_path / 'out/train/gap-seed0'
    until = time.monotonic() + 300
    while not (workdir / 'metrics.jsonl').exists() and time.monotonic() < until:
        time.sleep(0.2)
    code, lines = output(tmp_path, *flags)
    assert code == 1 and lines[0].startswith(f'error: workdir {tmp_path}/out is in use by process ')
    process.kill()
    process.communicate(timeout=60)
    while workdirs.holder(workdir) and time.monotonic() < until:
        time.sleep(0.2)
    assert 'stopped at step' in (workdir / 'output.txt').read_text()


ROWS = [
    Row(
        'train', {'depth': '1'}, 3, {'test/accuracy': {0: 0.5, 1: 0.7}, 'compute': {0: 2e18}}, 0.614
    ),
    Row('train', {'depth': '2'}, 3, {'test/accuracy': {0: 0.25}, 'compute': {}}, None),
]


def test_tables_have_means_deviations_published_values_and_how_many_seeds():
    assert results.table(ROWS, ('test/accuracy', 'compute')) == [
        '| depth | test/accuracy | compute | published | seeds |',
        '| --- | --- | --- | --- | --- |',
        '| 1 | 60.00% ± 14.14% | 2 exaFLOP | 61.40% | 2 of 3 |',
        '| 2 | 25.00% |  |  | 1 of 3 |',
    ]
    assert results.comma_separated(ROWS).splitlines() == [
        'grid,depth,measure,mean,deviation,runs,planned,published',
        'train,1,test/accuracy,0.6,0.141421,2,3,0.614',
        'train,1,compute,2e+18,,1,3,',
        'train,2,test/accuracy,0.25,,1,3,',
    ]


def lines_of(drawing, rows, grids=('train',)):
    config = Study(title='T', base=tiny.experiment(), grids=dict.fromkeys(grids, Grid()))
    found = results.lines(config, drawing, rows)
    return {line.name: [*zip(line.x, line.mean, strict=True)] for line in found.lines}


def test_a_picture_has_a_line_for_each_value_of_the_other_axes():
    rows = [
        Row('train', {'depth': depth, 'pool': pool}, 1, {'test/accuracy': {0: accuracy}}, None)
        for depth, pool, accuracy in [('2', 'gap', 0.2), ('1', 'gap', 0.1), ('1', 'cls', 0.3)]
    ]
    assert lines_of(Drawing(x='depth'), rows) == {
        'pool gap': [(2, 0.2), (1, 0.1)],
        'pool cls': [(1, 0.3)],
    }
    by_pool = lines_of(Drawing(x='pool'), rows)  # nothing lies between names
    assert {name: [y for _, y in points] for name, points in by_pool.items()} == {
        'depth 2': [0.2],
        'depth 1': [0.1, 0.3],
    }


def test_over_compute_a_line_is_of_the_first_axis():
    numbers = {'test/accuracy': {0: 0.5}, 'compute': {0: 4.0}}
    rows = [Row('train', {'kind': 'vit', 'size': 'B'}, 1, numbers, None), *ROWS]
    assert lines_of(Drawing(x='compute'), rows) == {
        'kind vit': [(4.0, 0.5)],
        'depth 1': [(2e18, pytest.approx(0.6))],
    }


def test_a_mean_is_drawn_in_place_of_what_it_is_of():
    one = {'test/accuracy': {0: 0.5}}
    rows = [Row('tune', {'size': 'B', 'task': 'a'}, 1, one, None)]
    rows.append(Row('tune', {'size': 'B', 'task': 'all (1 of 2)'}, 1, one, None, 'all'))
    assert lines_of(Drawing(x='size', mean='all'), rows) == {'tune': [(0.0, 0.5)]}
    assert lines_of(Drawing(x='size'), rows) == {'task a': [(0.0, 0.5)]}


def test_a_file_is_no_work_directory(tmp_path):
    (tmp_path / 'file').touch()
    one = Study(title='T', base=tiny.experiment(), grids={'train': Grid()})
    wrong = argparse.Namespace(config=one, workdir=str(tmp_path / 'file'), only='', list=True)
    with pytest.raises(UserError, match='/file: expected a folder, but it is a file$'):
        study.main(wrong)
