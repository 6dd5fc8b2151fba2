"""The program that runs studies, its tables and its pictures."""

import signal

import pytest

from tests import tiny
from tests.hosts import hosts
from vit_jax.studies import results
from vit_jax.studies.config import Grid, PlotConfig, Study
from vit_jax.studies.results import Row

FILE = """
from tests import tiny
from vit_jax.studies.config import PlotConfig, Grid, Study

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
        draw=PlotConfig(x='pool'),
    )
"""


def study(folder, *flags):
    (folder / 'study.py').write_text(FILE)
    command = ['vit_jax.study', f'--config={folder}/study.py', f'--workdir={folder}/out', *flags]
    return hosts(folder, command)


def output(folder, *flags):
    with study(folder, *flags) as [process]:
        return process.wait(), process.text.splitlines()


@pytest.mark.gate
def test_a_run_that_fails_is_named_and_the_others_continue_and_are_not_repeated(tmp_path):
    code, lines = output(tmp_path)
    assert code == 1
    assert [line.split()[3:5] for line in lines if ' of 4  ' in line] == [
        ['train/gap-seed0', 'starts'],
        ['train/no-seed0', 'starts'],
        ['train/no-seed0', 'failed'],
        ['tune/gap-a-seed0', 'starts'],
        ['tune/no-a-seed0', 'cannot'],
    ]
    assert lines[-1].endswith(': train/no-seed0, tune/no-a-seed0')
    files = {file.name for file in (tmp_path / 'out').glob('results.*')}
    assert files == {'results.md', 'results.csv', 'results.png'}
    code, lines = output(tmp_path, '--only=gap')
    assert code == 0 and lines[0] == 'nothing to train: 2 runs complete'
    assert not any('starts' in line for line in lines)
    code, lines = output(tmp_path, '--list')
    run = f'{tmp_path}/out/train/no-seed0'
    command = f'python -m vit_jax.train --config={run}.json --workdir={run}'
    assert code == 0 and lines[0] == command and len(lines) == 2
    assert lines[1].startswith('# tune/no-a-seed0: train/no-seed0 ')


@pytest.mark.gate
def test_a_signal_to_the_study_stops_the_training_which_saves(tmp_path):
    flags = '--config.base.total.steps=100000', '--only=train/gap'
    workdir = tmp_path / 'out/train/gap-seed0'
    with study(tmp_path, *flags) as [process]:
        process.wait_until((workdir / 'metrics.jsonl').exists, 'metrics.jsonl')
        code, lines = output(tmp_path, *flags)  # as on another host
        assert code == 1 and 'process' in lines[1] and 'starts' not in lines[1]
        process.signal(signal.SIGINT)
        assert process.wait() == 130 and 'stopped at step' in process.text
    assert [*(workdir / 'checkpoints').iterdir()]


@pytest.mark.gate
def test_a_signal_before_the_training_begins_stops_the_study(tmp_path):
    with study(tmp_path, '--config.base.total.steps=100000', '--only=train/gap') as [process]:
        process.wait_for_text('starts')
        process.signal(signal.SIGINT)
        assert process.wait() == 130 and 'Traceback' not in process.text
    assert not (tmp_path / 'out/train/gap-seed0/metrics.jsonl').exists()


ROWS = [
    Row(
        'train', {'depth': '1'}, 3, {'test/accuracy': {0: 0.5, 1: 0.7}, 'compute': {0: 2e18}}, 0.614
    ),
    Row('train', {'depth': '2'}, 3, {'test/accuracy': {0: 0.25}, 'compute': {}}, None),
]


def test_tables_have_means_deviations_published_values_and_the_number_of_seeds():
    assert results.format_table(ROWS, ('test/accuracy', 'compute')) == [
        '| depth | test/accuracy | compute | published | seeds |',
        '| --- | --- | --- | --- | --- |',
        '| 1 | 60.00% ± 14.14% | 2 exaFLOP | 61.40% | 2 of 3 |',
        '| 2 | 25.00% |  |  | 1 of 3 |',
    ]


def lines_of(drawing, rows):
    one = Study(title='T', base=tiny.experiment(), grids={'train': Grid()})
    lines, _, _ = results.make_lines(one, drawing, rows)
    return {line.name: [*zip(line.x, line.mean, strict=True)] for line in lines}


def test_a_picture_has_a_line_for_each_value_of_the_other_axes():
    rows = [
        Row('train', {'depth': depth, 'pool': pool}, 1, {'test/accuracy': {0: accuracy}}, None)
        for depth, pool, accuracy in [('2', 'gap', 0.2), ('1', 'gap', 0.1), ('1', 'cls', 0.3)]
    ]
    by_depth = {'pool gap': [(2, 0.2), (1, 0.1)], 'pool cls': [(1, 0.3)]}
    assert lines_of(PlotConfig(x='depth'), rows) == by_depth
    by_pool = {'depth 2': [(0, 0.2)], 'depth 1': [(0, 0.1), (1, 0.3)]}  # names have no places
    assert lines_of(PlotConfig(x='pool'), rows) == by_pool
    numbers = {'test/accuracy': {0: 0.5}, 'compute': {0: 4.0}}
    rows = [Row('train', {'kind': 'vit', 'size': 'B'}, 1, numbers, None), ROWS[0]]
    by_compute = {'kind vit': [(4.0, 0.5)], 'depth 1': [(2e18, pytest.approx(0.6))]}
    assert lines_of(PlotConfig(x='compute'), rows) == by_compute


def test_a_mean_replaces_the_values_of_the_last_axis():
    one = {'test/accuracy': {0: 0.5}}
    rows = [Row('tune', {'size': 'B', 'task': 'a'}, 1, one, None)]
    rows.append(Row('tune', {'size': 'B', 'task': 'all'}, 1, one, None, 'all'))
    assert lines_of(PlotConfig(x='size', mean='all'), rows) == {'tune': [(0.0, 0.5)]}
    assert lines_of(PlotConfig(x='size'), rows) == {'task a': [(0.0, 0.5)]}
