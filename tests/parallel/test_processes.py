"""One process of a job, where it needs no others."""

import subprocess
import sys

import jax
import pytest

from tests.hosts import ROOT, environment
from vit_jax.base.errors import UserError
from vit_jax.parallel import processes
from vit_jax.parallel.clusters import Launch
from vit_jax.parallel.processes import Interrupted, Job

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


def test_when_the_steps_have_ended_a_stop_is_not_waited_for():
    """What is saved then takes longer than a step; a signal may come before, meanwhile or late."""
    for stops in False, True:
        job = Job(Launch())
        job._be_patient()
        assert job._patience.runs
        if stops:
            job._stop_at = 0
            with pytest.raises(Interrupted):
                job.heartbeat()
        else:
            job.steps_ended()
        for _ in range(2):
            assert not job._patience.runs
            job._be_patient()
        job._watchdog.cancel()


def test_a_process_0_that_comes_late_is_one_sentence(monkeypatch):
    class Store:
        def blocking_key_value_get(self, key, wait_ms):
            raise jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED: no key')

    monkeypatch.setattr(processes.global_state, 'num_processes', 2)
    monkeypatch.setattr(processes.global_state, 'process_id', 1)
    monkeypatch.setattr(processes.global_state, 'client', Store())
    with pytest.raises(UserError, match="not every process came to 'damaged': DEADLINE"):
        Job().from_process_0('damaged', str)
