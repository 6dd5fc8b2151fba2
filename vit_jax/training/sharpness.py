"""Sharpness-aware minimization: SAM (Foret et al. 2021) and GSAM (Zhuang et al. 2022).

The formulas match `trainers/proj/gsam/gsam.py` in big_vision. `optax.contrib.sam` has no
GSAM, and stores a copy of the parameters in its state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

from vit_jax.base import Array, Batch, Int, Key, Params, records
from vit_jax.training.losses import BatchSums

Gradient = tuple[Params, BatchSums]  # gradient of the summed loss, and the sums
# Maps (parameters, batch, dropout key) to a gradient.
GradientFunction = Callable[[Params, Batch, Key[Array, '']], Gradient]
# Maps steps to norms of SAM's perturbation.
Radius = Callable[[Any], Any]
# Maps (gradient function, step) to the gradient function of SAM or GSAM.
Sharpener = Callable[[GradientFunction, Int[Array, '']], GradientFunction]
_EPSILON = 1e-12  # added to norms of gradients


@dataclasses.dataclass(kw_only=True)
class Sam(records.Record):
    """Sharpness-aware minimization: the gradient is computed at perturbed parameters.

    SAM moves the parameters by `rho` along the gradient of the batch, and computes the gradient
    there. GSAM adds two options: with `rho_min`, the distance follows the learning rate, from
    `rho` at its peak to `rho_min` at its final value; `alpha` adds a term that reduces the gap
    between the perturbed and the plain loss. A step costs two forward and two backward passes.
    """

    rho: float = 0.05  # norm of the perturbation at the peak learning rate; 0: no perturbation
    rho_min: float | None = None  # its norm at the final learning rate (GSAM); None: rho
    alpha: float = 0.0  # weight of the term that reduces the gap between both losses (GSAM)

    def check(self) -> None:
        records.require_between(self, 'rho', 'rho_min', 'alpha', low=0)
        low = 0.0 if self.rho_min is None else self.rho_min
        records.require(low <= self.rho, f'rho_min={low}: expected at most rho={self.rho}')
        records.require(self.rho > 0 or self.alpha == 0, f'alpha={self.alpha}: not used with rho=0')


def make_radius(
    config: Sam, schedule: Callable[[Any], Any], *, peak: float, total_steps: int
) -> Radius:
    """Makes the function that maps steps to norms of the perturbation.

    Args:
      config: Options of SAM.
      schedule: Maps steps to learning rates (see `make_schedule`).
      peak: The highest learning rate.
      total_steps: Length of the training, after which the learning rate is final.

    Raises:
      UserError: If `rho_min` has no effect, because the learning rate does not decrease.
    """
    final_rate = schedule(total_steps)
    rho_min = config.rho if config.rho_min is None else config.rho_min
    is_constant = rho_min == config.rho
    records.require(
        is_constant or final_rate < peak,
        f'config.optimizer.sharpness.rho_min={rho_min}: the learning rate must end below its '
        'peak; leave rho_min out',
    )

    def radius(step: Any) -> Any:
        if is_constant:
            return np.full(np.shape(step), rho_min)
        # During the warmup, the rate may be lower than the final one.
        fraction = (schedule(step) - final_rate) / (peak - final_rate)
        return np.maximum(0.0, rho_min + (config.rho - rho_min) * fraction)

    return radius


def make_sharpener(config: Sam | None, radius: Radius) -> Sharpener | None:
    """Makes the function that replaces the gradient of a batch by SAM's or GSAM's.

    Both passes have the same batch and the same dropout. The formulas hold for sums as for means,
    because they are homogeneous in the gradient. The whole batch has one perturbation, on all
    devices and in all parts of gradient accumulation. In the papers, each device has its own.

    Args:
      config: Options of SAM; None: the plain gradient.
      radius: Maps a step to the norm of the perturbation (see `make_radius`).

    Returns:
      The function; None without a perturbation, so that training compiles as without SAM.
    """
    if config is None or records.is_off(config.rho):
        return None

    def sharpen(gradients: GradientFunction, step: Int[Array, '']) -> GradientFunction:
        def sharpened(params: Params, batch: Batch, key: Key[Array, '']) -> Gradient:
            gradient, sums = gradients(params, batch, key)
            distance = radius(step) / (optax.tree.norm(gradient) + _EPSILON)
            moved = optax.tree.add_scale(params, distance, gradient)
            perturbed, _ = gradients(moved, batch, key)
            if records.is_off(config.alpha):
                return perturbed, sums
            # The part of the gradient that is orthogonal to the perturbed one is subtracted.
            direction = optax.tree.scale(1 / (optax.tree.norm(perturbed) + _EPSILON), perturbed)
            along = optax.tree.vdot(gradient, direction)
            orthogonal = optax.tree.add_scale(gradient, -along, direction)
            return optax.tree.add_scale(perturbed, -config.alpha, orthogonal), sums

        return sharpened

    return sharpen
