"""What can be read off a layer with few labels: probes by layer, and by token or pooling."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float
from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Labelled
from vit_jax.figures import layers
from vit_jax.figures.networks import LeftOut, Network, Numbers, Study
from vit_jax.models import ResNetConfig

_SEEDS, _MOST_SHOTS, _PATCHES, _L2 = (0, 1, 2), 10, 9, 1024.0


def probes(study: Study) -> Numbers:
    """Accuracy of ridge probes of each layer of all networks (section 7, appendix D): of the
    class token, the mean of the patches, and single patches, whose accuracies are averaged.

    `accuracy` and `deviation` over draws (series l), NaN where a network has fewer layers; the
    names of the `series`; the `shots`, images of each class that are learned from.
    """
    labels, parts, shots = _task(study)
    learned, tested = parts
    found: dict[str, list[tuple[float, float]]] = {}
    for network in study.networks:
        of_layers, kinds = _features(study, network)
        for rows in of_layers:
            accuracies: dict[str, list[list[float]]] = {}
            for kind, features in zip(kinds, rows, strict=True):
                scores, _ = ridge.probe(
                    labels[learned],
                    Labelled(features[tested], labels[tested]),
                    features_of=features[learned].__getitem__,
                    shots=[shots],
                    seeds=_SEEDS,
                    l2=_L2,
                )
                accuracies.setdefault(kind, []).append([*scores.values()])
            for kind, of_tokens in accuracies.items():
                of_draws = np.mean(of_tokens, axis=0)
                series = found.setdefault(f'{network.name}: {kind}', [])
                series.append((float(of_draws.mean()), float(of_draws.std())))
    longest = max(map(len, found.values()))
    rows = [one + [(np.nan, np.nan)] * (longest - len(one)) for one in found.values()]
    accuracy, deviation = np.moveaxis(np.array(rows), -1, 0)
    return {
        'accuracy': accuracy,
        'deviation': deviation,
        'series': np.array([*found]),
        'shots': np.array(shots),
    }


def _task(study: Study) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], int]:
    """The classes of the images; which are for learning and which for testing, half of them each,
    at random; and how many of each class are learned from."""
    source = study.networks[0].reader.source
    if not source.class_names:
        raise LeftOut('the images have no labels')
    if source.multi_label:
        raise LeftOut('an image may have several classes; probes need one')
    count = len(study.indices) // study.batch_size * study.batch_size
    labels = source.labels[study.indices[:count]]
    order = np.random.default_rng(0).permutation(count)
    learned, tested = order[: count // 2], order[count // 2 :]
    fewest = int(np.bincount(labels[learned], minlength=len(source.class_names)).min())
    if fewest < 1 or len(source.class_names) < 2:
        classes = len(source.class_names)
        raise LeftOut(
            f'{count:,} images are too few to learn {classes:,} classes from half of them'
        )
    return labels, (learned, tested), min(_MOST_SHOTS, fewest)


def _features(
    study: Study, network: Network
) -> tuple[Float[np.ndarray, 'l kinds n d'] | list[np.ndarray], list[str]]:
    """What probes learn from, (kinds n d) of each layer, and the kind of each."""
    config = network.loaded.config
    chosen = layers.sums(config)
    if isinstance(config, ResNetConfig):
        prefix, place = 0, 'places'
    else:
        prefix, place = network.prefix, 'patches'
    kinds = ['class token'] * prefix + [f'mean of {place}'] + [f'single {place}'] * _PATCHES
    of_layer = _of_tokens(prefix)
    seen = study.over(network, layers.wanted(chosen, of_layer))
    batches = [[s[tap] if b is None else s[tap][b] for tap, b in chosen] for s in seen]
    return [np.concatenate(parts, axis=1) for parts in zip(*batches, strict=True)], kinds


def _of_tokens(prefix: int) -> Callable[[Array], Float[Array, 'kinds b d']]:
    def kinds(x: Float[Array, 'b ... d']) -> Float[Array, 'kinds b d']:
        x = x.reshape(len(x), -1, x.shape[-1])  # places of a feature map as tokens
        patches = x[:, prefix:]
        some = jnp.linspace(0, patches.shape[1] - 1, _PATCHES).round().astype(int)
        every = [x[:, :prefix], patches.mean(axis=1, keepdims=True), patches[:, some]]
        return jnp.concatenate(every, axis=1).swapaxes(0, 1)

    return kinds
