"""What layers have in common: the figures of Raghu et al. that are made of CKA."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import cka
from vit_jax.analysis.localisation import localisation as terms_of_tokens
from vit_jax.analysis.localisation import patches
from vit_jax.base import Array, Batch, Float, Int, Params, UserError
from vit_jax.checkpoints.transfer import headless
from vit_jax.figures import layers
from vit_jax.figures.layers import Layer
from vit_jax.figures.networks import LeftOut, Network, Numbers, Study
from vit_jax.figures.vit_paper import distances_of
from vit_jax.models import ModelConfig, ResNetConfig, ViTConfig

FEWEST = 4  # images of a minibatch: the unbiased estimator of HSIC needs as many
_LINES = 8  # lower layers of a ResNet that heads are compared with
_TILES = 4  # tokens along a side of the grid whose localisation is drawn
_terms = jax.jit(cka.terms)


def similarity(
    study: Study, chosen: Callable[[ModelConfig], list[Layer]] = layers.every
) -> Numbers:
    """CKA of all pairs of layers of all networks (figures 1 and 2): `cka` (t t), and the names of
    the `layers` (t) and of their `networks` (t)."""
    study.require_images(FEWEST, 'CKA')
    of_each = [chosen(network.loaded.config) for network in study.networks]
    grams = [_grams(n, which) for n, which in zip(study.networks, of_each, strict=True)]

    def terms() -> Iterator[cka.Terms]:
        for batches in zip(*map(study.batches, study.networks), strict=True):
            every = [gram(batch) for gram, batch in zip(grams, batches, strict=True)]
            total = jnp.concatenate(every)
            yield _terms(total, total)

    names = [n.name for n, which in zip(study.networks, of_each, strict=True) for _ in which]
    return {
        'cka': _ratio(terms()),
        'layers': np.array([str(layer) for which in of_each for layer in which]),
        'networks': np.array(names),
    }


def _grams(network: Network, chosen: Sequence[Layer]) -> Callable[[Batch], Float[Array, 't n n']]:
    """The centred Gram matrices of these layers, computed within their blocks: the layers are
    never in memory together."""
    seen = network.seen(layers.wanted(chosen, cka.centred_gram))
    return lambda batch: layers.stacked(seen(batch), chosen)


def _ratio(terms: Iterable[cka.Terms]) -> Float[np.ndarray, 't s']:
    """CKA of terms that are summed over batches, in float64."""
    host = ([np.asarray(term, np.float64) for term in batch] for batch in terms)
    total = functools.reduce(lambda one, other: [*map(np.add, one, other)], host)
    return np.asarray(cka.ratio(*total))


def training_data(study: Study) -> Numbers:
    """Each block of networks like the first one with the same block of that (section 8): `cka`
    (m l), `names` (m), `layers` (l), `reference`."""
    first, *others = study.networks
    alike = [n for n in others if _body(n) == _body(first)]
    if not alike:
        raise LeftOut(f'no other network has the architecture of {first.name}, the first one given')
    found = similarity(dataclasses.replace(study, networks=(first, *alike)), layers.sums)
    count = len(layers.sums(first.loaded.config))
    blocks = found['cka'][:count].reshape(count, -1, count)
    return {
        'cka': np.einsum('lml->ml', blocks)[1:],
        'names': np.array([network.name for network in alike]),
        'layers': found['layers'][:count],
        'reference': np.array(first.name),
    }


def skip_removal(study: Study) -> Numbers:
    """Networks without the skip connections of some blocks, beside one that has all (figure 8).

    `cka` (p t t) of all pairs of layers of each, the last one that has all, their `names` (p), the
    names of the `layers` (t), and by network and layer (p t) where skip connections are `removed`.
    """
    without = [n for n in study.networks if _removed(n)]
    whole = [n for n in study.networks if not _removed(n)]
    pairs = [(n, other) for n in without for other in whole if _body(n, ()) == _body(other, ())]
    if not pairs:
        raise LeftOut(
            'needs a network that was trained with config.model.blocks_without_skips, and one of '
            'the same sizes that was trained without'
        )
    compared = (*(n for n, other in pairs if other is pairs[0][1]), pairs[0][1])
    chosen = layers.every(compared[0].loaded.config)
    alone = (dataclasses.replace(study, networks=(network,)) for network in compared)
    # The first norm of a block sees what is before it.
    within = [layer.block if layer.tap != 'norm1' else None for layer in chosen]
    removed = [[block in _removed(n) for block in within] for n in compared]
    return {
        'cka': np.stack([similarity(one)['cka'] for one in alone]),
        'names': np.array([network.name for network in compared]),
        'layers': np.array([str(layer) for layer in chosen]),
        'removed': np.array(removed),
    }


def _removed(network: Network) -> tuple[int, ...]:
    return getattr(network.loaded.config, 'blocks_without_skips', ())


def _body(network: Network, removed: tuple[int, ...] | None = None) -> ModelConfig:
    """The architecture but for its head; perhaps as if other blocks had no skip connections."""
    body = headless(network.loaded.config)
    if removed is not None and isinstance(body, ViTConfig):
        return dataclasses.replace(body, blocks_without_skips=removed)
    return body


def head_subsets(study: Study) -> Numbers:
    """Heads of block 0, from those that look nearest to those that look farthest, with the lower
    layers of a ResNet (figure 5): `cka` (s l), mean `distance` (s) in pixels, `layers` (l)."""
    study.require_images(FEWEST, 'CKA')
    vits = [n for n in study.networks if isinstance(n.loaded.config, ViTConfig)]
    vits = [n for n in vits if n.loaded.config.backbone is None] or vits  # rather than a hybrid
    resnets = [n for n in study.networks if isinstance(n.loaded.config, ResNetConfig)]
    if not vits or not resnets:
        raise LeftOut('needs the checkpoints of a ViT and of a ResNet')
    vit, resnet = vits[0], resnets[0]
    lower = layers.sums(resnet.loaded.config)
    lower = lower[: max(1, len(lower) // 2)][:_LINES]

    def grams_of_heads(mixed: Float[Array, 'b n k e']) -> Float[Array, 'k b b']:
        return jax.vmap(cka.centred_gram, in_axes=2)(mixed)

    heads = vit.seen({'attention/weights': distances_of(vit), 'attention/heads': grams_of_heads})
    first = ({tap: x[0] for tap, x in heads(batch).items()} for batch in study.batches(vit))
    seen = [jax.device_get(each) for each in first]
    distance = np.mean([each['attention/weights'] for each in seen], axis=0)
    subsets = jnp.asarray(_windows(distance), jnp.float32)
    grams = _grams(resnet, lower)

    def terms() -> Iterator[cka.Terms]:
        for each, batch in zip(seen, study.batches(resnet), strict=True):
            # The Gram matrix of several heads together is the sum of theirs.
            together = jnp.einsum('sk,kij->sij', subsets, each['attention/heads'])
            yield _terms(together, grams(batch))

    return {
        'cka': _ratio(terms()),
        'distance': np.asarray(subsets @ distance / subsets.sum(axis=1)),
        'layers': np.array([str(layer) for layer in lower]),
        'names': np.array([vit.name, resnet.name]),
    }


def _windows(distance: Float[np.ndarray, 'k']) -> Int[np.ndarray, 's k']:
    """Which heads (1) are in each subset: neighbours by distance, a third of all in each."""
    order, size = np.argsort(distance), max(1, len(distance) // 3)
    starts = range(len(distance) - size + 1)
    return np.array([np.isin(np.arange(len(order)), order[s : s + size]) for s in starts]) * 1


def localisation(study: Study, network: Network) -> Numbers:
    """Tokens of the last block, or places of the last feature map, with each patch of the image
    (section 7): `cka` (t rows columns), and where the `tokens` are (t 2); (-1, -1) is the class
    token."""
    study.require_images(FEWEST, 'CKA')
    config = network.loaded.config
    rows, columns = config.grid
    if isinstance(config, ResNetConfig):
        stages = len(config.backbone.blocks)
        tap, before = f'stage{stages}' if stages else 'root', 0
    else:
        tap, before = 'tokens', network.class_tokens

    def terms_of(params: Params, images: Float[Array, 'b h w c']) -> cka.Terms:
        kept = {tap: lambda x: x.reshape(len(x), -1, x.shape[-1])}
        tokens = network.loaded.model.capture(params, images, kept)[1][tap]
        last = tokens if isinstance(config, ResNetConfig) else tokens[-1]
        if not isinstance(config, ResNetConfig):  # without registers
            last = jnp.concatenate([last[:, :before], last[:, network.prefix :]], axis=1)
        try:
            pixels = patches(images, (rows, columns))
        except UserError as why:
            raise LeftOut(str(why)) from why
        return terms_of_tokens(last, pixels)

    found = _ratio(map(network.compiled(terms_of), study.batches(network)))
    if np.isnan(found).all(axis=1).any():
        raise LeftOut('a token is the same in all images')
    places = [(-1, -1)] * before + [(i, j) for i in range(rows) for j in range(columns)]
    return {'cka': found.reshape(-1, rows, columns), 'tokens': np.array(places)}


def some_tokens(numbers: Numbers) -> Numbers:
    """The class token, and tokens evenly spread over the grid: as many as a picture shows."""
    rows, columns = numbers['cka'].shape[1:]
    kept = [np.unique(np.linspace(0, n - 1, _TILES).round()) for n in (rows, columns)]
    y, x = numbers['tokens'].T
    shown = (y < 0) | np.isin(y, kept[0]) & np.isin(x, kept[1])
    return {name: values[shown] for name, values in numbers.items()}
