"""Effect of the amount of training data (Raghu et al., section 8).

The similarity (CKA) of each layer of the other models to the same layer of the first model. Use it
with models of one architecture that were trained on subsets of the same data. First layers are
learned from little data; last layers need more.
"""

import numpy as np

from vit_jax.base import UserError
from vit_jax.checkpoints.transfer import remove_head
from vit_jax.figures import cka, layers, style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel


def compute(images: Images, *models: PlacedModel) -> Numbers:
    """Compares each layer of the models with the same layer of the first model, the `reference`.

    Returns `cka` (m l), and the names of the other models, `names` (m), and of the `layers` (l).
    """
    first, *others = models
    body = remove_head(first.loaded.config)
    compared = [model for model in others if remove_head(model.loaded.config) == body]
    if not compared:
        raise UserError(
            f'needs another model with the architecture of {first.name}, the first CHECKPOINT'
        )
    numbers = cka.compare_layers(images, [first, *compared], layers.output_layers)
    count = len(layers.output_layers(first.loaded.config))
    blocks = numbers['cka'][:count].reshape(count, -1, count)
    return {
        'cka': np.einsum('lml->ml', blocks)[1:],
        'names': np.array([model.name for model in compared]),
        'layers': numbers['layers'][:count],
        'reference': np.array(first.name),
    }


def draw(numbers: Numbers) -> style.Drawing:
    """Draws a line per model."""
    reference = style.shorten(str(numbers['reference']), 40)
    drawing = style.canvas(8.0, 4.6, f'Similarity of each layer to the same layer of {reference}')
    axes = drawing.subplots()
    for place, name in enumerate(numbers['names'].tolist()):
        axes.plot(numbers['cka'][place], **style.line_style(place, name))
    axes.set(ylabel='CKA', ylim=(0, 1.02))
    style.label_depth_axis(axes, 'layer')
    style.add_legend(drawing, axes)
    return drawing


FIGURE = Figure(__doc__, compute, draw, compares_models=True)
