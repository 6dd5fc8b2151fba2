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
    (folder / 'ledger.jsonl').write_text(''.join(json.dumps(each) + '\n' for each in LEDGER))
    values = records.to_dict(tiny.experiment(**changes))
    write_config(folder / 'config.json', values)
    return str(folder)


def page_of(tmp_path, *folders, over='steps'):
    out = tmp_path / 'page.html'
    report.main(argparse.Namespace(workdirs=[*folders], out=str(out), over=over))
    return out.read_text()


def cells(page):
    """The texts of all tables, row by row."""
    rows = re.findall('<tr>(.*?)</tr>', page)
    return [html.unescape(' | '.join(re.findall('<t[hd][^>]*>(.*?)</t', row))) for row in rows]


@pytest.mark.full
def test_a_page_has_what_was_reached_what_happened_and_what_differs(tmp_path):
    one = run_of(tmp_path / 'a' / 'run', batch_size=16)
    two = run_of(tmp_path / 'b' / 'run', batch_size=32)
    page = page_of(tmp_path, one, two)
    rows = cells(page)
    assert rows[0] == 'run | state | training loss | test accuracy | 1-shot | images/s | wall time'
    state = 'not complete at step 30'
    assert rows[1].startswith(f'a/run | {state} |  | 43.75% | 37.50% | 200 | 0:01:4')
    assert 'b/run | 15 | update skipped: loss nan, gradient norm inf' in rows
    assert rows[-2:] == ['field | a/run | b/run', 'batch_size | 16 | 32']
    pictures = re.findall('<img src="(.{22})', page)
    assert pictures == ['data:image/png;base64,'] * 6  # and nothing from anywhere else
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    for title in 'Loss', 'Few-shot accuracy', 'Learning rate', 'Where the time went':
        assert f'<h2>{title}</h2>' in page
    assert 'Gradient norm' not in page  # no run has any


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    folder = run_of(tmp_path / 'run', lines=[])
    (tmp_path / 'run' / 'config.json').unlink()
    (tmp_path / 'run' / 'ledger.jsonl').unlink()
    page = page_of(tmp_path, folder)
    assert 'no numbers yet' in page and 'There were none.' in page
    assert 'No run has a ledger yet.' in page


def test_a_run_that_diverged_before_its_first_number_says_so(tmp_path):
    folder = run_of(tmp_path / 'run', lines=[])
    last = LEDGER[-1] | {'event': 'diverged', 'step': None}
    with (tmp_path / 'run' / 'ledger.jsonl').open('a') as file:
        file.write(json.dumps(last) + '\n')
    assert cells(page_of(tmp_path, folder))[1].startswith(
        'run | diverged before there were numbers'
    )


def test_time_counts_the_starts_of_a_run_one_after_the_other(tmp_path):
    (run,) = history.read_all([run_of(tmp_path / 'run')])
    lines = run.of_kind('train')
    assert history.seconds_since(lines, run).tolist() == [1.0, 2.0, 3.0]
    np.testing.assert_array_equal(history.values(lines, 'loss'), [2.0, 1.5, np.nan])
    assert run.evaluations == ['test']


def test_numbers_alone_have_a_page_that_claims_nothing_else(tmp_path):
    folders = [run_of(tmp_path / name) for name in ('one', 'two')]
    for path in tmp_path.rglob('metrics.jsonl'):
        (path.parent / 'ledger.jsonl').unlink()
        (path.parent / 'config.json').unlink()
    page = page_of(tmp_path, *folders, over='time')
    assert cells(page)[1] == 'one | at step 30 |  | 43.75% | 37.50% | 200 | '
    assert 'the same configuration' not in page and 'Without config.json: one, two.' in page


def test_damaged_files_have_a_page(tmp_path):
    strange = [
        '{"kind": "train", "step": 3, "run": "x", "seconds": null, "loss": 1.0}',
        '{"kind": "train", "step": 4, "run": 1, "seconds": 1.0, "loss": []}',
        '{"kind": "fewshot", "step": 4, "1_shot_accuracy": null}',
        '[1]',
    ]
    folder = run_of(tmp_path / 'run', lines=[*strange, *LINES])
    for name, text in {
        'config.json': '{"format": 3, "fewshot": 5}',
        'ledger.jsonl': '{"run": 1, "event": 3, "step": 1, "time": 1.0, "seconds": {}}\n',
    }.items():
        (tmp_path / 'run' / name).write_text(text)
    assert '<h2>Loss</h2>' in page_of(tmp_path, folder, over='time')


def test_what_is_no_work_directory_is_refused_by_name(tmp_path):
    (tmp_path / 'empty').mkdir()
    run = run_of(tmp_path / 'run')
    for folders, why in {
        (run, str(tmp_path / 'empty')): f'{tmp_path}/empty: no metrics.jsonl: expected the work',
        (str(tmp_path / 'gone'),): f'{tmp_path}/gone: no metrics.jsonl: there is no such folder',
        (run, f'{run}/'): f'{run}/: is given twice',
    }.items():
        with pytest.raises(UserError, match=re.escape(why)):
            history.read_all(folders)
    with pytest.raises(UserError, match='expected the name of a file, FILE.html'):
        report.main(argparse.Namespace(workdirs=[run], out=str(tmp_path), over='steps'))
