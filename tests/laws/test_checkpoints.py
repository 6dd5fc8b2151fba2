"""Checkpoints of other systems: their logits here, and what is written back."""

import re

import numpy as np
import pytest

import vit_jax
from tests import reference

REJECTED = 'beit_hf', 'beit_timm'  # relative positions are not supported
ENDINGS = {
    'vit_jax': '',
    'google': '.npz',
    'bigvision': '.npz',
    'timm': '.safetensors',
    'huggingface': '',
    'open_clip': '',
}


FAMILIES = [row for row in reference.families() if row[0] not in REJECTED]
QUICK_FAMILIES = 'clip_openclip', 'dinov3_hf'


@pytest.mark.parametrize(
    'name, size', [*reference.by_tier(FAMILIES, QUICK_FAMILIES, reference.COMMITTED_FAMILIES)]
)
def test_features_and_logits_of_a_family_equal_the_library_at_every_size(name, size):
    io = reference.family_io(name, size)
    options = reference.FAMILY_HINTS.get(name, {}) | {'image_size': io['images'].shape[1:3]}
    loaded = vit_jax.load(reference.family(name), **options)
    found, expected = loaded.features(io['images']), io['features']
    if 'features_dist' in io:  # the tokens, of which timm's features are the mean
        expected = (expected + io['features_dist']) / 2
    # A wrong epsilon changes them by 6e-5 at least, a wrong GELU by 1.8e-4.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    if 'logits' in io:
        np.testing.assert_allclose(loaded.logits(io['images']), io['logits'], rtol=0, atol=2e-5)


def arguments_named_by(notes):
    """Returns the arguments that a reader of the file is told to add."""
    told = [match[1] for note in notes if (match := re.search('load this file with (.*)', note))]
    return eval(f'dict({", ".join(told)})')  # as a reader would type them


QUICK = ('google_vit_token_prelogits',)


@pytest.mark.parametrize(
    'name', [*reference.by_tier([(name,) for name in reference.HINTS], QUICK, reference.COMMITTED)]
)
def test_logits_equal_the_original_code_and_each_format_returns_them(name, tmp_path):
    loaded = vit_jax.load(reference.path(name), **reference.HINTS[name])
    images, expected = reference.images_and_logits(name)
    logits = loaded.logits(images)
    # float32 rounding; hybrids are deeper and standardize their kernels.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 if 'hybrid' in name else 1e-5)
    kept = []
    for format, ending in ENDINGS.items():
        path = tmp_path / f'{format}{ending}'
        try:
            notes = vit_jax.save(loaded, path, format)
        except ValueError:
            continue
        kept.append(format)
        again = vit_jax.load(path, **arguments_named_by(notes))
        np.testing.assert_allclose(again.logits(images), logits, rtol=0, atol=1e-5)
    assert 'vit_jax' in kept and len(kept) > 1
