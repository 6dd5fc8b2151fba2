import jax
import numpy as np
import scipy.signal

from vit_jax.analysis.receptive_field import receptive_fields

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(3, 9, 11, 2)).astype(np.float32)
KERNELS = [RNG.normal(size=shape).astype(np.float32) for shape in ((3, 3, 2, 4), (3, 3, 4, 4))]


def convolved(images, kernel):
    dimensions = ('NHWC', 'HWIO', 'NHWC')
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), 'SAME', dimension_numbers=dimensions, precision='highest'
    )


def centres(images):
    first = convolved(images, KERNELS[0])
    return jax.numpy.stack([x[:, 4, 5] for x in (first, convolved(first, KERNELS[1]))])


def test_the_field_of_a_convolution_is_its_kernel_and_of_two_their_composition():
    """Of linear layers it is that of any image; each channel drawn and colour counts alone."""
    drawn = np.array([[0, 1], [3, 3], [2, 0]])
    found = receptive_fields(centres, IMAGES, drawn)
    first, second = (kernel.astype(np.float64) for kernel in KERNELS)
    composed = sum(
        scipy.signal.convolve(first[:, :, :, [i]], second[:, :, i, None, :]) for i in range(4)
    )
    for field, kernel in zip(found, (first, composed), strict=True):
        expected = np.zeros((9, 11))
        r = kernel.shape[0] // 2
        weights = np.abs(kernel[..., drawn]).mean(axis=(2, 3, 4))
        expected[4 - r : 5 + r, 5 - r : 6 + r] = weights
        np.testing.assert_allclose(field, expected, atol=1e-5)
