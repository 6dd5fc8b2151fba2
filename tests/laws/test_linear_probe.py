"""The heads of the linear probe are those of DINOv2's own code after 100 steps.

The fixture has their weights, with the bias as last row. They come from `setup_linear_classifiers`
and `eval_linear` of dinov2/eval/linear.py (facebookresearch/dinov2, b8931f7) in torch 2.13 on a
CPU, with the initial weights and the features that `draw` makes, `batch_size=128` and a global size
of 8. The imports of that file, the checkpoints and `cuda()` were replaced by stubs.
"""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.evaluation import linear_probe
from vit_jax.evaluation.linear_probe import Heads, LinearProbeConfig

REFERENCE = pathlib.Path(__file__).parents[1] / 'fixtures' / 'linear_probe.npz'
CONFIG = LinearProbeConfig(steps=100, batch_size=128 * 8)
KINDS = [*itertools.product(CONFIG.blocks, CONFIG.mean_of_patches)]


def draw(*, width, classes, images):
    """Class tokens (4 b d), patches (b 2 d) and labels of each step, and the first weights.

    They come from a generator whose numbers no version of numpy may change.
    """
    rng, batches = np.random.RandomState(0), []
    for _ in range(CONFIG.steps):
        tokens = [rng.standard_normal(s) for s in ((4, images, width), (images, 2, width))]
        batches.append((*(t.astype(np.float32) for t in tokens), rng.randint(0, classes, images)))
    weights = {}
    for blocks, mean in KINDS:
        shape = len(CONFIG.rates), width * (blocks + mean), classes
        weights[blocks, mean] = (0.01 * rng.standard_normal(shape)).astype(np.float32)
    return batches, weights


def used(blocks, mean):
    """The indices of the vectors that are the features of a kind of heads."""
    return [*range(4 - blocks, 4), *[4] * mean]


def trained(batches, weights):
    width, classes = weights[1, False].shape[1:]
    first = np.zeros((len(KINDS), len(CONFIG.rates), 5, width, classes), np.float32)
    for heads, kind in zip(first, KINDS, strict=True):
        heads[:, used(*kind)] = weights[kind].reshape(len(heads), -1, width, classes)
    heads = Heads(jnp.array(first.reshape(-1, *first.shape[2:])), jnp.zeros((52, classes)))
    state = linear_probe.ProbeState(heads, linear_probe.make_optimizer(CONFIG).init(heads))
    update = jax.jit(lambda *values: linear_probe.update(CONFIG, *values)[0])
    for tokens, patches, labels in batches:
        vectors = jnp.stack([*tokens, patches.mean(axis=1)], axis=1)
        state = update(state, vectors, jax.nn.one_hot(labels, classes))
    return [np.split(np.asarray(leaf), len(KINDS)) for leaf in state.heads]


def test_the_heads_are_those_of_dinov2s_code():
    """Each head alone, within 1e-5 of its largest weight."""
    weights, biases = trained(*draw(width=3, classes=3, images=8))
    with np.load(REFERENCE, allow_pickle=False) as file:
        for kind, heads, bias in zip(KINDS, weights, biases, strict=True):
            assert not np.delete(heads, used(*kind), axis=1).any()
            own = heads[:, used(*kind)].reshape(len(heads), -1, 3)
            expected = file[f'{kind[0]}_{str(kind[1]).lower()}']
            found = np.concatenate([own, bias[:, None]], axis=1)
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
