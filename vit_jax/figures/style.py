"""The style of all drawings: matplotlib settings, lines, legends, mosaics of tiles.

A drawing is a `matplotlib.figure.Figure`, used without pyplot: no display, no global state. Only
functions that draw import matplotlib, because it is an extra.
"""

import io
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from vit_jax.base import Float

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

    Axes = matplotlib.axes.Axes
    Drawing = matplotlib.figure.Figure
else:
    Axes = Any
    Drawing = Any

P = ParamSpec('P')

# Safe for color-blind readers; line colors by Okabe and Ito.
SEQUENTIAL = 'viridis'
DIVERGING = 'PuOr'
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#000000', '#56B4E9', '#E69F00')
MARKERS = 'osD^vP*X'
DASHES = ('-', '--', ':', '-.')
UNIT_RANGE: dict[str, Any] = {'cmap': SEQUENTIAL, 'vmin': 0, 'vmax': 1}  # options of imshow

SETTINGS: dict[str, Any] = {
    'axes.titlesize': 10,
    'figure.titlesize': 11,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'legend.frameon': False,
    'text.parse_math': False,  # names may contain dollars
}
_LETTER_INCHES = 0.085  # mean width of a character at 10 points


def png(draw: Callable[P, Drawing], *args: P.args, **kwargs: P.kwargs) -> bytes:
    """Draws in this style and renders a PNG without margins.

    Settings of the user (matplotlibrc) are ignored. Equal arguments give equal bytes.
    """
    import matplotlib.style

    file = io.BytesIO()
    with matplotlib.style.context(SETTINGS, after_reset=True):
        drawing = draw(*args, **kwargs)
        drawing.savefig(file, bbox_inches='tight', pad_inches=0.1, metadata={'Software': None})
    return file.getvalue()


def canvas(width: float, height: float, title: str) -> Drawing:
    """Returns an empty drawing with a title. Its size in inches is at least 5 x 2.5."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(max(5, width), max(2.5, height)), dpi=160, layout='compressed')
    FigureCanvasAgg(drawing)
    drawing.suptitle('\n'.join(textwrap.wrap(title, count_letters(drawing.get_figwidth() / 1.15))))
    return drawing


def canvas_for(tiles: Float[np.ndarray, 'r c h w'], title: str, *, left: float = 0) -> Drawing:
    """Returns an empty drawing with room for a mosaic and its color bar.

    `left` is additional room, as a fraction of the width of the mosaic.
    """
    rows, columns, h, w = tiles.shape
    size = np.array([columns * w * (1 + left), rows * h])
    width, height = 8 * size / size.max()
    return canvas(width + 1.6, height + 1.2, title)


def panels(
    rows: int, columns: int, width: float, height: float, title: str
) -> tuple[Drawing, np.ndarray]:
    """Returns a drawing with a grid of panels without axes, of this size in inches, and a title."""
    drawing = canvas(width * columns + 1.2, height * rows + 0.8, title)
    axes = drawing.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.set_axis_off()
    return drawing, axes


def count_letters(inches: float) -> int:
    """Returns the number of characters that fit into a width."""
    return int(inches / _LETTER_INCHES)


def shorten(name: str, most: int) -> str:
    """Shortens a name to at most `most` characters, by removing its middle."""
    most = max(3, most)
    if len(name) <= most:
        return name
    end = len(name) - (most - 1) // 2
    return f'{name[: most // 2]}…{name[end:]}'


def evenly(count: int, most: int) -> list[int]:
    """Returns at most `most` indices below `count`, evenly spaced from first to last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def line_style(place: int, name: str) -> dict[str, Any]:
    """Returns matplotlib options for line number `place`: color, marker, dashes, label."""
    label = shorten(name, 48)
    return {
        'color': COLORS[place % len(COLORS)],
        'marker': MARKERS[place % len(MARKERS)],
        'linestyle': DASHES[place // len(COLORS) % len(DASHES)],
        'markeredgewidth': 0,
        'label': f' {label}' if label.startswith('_') else label,  # `_` would hide the label
    }


def add_legend(drawing: Drawing, axes: Axes) -> None:
    """Adds a legend below the axes. The drawing grows if the legend has more than three rows."""
    lines, names = axes.get_legend_handles_labels()
    width = max(map(len, names)) * _LETTER_INCHES + 0.7
    columns = min(max(1, int(drawing.get_figwidth() / width)), len(names))
    rows = -(-len(names) // columns)
    drawing.set_figheight(drawing.get_figheight() + 0.22 * max(0, rows - 3))
    drawing.legend(lines, names, loc='outside lower center', ncols=columns)


def label_depth_axis(axes: Axes, unit: str = 'block') -> None:
    """Labels the x axis as depth, with integer ticks."""
    axes.set_xlabel(f'{unit} (0 is next to the image)')
    axes.locator_params(axis='x', integer=True, min_n_ticks=1)


def use_log_scale(axes: Axes) -> None:
    """Sets a logarithmic y axis with ticks such as 0.5, 1, 2, 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale('log')
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter('{x:g}')
    axes.yaxis.set_minor_formatter(NullFormatter())


def add_colorbar(
    axes: Any, label: str, *, low: float = 0.0, high: float = 1.0, cmap: str = SEQUENTIAL
) -> None:
    """Adds a color bar next to one axes object or an array of them."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    mappable = ScalarMappable(Normalize(low, high), cmap)
    drawing = np.ravel(axes)[0].figure
    drawing.colorbar(mappable, ax=axes, label=label, fraction=0.05, pad=0.02, aspect=30)


def divide_by_max(values: Float[np.ndarray, '*n']) -> Float[np.ndarray, '*n']:
    """Divides each map (the last two axes) by its largest value. Maps of zeros are unchanged."""
    largest = values.max(axis=(-2, -1), keepdims=True)
    return values / np.where(largest > 0, largest, 1)


def draw_mosaic(
    axes: Axes,
    tiles: Float[np.ndarray, 'r c h w'],
    *,
    rows: Sequence[object],
    columns: Sequence[object],
    **how: Any,
) -> None:
    """Draws tiles side by side, with row and column names. `how` has options of imshow."""
    r, c, h, w = tiles.shape
    gap = max(1, w // 16)
    padded = np.pad(tiles, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    image = padded.transpose(0, 2, 1, 3).reshape(r * (h + gap), c * (w + gap))
    axes.imshow(image[:-gap, :-gap], interpolation='nearest', **how)
    axes.set_xticks(np.arange(c) * (w + gap) + (w - 1) / 2, [str(name) for name in columns])
    axes.set_yticks(np.arange(r) * (h + gap) + (h - 1) / 2, [str(name) for name in rows])
    axes.set_facecolor('0.75')  # color of the gaps, since tiles may be white
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
