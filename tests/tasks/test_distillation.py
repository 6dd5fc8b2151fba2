"""A student learns from a frozen teacher."""

import functools

import chex
import cv2
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vit_jax
from tests import networks, tiny
from vit_jax.base import UserError
from vit_jax.base.tree_names import named_leaves
from vit_jax.checkpoints.store import load_params
from vit_jax.data.augmentation import Augmentation, augment
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import Compute, build
from vit_jax.planning.memory_plan import with_dummy_data
from vit_jax.tasks import distillation
from vit_jax.tasks.distillation import PROJECTION, Teacher
from vit_jax.training.losses import LossConfig, make_loss, make_targets
from vit_jax.training.objectives import TASK_PARAMS, Distillation, MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig
from vit_jax.training.update import TrainState, make_update

DEVICES = 8
RNG = np.random.default_rng(0)
BATCH = {'images': RNG.integers(0, 256, (16, 8, 8, 3), np.uint8), 'mask': np.arange(16) != 3}
BATCH |= {name: np.arange(16, dtype=np.int32) for name in ('epoch', 'example')}
BATCH['labels'] = jnp.arange(16) % tiny.CLASSES
SCALING = Preprocessing(mean=(100.0, 110.0, 120.0), std=(50.0, 60.0, 70.0))
TARGETS = functools.partial(make_targets, num_classes=tiny.CLASSES)


def saved(folder, config=None):
    """The path of a teacher with another image size, normalization and width than the student."""
    config = config or tiny.model(width=32, image_size=(16, 24))
    path = folder / 'teacher'
    network = networks.loaded(config, preprocessing=SCALING)
    vit_jax.save(network, path, 'vit_jax', overwrite=True)
    return str(path)


def experiment(teacher, kind='kl', **changes):
    options = Distillation(teacher=teacher, kind=kind)
    model = tiny.model(num_classes=None, depth=1)
    return tiny.experiment(**({'model': model, 'distillation': options} | changes))


@pytest.mark.gate
@pytest.mark.parametrize('parts', [1, 4])
def test_the_teacher_sees_the_augmented_images_of_the_student(parts):
    """Both models return the mean pixel of each image, with and without accumulation."""
    model = build(tiny.model())
    means = {'features': lambda params, images, key=None: params['by'] * images.mean(axis=(1, 2))}
    scale, kind = lambda images: images.astype(jnp.float32), 'features'
    options = Distillation(teacher='x', kind=kind), model._replace(**means)
    loss = make_loss(LossConfig())
    teacher = Teacher(model._replace(**means), scale)
    loss_sums = distillation.make_distillation_sums(*options, teacher, loss, scale)
    map_of_features = {'kernel': jnp.eye(3), 'bias': jnp.zeros(3)}
    head = {'kernel': jnp.zeros((3, tiny.CLASSES)), 'bias': jnp.zeros(tiny.CLASSES)}
    params = {'by': jnp.ones(()), 'head': head, TASK_PARAMS: {PROJECTION: map_of_features}}
    mixup = functools.partial(augment, config=Augmentation(mixup=0.5), targets_of=TARGETS)
    sgd, options = optax.sgd(0.1), {'augment': mixup, 'accumulation_steps': parts}
    update = make_update(loss_sums, sgd, jnp.sqrt, **options)
    _, metrics = jax.jit(update)(TrainState.initial(params, sgd), BATCH, {'by': 1.0})
    assert metrics.sums['distillation_loss'] == 0


@pytest.mark.parametrize(
    'dtype, rtol',
    [
        pytest.param('float32', 1e-5, marks=pytest.mark.gate),
        pytest.param('bfloat16', 0.05, marks=pytest.mark.nightly),  # of products
    ],
)
def test_a_new_student_is_as_far_from_the_teacher_as_equal_probabilities(dtype, rtol, tmp_path):
    """Its head is zero, so KL(p || 1/k) = log k - H(p), of images that OpenCV resized."""
    config = experiment(saved(tmp_path), compute=Compute(dtype=dtype))
    built, state, update = tiny.compiled(config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(built.frozen)} == {dtype}
    _, metrics = update(state, BATCH)
    resized = np.stack([cv2.resize(np.float32(image), (24, 16)) for image in BATCH['images']])
    p = vit_jax.load(tmp_path / 'teacher').probabilities(normalize(resized, SCALING))
    expected = np.log(10) + (p * np.log(p)).sum(axis=-1)[BATCH['mask']].mean()
    assert metrics.means['distillation_loss'] == pytest.approx(expected, rel=rtol)
    assert metrics.means['task_loss'] == pytest.approx(np.log(10), rel=1e-6)


