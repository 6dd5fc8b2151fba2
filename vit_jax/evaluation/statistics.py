"""The spread of repeated measurements."""

from collections.abc import Sequence

import numpy as np


def sample_deviation(numbers: Sequence[float]) -> float | None:
    """Returns the sample standard deviation (divided by n - 1); None for a single number."""
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
