import jax
import numpy as np
import pytest

from vit_jax.base.resampling import corner_aligned, half_pixel
from vit_jax.checkpoints import resize

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(4, 6, 3, 5)).astype(np.float32)


def enlarged(patch, new):
    rows, columns = (half_pixel(old, size) for old, size in zip(patch.shape[:2], new, strict=True))
    return np.einsum('rp,sq,pqc->rsc', rows, columns, patch)


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


def test_half_pixel_is_how_jax_and_opencv_resize():
    row = RNG.normal(size=9).astype(np.float32)
    for new in 4, 9, 20:
        for name, cubic in ('linear', False), ('cubic', True):
            for antialias in True, False:
                expected = jax.image.resize(row, (new,), name, antialias=antialias)
                got = half_pixel(9, new, cubic=cubic, antialias=antialias) @ row
                np.testing.assert_allclose(got, expected, atol=1e-5)


def test_corners_stay_on_corners():
    for old, new in (4, 7), (7, 4), (3, 3):
        matrix = corner_aligned(old, new)
        assert matrix[0, 0] == 1 and matrix[-1, -1] == 1
        np.testing.assert_allclose(matrix.sum(1), 1)
