import jax
import numpy as np
import pytest

from vit_jax.checkpoints import resize

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(4, 6, 3, 5)).astype(np.float32)


def enlarged(patch, new):
    """As OpenCV and TensorFlow resize images: bilinear, without antialias."""
    return jax.image.resize(patch, (*new, patch.shape[2]), 'linear', antialias=False)


@pytest.mark.parametrize('new', [(8, 12), (5, 7), (4, 6), (16, 6)])
def test_an_enlarged_patch_gives_the_token_that_it_gave(new):
    """Section 3.4 of FlexiViT: the pseudo-inverse is exact for larger patches."""
    patch = RNG.normal(size=(4, 6, 3))
    kernel = resize.resize(KERNEL, new)
    token = np.einsum('pqc,pqcd->d', patch, KERNEL)
    again = np.einsum('pqc,pqcd->d', enlarged(patch, new), kernel)
    np.testing.assert_allclose(again, token, atol=1e-5)  # float32 sums of 72 products


def test_the_same_patch_keeps_its_kernel():
    np.testing.assert_allclose(resize.resize(KERNEL, (4, 6)), KERNEL, atol=1e-6)


@pytest.mark.parametrize('new', [1, 2, 3, 4, 5, 7])
def test_images_of_equal_channels_give_the_tokens_that_they_gave(new):
    kernel = resize.rechannel(KERNEL, new)
    assert kernel.shape == (4, 6, new, 5) and kernel.dtype == np.float32
    if new != 2:  # fewer channels than before: what is dropped is dropped
        np.testing.assert_allclose(kernel.sum(2), KERNEL.sum(2), atol=1e-5)
    assert (resize.rechannel(KERNEL, 3) == KERNEL).all()
