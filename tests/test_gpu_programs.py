"""Programs for GPUs, on a machine without one.

XLA for GPUs pulls a strided slice into the matrix product that reads it, and aborts the process
while it compiles (openxla/xla issue 47381).
"""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests import gpu_programs, tiny
from tests.gpu_programs import HYBRID, PROGRAMS, RESNET
from tests.hosts import ROOT
from vit_jax.models import Compute, build

PLUGIN = ROOT / '.cache' / f'gpu_compiler-{jax.__version__}'
PRODUCTS = 'stablehlo.dot', 'stablehlo.dot_general'
# XLA fuses nothing through these: their result is written to memory.
WRITTEN = *PRODUCTS, 'stablehlo.convolution', 'stablehlo.optimization_barrier'


def products_of_strided_slices(module):
    """Locations of the matrix products of a StableHLO module that read a strided slice."""
    functions = {op.attributes['sym_name'].value: op for op in module.body.operations}
    strided, found = set(), []

    def read(block, arguments):
        """Marks what is strided in a block, given its arguments; returns it for its results."""
        strided.update(a for a, marked in zip(block.arguments, arguments, strict=False) if marked)
        reads = []
        for op in block.operations:
            op = getattr(op, 'operation', op)
            reads = [value in strided for value in op.operands]
            marks = [any(reads) and op.name not in WRITTEN] * len(op.results)
            if op.name == 'func.call':
                (body,) = functions[op.attributes['callee'].value].regions[0].blocks
                marks = read(body, reads)
            elif op.name == 'stablehlo.slice':
                marks = [any(reads) or max(op.attributes['strides']) > 1]
            elif any(reads) and op.name in PRODUCTS:
                found.append(str(op.location))
            for region in op.regions:  # of loops and branches; twice, as a loop feeds itself
                for body in [*region.blocks] * 2:
                    after = read(body, reads)
                    if len(after) == len(reads):
                        reads = [x or y for x, y in zip(reads, after, strict=True)]
                    if len(after) == len(marks):
                        marks = [x or y for x, y in zip(marks, after, strict=True)]
            strided.update(r for r, marked in zip(op.results, marks, strict=True) if marked)
        return reads

    (body,) = functions['main'].regions[0].blocks
    read(body, [False] * len(body.arguments))
    return found


def lowered_for_gpus(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=('cuda',))


def strided_products_of(function, *arguments):
    return products_of_strided_slices(lowered_for_gpus(function, *arguments).compiler_ir())


def test_a_strided_slice_is_seen_through_functions_and_elementwise_operations():
    x, kernel = jnp.ones((2, 6, 6, 4)), jnp.ones((4, 4))

    @jax.jit
    def halved(x):
        return jnp.maximum(x[:, ::2, ::2], 0).reshape(-1, 4)

    assert len(strided_products_of(lambda x: halved(x) @ kernel, x)) == 1
    assert not strided_products_of(lambda x: jax.lax.optimization_barrier(halved(x)) @ kernel, x)
    assert not strided_products_of(lambda x: halved(x @ kernel), x)


@pytest.mark.parametrize('loop', ['scan', 'fori_loop', 'cond', 'map'])
def test_a_strided_slice_is_seen_in_loops_and_branches(loop):
    x, kernel = jnp.ones((2, 6, 6, 4)), jnp.ones((4, 4))

    def product(x):
        return (x[:, ::2, ::2].reshape(-1, 4) @ kernel).sum()

    uses = {
        'scan': lambda x: jax.lax.scan(lambda c, y: (c + product(y), None), 0.0, x[None])[0],
        'fori_loop': lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + product(x), 0.0),
        'cond': lambda x: jax.lax.cond(x.sum() > 0, product, jnp.sum, x),
        'map': lambda x: jax.lax.map(lambda y: (y @ kernel).sum(), x[:, ::2]),
    }
    assert strided_products_of(uses[loop], x)


@pytest.mark.parametrize('config', [HYBRID, RESNET, gpu_programs.hybrid((), patch_size=(2, 2))])
def test_no_matrix_product_reads_a_strided_slice(config):
    config = dataclasses.replace(config, num_classes=3)
    model = build(config, compute=Compute(unroll=1), platform='gpu')
    params = jax.eval_shape(model.init, jax.random.key(0))
    gradient = jax.grad(lambda params, images: model.apply(params, images).std())
    assert not strided_products_of(gradient, params, tiny.images(2, config))


@pytest.mark.full
@pytest.mark.skipif(
    not PLUGIN.exists(),
    reason=f'no compiler for GPUs in {PLUGIN}: tests/gpu_programs.py says how to install it',
)
def test_every_program_compiles_for_a_gpu():
    """As a run compiles it, but that no kernel is timed. An abort ends a child, not the test."""
    environment = os.environ | {
        'PYTHONPATH': f'{ROOT}{os.pathsep}{PLUGIN}',
        'TF_CPP_MIN_LOG_LEVEL': '2',
    }
    command = [sys.executable, '-m', 'tests.gpu_programs']
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=1200
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith('ok ') for line in lines) == len(PROGRAMS), done.stdout
