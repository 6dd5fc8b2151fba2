"""The layers of a block, in the shapes that compilers do well. They compute what Flax's compute.

With `layout='flat'` a layer that treats each token alone is given the tokens of all images as the
rows of one matrix. XLA then sums the gradients of biases and scales over one axis; over two, it
first writes the tokens transposed, in float32. With `batched` they are as in Flax: TPUs tile the
last two axes, so that there a reshape of these is a copy.

The 1x1 convolutions of a ResNet and the pooling after its root are computed flat as well. In these
layers no strided slice may feed a matrix product: XLA for GPUs fuses the slice into the product,
and aborts the process while it compiles (openxla/xla issue 47381, open with jax 0.12.0).
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base import Array, Float
from vit_jax.models.options import Compute

Initializer = Callable[..., Array]
Norm = Literal['layer', 'rms']  # LayerNorm, or RMSNorm (Zhang and Sennrich): not centred, no bias


def norm(kind: Norm, compute: Compute, epsilon: float, *, name: str | None = None) -> nn.Module:
    """Normalises each vector of the last axis."""
    flat = compute.layout == 'flat'
    layers = (_RMSNorm, nn.RMSNorm) if kind == 'rms' else (_LayerNorm, nn.LayerNorm)
    return layers[0 if flat else 1](epsilon=epsilon, dtype=compute.dtype, name=name)


class _LayerNorm(nn.LayerNorm):
    def __call__(self, x: Float[Array, '... d']) -> Float[Array, '... d']:
        return _on_rows(super().__call__, x)


class _RMSNorm(nn.RMSNorm):
    def __call__(self, x: Float[Array, '... d']) -> Float[Array, '... d']:
        return _on_rows(super().__call__, x)


def _on_rows(function: Callable[[Array], Array], x: Float[Array, '... d']) -> Float[Array, '... d']:
    return function(x.reshape(-1, x.shape[-1])).reshape(x.shape)


class Dense(nn.Module):
    """`nn.DenseGeneral` from the last `axes` of its input to `features`."""

    features: tuple[int, ...]
    compute: Compute
    axes: int = 1
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    bias_init: Initializer = nn.initializers.zeros

    @nn.compact
    def parameters(self, inputs: tuple[int, ...]) -> tuple[Array, Array | None]:
        """The kernel (*inputs, *features) and the bias (*features), in the type of computation."""
        size = math.prod(inputs), math.prod(self.features)

        def initial(key: Array) -> Array:  # as of a matrix, which the rule for its size assumes
            return self.kernel_init(key, size).reshape(*inputs, *self.features)

        kernel = self.param('kernel', initial).astype(self.compute.dtype)
        if not self.use_bias:
            return kernel, None
        return kernel, self.param('bias', self.bias_init, self.features).astype(self.compute.dtype)

    def __call__(self, x: Float[Array, '...']) -> Float[Array, '...']:
        return side_by_side(x, [self])[0]


def side_by_side(x: Float[Array, '...'], layers: list[Dense]) -> list[Float[Array, '...']]:
    """What each of these layers gives for the same input: flat, by one matrix product."""
    axes, compute = layers[0].axes, layers[0].compute
    tokens, inputs = x.shape[:-axes], x.shape[-axes:]
    x = x.astype(compute.dtype)
    made = [layer.parameters(inputs) for layer in layers]
    if compute.layout != 'flat':
        products = [jnp.tensordot(x, kernel, axes) for kernel, _ in made]
        return [y if b is None else y + b for y, (_, b) in zip(products, made, strict=True)]
    rows = math.prod(inputs)
    kernels = [kernel.reshape(rows, -1) for kernel, _ in made]
    biases = [bias.reshape(-1) for _, bias in made if bias is not None]
    kernel = _joined(kernels)
    narrows = kernel.shape[0] > kernel.shape[1]
    product = _product_that_narrows if narrows and compute.is_for_cpu else jnp.matmul
    y = product(x.reshape(-1, rows), kernel)
    y = y + _joined(biases) if biases else y
    parts = jax.lax.split(y, [math.prod(layer.features) for layer in layers], axis=1)
    shapes = [(*tokens, *layer.features) for layer in layers]
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


@jax.custom_jvp
def _product_that_narrows(
    x: Float[Array, 'n wide'], kernel: Float[Array, 'wide narrow']
) -> Float[Array, 'n narrow']:
    """A product whose gradient of the kernel is made transposed, (narrow, wide).

    XLA's products on CPUs take the transpose of their left operand a quarter more slowly where that
    is the wide one.
    """
    return x @ kernel


@_product_that_narrows.defjvp
def _(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Float[Array, 'n narrow'], Float[Array, 'n narrow']]:
    """dx W + x dW, with dW read transposed, so that the gradient of W is written transposed."""
    (x, kernel), (of_x, of_kernel) = primals, tangents
    transposed = jax.lax.optimization_barrier(of_kernel.T)  # or XLA would undo it
    by_kernel = jax.lax.dot_general(x, transposed, (((1,), (1,)), ((), ())))
    return x @ kernel, of_x @ kernel + by_kernel


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)


def convolution(
    x: Float[Array, 'b h w c'], kernel: Float[Array, 'k k c d'], stride: int, compute: Compute
) -> Float[Array, 'b _ _ d']:
    """A SAME convolution without bias.

    In the flat layout a 1x1 convolution is a matrix product, which is 10 times as fast backwards on
    a CPU. A strided one is a product on CPUs only, where it makes a step of the CIFAR-10 hybrid a
    tenth faster. On a GPU the convolution of cuDNN moves fewer bytes.
    """
    is_pointwise = compute.layout == 'flat' and kernel.shape[:2] == (1, 1)
    if is_pointwise and (stride == 1 or compute.is_for_cpu):
        if stride > 1:
            x = _written_first(x[:, ::stride, ::stride])
        y = x.reshape(-1, x.shape[-1]) @ kernel[0, 0]
        return y.reshape(*x.shape[:3], -1)
    layout = 'NHWC', 'HWIO', 'NHWC'
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, 'SAME', dimension_numbers=layout)


def max_pool(x: Float[Array, 'b h w c'], compute: Compute) -> Float[Array, 'b _ _ c']:
    """The largest of 3x3, at every second place, SAME.

    Flat, as the maximum of nine shifted arrays: the gradient of XLA's window on a CPU takes 6 times
    as long. Where several of a window are the largest the gradient is divided among them.
    """
    if compute.layout != 'flat':
        return nn.max_pool(x, (3, 3), (2, 2), 'SAME')
    rows, columns = x.shape[1:3]
    sides = jax.lax.padtype_to_pads((rows, columns), (3, 3), (2, 2), 'SAME')
    padded = jnp.pad(x, ((0, 0), *sides, (0, 0)), constant_values=-jnp.inf)
    shifts = itertools.product(range(3), range(3))
    pooled = functools.reduce(
        jnp.maximum, (padded[:, i : i + rows : 2, j : j + columns : 2] for i, j in shifts)
    )
    return _written_first(pooled)


def _written_first(x: Float[Array, '... d']) -> Float[Array, '... d']:
    """The same array, behind a barrier: XLA writes it to memory before anything reads it."""
    return _on_rows(jax.lax.optimization_barrier, x)


def recomputed(function: Callable[[Array], Array], compute: Compute) -> Callable[[Array], Array]:
    """The same function; flat, its backward pass keeps the input alone, and begins from it again.

    XLA would otherwise write several arrays of the size of an MLP's hidden layer.
    """
    return jax.checkpoint(function) if compute.layout == 'flat' else function


def first_tokens(x: Float[Array, 'b n d'], count: int, compute: Compute) -> Float[Array, 'b r d']:
    """The first tokens of each sequence.

    Flat, behind a barrier: XLA for GPUs would otherwise keep the tokens of all blocks transposed,
    the images side by side, and write them anew for each product.
    """
    if compute.layout == 'flat' and not compute.is_for_cpu:
        x = _written_first(x)
    return x[:, :count]


def apart(x: Float[Array, '... d'], compute: Compute) -> Float[Array, '... d']:
    """The output of a matrix product, unchanged; flat, behind a barrier.

    XLA for GPUs would otherwise have cuBLAS add the residual stream within the product: in place,
    to a copy, since the stream is kept. Apart, the sum is one pass with the statistics of the norm
    that follows it. Where blocks are recomputed that costs more than it gives.
    """
    if compute.layout != 'flat' or compute.is_for_cpu or compute.remat != 'none':
        return x
    return _on_rows(_written, x)


@jax.custom_jvp
def _written(rows: Float[Array, 'n d']) -> Float[Array, 'n d']:
    return jax.lax.optimization_barrier(rows)


@_written.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _written(*primals), tangents[0]  # backwards nothing is held up
