"""Pictures of runs: numbers over steps or time, and where the time went."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, PercentFormatter

from vit_jax.base import Float
from vit_jax.figures import style

_WIDTH, _HEIGHT = 8.0, 4.2  # inches
_MOST_POINTS = 1500  # of a line: more cannot be seen
_LETTERS, _LONGEST = 80, 28  # that fit below the x axis side by side; of one name
_MARKED = 40  # a line of so few points has a marker at each, one of more has twelve


class Curve(NamedTuple):
    """A line, or single points: what it is called, and its place, which gives its colour.

    Without a name it is not in the legend; without a place it is grey.
    """

    name: str
    place: int | None
    x: Float[np.ndarray, 'n']
    y: Float[np.ndarray, 'n']
    style: Any = '-'  # of the line: '-', '--', ':', what matplotlib takes; '' for points alone
    fill: str = 'full'  # of its markers, 'none' for hollow ones, 'left' for a half
    marker: str = 'x'  # of points alone


@style.styled
def curves(
    title: str,
    drawn: Sequence[Curve],
    *,
    x: str,
    y: str,
    scale: Literal['linear', 'magnitudes', 'percent'] = 'linear',
) -> Figure:
    """The lines, each run in its colour, of numbers called `y` over what is called `x`.

    Values that are not finite are gaps; on the scale `magnitudes` the y axis is logarithmic, on
    `percent` 1 is 100 %. A line of many points is thinned.
    """
    figure = style.canvas(_WIDTH, _HEIGHT, title)
    axes = figure.subplots()
    for curve in drawn:
        kept = style.chosen(len(curve.x), _MOST_POINTS)
        how = style.line(curve.place or 0, curve.name) | {'linestyle': curve.style or 'none'}
        how |= {'fillstyle': curve.fill, 'markeredgewidth': 1, 'markerfacecoloralt': 'white'}
        if curve.place is None:
            how['color'] = '0.4'
        if not curve.name:
            del how['label']
        if np.isfinite(curve.x + curve.y).sum() == 1:  # there is no line to tell it by
            how['markersize'] = 8
        elif len(kept) > _MARKED:  # markers tell runs apart that have one colour
            how['markevery'] = len(kept) // 12
        if not curve.style:
            how |= {'marker': curve.marker, 'markersize': 9, 'markeredgewidth': 2}
        axes.plot(curve.x[kept], curve.y[kept], **how)
    axes.set(xlabel=x, ylabel=y)
    axes.margins(x=0.02)
    if scale == 'magnitudes':
        style.magnitudes(axes)
    elif scale == 'percent':
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis='y', color='0.9')
    style.legend(figure, axes)
    return figure


class Measured(NamedTuple):
    """A line of means along x, with their deviations, and what it is called."""

    name: str
    x: Float[np.ndarray, 'n']
    mean: Float[np.ndarray, 'n']
    deviation: Float[np.ndarray, 'n']


@style.styled
def measured(
    title: str,
    drawn: Sequence[Measured],
    *,
    x: str,
    y: str,
    ticks: Mapping[float, str] | None = None,
    unit: str = '',
    joined: bool = True,
    percent: bool = False,
    logarithmic: bool = False,
) -> Figure:
    """Means with bars of their deviations, over what is called `x`.

    It has `ticks` by name there, or numbers of a `unit`, with prefixes: 3 TFLOP.
    Points that are not `joined`, as nothing lies between them, stand beside each other.
    """
    figure = style.canvas(_WIDTH, _HEIGHT, title)
    axes = figure.subplots()
    for place, line in enumerate(drawn):
        order = np.argsort(line.x)
        how = style.line(place, line.name) | ({} if joined else {'linestyle': 'none'})
        apart = 0.0 if joined else 0.08 * (place - (len(drawn) - 1) / 2)
        bars = None if not line.deviation.any() else line.deviation[order]
        axes.errorbar(
            line.x[order] + apart, line.mean[order], yerr=bars, capsize=3, capthick=1.2, **how
        )
    axes.set(xlabel=x, ylabel=y)
    if logarithmic:
        axes.set_xscale('log')
    if ticks:
        names = [style.elided(name, _LONGEST) for name in ticks.values()]
        slanted = {'rotation': 25, 'ha': 'right', 'rotation_mode': 'anchor'}
        crowded = max(map(len, names)) * len(names) > _LETTERS
        axes.set_xticks([*ticks], names, minor=False, **(slanted if crowded else {}))
        figure.set_figheight(figure.get_figheight() + 0.8 * crowded)
        axes.xaxis.set_minor_locator(NullLocator())
    if unit:
        axes.xaxis.set_major_formatter(EngFormatter(unit))
        if logarithmic:
            low, high = axes.get_xlim()
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
            axes.xaxis.set_minor_locator(NullLocator())
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis='y', color='0.9')
    if len(drawn) > 1:
        style.legend(figure, axes)
    return figure


@style.styled
def where_time_went(seconds: Mapping[str, Mapping[str, float]]) -> Figure:
    """A bar for each run, by name, of the shares of its wall time."""
    names = [style.elided(name, 32) for name in seconds]
    figure = style.canvas(_WIDTH, 1.6 + 0.45 * len(names), 'Where the wall time went')
    axes = figure.subplots()
    parts = dict.fromkeys(part for each in seconds.values() for part in each)
    totals = np.array([sum(each.values()) for each in seconds.values()])
    left = np.zeros(len(names))
    for place, part in enumerate(parts):
        share = np.array([each.get(part, 0.0) for each in seconds.values()]) / totals
        colour = style.COLOURS[place % len(style.COLOURS)]
        hatch = '' if place < len(style.COLOURS) else '//'
        axes.barh(
            range(len(names)), share, left=left, color=colour, hatch=hatch, label=part, height=0.6
        )
        left += share
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda share, _: f'{share:.0%}')
    axes.set(xlim=(0, 1), xlabel='share of the wall time, over all starts')
    style.legend(figure, axes)
    return figure
