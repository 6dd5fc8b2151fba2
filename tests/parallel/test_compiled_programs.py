"""Compiled programs on the disk: whole or not there, bounded, and found by the next process."""

import argparse
import os
import subprocess
import sys

import jax
import pytest
from jax._src import compilation_cache

from vit_jax.command_line import app
from vit_jax.parallel import compiled_programs
from vit_jax.parallel.compiled_programs import KeptPrograms
from vit_jax.parallel.processes import Job

PROGRAM = """
import pathlib, sys, jax
from vit_jax.parallel import compiled_programs
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
assert compiled_programs.keep(pathlib.Path(sys.argv[1])) is not None
assert float(jax.jit(lambda x: x * 3)(2.0)) == 6.0
print(sum(event.endswith('/cache_hits') for event in events))
"""


@pytest.mark.parametrize(
    'damage', [lambda data: data[:-3], lambda data: data[:40] + b'?', lambda data: b'']
)
def test_what_is_damaged_is_not_there_and_is_kept_again(damage, tmp_path):
    kept = KeptPrograms(tmp_path)
    assert kept.get('one') is None
    kept.put('one', b'program')
    assert kept.get('one') == b'program'
    (tmp_path / 'one').write_bytes(damage((tmp_path / 'one').read_bytes()))
    assert kept.get('one') is None
    kept.put('one', b'program')
    assert kept.get('one') == b'program'


def test_what_was_not_used_for_longest_makes_room(tmp_path):
    kept = KeptPrograms(tmp_path, most_bytes=3 * (32 + 10))
    for number, key in enumerate('abc'):
        kept.put(key, bytes(10))
        os.utime(tmp_path / key, (number, number))
    assert kept.get('a')  # which is a use of it
    kept.put('d', bytes(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a', 'c', 'd']


def test_a_folder_that_is_gone_is_said_once_and_breaks_nothing(tmp_path, caplog):
    kept = KeptPrograms(tmp_path / 'gone')
    kept.put('one', b'program')
    kept.put('two', b'program')
    assert kept.get('one') is None
    assert caplog.text.count('compiled programs are not kept: ') == 1


@pytest.fixture
def settings():
    names = 'jax_compilation_cache_dir', 'jax_enable_compilation_cache'
    names += ('jax_persistent_cache_min_compile_time_secs',)
    before = {name: jax.config.values[name] for name in names}
    make = compilation_cache.get_file_cache
    yield lambda **values: [jax.config.update(f'jax_{n}', value) for n, value in values.items()]
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.get_file_cache = make


def test_a_folder_where_others_can_write_is_not_used(tmp_path, caplog, settings):
    place = compiled_programs.keep(tmp_path)
    assert place is not None and place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    assert compiled_programs.keep(tmp_path) is None
    assert f'{place}: others can write there' in caplog.text


def test_the_next_process_finds_what_the_first_compiled(tmp_path):
    environment = {k: v for k, v in os.environ.items() if 'COMPILATION_CACHE' not in k}
    found = [
        subprocess.check_output(
            [sys.executable, '-c', PROGRAM, str(tmp_path)], env=environment, text=True, timeout=100
        )
        for _ in range(2)
    ]
    assert int(found[0]) == 0 < int(found[1])


@pytest.mark.parametrize(
    'flag, of_jax, count, kept',
    [
        (None, None, 1, 'default'),
        (None, None, 2, None),  # one of several alone would find them
        (None, 'elsewhere', 2, 'elsewhere'),
        ('given', 'elsewhere', 2, 'given'),
        ('none', 'elsewhere', 1, 'off'),
    ],
)
def test_programs_are_kept_by_default_where_jax_was_told_or_the_flag_says(
    flag, of_jax, count, kept, tmp_path, settings, monkeypatch
):
    monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'default'))
    settings(compilation_cache_dir=of_jax, enable_compilation_cache=True)
    monkeypatch.setattr(Job, 'count', count)
    given = None if flag is None else flag if flag == 'none' else str(tmp_path / flag)
    app.keep_programs(argparse.Namespace(compiled=given), Job())
    folder = jax.config.values['jax_compilation_cache_dir']
    if kept == 'off':
        assert not jax.config.values['jax_enable_compilation_cache']
    elif kept in ('default', 'given'):
        assert folder.startswith(str(tmp_path / kept))
    else:
        assert folder == kept
