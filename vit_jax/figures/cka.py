"""Similarity of all layers (Raghu et al., section 4, figures 1 and 2).

Centered kernel alignment (CKA) is 1 if two layers have the same similarities between images, up to
rotation and scale of the features, and 0 if they have nothing in common. The estimate from batches
of images is unbiased; with few images it is noisy and can be below 0. Rows and columns are layers
from the input (top left) to the output: norms, branches, hidden layers and sums. In ViTs, layers
are similar from end to end; in ResNets, layers form stages. Between two models, the picture shows
which layers have similar representations.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import cka
from vit_jax.base import Array, Batch, Float
from vit_jax.figures import layers, style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.figures.layers import Layer
from vit_jax.models import ModelConfig

_MOST_TICKS = 24
_PART = re.compile(r'block\d+|stage\d+/unit\d+')
compute_terms = jax.jit(cka.terms)  # of Gram matrices


def compute(images: Images, *models: PlacedModel) -> Numbers:
    """Returns `cka` (t t) of all layers, and the names `layers` (t) and `models` (t)."""
    return compare_layers(images, models, layers.all_layers)


def compare_layers(
    images: Images, models: Sequence[PlacedModel], choose: Callable[[ModelConfig], list[Layer]]
) -> Numbers:
    """Returns the numbers of `compute` for the layers that `choose` selects."""
    layers_of_models = [choose(model.loaded.config) for model in models]
    gram_functions = [
        gram_matrices(model, chosen) for model, chosen in zip(models, layers_of_models, strict=True)
    ]

    def terms() -> Iterator[cka.Terms]:
        for batches in zip(*(images.batches(model) for model in models), strict=True):
            grams = [
                compute_grams(batch)
                for compute_grams, batch in zip(gram_functions, batches, strict=True)
            ]
            stacked = jnp.concatenate(grams)
            yield compute_terms(stacked, stacked)

    layer_names = [str(layer) for chosen in layers_of_models for layer in chosen]
    model_names = [model.name for model in models]
    return {
        'cka': compute_cka(terms()),
        'layers': np.array(layer_names),
        'models': np.repeat(model_names, [len(chosen) for chosen in layers_of_models]),
    }


def gram_matrices(
    model: PlacedModel, chosen: Sequence[Layer]
) -> Callable[[Batch], Float[Array, 't n n']]:
    """Returns a function from a batch to the centered Gram matrices of the chosen layers.

    They are computed inside the blocks, so that features of all layers are never in memory at once.
    """
    capture = model.capture(layers.same_reduction(chosen, cka.centered_gram))
    return lambda batch: layers.stack_layers(capture(batch), chosen)


def compute_cka(terms: Iterable[cka.Terms]) -> Float[np.ndarray, 't s']:
    """Returns CKA from the terms of all batches, summed in float64."""
    on_host = ([np.asarray(term, np.float64) for term in batch] for batch in terms)
    total = functools.reduce(lambda left, right: [*map(np.add, left, right)], on_host)
    return np.asarray(cka.ratio(*total))


def draw(numbers: Numbers) -> style.Drawing:
    """Draws the matrix, with the names of the models at the sides."""
    models = numbers['models']
    drawing = style.canvas(8.0, 8.0, 'CKA: similarity of the features of all pairs of layers')
    axes = drawing.subplots()
    draw_matrix(axes, numbers['cka'], numbers['layers'])
    starts = np.flatnonzero(np.r_[True, models[1:] != models[:-1]])
    ends = np.r_[starts[1:], len(models)]
    for start in starts[1:]:
        axes.axvline(start - 0.5, color='white', linewidth=3)
        axes.axhline(start - 0.5, color='white', linewidth=3)
    names = []
    for start, end in zip(starts, ends, strict=True):
        letters = style.count_letters(5.2 * (end - start) / len(models))
        names.append(style.shorten(str(models[start]), letters))
    middles = (starts + ends - 1) / 2
    above = axes.secondary_xaxis('top')
    right = axes.secondary_yaxis('right')
    above.set_xticks(middles, names)
    right.set_yticks(middles, names, rotation=90, va='center')
    for axis in above, right:
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    style.add_colorbar(axes, 'CKA')
    return drawing


def draw_matrix(axes: style.Axes, values: Float[np.ndarray, 't t'], names: np.ndarray) -> None:
    """Draws a matrix of layers, with a tick at the start of blocks or units."""
    axes.imshow(values, interpolation='nearest', **style.UNIT_RANGE)
    ticks: dict[int, str] = {}
    previous_part = None
    for i, name in enumerate(names):
        match = _PART.match(str(name))
        part = match[0] if match is not None else None
        has_room = not ticks or (i - max(ticks)) * _MOST_TICKS >= len(names)
        if part is not None and part != previous_part and has_room:
            ticks[i] = part
        previous_part = part
    axes.set_xticks([*ticks], [*ticks.values()], rotation=90)
    axes.set_yticks([*ticks], [*ticks.values()])


FIGURE = Figure(__doc__, compute, draw, compares_models=True)
