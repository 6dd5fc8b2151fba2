"""Muon orthogonalizes the momentum of kernels (optax.contrib.scale_by_muon).

These are the kernels of blocks and of the convolutions in the stages of a ResNet. Kernels of blocks
are stacked along the depth. Each device runs Newton-Schulz for a part of the blocks.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from vit_jax.base import Array, Float, Params, Scalar, tree_names
from vit_jax.models.activation_sharding import mesh_in_context
from vit_jax.training.param_groups import BLOCKS, is_stacked

MATRIX = f'(.*{BLOCKS}|backbone/stage).*kernel'  # parameters whose momentum Muon orthogonalizes
_ITERATIONS = 5  # Newton-Schulz iterations


def is_matrix(params: Any) -> Any:
    """Returns a tree of booleans that selects the kernels of blocks and of stages."""
    return tree_names.match_mask(params, MATRIX)


def scale_by_muon(momentum: Scalar, moment_dtype: str) -> optax.GradientTransformation:
    """Makes Muon with updates of Adam's RMS ("Muon is Scalable for LLM Training")."""
    axes = functools.partial(tree_names.map_named, _matrix_axes)
    make = functools.partial(optax.contrib.scale_by_muon, weight_dimension_numbers=axes)
    orthogonal = make(beta=0.0, nesterov=False, ns_steps=_ITERATIONS)

    def scale(name: str, momentum: Any, update: Any) -> Any:
        update = jax.lax.slice_in_dim(update, 0, len(momentum))  # without padding
        return 0.2 * math.sqrt(max(_matrix_sides(name, momentum))) * update

    def orthogonalize(momenta: Any, _: Any) -> Any:
        split = tree_names.map_named(_split_blocks, momenta)
        updates, _ = orthogonal.update(split, orthogonal.init(split))
        return tree_names.map_named(scale, momenta, updates)

    # The first transformation only normalizes the momentum; `orthogonalize` iterates.
    momentum_only = make(beta=momentum, ns_steps=0, mu_dtype=moment_dtype)
    return optax.chain(momentum_only, optax.stateless(orthogonalize))


def count_flops(params: Params, trainable: Any, mesh: Mesh) -> int:
    """Counts the floating-point operations of the iterations per step, on each device.

    `params` may be abstract. `trainable` is a tree of booleans. Each device iterates
    on the kernels of all convolutions, unless XLA splits them.
    """
    is_trained = tree_names.named_leaves(trainable)
    operations = 0
    for name, leaf in tree_names.named_leaves(params).items():
        if is_trained[name] and re.fullmatch(MATRIX, name):
            m, n = _matrix_sides(name, leaf)
            matrices_per_device = 1
            if is_stacked(name):
                depth = leaf.shape[0]
                _, num_devices = _depth_axes(depth, mesh)
                matrices_per_device = math.ceil(depth / num_devices)
            operations += matrices_per_device * _ITERATIONS * (4 * m**2 * n + 2 * m**3)
    return operations


def _matrix_axes(name: str, leaf: Any) -> optax.contrib.MuonDimensionNumbers:
    """Returns the input and output axes of a kernel.

    Axis 0 of a kernel of blocks is the depth, a batch axis. A convolution is a matrix with a row
    per (height, width, input channel) and a column per output channel.
    """
    if not is_stacked(name):
        return optax.contrib.MuonDimensionNumbers((0, 1, 2), (3,))
    first = leaf.ndim - 1 if name.endswith('attention/out/kernel') else 2
    return optax.contrib.MuonDimensionNumbers((*range(1, first),), (*range(first, leaf.ndim),))


def _matrix_sides(name: str, leaf: Any) -> list[int]:
    """Returns the smaller and the larger side of a kernel's matrix."""
    axes = _matrix_axes(name, leaf)
    return sorted(math.prod(leaf.shape[axis] for axis in group) for group in axes)


def _depth_axes(depth: int, mesh: Any) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes that split the blocks of a kernel, and their number of devices.

    The blocks are padded to a multiple of this number, which is at most twice the number of
    blocks, so that the padding needs little memory.
    """
    axes: tuple[str, ...] = ()
    num_devices = 1
    for axis in reversed(mesh.axis_names):
        if num_devices * mesh.shape[axis] <= 2 * depth:
            axes = (axis, *axes)
            num_devices *= mesh.shape[axis]
    return axes, num_devices


def _split_blocks(name: str, momentum: Float[Array, 'd ...']) -> Float[Array, 'p ...']:
    """Pads the blocks of a kernel and splits them over the mesh in jax's context."""
    mesh = mesh_in_context()
    if mesh is None or mesh.size == 1 or not is_stacked(name):
        return momentum
    axes, num_devices = _depth_axes(len(momentum), mesh)
    depth_padding = (0, -len(momentum) % num_devices)
    no_padding = (0, 0)
    padded = jnp.pad(momentum, [depth_padding] + [no_padding] * (momentum.ndim - 1))
    return jax.lax.with_sharding_constraint(padded, PartitionSpec(axes))
