"""One process of a job, where it needs no others."""

import subprocess
import sys

from tests.hosts import ROOT, environment
from vit_jax.parallel.processes import Job

AGE = """
import time
began = time.monotonic()
from vit_jax.parallel.clusters import Launch
from vit_jax.parallel.processes import Job
assert 0 < Job(Launch()).age <= time.monotonic() - began
"""


def test_the_age_of_a_program_is_not_that_of_the_shell_that_became_it():
    command = f"sleep 3; exec '{sys.executable}' -c '{AGE}'"
    subprocess.run(['bash', '-c', command], env=environment(), cwd=ROOT, check=True, timeout=120)


def test_a_job_within_another_program_has_no_age_and_is_alone():
    job = Job()
    assert job.age == 0.0 and (job.index, job.count) == (0, 1)
    job.require_same('anything', {'a': 1})
    assert job.from_process_0('anything', lambda: 'said') == 'said'
    assert list(job.with_heartbeat([1, 2, 3])) == [1, 2, 3]
