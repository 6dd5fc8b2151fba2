"""LP-FT: a linear probe of the checkpoint is the head with which fine-tuning starts."""

import types

import chex
import jax
import numpy as np
import pytest

import vit_jax
from tests import networks, tiny
from vit_jax.base.errors import UserError
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import InceptionCrop
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.evaluation import probing
from vit_jax.evaluation.probes import Labeled, LogisticConfig, fit_best_logistic
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.training.duration import Duration
from vit_jax.training.optimizer import ScheduleConfig


def fine_tuning(start, **changes):
    values = {
        'model': None,
        'start_from': start,
        'init_head': 'logistic',
        'train_split': 'train[:200]',
        'total': Duration(steps=1),
        'schedule': ScheduleConfig(warmup=Duration(steps=1)),  # the first step has the rate 0
    }
    return tiny.experiment(**(values | changes))


@pytest.mark.full
def test_predictions_at_step_0_are_those_of_the_probe(tmp_path, capsys):
    start, workdir = str(tmp_path / 'start'), str(tmp_path / 'run')
    vit_jax.save(networks.loaded(tiny.model(num_classes=None)), start, 'vit_jax')
    body = vit_jax.load(start)
    config = fine_tuning(
        start,
        augmentation=Augmentation(crop=InceptionCrop(), flip=True),
        ema_decay=0.5,
        mesh=MeshConfig(fsdp=2, tensor=2, fsdp_min_mb=0.0, max_replicated_fraction=1.0),
    )
    result = training_run.train(config, workdir)
    assert 'head: logistic regression on 200 images' in capsys.readouterr().out
    source = make_opener()('digits', 'train[:200]')
    images = np.stack([body.preprocess(source.read(i)[0]) for i in range(200)])
    train = Labeled(body.features(images), source.labels)
    probe, _ = fit_best_logistic(train, LogisticConfig())
    found = vit_jax.load(workdir).logits(images)
    scores = (train.features - probe.mean) @ probe.weights + probe.bias
    # float32 rounding of the features, which L-BFGS amplifies
    np.testing.assert_allclose(found, scores, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(found.argmax(axis=1), probe.predict(train.features))
    assert 0.5 < probe.accuracy(train)
    state = jax.device_get(result.state)
    chex.assert_trees_all_equal(state.ema_params['head'], state.params['head'])
    training_run.train(config, workdir)  # resumes
    assert 'head:' not in capsys.readouterr().out


def test_a_class_without_images_is_rejected():
    source = make_opener()('digits', 'train[:9]')
    with pytest.raises(UserError, match="class '[0-9]'"):
        probing.fit_head(
            lambda _, indices: np.ones((len(indices), 3)), types.SimpleNamespace(source=source)
        )


@pytest.mark.parametrize(
    'model',
    [tiny.model(pool='none'), tiny.model(pool='cls_dist'), tiny.model(head=lambda classes: None)],
)
def test_other_heads_are_rejected(model):
    with pytest.raises(UserError, match='config.init_head'):
        probing.check_init_head(model, make_opener()('digits', 'train'), has_start=True)


@pytest.mark.parametrize(
    'values, name',
    [
        ({'start_from': None, 'model': tiny.model()}, 'init_head'),
        ({'reuse_head': True}, 'init_head'),
    ],
)
def test_combinations_without_sense_are_rejected(values, name):
    with pytest.raises(UserError, match=name):
        build_experiment(fine_tuning('x', **values))
