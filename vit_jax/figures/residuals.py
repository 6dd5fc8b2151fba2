"""Skip connections and branches (Raghu et al., section 6, figure 7, appendix E.2).

Left: the norm of the skip connection divided by the norm of the branch that is added to it,
averaged over tokens and images; above 1, the skip connection dominates. Right: the cosine of the
branch and the sum; near 1, the branch determines the output. In the paper, the class token mostly
passes through the skip connections in the first half and is changed in the second half; for patches
it is the opposite.
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.analysis.residual import cosine, norm_ratio
from vit_jax.base import Array, Float, UserError
from vit_jax.figures import layers, style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models import ResNetConfig


def compute(images: Images, model: PlacedModel) -> Numbers:
    """Returns `ratio` and `cosine` (kinds l), the `kinds`, and the names of the `layers` (l)."""
    config = model.loaded.config
    prefix = 0
    class_tokens = 0
    if isinstance(config, ResNetConfig):
        names = layers.units(config.backbone)
        if not names:
            raise UserError('the ResNet has no residual units, only the root')
        taps = [f'{unit}/residual' for unit in names]
        kinds = ['units']
    else:
        names = [f'block{block}' for block in range(config.depth)]
        taps = ['attention/residual', 'mlp/residual']
        prefix = config.num_prefix_tokens
        class_tokens = config.num_class_tokens
        tokens = ['patches', 'class token'] if class_tokens else ['tokens']
        kinds = [f'{branch}, {token}' for branch in ('attention', 'MLP') for token in tokens]

    def measure(pair: tuple[Array, Array]) -> Float[Array, 'kinds 2']:
        skip, branch = pair
        both = jnp.stack([norm_ratio(skip, branch), cosine(branch, skip + branch)])
        both = both.reshape(2, len(skip), -1)  # places of a feature map as tokens
        groups = [both[..., prefix:]]
        if class_tokens:
            groups.append(both[..., :class_tokens])
        return jnp.stack([group.mean(axis=(1, 2)) for group in groups])

    captures = list(images.capture(model, dict.fromkeys(taps, measure)))
    means = [np.mean([captured[tap] for captured in captures], axis=0) for tap in taps]
    if isinstance(config, ResNetConfig):
        means = [np.stack(means)]
    pairs = np.concatenate(means, axis=1).swapaxes(0, 1)  # kinds l 2
    return {
        'ratio': pairs[..., 0],
        'cosine': pairs[..., 1],
        'kinds': np.array(kinds),
        'layers': np.array(names),
    }


def draw(numbers: Numbers) -> style.Drawing:
    """Draws a line per kind of branch and token."""
    drawing = style.canvas(11.0, 4.6, 'Skip connections and branches')
    left, right = drawing.subplots(1, 2)
    for place, kind in enumerate(numbers['kinds'].tolist()):
        left.plot(numbers['ratio'][place], **style.line_style(place, kind))
        right.plot(numbers['cosine'][place], **style.line_style(place, kind))
    for axes in left, right:
        style.label_depth_axis(axes, 'unit' if 'units' in numbers['kinds'] else 'block')
    style.use_log_scale(left)
    left.set_ylabel('norm of the skip connection / norm of the branch')
    right.set_ylabel('cosine of the branch and the output')
    style.add_legend(drawing, left)
    return drawing


FIGURE = Figure(__doc__, compute, draw)
