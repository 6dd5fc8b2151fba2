"""Class vectors make a zero-shot classifier of an image tower: its logits are OpenCLIP's."""

import numpy as np
import pytest

import vit_jax
from tests import reference, tiny
from tests.networks import loaded
from vit_jax.base.errors import UserError

NAMES = tuple('9876543210')
# CLIP's projection, SigLIP's attention pooling, and CLIP without its projection, by layout.
TOWERS = 'clip_openclip', 'siglip_timm_remainder', 'clip_hf', 'siglip_hf', 'clip_hf_vision'
SCALE = 50.0


def class_file(tmp_path, width, **changes):
    vectors = np.random.default_rng(0).normal(size=(len(NAMES), width)).astype(np.float32)
    arrays = {'vectors': vectors, 'scale': SCALE, 'class_names': NAMES} | changes
    path = tmp_path / 'classes.npz'
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path, vectors


def unit(vectors):
    return vectors / np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)


@pytest.mark.parametrize('bias', [None, -9.5])
@pytest.mark.parametrize(
    'name',
    [*reference.by_tier(zip(TOWERS), ('clip_openclip',), reference.COMMITTED_FAMILIES)],
)
def test_logits_are_scaled_cosine_similarities_plus_the_bias(name, bias, tmp_path):
    io = reference.family_io(name, None)
    embeddings, source = io.get('logits', io['features']), reference.family(name)
    path, vectors = class_file(tmp_path, embeddings.shape[1], bias=bias)
    classifier = vit_jax.load(source, head=path)
    expected = SCALE * unit(embeddings) @ unit(vectors).T + (bias or 0)
    found = classifier.logits(io['images'])
    # Embeddings differ by 2e-5 from the library's, and their length is at least 1.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * SCALE)
    powers = np.exp(expected - expected.max(axis=1, keepdims=True))
    softmax, sigmoid = powers / powers.sum(axis=1, keepdims=True), 1 / (1 + np.exp(-expected))
    shares = softmax if bias is None else sigmoid
    np.testing.assert_allclose(classifier.probabilities(io['images']), shares, rtol=0, atol=1e-3)
    vit_jax.save(classifier, tmp_path / 'copy', 'vit_jax')
    copy = vit_jax.load(tmp_path / 'copy')
    np.testing.assert_array_equal(copy.logits(io['images']), found)
    assert copy.class_names == NAMES


@pytest.mark.parametrize(
    'changes, wrong',
    [
        ({'vectors': np.ones((10, 5), np.float32)}, r'vectors: .*\(10, 5\).*\(10, 16\)'),
        ({'vectors': np.ones(16, np.float32)}, r'vectors: .*\(16,\)'),
        ({'vectors': None}, 'scale, class_names.* vectors'),
        ({'logit_scale': 4.6}, 'logit_scale'),
        ({'scale': np.inf}, 'scale: .*Inf'),
        ({'scale': 0.0}, 'scale: got 0.0'),
        ({'vectors': np.zeros((10, 16))}, 'vectors: got a vector of zeros'),
        ({'vectors': np.ones((10, 16), complex)}, 'complex'),
        ({'class_names': 'abc'}, 'class_names: got 1 name'),
        ({'bias': np.zeros(10)}, r'bias: .*\(10,\)'),
        ({'class_names': ('a', 'b')}, 'class_names: got 2 names'),
        ({'class_names': np.array([None] * 10)}, 'contains Python objects'),
    ],
)
def test_a_file_that_does_not_fit_is_rejected_by_name(changes, wrong, tmp_path):
    path, _ = class_file(tmp_path, 16, **changes)
    with pytest.raises(UserError, match=f'classes.npz: .*{wrong}'):
        vit_jax.load(reference.family('clip_openclip'), head=path)


def test_a_classifier_is_not_replaced_and_other_formats_do_not_lose_the_head(tmp_path):
    path, _ = class_file(tmp_path, 32)
    with pytest.raises(UserError, match='5 classes'):
        vit_jax.load(reference.family('siglip_hf_linear'), head=path)
    vit_jax.save(loaded(tiny.model(num_classes=None, pool='cls_dist')), tmp_path / 'y', 'vit_jax')
    with pytest.raises(UserError, match='two heads'):
        vit_jax.load(tmp_path / 'y', head=path)
    classifier = loaded(tiny.model(head='cosine:4'))
    with pytest.raises(UserError, match='head=cosine:4.*vit_jax'):
        vit_jax.save(classifier, tmp_path / 'x.npz')
