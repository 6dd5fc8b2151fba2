"""benchmarks/: every part runs, counts are those of known programs, what breaks is named."""

import functools
import json
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import device, device_parts
from benchmarks.communication import Traffic, count_sent_bytes, minimum_sent_bytes
from benchmarks.device import LIMITS, Results
from tests import tiny
from tests.hosts import ROOT, environment
from vit_jax.distributed import meshes
from vit_jax.distributed.meshes import MeshConfig

DEVICES = 8


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_images(folder):
    for split, count in {'train': 12, 'test': 4}.items():
        for name in 'cat', 'dog':
            tiny.draw_photos(folder / split / name, [(32, 32)] * count, ending='jpg')
    return folder


@pytest.mark.nightly
def test_every_part_measures_something(tmp_path):
    images = make_images(tmp_path / 'images')
    command = [sys.executable, '-m', 'benchmarks.device', f'--out={tmp_path}/lines.jsonl']
    # Limits are for devices: on a busy CPU a part needed more than 200 seconds.
    command += [f'--cifar10={images}', f'--photos={images}', '--minutes=45']
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    lines = read(tmp_path / 'lines.jsonl')
    assert not [line['text'] for line in lines if 'error' in line or 'stopped' in line]
    assert {line['part'] for line in lines} == {'device', *LIMITS}
    parts = {part: [line for line in lines if line['part'] == part] for part in LIMITS}
    assert {line['name'] for line in parts['compile']} >= {'hybrid', 'ResNet', 'ViT, xla'}
    assert all(np.isfinite(line['loss']) for line in parts['compile'])
    assert parts['peers'][0]['seconds'] > 0 and len(parts['options']) == 3
    assert 0.5 < sum(line['share'] for line in parts['profile'] if 'share' in line) <= 1
    assert [line['name'] for line in parts['files'][1:]] == ['threads']
    assert [line['step'] for line in parts['cifar10']] == 2 * [3, 6]
    assert all(0 < error < 0.02 for line in parts['attention'] for error in line['errors'])


@pytest.mark.gate
def test_attention_in_bfloat16_is_compared_with_exact_products(monkeypatch):
    """GPUs would otherwise round the operands of float32 products."""
    precisions, original = {}, device_parts.attention_and_gradients

    def recording(kind):
        def call(*inputs):
            used = precisions.setdefault(inputs[0].dtype.name, set())
            used.add(jax.default_matmul_precision.value)
            return original(kind)(*inputs)

        return call

    monkeypatch.setattr(device_parts, 'attention_and_gradients', recording)
    device_parts.part_attention({})
    assert precisions == {'float32': {'highest'}, 'bfloat16': {None}}


@pytest.mark.nightly
def test_a_part_that_fails_or_takes_too_long_is_said(tmp_path):
    results = Results(tmp_path / 'lines.jsonl')
    options = {'photos': str(tmp_path)}
    device.run_part('compile', options, 0.2, results)
    device.run_part('nonsense', options, 100, results)
    slow, wrong = read(tmp_path / 'lines.jsonl')
    assert slow['stopped']
    assert 'part_nonsense' in wrong['error']


@pytest.mark.nightly
def test_a_soak_that_is_stopped_continues_and_ends_with_the_same_bits(tmp_path):
    """Two processes: one or both are killed, and the others exit by themselves."""
    command = [sys.executable, '-m', 'benchmarks.soak', tmp_path, '--kills=2', '--processes=2']
    how = {'env': environment(), 'cwd': ROOT, 'text': True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **how) as stopped:
        assert 'kill 1 of 2' in stopped.stdout.readline()
        stopped.send_signal(signal.SIGTERM)
    done = subprocess.run(command, capture_output=True, timeout=600, **how)
    assert 'same parameters' in done.stdout.splitlines()[-1], done.stderr
    record = read(tmp_path / '2/kills.jsonl')
    assert len(record) == 2 and all(0 < one['seconds'] < 600 for one in record)
    assert {code for one in record for code in one['codes']} <= {-9, 75}


STEPS, SIZE = 5, 4 * 64
COLLECTIVES = {
    'all-gather': (lambda x: lax.all_gather(x, 'data').sum(0), 7),
    'all-reduce': (lambda x: lax.psum(x, 'data'), 2 * 7 / 8),
    'reduce-scatter': (
        lambda x: jnp.tile(lax.psum_scatter(x, 'data', scatter_dimension=0, tiled=True), 8),
        7 / 8,
    ),
    'collective-permute': (lambda x: lax.ppermute(x, 'data', [(n, n ^ 1) for n in range(8)]), 1),
}


@pytest.mark.parametrize('kind', COLLECTIVES)
def test_what_is_sent_in_a_loop_counts_as_often_as_it_runs(kind):
    """Of a ring of eight devices, by the known cost of each collective."""
    collective, ring = COLLECTIVES[kind]
    mesh, parts = Mesh(jax.devices(), ('data',)), PartitionSpec('data')

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    def loop(x):
        return lax.scan(lambda x, _: (jnp.sin(collective(x)), None), x, length=STEPS)[0]

    x = jax.ShapeDtypeStruct((8 * 64,), 'float32')
    text = jax.jit(loop).lower(x).compile().as_text()
    assert count_sent_bytes(text, 8) == {kind: Traffic(STEPS, STEPS * ring * SIZE)}


@pytest.mark.parametrize(
    'data, fsdp, expected', [(8, 1, 2 * 7 / 8), (1, 8, 3 * 7 / 8), (2, 4, 3 * 3 / 4 + 1 / 4)]
)
def test_the_least_is_that_of_rings(data, fsdp, expected):
    """Of a kernel that fsdp splits: two gathers, a scatter, and the sum over data of a part."""
    mesh = meshes.make_mesh(MeshConfig(data=data, fsdp=fsdp))
    split = NamedSharding(mesh, PartitionSpec(None, 'fsdp' if fsdp > 1 else None))
    kernel = jax.ShapeDtypeStruct((16, 64), 'float32', sharding=split)
    assert minimum_sent_bytes([kernel], mesh, itemsize=2) == expected * 16 * 64 * 2


def test_the_least_over_tensor_is_a_sum_of_each_branch_forward_and_backward():
    mesh = meshes.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    kernel = jax.ShapeDtypeStruct((16,), 'float32', sharding=NamedSharding(mesh, PartitionSpec()))
    of_gradient = 2 * 3 / 4 * 16 * 2  # over data and fsdp
    of_branches = 2 * (2 * 1 / 2) * 1000 * 2
    assert (
        minimum_sent_bytes([kernel], mesh, itemsize=2, branches=1000) == of_gradient + of_branches
    )
