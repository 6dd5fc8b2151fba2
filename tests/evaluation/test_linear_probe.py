import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from vit_jax.base import UserError
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.arrays import array_source
from vit_jax.evaluation import linear_probe
from vit_jax.evaluation.evaluator import batches_on_all_devices
from vit_jax.evaluation.linear_probe import LinearProbe, LinearProbeConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.experiment.build import build_experiment
from vit_jax.models import build, variant

RNG = np.random.default_rng(0)
LABELS = np.repeat([0, 1, 2], 20)
IMAGES = (85 * LABELS[:, None, None, None] + RNG.integers(0, 86, (60, 8, 8, 3))).astype(np.uint8)
CONFIG = LinearProbeConfig(
    rates=(0.1, 10.0), blocks=(1, 3), steps=20, batch_size=16, augmentation=Augmentation()
)


def make_reader(images, labels, **options):
    source = array_source(images, labels, 'abc', name='data')
    return ImageReader(source, Preprocessing().crop, (8, 8), exif_rotation=False, **options)


def make_probe(reader, config=CONFIG, **changes):
    model, params = tiny.built(tiny.model(num_classes=None, **changes))
    batches = batches_on_all_devices(reader, 16)
    return LinearProbe(config, model, Preprocessing(), batches, report=lambda line: None), params


@pytest.mark.parametrize(
    'changes',
    [
        pytest.param({'pool': 'gap', 'class_tokens': 1}, marks=pytest.mark.gate),
        pytest.param({}, marks=pytest.mark.gate),
        pytest.param({'final_norm': 'after_pool'}, marks=pytest.mark.gate),
        pytest.param({'registers': 2, 'norm': 'rms'}, marks=pytest.mark.nightly),
        pytest.param({'pool': 'gap'}, marks=pytest.mark.nightly),
    ],
)
def test_vectors_are_the_features_of_the_model_cut_after_each_block(changes):
    probe, params = make_probe(make_reader(IMAGES, LABELS), **changes)
    images, config = jnp.asarray(IMAGES[:2]), probe.model.config
    normalized = normalize(images, Preprocessing())
    vectors = probe.compute_vectors(params, images)

    def features(depth, **changes):
        block = jax.tree.map(lambda leaf: leaf[:depth], params['encoder']['block'])
        cut = params | {'encoder': params['encoder'] | {'block': block}}
        return build(dataclasses.replace(config, depth=depth, **changes)).features(cut, normalized)

    for depth in 1, 2, 3:
        # float32 rounding of one block after another
        np.testing.assert_allclose(vectors[:, depth - 1], features(depth), atol=1e-5)
    if config.final_norm == 'before_pool':  # else the mean of the patches is normalized
        mean = features(3, pool='gap', class_tokens=config.num_class_tokens)
        np.testing.assert_allclose(vectors[:, -1], mean, atol=1e-5)


def test_images_that_cannot_be_read_do_not_count():
    vectors = jnp.asarray(RNG.normal(size=(6, 4, 5)), jnp.float32)
    targets = jax.nn.one_hot(jnp.arange(6) % 3, 3)
    state = linear_probe.init_state(CONFIG, jax.random.key(0), 5, 3)
    update = jax.jit(functools.partial(linear_probe.update, CONFIG))
    found = update(state, vectors, targets.at[4:].set(0))
    expected = update(state, vectors[:4], targets[:4])
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)  # sums of another length


@pytest.mark.gate
def test_the_test_set_does_not_choose_the_head():
    train = make_reader(IMAGES, LABELS)
    probe, params = make_probe(train)
    labels = LABELS, (LABELS + 1) % 3
    found, other = (probe.evaluate(params, train, make_reader(IMAGES, one)) for one in labels)
    assert found['accuracy'] != other['accuracy']
    assert found | {'accuracy': None} == other | {'accuracy': None}
    best = max(found['validation_accuracy'].values())
    assert found['validation_accuracy'][found['chosen']] == best


@pytest.mark.gate
def test_an_image_is_either_trained_on_or_validates():
    reads, train = [], make_reader(IMAGES, LABELS)
    source = train.source
    watched = dataclasses.replace(source, read=lambda i: (reads.append(i), source.read(i))[1])

    class Marked(LinearProbe):
        def train(self, params, reader):
            heads = super().train(params, reader)
            reads.append('trained')
            return heads

    probe, params = make_probe(train)
    fields = probe.config, probe.model, probe.preprocessing, probe.batches
    marked = Marked(*fields, report=probe.report)
    found = marked.evaluate(params, dataclasses.replace(train, source=watched), train)
    end = reads.index('trained')
    trained, validated = {*reads[:end]}, reads[end + 1 :]
    assert len(validated) == found['validation_images'] == 6
    assert trained | {*validated} == {*range(60)} and not trained & {*validated}


def test_a_probe_that_does_not_fit_is_refused():
    reader = make_reader(IMAGES, LABELS)
    with pytest.raises(UserError, match=r'blocks=\(1, 4\).* 3 ViT blocks'):
        make_probe(reader, LinearProbeConfig())
    resnet = build(variant('R50x1', image_size=(32, 32)))
    with pytest.raises(UserError, match='blocks'):
        LinearProbe(CONFIG, resnet, Preprocessing(), batches_on_all_devices(reader, 16), str)
    for values in {'blocks': ()}, {'rates': (0.0,)}, {'validation_fraction': 0.9}:
        with pytest.raises(UserError, match=next(iter(values))):
            LinearProbeConfig(**values)
    config = tiny.experiment(fewshot=FewshotConfig(linear_probe=CONFIG))
    with pytest.raises(UserError, match='config.fewshot.linear_probe'):
        build_experiment(config)
