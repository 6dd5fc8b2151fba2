"""How a network passes its input on: skip connections, and what each layer sees of the image."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis.receptive_field import receptive_fields
from vit_jax.analysis.residual import cosine, norm_ratio
from vit_jax.base import Array, Float, Params
from vit_jax.figures import layers
from vit_jax.figures.layers import Layer
from vit_jax.figures.networks import LeftOut, Network, Numbers, Study
from vit_jax.models import ResNetConfig, build

_LAYERS, _IMAGES, _CHANNELS = 6, 32, 2  # whose receptive fields are drawn, and made of what


def residuals(study: Study, network: Network) -> Numbers:
    """Norms of skip connection and branch, and the cosine of branch and sum, by block and kind of
    token, or by unit (figures 7, E.2): `ratio` and `cosine` (kinds l), `kinds`, `layers` (l)."""
    config = network.loaded.config
    if isinstance(config, ResNetConfig):
        names = _units(config)
        taps = {f'{unit}/residual': 'units' for unit in names}
    else:
        names = [f'block{block}' for block in range(config.depth)]
        taps = {'attention/residual': 'attention', 'mlp/residual': 'MLP'}

    def measures(pair: tuple[Array, Array]) -> Float[Array, 'kinds 2']:
        skip, branch = pair
        both = jnp.stack([norm_ratio(skip, branch), cosine(branch, skip + branch)])
        both = both.reshape(2, len(skip), -1)  # places of a feature map as tokens
        prefix, before = 0, 0
        if not isinstance(config, ResNetConfig):
            prefix, before = network.prefix, network.class_tokens
        parts = [both[..., prefix:]] + ([both[..., :before]] if before else [])
        return jnp.stack([part.mean(axis=(1, 2)) for part in parts])

    seen = list(study.over(network, dict.fromkeys(taps, measures)))
    means = {tap: np.mean([each[tap] for each in seen], axis=0) for tap in taps}
    if isinstance(config, ResNetConfig):
        found = np.stack([means[tap][0] for tap in taps])[None]  # kinds l 2
        kinds = ['units']
    else:
        found = np.concatenate([means[tap].swapaxes(0, 1) for tap in taps])
        of = {
            0: ['tokens'],
            1: ['patches', 'class token'],
            2: ['patches', 'class and distillation token'],
        }[network.class_tokens]
        kinds = [f'{branch}, {token}' for branch in taps.values() for token in of]
    values = {'ratio': found[..., 0], 'cosine': found[..., 1]}
    return values | {'kinds': np.array(kinds), 'layers': np.array(names)}


def fields(study: Study, network: Network) -> Numbers:
    """Effective receptive fields in the middle of some layers (figure 6, appendix C.4): `before`
    and `after` the skip connection is added (l h w), the names of the `layers` (l)."""
    config = network.loaded.config
    if isinstance(config, ResNetConfig):
        units = _evenly(_units(config))
        before = [Layer(f'{unit}/norm3') for unit in units]
        after = [Layer(f'{unit}/out') for unit in units]
        found = [[_fields(study, network, [each])[0] for each in part] for part in (before, after)]
        fields, names = np.array(found), units
    else:
        blocks = _evenly(range(config.depth))
        before = [Layer('attention/out', block) for block in blocks]
        after = [Layer('tokens', block) for block in blocks]
        fields = np.stack([_fields(study, network, part) for part in (before, after)])
        names = [f'block{block}' for block in blocks]
    return {'before': fields[0], 'after': fields[1], 'layers': np.array(names)}


def _fields(study: Study, network: Network, chosen: Sequence[Layer]) -> Float[np.ndarray, 'l h w']:
    """The fields of layers that have as many channels."""
    config = network.loaded.config
    taps = layers.wanted(chosen, _centre_of(network))
    # The backward pass computes blocks anew: their activations would not fit.
    compute = dataclasses.replace(network.loaded.compute, remat='block')
    model = build(config, compute=compute)

    def centres(params: Params, images: Float[Array, 'b h w c']) -> Float[Array, 'l b d']:
        seen = model.capture(params, images, taps)[1]
        return layers.stacked(seen, chosen)

    image = jax.ShapeDtypeStruct((1, *config.image_size, config.channels), np.float32)
    width = jax.eval_shape(centres, network.params, image).shape[-1]

    def of_batch(params: Params, images: Float[Array, 'b h w c']) -> Float[Array, 'l h w']:
        images = images[:_IMAGES]
        channels = jax.random.randint(jax.random.key(0), (len(images), _CHANNELS), 0, width)
        return receptive_fields(lambda x: centres(params, x), images, channels)

    found = [*map(network.compiled(of_batch), study.batches(network, _IMAGES))]
    return np.mean(found, axis=0)


def _centre_of(network: Network) -> Callable[[Array], Float[Array, 'b d']]:
    """What is in the middle of a feature map, or of the grid of tokens."""
    if isinstance(network.loaded.config, ResNetConfig):
        return lambda x: x[:, x.shape[1] // 2, x.shape[2] // 2]
    rows, columns = network.vit.grid
    middle = network.prefix + rows // 2 * columns + columns // 2
    return lambda x: x[:, middle]


def _units(config: ResNetConfig) -> list[str]:
    if not config.backbone.blocks:
        raise LeftOut('the ResNet has no units: it is the root alone')
    return layers.units(config.backbone)


def _evenly(values: Sequence[Any]) -> list[Any]:
    """The first, the last, and some between them."""
    kept = np.unique(np.linspace(0, len(values) - 1, min(_LAYERS, len(values))).round().astype(int))
    return [values[i] for i in kept.tolist()]
