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


needs_compiler = pytest.mark.skipif(
    not PLUGIN.exists(),
    reason=f'no compiler for GPUs in {PLUGIN}: benchmarks/gpu_programs.py says how to install it',
)
FIRST = 'B/16'
OTHERS = [name for name in PROGRAMS if name != FIRST]


def compile_for_a_gpu(*names):
    """As a run compiles it, but that no kernel is timed. An abort ends a child, not the test."""
    environment = os.environ | {
        'PYTHONPATH': f'{ROOT}{os.pathsep}{PLUGIN}',
        'TF_CPP_MIN_LOG_LEVEL': '2',
    }
    command = [sys.executable, '-m', 'benchmarks.gpu_programs', *names]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.gate
@needs_compiler
def test_the_training_step_of_b16_compiles_for_a_gpu():
    compile_for_a_gpu(FIRST)


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize('quarter', range(4))
def test_every_other_program_compiles_for_a_gpu(quarter):
    compile_for_a_gpu(*OTHERS[quarter::4])
