"""Removed skip connections (Raghu et al., section 6, figure 8).

Similarity of layers (CKA) in models that were trained without the two skip connections of a block;
the last model has all skip connections. Skip connections pass features of the first layers to the
last layers. In the paper, layers before the block are dissimilar to layers after it.
"""

import dataclasses

import numpy as np

from vit_jax.base import UserError
from vit_jax.checkpoints.transfer import remove_head
from vit_jax.figures import cka, layers, style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models import ModelConfig, ViTConfig


def compute(images: Images, *models: PlacedModel) -> Numbers:
    """Compares models without the skip connections of some blocks with a model that has all.

    Returns `cka` (p t t) of each model, the complete model last; `names` (p) of the models; names
    of the `layers` (t); and `removed` (p t), which marks layers in blocks without skip connections.
    """
    complete = [model for model in models if not _removed(model)]
    cut = [model for model in models if _removed(model)]
    pairs = [
        (model, reference)
        for reference in complete
        for model in cut
        if _body(model) == _body(reference)
    ]
    if not pairs:
        raise UserError(
            'needs a model that was trained with config.model.blocks_without_skips, and a model of '
            'the same architecture that has all skip connections'
        )
    _, reference = pairs[0]
    compared = [model for model, other in pairs if other is reference]
    compared.append(reference)
    chosen = layers.all_layers(reference.loaded.config)
    # The first norm of a block is before its skip connections.
    blocks = [None if layer.tap == 'norm1' else layer.block for layer in chosen]
    return {
        'cka': np.stack([cka.compute(images, model)['cka'] for model in compared]),
        'names': np.array([model.name for model in compared]),
        'layers': np.array([str(layer) for layer in chosen]),
        'removed': np.array([[block in _removed(model) for block in blocks] for model in compared]),
    }


def _removed(model: PlacedModel) -> tuple[int, ...]:
    return getattr(model.loaded.config, 'blocks_without_skips', ())


def _body(model: PlacedModel) -> ModelConfig:
    """Returns the architecture without head, with skip connections in all blocks."""
    body = remove_head(model.loaded.config)
    if isinstance(body, ViTConfig):
        return dataclasses.replace(body, blocks_without_skips=())
    return body


def draw(numbers: Numbers) -> style.Drawing:
    """Draws the matrices side by side, with dashed lines around blocks without skip connections."""
    count = len(numbers['names'])
    title = 'CKA of all layers; the dashed lines enclose a block without skip connections'
    drawing = style.canvas(6.0 * count, 6.5, title)
    panels = drawing.subplots(1, count)
    for axes, similarity, name, removed in zip(
        panels, numbers['cka'], numbers['names'].tolist(), numbers['removed'], strict=True
    ):
        cka.draw_matrix(axes, similarity, numbers['layers'])
        axes.set_title(style.shorten(name, 48))
        for edge in np.flatnonzero(np.diff(removed, prepend=False)):
            axes.axvline(edge - 0.5, color=style.COLORS[1], linestyle='--')
            axes.axhline(edge - 0.5, color=style.COLORS[1], linestyle='--')
    style.add_colorbar(panels, 'CKA')
    return drawing


def finding(numbers: Numbers) -> str:
    """Returns the mean CKA of layers on different sides of the first cut block, and on one side."""
    cut = int(numbers['removed'].any(axis=0).argmax())
    is_before = np.arange(len(numbers['layers'])) < cut
    same_side = np.equal.outer(is_before, is_before)
    same_layer = np.eye(len(is_before), dtype=bool)
    means = []
    for name, similarity in zip(numbers['names'].tolist(), numbers['cka'], strict=True):
        across = np.nanmean(similarity[~same_side])
        within = np.nanmean(similarity[same_side & ~same_layer])
        means.append(f'{name} {across:.2f} ({within:.2f})')
    layer = numbers['layers'][cut]
    return f'Mean CKA of layers before {layer} with the rest (within a part): {", ".join(means)}.'


FIGURE = Figure(__doc__, compute, draw, finding, compares_models=True)
