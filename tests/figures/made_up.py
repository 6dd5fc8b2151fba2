"""Made-up numbers for every picture, of any size: what the figures draw, without a network."""

import numpy as np

LONG = '/data/experiments of 2026/vit $b$_16 <trained> on & off/checkpoints/000120000'


def smooth(rng, *shape):
    """Bumps in the last two axes, in 0..1."""
    *lead, rows, columns = shape
    y, x = np.mgrid[0 : 1 : rows * 1j, 0 : 1 : columns * 1j]
    centre = rng.random((*lead, 2, 1, 1))
    distance = (y - centre[..., 0, :, :]) ** 2 + (x - centre[..., 1, :, :]) ** 2
    return np.exp(-8 * distance)


def photos(rng, count, height, width):
    return np.stack([smooth(rng, count, height, width) for _ in range(3)], axis=-1)


def layer_names(blocks):
    """Those of a ViT, as `figures/layers.py` has them."""
    parts = 'norm1', 'attention/out', 'norm2', 'mlp/hidden', 'mlp/out', 'tokens'
    return ['embedding', *(f'block{i}/{part}' for i in range(blocks) for part in parts)]


def unit_names(units):
    """Those of a ResNet."""
    parts = 'conv1', 'norm1', 'conv2', 'norm2', 'conv3', 'norm3', 'out'
    return [f'stage{1 + i // 4}/unit{1 + i % 4}/{part}' for i in range(units) for part in parts]


def arguments(*, blocks=12, heads=12, grid=(14, 14), patch=16, networks=2, name=LONG, channels=3):
    """By name of the picture, what it is drawn from."""
    rng = np.random.default_rng(0)
    count = min(28, channels * patch**2)
    image = photos(rng, 8, grid[0] * patch, grid[1] * patch)
    tokens = np.argwhere(np.ones(grid))[:: max(1, grid[0] * grid[1] // 8)]
    names = [f'{name}-{i}' for i in range(networks)]
    layers = layer_names(blocks)
    depth = np.linspace(0, 1, networks * len(layers))
    similarity = np.exp(-3 * np.abs(depth[:, None] - depth))
    kinds = ['attention, class token', 'attention, patches', 'MLP, class token', 'MLP, patches']
    curve = np.linspace(0.3, 0.9, blocks)
    maps = smooth(rng, *grid, *grid)
    return {
        'filters': (rng.random((count, patch, patch, channels)), rng.random(count) / count),
        'positions': (2 * maps - 1,),
        'attention_distance': (
            90 * rng.random((blocks, heads)) * np.linspace(0.3, 1, blocks)[:, None],
            {'uniform': 84.5, 'width': grid[1] * patch},
        ),
        'rollout': (
            image,
            smooth(rng, 8, *grid),
            'Where the class token looks, through all blocks',
        ),
        'attention_maps': (image[0], smooth(rng, blocks, heads, *grid), [*map(str, range(blocks))]),
        'cka': (
            similarity,
            np.array(layers * networks),
            np.repeat(names, len(layers)),
            {'removed': [len(layers) // 2]},
        ),
        'head_subsets': (
            rng.random((heads, networks + 3)),
            90 * rng.random(heads),
            unit_names(blocks + 3)[: networks + 3],
        ),
        'residuals': (
            {kind: 10 ** (curve * i) for i, kind in enumerate(kinds)},
            {kind: curve - 0.2 * i for i, kind in enumerate(kinds)},
        ),
        'receptive_fields': (
            smooth(rng, blocks, *image.shape[1:3]),
            smooth(rng, blocks, *image.shape[1:3]),
            [f'block{i}' for i in range(blocks)],
        ),
        'localisation': (
            smooth(rng, len(tokens) + 1, *grid) * 0.6,
            np.concatenate([[[-1, -1]], tokens]),
        ),
        'probes': (
            curve - 0.1 * np.arange(networks)[:, None],
            names,
            {'deviations': np.full((networks, blocks), 0.01)},
        ),
        'training_data': (rng.random((networks, blocks)), names, name),
    }


def draw(picture, **sizes):
    from vit_jax.figures import drawing

    *values, options = (*arguments(**sizes)[picture], {})
    if values and isinstance(values[-1], dict) and picture != 'residuals':
        *values, options = values
    return getattr(drawing, picture)(*values, **options)
