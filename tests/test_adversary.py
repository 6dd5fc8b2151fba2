"""The table of what an adversary tries: its rows are there, and a broken one is heard."""

import re

import pytest

from benchmarks import adversary
from benchmarks.adversary import Outcome
from tests.hosts import ROOT

ROWS = {name: attempt for name, (_, attempt) in adversary.rows(2).items()}
TESTS = {name: row.args for name, row in ROWS.items() if getattr(row, 'func', 0) is adversary.tests}


@pytest.mark.parametrize('row', TESTS)
def test_a_row_names_tests_that_are_there(row):
    """In its files and folders one at least has a word of its `-k`."""
    words = [word for text in TESTS[row] for word in re.findall('^-k=(.*)', text)]
    given = [ROOT / text for text in TESTS[row] if not text.startswith('-')]
    paths = [path for place in given for path in ([place] if place.suffix else place.rglob('*.py'))]
    names = re.findall(r'^def (test_\w+)', '\n'.join(p.read_text() for p in paths), re.MULTILINE)
    assert any(word in name for word in ' or '.join(words).split(' or ') for name in names)


def test_a_row_that_breaks_is_named_and_the_exit_code_says_so(monkeypatch, capsys):
    def breaking():
        raise OSError('the disk is on fire')

    known = {'good': ('x', lambda: Outcome(3, [])), 'bad': ('y', breaking)}
    monkeypatch.setattr(adversary, 'rows', lambda number: known)
    assert adversary.run(['good'], 1) == 0
    assert adversary.run([], 1) == 1
    assert 'OSError: the disk is on fire' in capsys.readouterr().out
    with pytest.raises(SystemExit, match='known are good, bad'):
        adversary.run(['ugly'], 1)


@pytest.mark.full
def test_tests_are_counted_and_that_there_are_none_is_said(tmp_path):
    text = 'import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip()'
    (tmp_path / 'test_x.py').write_text(text)
    counted = adversary.tests(f'--rootdir={tmp_path}', str(tmp_path / 'test_x.py'))
    assert counted == Outcome(1, ['test_b'], 1)
    assert adversary.tests(str(tmp_path / 'test_x.py'), '-k=nothing').broken