@pytest.mark.nightly
def test_devices_parts_and_sharding_change_nothing_and_the_teacher_stays(tmp_path):
    rate = {'optimizer': OptimizerConfig(kind='sgd')}
    rate['schedule'] = ScheduleConfig(kind='constant', learning_rate=0.1)
    mesh = MeshConfig(fsdp=8, fsdp_min_mb=0.0, max_replicated_fraction=1.0)
    results, teacher = [], None
    for devices, changes in (
        (None, {'accumulation_steps': 2, 'mesh': mesh}),
        ([jax.devices()[0]], {}),
    ):
        config = experiment(saved(tmp_path), 'features', **rate, **changes)
        built, state, update = tiny.compiled(config, devices)
        placed = built.frozen if teacher is None else jax.device_put(teacher, devices[0])
        assert placed['embedding']['kernel'].is_fully_replicated == (teacher is not None)
        teacher = jax.device_get(placed)
        state, metrics = update(state, BATCH, placed)
        chex.assert_trees_all_equal(jax.device_get(placed), teacher)
        results.append((jax.device_get(state.params), metrics.sums))
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)  # float32 sums in another order


@pytest.mark.gate
def test_each_head_has_its_own_target():
    model, params = tiny.built(tiny.model(depth=1, pool='cls_dist'))
    scale = functools.partial(normalize, preprocessing=SCALING)
    predicts = model._replace(apply=lambda params, images: params['logits'])
    options = Distillation(teacher='x', kind='token'), model, Teacher(predicts, scale)
    sums = distillation.make_distillation_sums(*options, make_loss(LossConfig()), scale)

    @jax.jit
    @jax.grad
    def gradient(params, labels, predicted):
        batch = jax.tree.map(jnp.asarray, BATCH) | {'labels': labels}
        return sums(params, batch, frozen={'logits': TARGETS(predicted)}).sums['loss']

    same, others = BATCH['labels'], (BATCH['labels'] + 1) % 10
    pairs = (same, same), (others, same), (same, others)
    base, labels, outputs = (gradient(params, *pair)['head'] for pair in pairs)
    chex.assert_trees_all_equal(labels['dist'], base['dist'])
    chex.assert_trees_all_equal(outputs['cls'], base['cls'])
    assert not np.allclose(labels['cls']['bias'], base['cls']['bias'])
    assert not np.allclose(outputs['dist']['bias'], base['dist']['bias'])


@pytest.mark.gate
def test_a_checkpoint_has_only_the_student_and_its_teacher_may_not_change(tmp_path):
    decay = OptimizerConfig(layer_decay=0.5)  # of layers below the map of features
    config = experiment(saved(tmp_path), 'features', optimizer=decay)
    run = training_run.train(config, str(tmp_path / 'run'))
    start = run.experiment.functions.init_params(run.experiment.values)[TASK_PARAMS]
    moved = run.state.params[TASK_PARAMS][PROJECTION]['kernel'] - start[PROJECTION]['kernel']
    assert np.abs(moved).max() > 1e-3
    model = run.experiment.model
    stored, fresh = load_params(str(tmp_path / 'run')), model.init(jax.random.key(0))
    chex.assert_trees_all_equal_shapes(named_leaves(stored), named_leaves(fresh))
    saved(tmp_path, tiny.model(width=32))
    with pytest.raises(UserError, match=r'distillation\.digest'):
        training_run.train(config, str(tmp_path / 'run'))


@pytest.mark.gate
def test_a_planned_step_has_the_teacher_as_an_argument_that_is_not_donated(tmp_path):
    config = with_dummy_data(experiment(saved(tmp_path)), num_classes=10, num_images=100)
    built = build_experiment(config, devices=jax.devices())
    lowered = training_run.lower_update(built, training_run.abstract_state(built))
    state, _, _, teacher, _ = lowered.args_info[0]
    assert all(leaf.donated for leaf in jax.tree.leaves(state))
    assert not any(leaf.donated for leaf in jax.tree.leaves(teacher))
    assert len(jax.tree.leaves(teacher)) == len(jax.tree.leaves(built.frozen))


@pytest.mark.parametrize(
    'kind, model, changes, message',
    [
        ('kl', tiny.model(num_classes=7), {}, '7 classes'),
        ('kl', tiny.model(num_classes=None), {}, 'no head'),
        ('token', tiny.model(), {}, 'kind=token.*cls_dist'),
        ('features', tiny.model(pool='none', num_classes=None), {}, r'teacher.*pool=none'),
        ('kl', tiny.model(pool='none'), {}, r'distillation\.teacher.*pool=none'),
        ('kl', tiny.model(channels=1), {}, r'distillation\.teacher.*channels'),
        ('features', tiny.model(), {'model': tiny.model(pool='none')}, 'model.pool=none'),
        ('features', tiny.model(), {'optimizer': OptimizerConfig(trained_blocks=0)}, 'the head'),
        ('kl', tiny.model(), {'objective': MaskedPatches()}, 'distillation'),
    ],
)
def test_what_does_not_fit_is_rejected(kind, model, changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        build_experiment(experiment(saved(tmp_path, model), kind, **changes))


def test_classes_are_compared_by_name_and_order():
    names = tuple('abcdefghij')
    network = networks.loaded(tiny.model(), class_names=names)
    network.require_classes(names)
    network.require_classes([str(number) for number in range(10)])  # no names
    with pytest.raises(UserError, match="'b'.*'x'"):
        network.require_classes(['a', 'x', *names[2:]])
