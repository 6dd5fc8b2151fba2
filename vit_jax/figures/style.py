"""How all pictures look: colours, lines, letters, tiles; and their bytes.

A picture is a `matplotlib.figure.Figure` of the object interface: no display, no global state.
Letters have 10 points at 160 dots an inch: 11 pixels where a picture is shown at half size.
"""

import contextlib
import functools
import io
import textwrap
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from vit_jax.base import Num

P = ParamSpec('P')
Names = Sequence[str] | np.ndarray

# Colours that people with any kind of colour vision tell apart. From small to large; about zero:
SEQUENTIAL, DIVERGING = 'viridis', 'PuOr'
# Okabe and Ito's, the pale ones last; two lines never share colour and marker.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#000000', '#56B4E9', '#E69F00')
MARKERS, DASHES = 'osD^vP*X', ('-', '--', ':', '-.')

_LETTER_INCHES = 0.085  # the width of a letter of 10 points, on average
_LEGEND_ROWS, _ROW_INCHES = 3, 0.22  # that every picture has room for; the height of one more
_SETTINGS: dict[str, Any] = {
    'font.family': 'sans-serif',
    'font.sans-serif': ['DejaVu Sans'],  # comes with matplotlib: the same bytes on every machine
    'font.size': 10,
    'axes.titlesize': 10,
    'figure.titlesize': 11,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': False,
    'lines.linewidth': 1.6,
    'lines.markersize': 5,
    'legend.frameon': False,
    'text.parse_math': False,  # names of files may hold dollars
}


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Matplotlib's own defaults and those above, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Glyph .* missing', UserWarning)
        matplotlib.rcParams.update(matplotlib.rcParamsDefault)
        matplotlib.rcParams.update(_SETTINGS)
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """The function that draws, in the style of this module."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _settings():
            return draw(*args, **kwargs)

    return drawn


def canvas(width: float, height: float, title: str) -> Figure:
    """An empty picture with its title; the size in inches, at least 5 x 2.5."""
    figure = Figure(figsize=(max(5, width), max(2.5, height)), dpi=160, layout='compressed')
    FigureCanvasAgg(figure)
    figure.suptitle('\n'.join(textwrap.wrap(title, letters(figure.get_figwidth() / 1.15))))
    return figure


def png(figure: Figure) -> bytes:
    """The picture, cut to what is drawn. Equal pictures have equal bytes: nothing says when."""
    file = io.BytesIO()
    with _settings():
        figure.savefig(
            file, format='png', bbox_inches='tight', pad_inches=0.1, metadata={'Software': None}
        )
    return file.getvalue()


def elided(name: str, letters: int) -> str:
    """A name in so many letters at most, its middle left out; line ends and the like are blanks."""
    name = ' '.join(''.join(c if c.isprintable() else ' ' for c in name).split()) or '?'
    most = max(letters * len(name) // _cells(name), 3)
    if len(name) <= most:
        return name
    return f'{name[: most // 2]}…{name[len(name) - (most - 1) // 2 :]}'


def _cells(name: str) -> int:
    """How many letters wide a name is: Chinese ones and the like count twice."""
    return sum(2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in name)


def letters(inches: float) -> int:
    """How many letters can be written in so many inches."""
    return int(inches / _LETTER_INCHES)


def chosen(count: int, most: int) -> list[int]:
    """So many indices below `count` at most, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def line(place: int, name: str) -> dict[str, Any]:
    """Colour, marker, dashes and label of the line in such a place, with such a name."""
    label = elided(name, 48)
    return {
        'color': COLOURS[place % len(COLOURS)],
        'marker': MARKERS[place % len(MARKERS)],
        'linestyle': DASHES[place // len(COLOURS) % len(DASHES)],
        'markeredgewidth': 0,
        'label': f' {label}' if label.startswith('_') else label,  # `_` would hide it
    }


def legend(figure: Figure, axes: Axes) -> None:
    """What each line of the axes is, below them."""
    lines, names = axes.get_legend_handles_labels()
    fit = int(figure.get_figwidth() / (max(map(_cells, names)) * _LETTER_INCHES + 0.7))
    columns = min(max(fit, 1), len(names))
    more_rows = -(-len(names) // columns) - _LEGEND_ROWS
    figure.set_figheight(figure.get_figheight() + max(0, more_rows) * _ROW_INCHES)
    figure.legend(lines, names, loc='outside lower center', ncols=columns)


def magnitudes(axes: Axes) -> None:
    """A y axis of magnitudes: 0.5, 1, 2, 5, 10 are equally far apart."""
    axes.set_yscale('log')
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter('{x:g}')
    axes.yaxis.set_minor_formatter(NullFormatter())


def integers(axes: Axes) -> None:
    """Whole numbers alone along the x axis: blocks, layers."""
    axes.xaxis.set_major_locator(MaxNLocator('auto', integer=True, min_n_ticks=1))


def bar(
    axes: Any, label: str, *, low: float = 0.0, high: float = 1.0, colours: str = SEQUENTIAL
) -> None:
    """A bar beside axes, one or an array of them, that says what the colours mean."""
    mappable = ScalarMappable(Normalize(low, high), colours)
    figure = np.ravel(axes)[0].figure
    figure.colorbar(mappable, ax=axes, label=label, fraction=0.05, pad=0.02, aspect=30)


def tile_inches(rows: int, columns: int, shape: Sequence[int]) -> tuple[float, float]:
    """Width and height of a tile, in inches, such that so many of them fit a picture.

    A tile has the shape of the image (height, width, ...) that it shows, unless that is so long
    that axes, numbers or the bar of colours would have no place.
    """
    ratio = min(max(shape[0] / shape[1], 1 / 3), 3)
    side = max(1.4, 2 / columns)
    width = min(side, side / ratio, 9 / columns, 9 / rows / ratio)
    return max(width, 2 / columns, 0.26), max(width * ratio, 1.5 / rows, 0.26)


def tiles(
    axes: Axes,
    shown: Sequence[Sequence[Num[np.ndarray, 'h w *c']]],
    size: tuple[float, float],
    *,
    rows: Sequence[object],
    columns: Sequence[object],
    **how: Any,
) -> None:
    """Rows of images, tile (r, c) in the unit square from (c, r) on; `how` of `imshow`."""
    for row, images in enumerate(shown):
        for column, image in enumerate(images):
            place = (column + 0.03, column + 0.97, row + 0.97, row + 0.03)
            axes.imshow(image, extent=place, **how)
    axes.set(xlim=(0, max(map(len, shown))), ylim=(len(shown), 0))
    axes.set_xticks(np.arange(len(columns)) + 0.5, [str(name) for name in columns])
    axes.set_yticks(np.arange(len(rows)) + 0.5, [str(name) for name in rows])
    axes.set_aspect(size[1] / size[0])
    axes.set_facecolor('0.75')  # between tiles that are white themselves
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
