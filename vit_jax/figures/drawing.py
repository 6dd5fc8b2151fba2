"""The figures of both papers, from the numbers behind them: arrays in, a picture out.

"An Image is Worth 16x16 Words" (figures 6, 7, 11, 13 and 14) and "Do Vision Transformers See Like
Convolutional Neural Networks?". What a picture cannot hold is thinned, and its title says so.
Letters of shapes: l layers, h heads, r c rows and columns of patches, t taps or tokens, s series.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vit_jax.base import Float, Int, counted
from vit_jax.figures import style
from vit_jax.figures.style import Names

_WIDTH, _HEIGHT = 8.0, 4.6  # inches, of a picture of lines
_MOST_TILES, _MOST_LAYERS, _MOST_HEADS, _MOST_LINES = 14, 12, 16, 8
_MOST_TICKS, _MOST_TOKENS = 24, 25
_SHARES: dict[str, Any] = {'cmap': style.SEQUENTIAL, 'vmin': 0, 'vmax': 1}
_IN_BLOCK = re.compile(r'block\d+|stage\d+/unit\d+')
_REMOVED = 'between these, no skip connections'
_BLOCK = 'block (0 is next to the image)'


@style.styled
def filters(components: Float[np.ndarray, 'k p q c'], explained: Float[np.ndarray, 'k']) -> Figure:
    """Principal components of the patch embedding (values in 0..1), with their share in 0..1."""
    count, height, width, channels = components.shape
    rows, columns = -(-count // 7), min(count, 7)
    size = style.tile_inches(rows, columns, (height, width))
    title = f'The first {counted(count, "principal component")} of the filters'
    figure = style.canvas(size[0] * columns + 0.5, (size[1] + 0.25) * rows + 0.7, title)
    axes = figure.subplots(rows, columns, squeeze=False)
    how = {'cmap': 'gray', 'vmin': 0, 'vmax': 1} if channels == 1 else {}
    for place, ax in enumerate(axes.flat):
        ax.set_axis_off()
        if place < count:
            ax.imshow(components[place], **how)
            ax.set_title(f'{explained[place]:.1%}', pad=3)
    label = f'each {height} x {width} pixels; above, its share of the variance of all filters'
    figure.supxlabel(label, fontsize='medium')
    return figure


@style.styled
def positions(similarity: Float[np.ndarray, 'r c r c']) -> Figure:
    """Cosine similarity of each position embedding with all, a tile for each position."""
    grid = similarity.shape[:2]
    down, across = (range(0, count, -(-count // _MOST_TILES)) for count in grid)
    shown = [[similarity[i, j] for j in across] for i in down]
    size = style.tile_inches(len(down), len(across), grid)
    title = 'Each position embedding compared with all others, one tile for each position'
    if (len(down), len(across)) != grid:
        title += f' ({len(down)} x {len(across)} of {grid[0]} x {grid[1]})'
    figure = style.canvas(size[0] * len(across) + 1.6, size[1] * len(down) + 1.2, title)
    how = {'cmap': style.DIVERGING, 'vmin': -1, 'vmax': 1}
    axes = figure.subplots()
    style.tiles(axes, shown, size, rows=down, columns=across, **how)
    axes.set(xlabel='column of the patch', ylabel='row of the patch')
    style.bar(axes, 'cosine similarity', low=-1.0, colours=style.DIVERGING)
    return figure


@style.styled
def attention_distance(distance: Float[np.ndarray, 'l h'], *, uniform: float, width: int) -> Figure:
    """Mean attention distance of each head by depth, in pixels of images of such a width.

    `uniform` is that of an attention which is the same everywhere.
    """
    blocks, heads = distance.shape
    figure = style.canvas(
        _WIDTH, _HEIGHT, f'How far each head looks, in images {width} pixels wide'
    )
    axes = figure.subplots()
    depth = np.arange(blocks)
    look: dict[str, Any] = {'color': style.COLOURS[0], 'alpha': 0.5, 'linewidths': 0}
    axes.scatter(depth.repeat(heads), distance.ravel(), s=28, label='a head', **look)
    axes.plot(depth, distance.mean(axis=1), **style.line(1, 'mean of the heads'))
    axes.axhline(uniform, color='black', linestyle='--', label='uniform attention')
    axes.set(xlabel=_BLOCK, ylabel='mean attention distance (pixels)')
    axes.set_ylim(0, 1.08 * max(uniform, float(distance.max())) or 1)
    style.integers(axes)
    style.legend(figure, axes)
    return figure


@style.styled
def rollout(
    images: Float[np.ndarray, 'b h w 3'], relevance: Float[np.ndarray, 'b r c'], title: str
) -> Figure:
    """At most eight images (in 0..1), each again in grey with its patches' relevance over it."""
    kept = style.chosen(len(images), 8)
    height, width = images.shape[1:3]
    pairs = 2 if len(kept) > 2 else 1
    rows = -(-len(kept) // pairs)
    size = style.tile_inches(rows, 2 * pairs, (height, width))
    scale = 2.0 / max(size)
    figure = style.canvas(size[0] * scale * 2 * pairs + 1.2, size[1] * scale * rows + 0.8, title)
    axes = figure.subplots(rows, 2 * pairs, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
        ax.set_box_aspect(size[1] / size[0])
    for place, index in enumerate(kept):
        left, right = axes.reshape(-1, 2)[place]
        left.imshow(images[index], aspect='auto')
        overlay(right, images[index], relevance[index])
    style.bar(axes, 'relevance, of the\nlargest in its image')
    return figure


def overlay(
    axes: Axes, image: Float[np.ndarray, 'h w 3'], shares: Float[np.ndarray, 'r c']
) -> None:
    """The image in grey, and over it each patch's share of the largest, by its colour."""
    height, width = image.shape[:2]
    axes.imshow(image.mean(axis=-1), cmap='gray', vmin=0, vmax=1, aspect='auto')
    where = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(
        _of_largest(shares),
        extent=where,
        interpolation='bilinear',
        aspect='auto',
        alpha=0.5,
        **_SHARES,
    )


def _part(kept: Sequence[int], count: int, noun: str) -> str:
    """What a title says where not all is shown."""
    return f' ({len(kept)} of {counted(count, noun)})' if len(kept) < count else ''


def _of_largest(values: Float[np.ndarray, '*n']) -> Float[np.ndarray, '*n']:
    """Values as shares of the largest of them; all zeros remain."""
    largest = np.nanmax(values, initial=0)
    return values / (largest or 1)


@style.styled
def attention_maps(
    image: Float[np.ndarray, 'h w 3'], maps: Float[np.ndarray, 'l heads r c'], layers: Names
) -> Figure:
    """One image, and where each head of each layer looks in it; each map of its own scale."""
    blocks = style.chosen(len(maps), _MOST_LAYERS)
    heads = style.chosen(maps.shape[1], _MOST_HEADS)
    size = style.tile_inches(len(blocks), len(heads), image.shape)
    title = 'Where each head of each block looks in this image'
    title += _part(blocks, len(maps), 'block') + _part(heads, maps.shape[1], 'head')
    wide, high = size[0] * len(heads), size[1] * len(blocks)
    figure = style.canvas(wide + 5.5, max(high, 2.5) + 1.2, title)
    axes = figure.subplots()
    shown = [[_of_largest(maps[i, j]) for j in heads] for i in blocks]
    rows = [layers[i] for i in blocks]
    style.tiles(axes, shown, size, rows=rows, columns=heads, **_SHARES)
    side = 2.5 / max(image.shape)
    height, width = side * image.shape[0], side * image.shape[1]
    beside = axes.inset_axes((-(width + 1) / wide, 1 - height / high, width / wide, height / high))
    beside.imshow(image)
    beside.set_axis_off()
    axes.set(xlabel='head', ylabel=_BLOCK)
    style.bar(axes, 'attention, of the\nlargest in its map')
    return figure


@style.styled
def cka(
    similarity: Float[np.ndarray, 't t'],
    layers: Names,
    networks: Names,
    *,
    removed: Sequence[int] | np.ndarray = (),
) -> Figure:
    """CKA (0..1) of all pairs of layers, one network after the other, with lines between them.

    Many layers have ticks at blocks or units alone: `block0`, `stage1/unit2`. Dashed
    lines are drawn before the layers with the indices `removed`: there a skip connection was.
    """
    starts = [i for i, name in enumerate(networks) if i == 0 or networks[i - 1] != name]
    names = [str(name) for name in layers]
    if len(layers) > _MOST_TICKS:
        names = [found[0] if (found := _IN_BLOCK.match(name)) else name for name in names]
    ticks = _ticks(names, starts)
    figure = style.canvas(_WIDTH, _WIDTH, 'CKA: how alike any two layers represent the same images')
    axes = figure.subplots()
    axes.imshow(similarity, cmap=style.SEQUENTIAL, vmin=0, vmax=1, interpolation='nearest')
    shown = [style.elided(names[i], 22) for i in ticks]
    axes.set_xticks(ticks, shown, rotation=90)
    axes.set_yticks(ticks, shown)
    axes.set(xlabel='layer', ylabel='layer')
    for start in starts[1:]:
        _cross(axes, start, color='white', linewidth=3)
    for place in removed:
        _cross(axes, place, color=style.COLOURS[1], linestyle='--', label=_REMOVED)
    _name_networks(axes, starts, networks)
    style.bar(axes, 'CKA')
    if len(removed):
        handles = [line for line in axes.lines if line.get_label() == _REMOVED]
        figure.legend(handles[:1], [_REMOVED], loc='outside lower center')
    return figure


def _ticks(names: Sequence[str], starts: Sequence[int]) -> list[int]:
    """Where the name changes and networks start, none nearer to the next than can be read."""
    ticks: list[int] = []
    for i, name in enumerate(names):
        if i in starts:
            ticks = [tick for tick in ticks if (i - tick) * _MOST_TICKS >= len(names)] + [i]
        elif name != names[i - 1] and (i - ticks[-1]) * _MOST_TICKS >= len(names):
            ticks.append(i)
    return ticks


def _cross(axes: Axes, place: int, **how: Any) -> None:
    """A vertical and a horizontal line before such a layer."""
    axes.axvline(place - 0.5, **how)
    axes.axhline(place - 0.5, **how)


def _name_networks(axes: Axes, starts: Sequence[int], networks: Names) -> None:
    """The name of each network above and beside its part of the axes; one alone, above."""
    ends = [*starts[1:], len(networks)]
    middles = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    shares = [(end - start) / len(networks) for start, end in zip(starts, ends, strict=True)]
    side = 0.7 * _WIDTH
    fitting = [style.letters(side * share) - 1 for share in shares]
    names = [
        style.elided(networks[start], most) if most > 2 else ''
        for start, most in zip(starts, fitting, strict=True)
    ]
    above, beside = axes.secondary_xaxis('top'), axes.secondary_yaxis('right')
    above.set_xticks(middles, names)
    beside.set_yticks(middles, names if len(names) > 1 else [''], rotation=90, va='center')
    for other in (above, beside):
        other.tick_params(length=0)
        other.spines[:].set_visible(False)


@style.styled
def head_subsets(
    cka: Float[np.ndarray, 's l'], distance: Float[np.ndarray, 's'], layers: Names
) -> Figure:
    """CKA of subsets of heads with lower layers of a ResNet, against their distance in pixels."""
    kept = style.chosen(len(layers), _MOST_LINES)
    title = 'Heads by how far they look, beside the lower layers of a ResNet'
    title += _part(kept, len(layers), 'layer')
    figure = style.canvas(_WIDTH, _HEIGHT, title)
    axes = figure.subplots()
    order = np.argsort(distance)
    for place, index in enumerate(kept):
        axes.plot(distance[order], cka[order, index], **style.line(place, layers[index]))
    axes.set(xlabel='mean attention distance of the heads (pixels)', ylabel='CKA')
    axes.set_ylim(bottom=0)
    style.legend(figure, axes)
    return figure


@style.styled
def residuals(
    ratio: Mapping[str, Float[np.ndarray, 'l']],
    cosine: Mapping[str, Float[np.ndarray, 'l']],
    *,
    layer: str = 'block',
) -> Figure:
    """Norm of the skip connection over that of its branch, and the cosine of branch and output.

    Both by kind, such as 'MLP, patches', and layer. Kinds have the same line in both.
    """
    figure = style.canvas(1.4 * _WIDTH, _HEIGHT, 'What a block keeps, and what it adds')
    left, right = figure.subplots(1, 2)
    kinds = list(dict.fromkeys([*ratio, *cosine]))
    for axes, values in ((left, ratio), (right, cosine)):
        for place, kind in enumerate(kinds):
            if kind in values:
                axes.plot(values[kind], **style.line(place, kind))
        axes.set_xlabel(_BLOCK.replace('block', layer))
        style.integers(axes)
    style.magnitudes(left)
    left.set_ylabel('norm of the skip connection / of the branch')
    right.set_ylabel('cosine of the branch and the output')
    style.legend(figure, left)
    return figure


@style.styled
def receptive_fields(
    before: Float[np.ndarray, 'l h w'], after: Float[np.ndarray, 'l h w'], layers: Names
) -> Figure:
    """What the middle of each layer depends on in the image, before and after the residual."""
    kept = style.chosen(len(layers), _MOST_LAYERS)
    size = style.tile_inches(2, len(kept), before.shape[1:])
    title = 'What the middle of each layer sees of the image'
    title += _part(kept, len(layers), 'layer')
    figure = style.canvas(size[0] * len(kept) + 2.5, size[1] * 2 + 1.8, title)
    shown = [[_of_largest(stage[i]) for i in kept] for stage in (before, after)]
    names = [style.elided(layers[i], 24) for i in kept]
    stages = ('branch alone', 'after the\nresidual')
    axes = figure.subplots()
    style.tiles(axes, shown, size, rows=stages, columns=names, **_SHARES)
    if max(map(len, names)) > style.letters(size[0]) - 1:
        axes.tick_params(axis='x', rotation=90)
    axes.set_xlabel('layer')
    style.bar(axes, 'gradient, of the\nlargest in its tile')
    return figure


@style.styled
def localisation(cka: Float[np.ndarray, 't r c'], tokens: Int[np.ndarray, 't 2']) -> Figure:
    """CKA of tokens with each patch of the image; the token's own place is marked.

    `tokens` are their rows and columns; the class token's are -1 and -1.
    """
    kept = style.chosen(len(cka), _MOST_TOKENS)
    columns = int(np.ceil(np.sqrt(len(kept))))
    rows = -(-len(kept) // columns)
    size = style.tile_inches(rows, columns, cka.shape[1:])
    size = max(size[0], 1.2), size[1]
    title = 'Which part of the image each token represents'
    title += _part(kept, len(cka), 'token')
    figure = style.canvas(size[0] * columns + 1.6, (size[1] + 0.3) * rows + 1.2, title)
    axes = figure.subplots(rows, columns, squeeze=False)
    low, high = float(np.nanmin(cka, initial=0)), float(np.nanmax(cka, initial=1e-3))
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, index in zip(axes.flat, kept, strict=False):
        row, column = tokens[index].tolist()
        ax.imshow(cka[index], cmap=style.SEQUENTIAL, vmin=low, vmax=high, aspect='auto')
        ax.set_box_aspect(size[1] / size[0])
        ax.set_title('class token' if row < 0 else f'{row}, {column}', pad=3)
        if row >= 0:
            corner, colour = (column - 0.5, row - 0.5), style.COLOURS[1]
            ax.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=2))
    figure.supxlabel('above: row, column of the token; framed: its own patch', fontsize='medium')
    style.bar(axes, 'CKA of token and patch', low=low, high=high)
    return figure


@style.styled
def probes(
    accuracy: Float[np.ndarray, 's l'],
    series: Names,
    *,
    deviations: Float[np.ndarray, 's l'] | None = None,
) -> Figure:
    """Accuracy (0..1) of probes of each layer; of a shorter series the rest of its row is NaN."""
    figure = style.canvas(
        _WIDTH, _HEIGHT, 'What a linear probe with few images reads off each layer'
    )
    axes = figure.subplots()
    for place, (name, row) in enumerate(zip(series, accuracy, strict=True)):
        there = np.flatnonzero(~np.isnan(row))
        depth, percent = np.linspace(0, 1, len(there)), 100 * row[there]
        look = style.line(place, name)
        axes.plot(depth, percent, **look)
        if deviations is not None:
            around = 100 * deviations[place, there]
            how = {'color': look['color'], 'alpha': 0.2, 'linewidth': 0}
            axes.fill_between(depth, percent - around, percent + around, **how)
    axes.set_xlim(-0.02, 1.02)
    axes.set(xlabel='relative depth (0 is next to the image)', ylabel='accuracy (%)')
    style.legend(figure, axes)
    return figure


@style.styled
def training_data(cka: Float[np.ndarray, 's l'], names: Names, reference: str) -> Figure:
    """CKA, layer by layer, of networks trained on less with the one that was trained on most."""
    title = f'How alike each layer is to that of {style.elided(reference, 40)}'
    figure = style.canvas(_WIDTH, _HEIGHT, title)
    axes = figure.subplots()
    for place, (name, row) in enumerate(zip(names, cka, strict=True)):
        axes.plot(row, **style.line(place, name))
    axes.set(xlabel='layer (0 is next to the image)', ylabel='CKA')
    axes.set_ylim(0, 1.02)
    style.integers(axes)
    style.legend(figure, axes)
    return figure
