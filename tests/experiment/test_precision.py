"""What `compute.dtype` is where it is not set, and what bfloat16 changes."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.networks import loaded
from vit_jax.base import UserError
from vit_jax.data import loading
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed import meshes
from vit_jax.evaluation import head
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment import build, probing_run, training_run
from vit_jax.models import Backbone, Compute, attention, compute, vit
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import ScheduleConfig

VIT = tiny.model(num_classes=None)
HYBRID = tiny.model(
    image_size=(16, 16),
    patch_size=(1, 1),
    backbone=Backbone(blocks=(1, 1), width=32),
    num_classes=None,
)
STEPS = 30


@pytest.mark.parametrize(
    'platform, capability, expected',
    [
        ('cpu', None, False),
        ('tpu', None, True),
        ('gpu', '7.5', False),  # Turing
        ('gpu', '8.0', True),
        ('gpu', '9.0', True),
        ('gpu', '12.1', True),
        ('gpu', 'gfx942', False),  # of AMD
    ],
)
def test_tpus_and_recent_gpus_have_bfloat16(platform, capability, expected):
    device = types.SimpleNamespace(platform=platform)
    if capability is not None:
        device.compute_capability = capability
    assert compute.has_fast_bfloat16(device) == expected


@pytest.mark.gate
def test_a_run_keeps_the_precision_that_it_began_with(tmp_path, monkeypatch, capsys):
    folder, short = str(tmp_path), tiny.experiment(total=Duration(steps=2))
    with monkeypatch.context() as here:
        here.setattr(build, 'has_fast_bfloat16', lambda device: True)
        training_run.train(short, folder)
    assert 'compute dtype=bfloat16' in capsys.readouterr().out
    longer = tiny.experiment(total=Duration(steps=4))
    result = training_run.train(longer, folder, accept_changes=True)
    assert 'compute dtype=bfloat16' in capsys.readouterr().out
    assert result.experiment.compute.dtype == 'bfloat16'
    assert json.loads((tmp_path / 'config.json').read_text())['compute']['dtype'] == 'bfloat16'
    other = dataclasses.replace(longer, compute=Compute(dtype='float32'))
    with pytest.raises(UserError, match='compute.dtype'):
        training_run.train(other, folder)


@pytest.mark.nightly
@pytest.mark.parametrize('model', [VIT, HYBRID])
def test_losses_in_bfloat16_are_within_a_hundredth_of_those_in_float32(model):
    """While 32 images are learned. bfloat16 rounds each number by at most 1 in 256."""
    losses = {}
    for dtype in 'float32', 'bfloat16':
        config = tiny.experiment(
            model=model,
            batch_size=32,
            compute=Compute(dtype=dtype),
            total=Duration(steps=STEPS),
            schedule=ScheduleConfig(learning_rate=3e-3, warmup=Duration(steps=5)),
        )
        decided, state, update = tiny.compiled(config, devices=jax.devices()[:1])
        loader = loading.make_loader(
            decided.train_reader, config.loader, meshes.batch_sharding(decided.mesh)
        )
        batch = next(loading.sequential_batches(loader, np.arange(32), batch_size=32))
        losses[dtype] = []
        for _ in range(STEPS):
            state, metrics = update(state, batch)
            losses[dtype].append(float(metrics.means['loss']))
    exact, rounded = losses.values()
    assert exact[-1] < 0.8 * exact[0]
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=0.01)


@pytest.mark.gate
def test_a_given_checkpoint_is_used_with_exact_products(tmp_path, monkeypatch):
    """GPUs and TPUs would otherwise round the operands of float32 products."""
    config = tiny.experiment(model=None, total=None, start_from=str(tmp_path / 'network'))
    config.fewshot = FewshotConfig(shots=(1,), seeds=(0,))
    network = loaded(tiny.model(num_classes=10))
    vit_jax.save(network, config.start_from, 'vit_jax')
    source = make_opener()('digits', 'test[:20]')
    reader = head.make_model_reader(network, source, max_pixels=10**6)
    seen = []

    def attend(*args, **options):
        if len(args[0]) > 1:  # else the one image of `init`
            seen.append((args[0].dtype.name, jax.default_matmul_precision.value))
        return attention.attend(*args, **options)

    monkeypatch.setattr(vit, 'attend', attend)
    for use in (
        lambda: head.evaluate_head(network, reader, batch_size=16),
        lambda: probing_run.probe(config, str(tmp_path / 'fewshot')),
        lambda: vit_jax.load(config.start_from).features(np.zeros((2, 8, 8, 3))),
    ):
        seen.clear()
        use()
        assert {*seen} == {('float32', 'highest')}
