"""The spread of repeated measurements."""

from collections.abc import Sequence

import numpy as np

from vit_jax.base import Float


def sample_deviation(numbers: Sequence[float] | Float[np.ndarray, 'n']) -> float | None:
    """Returns the sample standard deviation (divided by n - 1); None for a single number."""
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
