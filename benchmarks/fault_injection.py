"""Injects faults and counts which promises hold.

Command: python -m benchmarks.fault_tolerance --inject_faults

A row is a promise, how often it was tried, and the first case that broke it. Most rows count tests;
the others try more than a test may take: kills at any moment of a run's life, each kind of damage
to each kind of file of a run, many copies of foreign files.
"""

import contextlib
import functools
import io
import itertools
import json
import logging
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from tests import tiny_config
from tests.hosts import ROOT, hosts, result
from vit_jax.base import UserError
from vit_jax.experiment import training_run

LONGEST = 1800  # seconds, of a row


class Outcome(NamedTuple):
    """How many cases kept the promise, which did not, and how many could not be tried."""

    held: int
    broken: list[str]
    skipped: int = 0


def tests(*arguments: str) -> Outcome:
    """What pytest says of these tests, the full ones too; that there are none breaks the row."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / 'report.xml'
        command = [sys.executable, '-m', 'pytest', '-n', '0', '-m', '', f'--junitxml={report}']
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST
        )
        cases = [*ElementTree.parse(report).iter('testcase')] if report.exists() else []
    found: dict[str, list[str]] = {'held': [], 'broken': [], 'skipped': []}
    for case in cases:
        tags = {child.tag for child in case}
        kind = (
            'broken' if tags & {'failure', 'error'} else 'skipped' if 'skipped' in tags else 'held'
        )
        found[kind].append(case.get('name', ''))
    if done.returncode and not found['broken']:
        found['broken'] = [f'{arguments}: {(done.stdout + done.stderr).strip()[-200:]}']
    return Outcome(len(found['held']), found['broken'], len(found['skipped']))


@contextlib.contextmanager
def training(folder: pathlib.Path, faults: str, count: int = 1, *flags: str) -> Iterator[Any]:
    """The processes of a small training in FOLDER/run."""
    folder.mkdir(exist_ok=True)
    command = ['tests.faulty', faults, '--config=tests/tiny_config.py', f'--workdir={folder}/run']
    with hosts(folder, [*command, *flags], count) as started:
        yield started


def to_the_end(folder: pathlib.Path, count: int = 1, *flags: str) -> tuple[list[int], str]:
    """The exit codes of a training without faults, and what its first process said."""
    with training(folder, 'slow:0', count, *flags) as started:
        return [host.wait(LONGEST) for host in started], started[0].text


def unlike(folder: pathlib.Path, whole: pathlib.Path, metrics: bool = True) -> str:
    """How the run in one folder ended differently from that in the other; '' where it did not."""
    (params, lines), (expected, told) = result(folder), result(whole)
    if any(not np.array_equal(params[name], leaf) for name, leaf in expected.items()):
        return 'other bits'
    return 'other lines in metrics.jsonl' if metrics and lines != told else ''


def kills(count: int, number: int) -> Outcome:
    """SIGKILL at random moments of one run's life: of all its processes, or of one of them."""
    moments = random.Random(count)
    folder = pathlib.Path(tempfile.mkdtemp())
    flags = f'--config.total.steps={max(60, 40 * number)}', '--heartbeat_seconds=10'
    to_the_end(folder / 'whole', count, *flags)
    life, died = 0.0, 0
    for _ in range(number):
        with training(folder / 'killed', 'slow:300', count, *flags) as started:
            began = time.monotonic()
            if not life:
                started[0].wait_for('reported')
                life = 2 * (time.monotonic() - began)
            time.sleep(moments.uniform(0, life))
            if all(host.process.exitcode == 0 for host in started):
                break  # it is complete
            died += 1
            victims = moments.choice([started, *([host] for host in started)])
            for host in moments.sample(victims, len(victims)):
                host.process.kill()
            for host in started:  # one that still waits for its dead peers is killed after this
                with contextlib.suppress(AssertionError):
                    host.wait(20)
    codes, text = to_the_end(folder / 'killed', count, *flags)
    how = unlike(folder / 'killed', folder / 'whole') if not any(codes) else text[-300:]
    shutil.rmtree(folder)
    return Outcome(0 if how else died, [f'after {died} kills: {how}'] if how else [])


