"""Norms of tokens ("Vision Transformers Need Registers", figures 3, 4 and 7).

The plot shows the norms of the tokens after each block, over all images. A patch is an outlier if
its norm is more than 4 times the median of the patches of its block; the paper counts norms above
150 in the last block of DINOv2-g. The outliers in the last block are red in the photos. In the
paper, large models without registers have outliers in the background from the middle blocks on; in
models with registers, the registers have large norms and the patches do not.
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.base import UserError
from vit_jax.figures import style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models import ViTConfig

_FACTOR = 4  # outlier limit, in medians
_SHOWN = 4  # number of photos
_KINDS = 'patches', 'class token', 'registers'
_LINES = {'median': '-', '99 %': '--', 'maximum': ':'}


def compute(images: Images, *models: PlacedModel) -> Numbers:
    """Measures the norms of the tokens of each ViT.

    Returns the `names` of the ViTs. Keys of ViT number i end with i: `patches`, `class token` and
    `registers` (3 l) have the median, 99th percentile and maximum of the norms, `outliers`
    (b rows columns) marks patches of the last block, `photos` (s h w 3) are the first images.
    """
    vits = [model for model in models if isinstance(model.loaded.config, ViTConfig)]
    if not vits:
        raise UserError('needs a ViT: a ResNet has no tokens')
    numbers = {'names': np.array([model.name for model in vits])}
    wanted = {'tokens': lambda x: jnp.linalg.norm(x.astype(jnp.float32), axis=-1)}
    for i, model in enumerate(vits):
        ends = model.vit.num_class_tokens, model.vit.num_prefix_tokens
        batches = [captured['tokens'] for captured in images.capture(model, wanted)]
        cls, registers, patches = np.split(np.concatenate(batches, axis=1), ends, axis=2)  # l b n
        for kind, norms in zip(_KINDS, (patches, cls, registers), strict=True):
            if norms.size:
                numbers[f'{kind}{i}'] = np.quantile(norms, (0.5, 0.99, 1), axis=(1, 2))
        outliers = patches[-1] > _FACTOR * np.median(patches[-1])
        numbers[f'outliers{i}'] = outliers.reshape(-1, *model.vit.grid)
        numbers[f'photos{i}'] = images.first_images(model, min(_SHOWN, len(outliers)))
    return numbers


def draw(numbers: Numbers) -> style.Drawing:
    """Draws the norms over the depth, and photos with outliers, of each model."""
    from matplotlib.colors import to_rgba

    names = numbers['names'].tolist()
    title = 'Norms of tokens after each block, and outliers of the last block'
    drawing = style.canvas(max(6.4, 4.4 * len(names)), 6.0, title)
    panels = drawing.subplots(2, len(names), squeeze=False, sharey='row', height_ratios=(3, 1))
    for i, (upper, lower) in enumerate(panels.T):
        for kind, color in zip(_KINDS, style.COLORS, strict=False):
            for line, norms in zip(_LINES, numbers.get(f'{kind}{i}', ()), strict=False):
                upper.plot(norms, f'.{_LINES[line]}', color=color, label=f'{kind}: {line}')
        limit = _FACTOR * numbers[f'patches{i}'][0]
        upper.plot(limit, color='0.5', linestyle='-.', label='outlier limit')
        upper.set(title=style.shorten(names[i], 40), ylabel='norm')
        style.label_depth_axis(upper)
        style.use_log_scale(upper)
        shown = numbers[f'photos{i}']
        photos = np.concatenate(shown, axis=1)
        marked = np.concatenate(numbers[f'outliers{i}'][: len(shown)], axis=1)
        for picture in photos, marked[..., None] * np.array(to_rgba('red')):
            lower.imshow(picture, extent=(0, photos.shape[1] / len(photos), 1, 0))
        lower.set_axis_off()
    style.add_legend(drawing, max(panels[0], key=lambda axes: len(axes.lines)))
    return drawing


def finding(numbers: Numbers) -> str:
    """Returns the share of outliers in the last block of each model."""
    names = enumerate(numbers['names'].tolist())
    shares = [f'{name} {numbers[f"outliers{i}"].mean():.2%}' for i, name in names]
    return f'Outliers among the patches of the last block: {", ".join(shares)}.'


FIGURE = Figure(__doc__, compute, draw, finding, compares_models=True)
