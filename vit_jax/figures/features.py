"""Features of patches (DINOv2, figure 1; DINOv3).

The first three principal components of the patches are drawn as red, green and blue, each scaled to
its range in the drawn photos. They are fitted to the patches of at most 64 images together, so
similar colors mean similar features in all photos. The similarity is the cosine of each patch and
the framed patch (--patch). Features are the tokens after the final norm, or after the last block if
the model normalizes only the pooled features. In good models, equal parts of objects have equal
colors in all photos, and the framed patch is similar to its own object only.
"""

import numpy as np

from vit_jax.analysis import residual
from vit_jax.figures import layers, style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.figures.filters import principal_components, to_unit_range

_FITTED = 64  # images for the components
_SHOWN = 6  # drawn images
_PAIRS = 2  # drawn images per row


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Computes principal components and similarities of the patches.

    Returns the first `images` (b h w 3) in [0, 1], their `components` (b rows columns 3) in [0, 1],
    the fractions of the variance `explained` (k), the cosine `similarity` (b rows columns) to the
    chosen patch, and the row and column of that `patch` (2).
    """
    prefix = model.vit.num_prefix_tokens
    rows, columns = model.vit.grid
    last = layers.all_layers(model.vit)[-1:]
    wanted = layers.same_reduction(last, lambda tokens: tokens[:, prefix:].astype(np.float32))
    captures = images.capture(model, wanted, _FITTED)
    batches = [layers.select_layers(captured, last)[0] for captured in captures]
    patches = np.concatenate(batches)[:_FITTED]
    axes, explained = principal_components(patches.reshape(-1, patches.shape[-1]).T, 3)
    weights = np.pad(axes, ((0, 3 - len(axes)), (0, 0)))  # zeros if there are fewer than three
    shown = patches[:_SHOWN]
    maps = np.einsum('kd,bnd->kbn', weights, shown).reshape(3, len(shown), rows, columns)
    x, y = images.point
    row = min(int(y * rows), rows - 1)
    column = min(int(x * columns), columns - 1)
    chosen = row * columns + column
    similarity = residual.cosine(shown, shown[:, chosen : chosen + 1])
    return {
        'images': images.first_images(model, len(shown)),
        'components': np.asarray(to_unit_range(maps)).transpose(1, 2, 3, 0),
        'explained': np.asarray(explained),
        'similarity': np.asarray(similarity).reshape(-1, rows, columns),
        'patch': np.array((row, column)),
    }


def draw(numbers: Numbers) -> style.Drawing:
    """Draws each image with its components and its similarities."""
    from matplotlib.patches import Rectangle

    images = numbers['images']
    similarity = numbers['similarity']
    height, width = images.shape[1:3]
    rows, columns = similarity.shape[1:]
    pairs = min(_PAIRS, len(images))
    share = np.nansum(numbers['explained'])
    title = (
        f'Patch features: three principal components ({share:.0%} of the variance), '
        'and similarity to the framed patch'
    )
    drawing, axes = style.panels(
        -(-len(images) // pairs), 3 * pairs, 1.6, 1.6 * height / width + 0.1, title
    )
    low = float(np.nanmin(similarity, initial=1))
    for panel, name in zip(axes[0], ('photo', 'components', 'similarity') * pairs, strict=True):
        panel.set_title(name, pad=3)
    how = {'extent': (0, width, height, 0), 'cmap': style.SEQUENTIAL, 'vmin': low, 'vmax': 1}
    patch_height, patch_width = height / rows, width / columns
    row, column = numbers['patch']
    corner = column * patch_width, row * patch_height
    pictures_of_images = zip(images, numbers['components'], similarity, strict=True)
    for panels, pictures in zip(axes.reshape(-1, 3), pictures_of_images, strict=False):
        for panel, picture in zip(panels, pictures, strict=True):
            panel.imshow(picture, **how)
        frame = Rectangle(
            corner, patch_width, patch_height, fill=False, edgecolor='red', linewidth=2
        )
        panels[0].add_patch(frame)
    style.add_colorbar(axes, 'cosine similarity', low=low)
    return drawing


FIGURE = Figure(__doc__, compute, draw)