def half_a_line(data: bytes) -> bytes:
    """Cut in the middle of the last line."""
    whole = data.rstrip()
    start = whole.rfind(b'\n') + 1
    return whole[: (start + len(whole)) // 2]


def flipped(data: bytes) -> bytes:
    """With one bit the other way round."""
    place = random.Random(zlib.crc32(data)).randrange(8 * max(1, len(data)))
    changed = bytearray(data or b'\0')
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    'emptied': lambda data: b'',
    'cut': lambda data: data[: len(data) // 2],
    'half a line': half_a_line,
    'a number': lambda data: b'12\n',
    'a list': lambda data: b'[]\n' + data.partition(b'\n')[2],  # of a line, where there are more
    'deep': lambda data: b'[' * 100_000 + data,
    'not UTF-8': lambda data: b'\xff\xfe' + data,
    'flipped': flipped,
}


def damage(path: pathlib.Path, kind: str) -> None:
    """Damages a file in one of the ways of DAMAGES, removes it, or puts another beside it."""
    if kind == 'removed':
        path.unlink()
    elif kind == 'stray':
        (path.parent / '.nfs0001').write_bytes(b'stray')
    else:
        path.write_bytes(DAMAGES[kind](path.read_bytes()))


def go_on(folder: pathlib.Path) -> tuple[str, str]:
    """What a start of the run in FOLDER/run ended with, an error or '', and its warnings."""
    warned = io.StringIO()
    handler = logging.StreamHandler(warned)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            training_run.train(tiny_config.get_config(), str(folder / 'run'))
        error = ''
    except UserError as refused:
        error = f'refused: {refused}'
    except Exception as raised:  # which a user would see as a traceback
        error = f'{type(raised).__name__}: {raised}'
    finally:
        logging.getLogger().removeHandler(handler)
    return error, warned.getvalue()


def _kind(path: pathlib.Path) -> str:
    """Files of one kind have one name, but for those named by a digest or by what they describe."""
    if path.name == 'metadata':
        return f'{path.parent.name}/metadata'
    return re.sub('[0-9a-f]{16,}', 'data', path.name)


def own_files() -> Outcome:
    """Each kind of damage to each kind of file of a run that was killed at step 38 of 60.

    It goes on to the same bits, with a warning where the file has a digest, or is refused in words.
    """
    folder = pathlib.Path(tempfile.mkdtemp())
    go_on(folder / 'whole')
    with training(folder / 'base', 'slow:100,die:38') as (host,):
        host.wait()
    run = folder / 'base/run'
    steps = [int(path.name) for path in run.glob('checkpoints/*') if path.name.isdecimal()]
    newest = (run / 'checkpoints' / str(max(steps))).rglob('*')
    paths = [path for path in (*run.glob('*'), *sorted(newest)) if path.is_file()]
    kinds = {_kind(path): str(path.relative_to(run)) for path in paths}

    def broken(name: str, kind: str) -> str:
        copy = folder / 'copy'
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder / 'base', copy)
        damage(copy / 'run' / name, kind)
        error, warned = go_on(copy)
        if error:
            return '' if error.startswith('refused: ') else error
        if name.startswith('checkpoints') and not warned:
            return 'in silence'
        return unlike(copy, folder / 'whole', metrics=name != 'metrics.jsonl')

    cases = [*itertools.product(kinds.values(), [*DAMAGES, 'removed', 'stray'])]
    found = [f'{name}, {kind}: {how}' for name, kind in cases if (how := broken(name, kind))]
    shutil.rmtree(folder)
    return Outcome(len(cases) - len(found), found)


def foreign_files(copies: int) -> Outcome:
    """Damaged copies of each foreign file that is here."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, '-m', 'tests.checkpoints.damage', folder, str(copies)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    if done.returncode:
        return Outcome(0, [done.stderr.strip()[-300:]])
    counts = json.loads(done.stdout.splitlines()[-1])
    return Outcome(sum(sum(outcomes.values()) for outcomes in counts.values()), [])


CHECKPOINTS, RUNS = 'tests/checkpoints', 'tests/experiment'
FORMATS = f'{CHECKPOINTS}/formats'
READING = FORMATS, 'tests/data'
HOSTS = f'{RUNS}/test_hosts.py'


def rows(number: int) -> dict[str, tuple[str, Callable[[], Outcome]]]:
    """What is tried, by the name of the row; `number` kills of one process, half as many of two."""

    def row(what: str, *arguments: str) -> tuple[str, Callable[[], Outcome]]:
        return what, functools.partial(tests, *arguments)

    return {
        'kills': ('SIGKILL, one process, any moment', lambda: kills(1, number)),
        'kills-of-two': ('SIGKILL of both or one of two', lambda: kills(2, number // 2)),
        'own-files': ("damage to a run's own files", own_files),
        'foreign-files': ('damage to foreign files', lambda: foreign_files(100)),
        'crashes': row(
            'a crash at each file operation, power', 'tests', '-k=kill_at or test_power'
        ),
        'bits': row('flipped bits and lost files of checkpoints', CHECKPOINTS, '-k=flip or damage'),
        'alone': row('one of two processes is killed', HOSTS, '-k=killed_alone'),
        'ends': row('SIGTERM and other ends, hangs', RUNS, '-k=sigterm or hangs or test_stopping'),
        'not-finite': row('NaN, in both or in one of two', RUNS, '-k=finite or poisoned'),
        'evaluation': row('1 to 359 images, by two processes', HOSTS, '-k=counts_every_image'),
        'changes': row('other data or values than before', RUNS, '-k=differ or test_data_manifest'),
        'pickles': row('pickles that would be executed', FORMATS, '-k=pickle'),
        'bombs': row('images that declare too many pixels', READING[1], '-k=more_pixels'),
        'records': row('damage to stored records', READING[1], '-k=noticed'),
        'disks': row(
            'full and read-only disks, no memory', RUNS, '-k=disk or be_written or without_memory'
        ),
    }


def run(only: list[str], number: int) -> int:
    """Runs the rows of these names, or all; prints the table. 1 where anything broke, else 0."""
    known = rows(number)
    if wrong := set(only) - known.keys():
        sys.exit(f'--only={",".join(sorted(wrong))}: known are {", ".join(known)}')
    print(f'{"row":<17}{"what":<44}{"held":>6}{"broken":>8}{"skipped":>9}{"s":>7}')
    all_held = True
    for name in only or known:
        what, attempt = known[name]
        began = time.monotonic()
        try:
            outcome = attempt()
        except Exception as error:  # what is tried may break anything
            outcome = Outcome(0, [f'{type(error).__name__}: {str(error)[-300:]}'])
        numbers = f'{outcome.held:>6}{len(outcome.broken):>8}{outcome.skipped:>9}'
        print(f'{name:<17}{what:<44}{numbers}{time.monotonic() - began:>7.0f}', flush=True)
        for line in outcome.broken[:20]:
            print(f'    {line}', flush=True)
        all_held &= not outcome.broken
    return 0 if all_held else 1
