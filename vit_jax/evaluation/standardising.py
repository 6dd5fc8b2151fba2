"""What every linear probe does to features first."""

import numpy as np

from vit_jax.base.array_types import Float


def standardised(
    train: Float[np.ndarray, 'n d'], test: Float[np.ndarray, 'm d'], *, constant: float
) -> tuple[Float[np.ndarray, 'n e'], Float[np.ndarray, 'm e']]:
    """Both by mean and deviation of the training features, with a constant feature at the end."""
    mean, std = train.mean(axis=0), train.std(axis=0) + 1e-5
    return with_constant((train - mean) / std, constant), with_constant(
        (test - mean) / std, constant
    )


def with_constant(x: Float[np.ndarray, 'n d'], constant: float) -> Float[np.ndarray, 'n e']:
    """The features with one more, the same for all: its weight is a bias."""
    return np.concatenate([x, np.full((len(x), 1), constant, x.dtype)], axis=1)
