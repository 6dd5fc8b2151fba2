"""Few-shot accuracies equal those of big_vision's solver."""

import pathlib

import numpy as np

from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Labeled

REFERENCE = pathlib.Path(__file__).parents[1] / 'fixtures' / 'fewshot.npz'


def test_accuracies_equal_big_vision_to_the_example():
    with np.load(REFERENCE, allow_pickle=False) as file:
        z = dict(file)
    found, *_ = ridge.few_shot(
        z['train_labels'],
        Labeled(z['test_features'], z['test_labels']),
        features_of=z['train_features'].__getitem__,
        shots=z['shots'].tolist(),
        seeds=z['seeds'].tolist(),
        l2=float(z['l2']),
    )
    count = len(z['test_labels'])
    correct = np.array([[found[s, k] for k in z['shots']] for s in z['seeds']]) * count
    np.testing.assert_allclose(correct, np.rint(z['accuracy'] * count), atol=1e-9)
