"""Draws metrics over steps or time, means of studies, and the reliability of probabilities."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax.base import Float
from vit_jax.evaluation.calibration import Calibration
from vit_jax.figures import style

_WIDTH = 8.0  # inches
_HEIGHT = 4.2  # inches
_LETTERS = 80  # characters that fit below the x axis
_LONGEST = 28  # characters of a tick label


class Curve(NamedTuple):
    """A line."""

    name: str  # name in the legend
    color_index: int
    x: Float[np.ndarray, 'n']
    y: Float[np.ndarray, 'n']
    style: Any = '-'  # matplotlib's linestyle


def draw_curves(
    title: str,
    drawn: Sequence[Curve],
    *,
    x: str,
    y: str,
    scale: Literal['linear', 'magnitudes', 'percent'] = 'linear',
) -> style.Drawing:
    """Draws curves.

    Args:
      title: Title of the drawing.
      drawn: The curves. Values that are not finite become gaps.
      x: Label of the x axis.
      y: Label of the y axis.
      scale: Scale of the y axis. `magnitudes` is logarithmic; `percent` shows 1 as 100 %.
    """
    from matplotlib.ticker import PercentFormatter

    drawing = style.canvas(_WIDTH, _HEIGHT, title)
    axes = drawing.subplots()
    for curve in drawn:
        look = style.line_style(curve.color_index, curve.name) | {
            'linestyle': curve.style,
            'markeredgewidth': 1,
            'markevery': max(1, len(curve.x) // 12),
        }
        axes.plot(curve.x, curve.y, **look)
    axes.set(xlabel=x, ylabel=y)
    if scale == 'magnitudes':
        style.use_log_scale(axes)
    elif scale == 'percent':
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis='y', color='0.9')
    style.add_legend(drawing, axes)
    return drawing


def draw_reliability(found: Calibration) -> style.Drawing:
    """Draws the accuracy over the confidence of each bin (reliability diagram).

    Uses the half of the images to which the temperature was not fitted. The area of a point is
    proportional to the number of images in its bin.
    """
    from matplotlib.ticker import PercentFormatter

    drawing = style.canvas(5.6, 5.6, 'Accuracy by confidence (test half)')
    axes = drawing.subplots()
    axes.plot([0, 1], [0, 1], color='0.6', linestyle='--', label='calibrated')
    by_temperature = {1.0: found.before, found.temperature: found.after}
    for color, (temperature, scores) in zip(style.COLORS, by_temperature.items(), strict=False):
        x, y, size = np.array([(b.confidence, b.accuracy, b.images) for b in scores.bins]).T
        label = f'temperature {temperature:.3g}: ECE {scores.calibration_error:.2%}'
        axes.plot(x, y, color=color, label=label)
        axes.scatter(x, y, 600 * size / size.sum(), color=color, alpha=0.6)
    for axis in axes.xaxis, axes.yaxis:
        axis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel='confidence: probability of the predicted class', ylabel='accuracy')
    axes.grid(color='0.9')
    style.add_legend(drawing, axes)
    return drawing


class MeanCurve(NamedTuple):
    """Means and standard deviations along x."""

    name: str
    x: Float[np.ndarray, 'n']
    mean: Float[np.ndarray, 'n']
    deviation: Float[np.ndarray, 'n']


def draw_means(
    title: str,
    drawn: Sequence[MeanCurve],
    *,
    x: str,
    y: str,
    ticks: Mapping[float, str] | None = None,
    unit: str = '',
    joined: bool = True,
    percent: bool = False,
    logarithmic: bool = False,
) -> style.Drawing:
    """Draws means with error bars.

    Args:
      title: Title of the drawing.
      drawn: The lines.
      x: Label of the x axis.
      y: Label of the y axis.
      ticks: Names of positions on the x axis. None: numbers.
      unit: Unit of the numbers on the x axis, which get prefixes, such as 3 TFLOP.
      joined: Whether to join the points of a line.
      percent: Whether to show y in percent.
      logarithmic: Whether the x axis is logarithmic.
    """
    from matplotlib.ticker import EngFormatter, NullLocator, PercentFormatter

    drawing = style.canvas(_WIDTH, _HEIGHT, title)
    axes = drawing.subplots()
    for place, line in enumerate(drawn):
        order = np.argsort(line.x)
        look = style.line_style(place, line.name) | ({} if joined else {'linestyle': 'none'})
        bars = line.deviation[order] if line.deviation.any() else None
        axes.errorbar(line.x[order], line.mean[order], yerr=bars, capsize=3, capthick=1.2, **look)
    axes.set(xlabel=x, ylabel=y)
    if logarithmic:
        axes.set_xscale('log')
    if ticks:
        names = [style.shorten(name, _LONGEST) for name in ticks.values()]
        crowded = max(map(len, names)) * len(names) > _LETTERS
        slanted: Any = {'rotation': 25, 'ha': 'right', 'rotation_mode': 'anchor'} if crowded else {}
        axes.set_xticks([*ticks], names, **slanted)
        axes.xaxis.set_minor_locator(NullLocator())
    if unit:
        axes.xaxis.set_major_formatter(EngFormatter(unit))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis='y', color='0.9')
    if len(drawn) > 1:
        style.add_legend(drawing, axes)
    return drawing
