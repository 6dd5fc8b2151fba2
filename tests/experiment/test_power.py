"""A power failure at any moment: what was called complete is on the disk."""

import json
import os
import pathlib
import tempfile

import chex
import numpy as np
import pytest

from tests import tiny
from tests.power import Disk, failures
from vit_jax.checkpoints import digests, store
from vit_jax.experiment import training_run


def restored(folder):
    """The step from which a run in this folder would go on, whole; 0: it would begin anew."""
    assert store.quarantine_damaged(folder) == []
    step = max(digests.list_steps(folder / 'checkpoints'), default=0)
    if step:
        store.load_params(str(folder))
    return step


@pytest.fixture
def disk(tmp_path):
    """A folder to write in, and one for what failures leave of it; in memory where that can be."""
    memory = '/dev/shm' if os.path.isdir('/dev/shm') else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = pathlib.Path(name)
        for name in 'disk', 'after':
            (folder / name).mkdir()
        yield folder / 'disk', folder / 'after'


@pytest.mark.gate
def test_a_checkpoint_that_is_complete_survives_any_failure_of_power(disk):
    folder, after = disk
    promised = []  # what was complete before each failure
    with failures(Disk(folder), after) as places:
        checkpoints = store.Checkpoints(folder, keep=1)
        for step in range(1, 4):
            array = np.full(100, step, np.float32)
            checkpoints.save(step, {'a': array}, {'b': array}, {'step': step}, {})
            checkpoints.wait()
            promised += [step - 1] * (len(places) - len(promised))
        checkpoints.close()
    assert len(places) > 100
    found = [restored(place) for place in places]
    assert set(found) == {0, 1, 2, 3}
    promised += [3] * (len(places) - len(promised))
    assert [n for n, step in enumerate(found) if step < promised[n]] == []


@pytest.mark.nightly
def test_a_run_goes_on_after_a_failure_of_power_with_no_number_missing(disk):
    folder, after = disk
    config = tiny.experiment(checkpoint_every_steps=5, log_every_steps=2, eval_every_steps=5)
    with failures(Disk(folder), after) as places:
        whole = training_run.train(config, str(folder / 'new' / 'run'))
    lines = [json.loads(line) for line in (whole.folder / 'metrics.jsonl').open()]
    steps = []
    for place in places:
        run = place / 'new' / 'run'
        steps.append(restored(run))
        text = (run / 'metrics.jsonl').read_text() if steps[-1] else ''
        kept = [json.loads(line) for line in text.splitlines()]
        needed = [line for line in lines if line['step'] <= steps[-1] and line['kind'] == 'train']
        assert [line for line in needed if line not in kept] == [], place
    assert set(steps) == {0, 5, 10}
    assert steps[-1] == 10  # when `train` has returned
    again = training_run.train(config, str(places[steps.index(5)] / 'new' / 'run'))
    chex.assert_trees_all_equal(again.state, whole.state)
