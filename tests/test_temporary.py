"""Nothing that a test run writes to the temporary folder is left there."""

import subprocess
import sys

import pytest

from tests.hosts import environment

TESTS = """
import multiprocessing.util, os, pathlib, signal, tempfile

def write(folder):
    (pathlib.Path(folder) / 'large').write_bytes(bytes(1000))

def test_that_fails(tmp_path, tmp_path_factory):
    write(tmp_path)
    write(tmp_path_factory.mktemp('shared'))
    write(tempfile.mkdtemp())
    write(multiprocessing.util.get_temp_dir())  # multiprocessing removes it when the process exits
    assert False

def test_that_is_killed():
    write(tempfile.mkdtemp())
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.gate
def test_a_run_leaves_nothing_in_the_temporary_folder(tmp_path):
    """After a failure; a killed run leaves its folder to the next run."""
    (tmp_path / 'test_writing.py').write_text(TESTS)
    left = tmp_path / 'left'
    left.mkdir()

    def run(name):
        options = ['-p', 'tests.temporary', '-p', 'no:cacheprovider', '-c', '/dev/null']
        command = [sys.executable, '-m', 'pytest', *options, f'test_writing.py::{name}']
        env = environment() | {'TMPDIR': str(left), 'PYTEST_ADDOPTS': ''}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)

    failed = run('test_that_fails')
    assert failed.returncode == 1 and b'Traceback' not in failed.stderr, failed.stderr
    assert [*left.iterdir()] == []
    assert run('test_that_is_killed').returncode == -9
    assert [*left.iterdir()] != []
    assert run('test_that_fails').returncode == 1
    assert [*left.iterdir()] == []
