"""The figures of the ViT paper: section 4.5, appendices D.7 and D.8."""

from typing import assert_never

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import attention, filters, positions
from vit_jax.base import Array, Float
from vit_jax.figures.networks import LeftOut, Network, Numbers, Study
from vit_jax.models.model import position_array
from vit_jax.models.positions import MULTIPLES
from vit_jax.models.resnet import standardised
from vit_jax.models.taps import Reduction

_SHOWN = 6  # images of the rollout
_COMPONENTS = 28  # of the filters, as in figure 7


def patch_filters(study: Study, network: Network) -> Numbers:
    """Principal components of the filters that see the image (figure 7, left): `components`
    (count p q c) from 0 to 1, the share of the variance that each `explained` (count), and what
    as many would explain of `noise`."""
    params, config = network.loaded.params, network.loaded.config
    if config.channels not in (1, 3):
        raise LeftOut(f'filters of {config.channels} channels have no colours')
    kernel: np.ndarray
    if config.backbone is None:
        kernel = np.asarray(params['embedding']['kernel'], np.float32)
    else:
        kernel = np.asarray(standardised(params['backbone']['conv_root']['kernel']))
    components, explained = filters.principal_components(kernel, _COMPONENTS)
    if not np.isfinite(explained).all():
        raise LeftOut('all filters are the same')
    noise = np.random.default_rng(0).normal(size=kernel.shape)
    _, of_noise = filters.principal_components(noise, _COMPONENTS)
    return {
        'components': np.asarray(filters.as_picture(components)),
        'explained': np.asarray(explained),
        'noise': np.asarray(of_noise).sum(),
    }


def position_embeddings(study: Study, network: Network) -> Numbers:
    """Cosine of each position embedding with all others (figure 7, centre): `similarity`
    (rows columns rows columns)."""
    config = network.vit
    if config.positions not in MULTIPLES:
        raise LeftOut('the network has no position embeddings')
    if config.positions_at == 'every_layer' and config.positions != 'sincos2d':
        raise LeftOut('each layer has position embeddings of its own')
    table = position_array(config, network.loaded.params)
    found = np.asarray(positions.similarity(table, config.grid, prefix=network.class_tokens))
    if not np.isfinite(found).all():
        raise LeftOut('a position embedding is zero: it has no direction')
    return {'similarity': found}


def attention_distance(study: Study, network: Network) -> Numbers:
    """Mean attention distance of each head (figure 7, right; D.7): `distance` (l k) in pixels, that
    of a `uniform` attention, and the `width` of the image."""
    grid, size = network.vit.grid, network.patch_size
    seen = study.over(network, {'attention/weights': distances_of(network)})
    tokens = network.vit.num_tokens
    patches = tokens - network.prefix
    return {
        'distance': np.mean([each['attention/weights'] for each in seen], axis=0),
        # Of all tokens alike: what goes to the class token has no distance.
        'uniform': np.array(attention.uniform_distance(grid, size) * patches / tokens),
        'width': np.array(network.vit.image_size[1]),
    }


def distances_of(network: Network) -> Reduction:
    """The mean distance (k) of the heads of a block, from its attention weights (b k n n)."""
    grid, size = network.vit.grid, network.patch_size

    def distances(weights: Float[Array, 'b k n n']) -> Float[Array, 'k']:
        return attention.mean_distance(weights[None], grid, size, prefix=network.prefix)[0]

    return distances


def rollout(study: Study, network: Network) -> Numbers:
    """What the output sees of the first images (figures 6 and 14; D.8): `images` (b h w 3) from 0
    to 1, and the `relevance` of each patch (b rows columns)."""
    pool, prefix, removed = network.vit.pool, network.prefix, network.vit.blocks_without_skips
    skips = [block not in removed for block in range(network.vit.depth)]

    @jax.jit
    def relevance(seen: dict[str, Array]) -> Float[Array, 'b m']:
        rolled = attention.rollout(seen['attention/weights'][:, :, None], skips=skips)
        if pool == 'map':
            pooling = seen['pool/attention/weights']  # of the patches alone
            output = jnp.einsum('bn,bnm->bm', pooling, rolled[:, prefix:])
        else:
            output = _of_the_output(network, rolled)
        return output[:, prefix:]

    wanted = {'attention/weights': lambda weights: weights.mean(axis=1)}
    if pool == 'map':
        wanted['pool/attention/weights'] = lambda weights: weights.mean(axis=(1, 2))
    found = [np.asarray(relevance(seen)) for seen in study.over(network, wanted, _SHOWN)]
    shown = np.concatenate(found)[:_SHOWN].reshape(-1, *network.vit.grid)
    return {'images': study.pictures(network, len(shown)), 'relevance': shown}


def _of_the_output(network: Network, rows: Float[Array, 'b n m']) -> Float[Array, 'b m']:
    """Of an attention's rows, one for each token, the mean of those that the head reads."""
    prefix = network.prefix
    match network.vit.pool:
        case 'cls':
            return rows[:, 0]
        case 'cls_dist':
            return rows[:, :2].mean(axis=1)
        case 'cls_gap':
            return (rows[:, 0] + rows[:, prefix:].mean(axis=1)) / 2
        case 'gap' | 'map':
            return rows[:, prefix:].mean(axis=1)
        case 'none':
            return rows.mean(axis=1)
        case other:
            assert_never(other)


def attention_maps(study: Study, network: Network) -> Numbers:
    """Where each head of each block looks in the first image: `image` (h w 3) from 0 to 1, and
    `maps` (l k rows columns). Of the tokens that the head reads; below the blocks those of
    attention pooling."""
    pool, prefix = network.vit.pool, network.prefix

    def of_queries(weights: Float[Array, 'b k n n']) -> Float[Array, 'k m']:
        return _of_the_output(network, weights[0])[:, prefix:]

    wanted: dict[str, Reduction] = {'attention/weights': of_queries}
    if pool == 'map':
        wanted['pool/attention/weights'] = lambda weights: weights[0, :, 0]
    (seen,) = study.over(network, wanted, most=1)
    maps = seen['attention/weights']
    if pool == 'map':
        maps = np.concatenate([maps, seen['pool/attention/weights'][None]])
    (image,) = study.pictures(network, 1)
    names = [str(block) for block in range(network.vit.depth)] + ['pool'] * (pool == 'map')
    return {
        'image': image,
        'maps': maps.reshape(*maps.shape[:2], *network.vit.grid),
        'layers': np.array(names),
    }
