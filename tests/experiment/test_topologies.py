"""Any number of processes and devices: the same batches, the same training, the same files."""

import json

import numpy as np
import pytest

from tests.hosts import hosts


def written(folder, flags, count, devices, fsdp=1, tensor=1):
    """What the processes of this topology write."""
    out = folder / f'{count}-{devices}-{fsdp}-{tensor}.json'
    command = ['tests.topology', str(out), str(fsdp), str(tensor), *flags]
    with hosts(folder, command, count, devices=devices) as started:
        assert [host.wait(400) for host in started] == [0] * count, started[0].text
    return json.loads(out.read_text())


def assert_alike(found, expected):
    assert found['initial'] == expected['initial']
    assert found['batches'] == expected['batches']
    assert found['evaluations'] == expected['evaluations']
    # Sums over devices are taken in another order: float32 rounding.
    np.testing.assert_allclose(found['losses'], expected['losses'], rtol=1e-6)


@pytest.mark.full
def test_every_topology_trains_alike_and_restores_what_every_other_saved(tmp_path):
    # Processes, devices of each, fsdp, tensor.
    kinds = {'a': (1, 1), 'b': (1, 8, 8), 'c': (2, 2, 2, 2), 'd': (4, 1, 1, 2)}
    saved, folders = {}, {}
    for name, kind in [*kinds.items(), ('again', kinds['a'])]:
        flags = [f'--save={tmp_path / name}', f'--restore={",".join(folders)}']
        found = written(tmp_path, flags, *kind)
        saved[name] = found['saved']
        first = found if name == 'a' else first
        assert_alike(found, first)
        assert found['restored'] == {folder: saved[other] for folder, other in folders.items()}
        folders[str(tmp_path / name)] = name
