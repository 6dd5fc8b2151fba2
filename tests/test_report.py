"""The page about runs: what stands in it, while they go on and afterwards."""

import argparse
import html
import json
import re

import numpy as np
import pytest

from tests import tiny
from vit_jax import report
from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.config import write_config
from vit_jax.studies import history


def line(kind, step, run=1, **numbers):
    seconds = numbers.pop('seconds', step / 10)
    return json.dumps({'kind': kind, 'step': step, 'run': run, 'seconds': seconds} | numbers)


LINES = [
    line('train', 10, loss=2.0, accuracy=0.25, learning_rate=0.1, images_per_second=100.0),
    line('skipped', 15, loss='nan', gradient_norm='inf'),
    line('train', 20, loss=1.5, accuracy=0.5, learning_rate=0.2, images_per_second=300.0),
    line('test', 20, loss=1.75, accuracy=0.4375),
    line('fewshot', 20, **{'1_shot_accuracy': 0.375}),
    line('train', 30, run=2, seconds=1.0, loss=None, accuracy=None, images_per_second=200.0),
]
LEDGER = [
    {'run': 1, 'event': 'saving', 'step': 20, 'time': 105.0, 'seconds': {'step': 5.0}},
    {'run': 2, 'event': 'training', 'step': 20, 'time': 202.0, 'seconds': {'step': 102.0}},
]


def run_of(folder, *, lines=LINES, **changes):
    """A work directory as a run has left it, in the middle of a line."""
    folder.mkdir(parents=True)
    text = ''.join(f'{each}\n' for each in lines)
    (folder / 'metrics.jsonl').write_text(text + '{"kind": "train", "st')
    (folder / 'events.jsonl').write_text(''.join(json.dumps(each) + '\n' for each in LEDGER))
    values = records.to_dict(tiny.experiment(**changes))
    write_config(folder / 'config.json', values)
    return str(folder)


def page_of(tmp_path, *folders):
    out = tmp_path / 'page.html'
    report.main(argparse.Namespace(workdirs=[*folders], out=str(out)))
    return out.read_text()


def cells(page):
    """The texts of all tables, row by row."""
    rows = re.findall('<tr>(.*?)</tr>', page)
    return [html.unescape(' | '.join(re.findall('<t[hd][^>]*>(.*?)</t', row))) for row in rows]


@pytest.mark.gate
def test_a_page_has_results_curves_events_and_differences(tmp_path):
    one = run_of(tmp_path / 'a' / 'run', batch_size=16)
    two = run_of(tmp_path / 'b' / 'run', batch_size=32)
    page = page_of(tmp_path, one, two)
    rows = cells(page)
    names = 'train/loss | train/images_per_second | test/accuracy | fewshot/1_shot_accuracy'
    assert rows[0] == f'run | state | {names} | wall time'
    state = 'incomplete at step 30'
    assert rows[1] == f'a/run | {state} | 1.5 | 200 | 43.75% | 37.50% | 0:01:47'
    assert 'a/run: 1, b/run: 1.' in page
    assert rows[-2:] == ['run | a/run -> run', 'b/run | batch_size: 16 -> 32']
    pictures = re.findall('<img src="(.{22})', page)
    assert pictures == ['data:image/png;base64,'] * 5
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    for title in 'Loss', 'Few-shot accuracy', 'Learning rate', 'Wall time':
        assert f'<h2>{title}</h2>' in page
    assert 'Gradient norm' not in page  # no run has any


def test_the_best_step_is_named_with_the_split_that_selected_it(tmp_path):
    lines = [line('test', 10 * n, loss=loss) for n, loss in enumerate([1.5, 1.25, None], 1)]
    run = run_of(tmp_path / 'a', lines=lines, keep_best='test/loss', eval_split='train[90%:]')
    assert '| 20: test/loss 1.25 on train[90%:] |' in cells(page_of(tmp_path, run))[1]


def test_only_steps_after_a_change_of_the_selection_are_the_best(tmp_path):
    losses = {10: 1.0, 20: 1.5, 30: 1.25}
    lines = [line('test', step, run=1 + step // 20, loss=loss) for step, loss in losses.items()]
    run = run_of(tmp_path / 'a', lines=lines, keep_best='test/loss', eval_split='train[90%:]')
    assert '| 10: test/loss 1 on' in cells(page_of(tmp_path, run))[1]
    anew = {'run': 2, 'event': 'training', 'step': 10, 'time': 300.0, 'seconds': {}}
    with open(tmp_path / 'a/events.jsonl', 'a') as file:
        json.dump(anew | {'selects_anew': True}, file)
    assert '| 30: test/loss 1.25 on train[90%:] |' in cells(page_of(tmp_path, run))[1]


def test_every_evaluation_is_in_the_results(tmp_path):
    lines = [
        line('train', 10, loss=1.5),
        line('pixels', 10, loss=12345.678, unreadable=1),
        line('train_held', 10, loss=1.25, accuracy=0.5),
    ]
    rows = cells(page_of(tmp_path, run_of(tmp_path / 'a', lines=lines)))
    names = 'train/loss | pixels/loss | train_held/accuracy'
    assert rows[0] == f'run | state | {names} | wall time'
    assert '| 1.5 | 12,346 | 50.00% |' in rows[1]


def test_a_run_without_numbers_has_a_page(tmp_path):
    folder = run_of(tmp_path / 'run', lines=[])
    assert cells(page_of(tmp_path, folder))[1] == 'run | incomplete at step 20 | 0:01:47'


def test_numbers_alone_have_a_page(tmp_path):
    folder = run_of(tmp_path / 'run')
    for name in 'events.jsonl', 'config.json':
        (tmp_path / 'run' / name).unlink()
    page = page_of(tmp_path, folder)
    assert cells(page)[1] == 'run | at step 30 | 1.5 | 200 | 43.75% | 37.50% | 0:00:00'
    assert '<h2>Wall time</h2>' in page and page.count('<img') == 5


def test_numbers_are_by_kind_name_and_step(tmp_path):
    (run,) = history.read_histories([run_of(tmp_path / 'run')])
    by_step = run.numbers['train/loss']
    assert [*by_step] == [10, 20, 30]
    np.testing.assert_array_equal([*by_step.values()], [2.0, 1.5, np.nan])
    assert 'skipped/loss' not in run.numbers


def test_a_page_replaces_no_other_file(tmp_path):
    run = run_of(tmp_path / 'run')
    before = (tmp_path / 'run/metrics.jsonl').read_text()
    with pytest.raises(UserError, match='metrics.jsonl: expected FILE.html'):
        report.main(argparse.Namespace(workdirs=[run], out=f'{run}/metrics.jsonl'))
    assert (tmp_path / 'run/metrics.jsonl').read_text() == before


def test_a_run_is_at_the_last_step_that_any_of_its_files_names(tmp_path):
    run = run_of(tmp_path / 'run', lines=LINES[:1])
    assert f'{run}, incomplete at step 20' in page_of(tmp_path, run)


def test_a_folder_that_is_no_work_directory_is_rejected_by_name(tmp_path):
    (tmp_path / 'empty').mkdir()
    run = run_of(tmp_path / 'run')
    for folders, name in {
        (run, str(tmp_path / 'empty')): f'{tmp_path}/empty',
        (run, f'{run}/'): f'{run}/',
    }.items():
        with pytest.raises(UserError, match=re.escape(name)):
            history.read_histories(folders)
