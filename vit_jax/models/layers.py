"""The last layer of a classifier."""

import flax.linen as nn


def zero_head(num_classes: int, bias: float) -> nn.Dense:
    """A linear head that begins at zero, so that fine-tuning begins uniform (section 3.2)."""
    return nn.Dense(
        num_classes,
        kernel_init=nn.initializers.zeros,
        bias_init=nn.initializers.constant(bias),
    )
