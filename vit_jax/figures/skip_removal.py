"""Without the skip connections of a block (Raghu et al., section 6, figure 8).

Networks that were trained without the two skip connections of a block, and last the same network
with all of them. Skip connections pass the features of the first layers to the last. In the paper
layers before the block are dissimilar to layers after it.
"""

import dataclasses

import numpy as np

from vit_jax.base import UserError
from vit_jax.checkpoints.transfer import headless
from vit_jax.figures import cka, layers, style
from vit_jax.figures.figure import Figure, Images, Network, Numbers
from vit_jax.models import ModelConfig, ViTConfig


def compute(images: Images, *networks: Network) -> Numbers:
    """Compares networks without the skip connections of some blocks with one that has all.

    Returns `cka` (p t t) of each, the whole network last; `names` (p); the names of the `layers`
    (t); and which layers (p t) are in a block whose skip connections are `removed`.
    """
    whole = [network for network in networks if not _removed(network)]
    cut = [network for network in networks if _removed(network)]
    pairs = [(one, other) for other in whole for one in cut if _body(one) == _body(other)]
    if not pairs:
        raise UserError(
            'needs a network that was trained with config.model.blocks_without_skips, and one of '
            'the same sizes that was trained without'
        )
    reference = pairs[0][1]
    compared = [one for one, other in pairs if other is reference] + [reference]
    chosen = layers.all_layers(reference.loaded.config)
    # The first norm of a block is before its skip connections.
    blocks = [None if layer.tap == 'norm1' else layer.block for layer in chosen]
    return {
        'cka': np.stack([cka.compute(images, network)['cka'] for network in compared]),
        'names': np.array([network.name for network in compared]),
        'layers': np.array([str(layer) for layer in chosen]),
        'removed': np.array([[block in _removed(one) for block in blocks] for one in compared]),
    }


def _removed(network: Network) -> tuple[int, ...]:
    return getattr(network.loaded.config, 'blocks_without_skips', ())


def _body(network: Network) -> ModelConfig:
    """Returns the architecture without its head, as if all blocks had skip connections."""
    body = headless(network.loaded.config)
    return (
        dataclasses.replace(body, blocks_without_skips=()) if isinstance(body, ViTConfig) else body
    )


@style.styled
def draw(numbers: Numbers) -> style.Drawing:
    """Draws the matrices side by side, with dashed lines around the blocks without skips."""
    count = len(numbers['names'])
    title = 'CKA of all layers; between the dashed lines, a block without skip connections'
    drawing = style.canvas(6.0 * count, 6.5, title)
    panels = drawing.subplots(1, count)
    for axes, values, name, removed in zip(
        panels, numbers['cka'], numbers['names'].tolist(), numbers['removed'], strict=True
    ):
        cka.draw_matrix(axes, values, numbers['layers'])
        axes.set_title(style.shorten(name, 48))
        for edge in np.flatnonzero(np.diff(removed, prepend=False)):
            axes.axvline(edge - 0.5, color=style.COLORS[1], linestyle='--')
            axes.axhline(edge - 0.5, color=style.COLORS[1], linestyle='--')
    style.colorbar(panels, 'CKA')
    return drawing


def finding(numbers: Numbers) -> str:
    """Returns the mean CKA across the first removed block and on the same side of it."""
    cut = int(numbers['removed'].any(axis=0).argmax())
    before = np.arange(len(numbers['layers'])) < cut
    same = np.equal.outer(before, before)
    others = ~np.eye(len(before), dtype=bool)
    means = [
        f'{name} {np.nanmean(values[~same]):.2f} ({np.nanmean(values[same & others]):.2f})'
        for name, values in zip(numbers['names'].tolist(), numbers['cka'], strict=True)
    ]
    where = numbers['layers'][cut]
    return f'Mean CKA across {where} (and of layers on the same side): {", ".join(means)}.'


FIGURE = Figure(__doc__, compute, draw, finding, of_all=True)
