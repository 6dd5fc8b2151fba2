"""What can be read off a layer with few labels: probes by layer, and by token or pooling."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from vit_jax.base import Array, Float, Int
from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Labelled
from vit_jax.figures import layers
from vit_jax.figures.networks import LeftOut, Network, Numbers, Study
from vit_jax.models import ResNetConfig

_SEEDS, _SHOTS, _MOST_IMAGES = (0, 1, 2), 10, 2048
_ALONG = 3  # single patches along a side of the grid: 9 of them


class _Task(NamedTuple):
    """Images that are learned from and images that are tested on, by their place, and classes."""

    learned: Int[np.ndarray, 'n']
    tested: Int[np.ndarray, 'm']
    labels: Int[np.ndarray, 'i']


def probes(study: Study) -> Numbers:
    """Accuracy of ridge probes of each layer of all networks (section 7, appendix D).

    Of the class token, of means, and of single patches, whose accuracies are averaged. `accuracy`
    and `deviation` over draws (series l), NaN where a network has fewer layers; the names of the
    `series`; the `shots`, images of each class that are learned from at most; the numbers of
    `classes`, of images that these are drawn from (`learned`) and of `tested` ones.
    """
    task = _task(study)
    found: dict[str, list[tuple[float, float]]] = {}
    for network in study.networks:
        for kinds, features in _features(study, network):
            scores = [_accuracies(task, one, study.probe_l2) for one in features]
            for kind in dict.fromkeys(kinds):
                same = [score for score, name in zip(scores, kinds, strict=True) if name == kind]
                of_draws = np.mean(same, axis=0)
                series = found.setdefault(f'{network.name}: {kind}', [])
                series.append((float(of_draws.mean()), float(of_draws.std())))
    longest = max(map(len, found.values()))
    rows = [one + [(np.nan, np.nan)] * (longest - len(one)) for one in found.values()]
    accuracy, deviation = np.moveaxis(np.array(rows), -1, 0)
    return {
        'accuracy': accuracy,
        'deviation': deviation,
        'series': np.array([*found]),
        'shots': np.array(_SHOTS),
        'classes': np.array(len(np.unique(task.labels[task.learned]))),
        'learned': np.array(len(task.learned)),
        'tested': np.array(len(task.tested)),
    }


def _accuracies(task: _Task, features: Float[np.ndarray, 'i d'], l2: float) -> list[float]:
    """Of each draw."""
    scores, *_ = ridge.probe(
        task.labels[task.learned],
        Labelled(features[task.tested], task.labels[task.tested]),
        features_of=features[task.learned].__getitem__,
        shots=[_SHOTS],
        seeds=_SEEDS,
        l2=l2,
    )
    return [*scores.values()]


def _task(study: Study) -> _Task:
    """Half of the images, at random, to learn from; of the others those of the same classes."""
    source = study.networks[0].reader.source
    if not source.class_names:
        raise LeftOut('the images have no labels')
    if source.multi_label:
        raise LeftOut('an image may have several classes; probes need one')
    count = min(len(study.indices), _MOST_IMAGES) // study.batch_size * study.batch_size
    labels = source.labels[study.indices[: max(count, study.batch_size)]]
    order = np.random.default_rng(0).permutation(len(labels))
    learned, tested = np.split(order, [len(order) // 2])
    tested = tested[np.isin(labels[tested], labels[learned])]
    if len(np.unique(labels[learned])) < 2 or not len(tested):
        raise LeftOut(f'{len(labels):,} images are too few for probes: no two classes, or no test')
    return _Task(learned, tested, labels)


def _features(
    study: Study, network: Network
) -> list[tuple[list[str], Float[np.ndarray, 'kinds i d']]]:
    """What probes learn from in each layer, and the kind of each."""
    config = network.loaded.config
    chosen, grid = layers.sums(config), config.grid
    if isinstance(config, ResNetConfig):
        kinds, select = ['mean of places'], _of_map
        singles = 'single places'
    else:
        token, singles = network.class_tokens > 0, 'single patches'
        kinds = ['class token', 'mean of patches', 'mean of all tokens']
        kinds = kinds if token else ['mean of patches', 'first patch']
        select = functools.partial(_of_tokens, grid=grid, prefix=network.prefix, token=token)
    seen = study.over(network, layers.wanted(chosen, select), _MOST_IMAGES)
    batches = [[s[tap] if b is None else s[tap][b] for tap, b in chosen] for s in seen]
    found = [np.concatenate(parts, axis=1) for parts in zip(*batches, strict=True)]
    return [(kinds + [singles] * (len(layer) - len(kinds)), layer) for layer in found]


def _of_tokens(
    x: Float[Array, 'b n d'], *, grid: tuple[int, int], prefix: int, token: bool
) -> Float[Array, 'kinds b d']:
    """The class token, the means and single patches; or the mean, the first and single patches."""
    patches = x[:, prefix:]
    if token:
        whole = [x[:, 0], patches.mean(axis=1), x.mean(axis=1)]
    else:
        whole = [patches.mean(axis=1), patches[:, 0]]
    return jnp.concatenate([jnp.stack(whole), patches[:, _spread(grid)].swapaxes(0, 1)])


def _of_map(x: Float[Array, 'b h w c']) -> Float[Array, 'kinds b c']:
    """The mean, and single places."""
    places = x.reshape(len(x), -1, x.shape[-1])
    singles = places[:, _spread(x.shape[1:3])].swapaxes(0, 1)
    return jnp.concatenate([places.mean(axis=1)[None], singles])


def _spread(grid: tuple[int, ...]) -> Int[np.ndarray, 'n']:
    """Some places of a grid, evenly spread over rows and columns, each once."""
    rows, columns = (np.unique(np.linspace(0, n - 1, _ALONG + 2).round())[1:-1] for n in grid)
    rows = rows if len(rows) else np.zeros(1)
    columns = columns if len(columns) else np.zeros(1)
    return np.add.outer(rows * grid[1], columns).ravel().astype(int)
