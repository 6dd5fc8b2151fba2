"""Heads compared with a ResNet (Raghu et al., section 5, figure 5).

The heads of the first block are sorted by attention distance. Each window of a third of the sorted
heads is compared (CKA) with the lower layers of the ResNet, whose convolutions are local. Lines
that are higher on the left mean that local heads compute features similar to convolutions.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis.cka import Terms, centered_gram
from vit_jax.base import Array, Float, Int, UserError
from vit_jax.figures import cka, layers, style
from vit_jax.figures.attention_distance import mean_distance
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models import ResNetConfig, ViTConfig

_MOST_LAYERS = 8


def compute(images: Images, *models: PlacedModel) -> Numbers:
    """Compares subsets of the heads of block 0 with the lower layers of a ResNet.

    Returns `cka` (s l), the mean `distance` (s) in pixels, and the names of the `layers` (l).
    """
    vits = [model for model in models if isinstance(model.loaded.config, ViTConfig)]
    vits.sort(key=lambda model: model.loaded.config.backbone is not None)  # ViTs before hybrids
    resnets = [model for model in models if isinstance(model.loaded.config, ResNetConfig)]
    if not vits or not resnets:
        raise UserError('needs a ViT and a ResNet')
    vit = vits[0]
    resnet = resnets[0]
    lower = layers.output_layers(resnet.loaded.config)
    lower = lower[: max(1, len(lower) // 2)][:_MOST_LAYERS]

    def grams_of_heads(mixed: Float[Array, 'b n k e']) -> Float[Array, 'k b b']:
        return jax.vmap(centered_gram, in_axes=2)(mixed)

    wanted = {'attention/weights': mean_distance(vit), 'attention/heads': grams_of_heads}
    captures = list(images.capture(vit, wanted))
    distances = [captured['attention/weights'][0] for captured in captures]  # of block 0
    head_grams = [captured['attention/heads'][0] for captured in captures]
    distance = np.mean(distances, axis=0)
    subsets = _windows(distance)
    resnet_grams = cka.gram_matrices(resnet, lower)

    def terms() -> Iterator[Terms]:
        for vit_grams, batch in zip(head_grams, images.batches(resnet), strict=True):
            # The Gram matrix of concatenated heads is the sum of their Gram matrices.
            subset_grams = jnp.einsum('sk,kij->sij', subsets, vit_grams, precision='highest')
            yield cka.compute_terms(subset_grams, resnet_grams(batch))

    return {
        'cka': cka.compute_cka(terms()),
        'distance': subsets @ distance / subsets.sum(axis=1),
        'layers': np.array([str(layer) for layer in lower]),
    }


def _windows(distance: Float[np.ndarray, 'k']) -> Int[np.ndarray, 's k']:
    """Marks with 1 the heads of each window: a third of all heads, sorted by distance."""
    order = np.argsort(distance)
    heads = np.arange(len(order))
    size = max(1, len(order) // 3)
    starts = range(len(order) - size + 1)
    return np.array([np.isin(heads, order[start : start + size]) for start in starts]).astype(int)


def draw(numbers: Numbers) -> style.Drawing:
    """Draws a line per layer of the ResNet."""
    title = 'Heads by attention distance, compared with the lower layers of a ResNet'
    drawing = style.canvas(8.0, 4.6, title)
    axes = drawing.subplots()
    for place, name in enumerate(numbers['layers'].tolist()):
        axes.plot(numbers['distance'], numbers['cka'][:, place], **style.line_style(place, name))
    axes.set(xlabel='mean attention distance of the heads (pixels)', ylabel='CKA', ylim=(0, 1.02))
    style.add_legend(drawing, axes)
    return drawing


FIGURE = Figure(__doc__, compute, draw, compares_models=True)
