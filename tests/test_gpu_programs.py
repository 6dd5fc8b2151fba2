"""Programs for GPUs, on a machine without one.

XLA for GPUs pulls a strided slice into the matrix product that reads it, and aborts the process
while it compiles (openxla/xla issue 47381).
"""

import os
import subprocess
import sys

import jax
import pytest

from benchmarks.gpu_programs import PROGRAMS
from tests.hosts import ROOT

PLUGIN = ROOT / '.cache' / f'gpu_compiler-{jax.__version__}'


@pytest.mark.full
@pytest.mark.skipif(
    not PLUGIN.exists(),
    reason=f'no compiler for GPUs in {PLUGIN}: benchmarks/gpu_programs.py says how to install it',
)
def test_every_program_compiles_for_a_gpu():
    """As a run compiles it, but that no kernel is timed. An abort ends a child, not the test."""
    environment = os.environ | {
        'PYTHONPATH': f'{ROOT}{os.pathsep}{PLUGIN}',
        'TF_CPP_MIN_LOG_LEVEL': '2',
    }
    command, names = [sys.executable, '-m', 'benchmarks.gpu_programs'], [*PROGRAMS]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    halves = [
        subprocess.Popen([*command, *half], env=environment, cwd=ROOT, **pipes)
        for half in (names[::2], names[1::2])
    ]
    for half in halves:
        printed = half.communicate(timeout=1200)[0]
        assert half.returncode == 0, printed[-4000:]
