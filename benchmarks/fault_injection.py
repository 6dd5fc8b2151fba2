"""Injects faults and counts how often each guarantee holds.

Command: python -m benchmarks.fault_tolerance --inject_faults

Each row of the table tests one guarantee and lists the first 20 cases that broke it. Most rows run
tests. The others try more cases than a test has time for: kills at any moment of a run, each kind
of damage to each kind of file of a run, and many damaged copies of published checkpoints.
"""

import contextlib
import functools
import io
import itertools
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

import jax
import numpy as np

import vit_jax
from benchmarks import soak
from tests import reference, tiny_config
from tests.hosts import ROOT, hosts
from vit_jax.base import UserError
from vit_jax.experiment import training_run

HINTS: dict[str, Any] = {**reference.HINTS}
TIMEOUT_SECONDS = 1800  # time limit of one process, in seconds


class Outcome(NamedTuple):
    """The number of cases that held, the cases that broke, and the number that was skipped."""

    held: int
    broken: list[str]
    skipped: int = 0


def tests(*arguments: str) -> Outcome:
    """Runs tests with pytest, including the full ones. Finding no test counts as broken."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / 'report.xml'
        command = [sys.executable, '-m', 'pytest', '-n', '0', '-m', '', f'--junitxml={report}']
        finished = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        cases = [*ElementTree.parse(report).iter('testcase')] if report.exists() else []
    names: dict[str, list[str]] = {'held': [], 'broken': [], 'skipped': []}
    for case in cases:
        tags = {child.tag for child in case}
        kind = (
            'broken' if tags & {'failure', 'error'} else 'skipped' if 'skipped' in tags else 'held'
        )
        names[kind].append(case.get('name', ''))
    if finished.returncode and not names['broken']:
        names['broken'] = [f'{arguments}: {(finished.stdout + finished.stderr).strip()[-200:]}']
    return Outcome(len(names['held']), names['broken'], len(names['skipped']))


@contextlib.contextmanager
def start_training(folder: pathlib.Path, faults: str, count: int = 1, *flags: str) -> Iterator[Any]:
    """Starts the processes of a small training in FOLDER/run, with faults."""
    folder.mkdir(exist_ok=True)
    command = ['tests.faulty', faults, '--config=tests/tiny_config.py', f'--workdir={folder}/run']
    with hosts(folder, [*command, *flags], count) as started:
        yield started


def inject_kills(count: int, number: int) -> Outcome:
    """Kills all processes of a run, or one of them, at random moments, and resumes it each time."""
    with tempfile.TemporaryDirectory() as folder:
        difference = soak.measure(pathlib.Path(folder), count, number)[1]
    return Outcome(0, [difference]) if difference else Outcome(number, [])


def cut_last_line(data: bytes) -> bytes:
    """Cuts the last line in the middle."""
    text = data.rstrip()
    start = text.rfind(b'\n') + 1
    return text[: (start + len(text)) // 2]


def flip_bit(data: bytes) -> bytes:
    """Flips one bit."""
    place = random.Random(zlib.crc32(data)).randrange(8 * max(1, len(data)))
    changed = bytearray(data or b'\0')
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    'emptied': lambda data: b'',
    'cut': lambda data: data[: len(data) // 2],
    'half a line': cut_last_line,
    'a number': lambda data: b'12\n',
    'a list': lambda data: b'[]\n' + data.partition(b'\n')[2],  # replaces the first line
    'deep': lambda data: b'[' * 100_000 + data,
    'not UTF-8': lambda data: b'\xff\xfe' + data,
    'flipped': flip_bit,
}


def damage(path: pathlib.Path, kind: str) -> None:
    """Damages a file as DAMAGES[kind] does, removes it, or adds another file to its folder."""
    if kind == 'removed':
        path.unlink()
    elif kind == 'stray':
        (path.parent / '.nfs0001').write_bytes(b'stray')
    else:
        path.write_bytes(DAMAGES[kind](path.read_bytes()))


def resume(folder: pathlib.Path) -> tuple[str, str]:
    """Starts or resumes the run in FOLDER/run; returns its error, or '', and its warnings."""
    warned = io.StringIO()
    handler = logging.StreamHandler(warned)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            training_run.train(tiny_config.get_config(), str(folder / 'run'))
        error = ''
    except UserError as refused:
        error = f'refused: {refused}'
    except Exception as raised:  # a user would see a traceback
        error = f'{type(raised).__name__}: {raised}'
    finally:
        logging.getLogger().removeHandler(handler)
    return error, warned.getvalue()


def _kind(path: pathlib.Path) -> str:
    """Returns the kind of a file: its name, without digests and with the folder of metadata."""
    if path.name == 'metadata':
        return f'{path.parent.name}/metadata'
    return re.sub('[0-9a-f]{16,}', 'data', path.name)


def damage_run_files() -> Outcome:
    """Damages each kind of file of a run that was killed at step 38 of 60, in each way.

    The run must resume to the same parameters, with a warning if the file is part of a checkpoint,
    or be rejected with a UserError.
    """
    folder = pathlib.Path(tempfile.mkdtemp())
    resume(folder / 'whole')
    with start_training(folder / 'base', 'slow:100,die:38') as (host,):
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
        error, warned = resume(copy)
        if error:
            return '' if error.startswith('refused: ') else error
        if name.startswith('checkpoints') and not warned:
            return 'no warning'
        return soak.describe_difference(copy, folder / 'whole', metrics=name != 'metrics.jsonl')

    cases = [*itertools.product(kinds.values(), [*DAMAGES, 'removed', 'stray'])]
    failed = [f'{name}, {kind}: {why}' for name, kind in cases if (why := broken(name, kind))]
    shutil.rmtree(folder)
    return Outcome(len(cases) - len(failed), failed)


def damage_copies(name: str, folder: pathlib.Path, copies: int) -> dict[str, int]:
    """Loads damaged copies of a small published npz file, as vit_jax writes it.

    Each copy must be rejected in one sentence or give the same values. Returns the counts of both.
    (safetensors files have no checksums, so that a flipped bit in their numbers is not noticed.)
    """
    original, hints = pathlib.Path(reference.path(name)), HINTS[name]
    whole, path = vit_jax.load(original, **hints), folder / original.name
    vit_jax.save(whole, path, overwrite=True)
    data, expected = path.read_bytes(), jax.tree.leaves(whole.params)
    rng, counts = np.random.default_rng(0), {'rejected': 0, 'same': 0}
    for number in range(copies):
        copy = bytearray(data)
        ends = (0, 6000), (len(data) - 6000, len(data)), (0, len(data))
        for position in rng.integers(*ends[number % 3], 3):
            copy[position] ^= 1 << rng.integers(8)
        path.write_bytes(copy if number % 4 else copy[: len(copy) // 2])
        try:
            params = jax.tree.leaves(vit_jax.load(path, **hints).params)
        except UserError as error:
            assert '\n' not in str(error) and str(error).startswith(str(path)), error
            counts['rejected'] += 1
            continue
        pairs = zip(params, expected, strict=True)
        assert all(np.asarray(one).tobytes() == other.tobytes() for one, other in pairs), number
        counts['same'] += 1
    return counts


def damage_published_files(copies: int) -> Outcome:
    """Loads damaged copies of each published npz file that is on this machine."""
    places = {name: reference.find(name) for name in HINTS}
    names = [name for name, place in places.items() if place and place.suffix == '.npz']
    with tempfile.TemporaryDirectory() as folder:
        counts = [damage_copies(name, pathlib.Path(folder), copies) for name in names]
    return Outcome(sum(sum(outcomes.values()) for outcomes in counts), [])


CHECKPOINTS, RUNS = 'tests/checkpoints', 'tests/experiment'
FORMATS = f'{CHECKPOINTS}/formats'
DATA_TESTS = FORMATS, 'tests/data'
HOSTS, PROCESSES = f'{RUNS}/test_hosts.py', 'tests/distributed/test_processes.py'


def make_rows(number: int) -> dict[str, tuple[str, Callable[[], Outcome]]]:
    """Returns the text and the function of each row. `number` is the number of kills."""

    def row(what: str, *arguments: str) -> tuple[str, Callable[[], Outcome]]:
        return what, functools.partial(tests, *arguments)

    return {
        'kills': ('SIGKILL of one process at random moments', lambda: inject_kills(1, number)),
        'kills-of-two': (
            'SIGKILL of one or both of two processes',
            lambda: inject_kills(2, number // 2),
        ),
        'own-files': ("damage to a run's own files", damage_run_files),
        'foreign-files': ('damage to published npz files', lambda: damage_published_files(100)),
        'crashes': row(
            'crash or power failure at a file operation', 'tests', '-k=kill_at or test_power'
        ),
        'bits': row('flipped bits, lost files of checkpoints', CHECKPOINTS, '-k=flip or damage'),
        'alone': row('SIGKILL of one of two: the other exits', PROCESSES, '-k=killed'),
        'ends': row('SIGTERM and other stops, hangs', RUNS, '-k=sigterm or hangs or test_stopping'),
        'not-finite': row('NaN in one or both of two processes', RUNS, '-k=finite or poisoned'),
        'evaluation': row('1 to 359 test images, two processes', HOSTS, '-k=counts_every_image'),
        'changes': row('changed data or configuration', RUNS, '-k=differ or test_data_manifest'),
        'pickles': row('pickles that execute code', FORMATS, '-k=pickle'),
        'bombs': row('images that declare too many pixels', DATA_TESTS[1], '-k=more_pixels'),
        'records': row('damage to TFRecord, ArrayRecord files', DATA_TESTS[1], '-k=noticed'),
        'disks': row(
            'full or read-only disk, out of memory', RUNS, '-k=disk or be_written or without_memory'
        ),
    }


def run(only: list[str], number: int) -> int:
    """Runs the rows in `only`, or all, and prints the table. Returns 1 if a case broke, else 0."""
    table = make_rows(number)
    if wrong := set(only) - table.keys():
        sys.exit(f'--only={",".join(sorted(wrong))}: unknown; rows: {", ".join(table)}')
    print(f'{"row":<17}{"what":<44}{"held":>6}{"broken":>8}{"skipped":>9}{"s":>7}')
    all_held = True
    for name in only or table:
        text, attempt = table[name]
        began = time.monotonic()
        try:
            outcome = attempt()
        except Exception as error:  # a fault may break anything
            outcome = Outcome(0, [f'{type(error).__name__}: {str(error)[-300:]}'])
        numbers = f'{outcome.held:>6}{len(outcome.broken):>8}{outcome.skipped:>9}'
        print(f'{name:<17}{text:<44}{numbers}{time.monotonic() - began:>7.0f}', flush=True)
        for line in outcome.broken[:20]:
            print(f'    {line}', flush=True)
        all_held &= not outcome.broken
    return 0 if all_held else 1
