"""Few-shot probes of each layer (Raghu et al., section 7, appendix D).

A few-shot linear probe (ridge regression) is fit to the representation in each layer: the class
token, the mean over patches, or single patches (9 per image, whose accuracies are averaged). Half
of the images are for training, from which a few per class are drawn three times; the other half is
for testing. In the paper, models with a class token and models that average their tokens are
equally good if they are probed as they were trained. Single patches of the last layers contain
little about the class in models with a class token, and much in the others and in ResNets.
"""

import numpy as np

from vit_jax.base import Array, Float, Int, UserError
from vit_jax.evaluation import ridge
from vit_jax.evaluation.probes import Labeled
from vit_jax.evaluation.statistics import sample_deviation
from vit_jax.figures import curves, layers, style
from vit_jax.figures.figure import Figure, Images, Numbers, PlacedModel
from vit_jax.models import ResNetConfig

_SEEDS = (0, 1, 2)
_SHOTS = 10
_MOST_IMAGES = 2048
_ALONG = 3  # single patches per side of the grid, 9 in total


def compute(images: Images, *models: PlacedModel) -> Numbers:
    """Fits ridge probes to the class token, to means, and to single patches of each layer.

    Returns `accuracy` and its `deviation` over draws (series l), NaN beyond the layers of a model;
    the names of the `series`; and the numbers of `shots`, `classes` and `tested` images.
    """
    source = models[0].reader.source
    if not source.class_names or source.multi_label:
        raise UserError('needs images with one class label each')
    labels = source.labels[images.used_indices(_MOST_IMAGES)]
    order = np.random.default_rng(0).permutation(len(labels))
    train, tested = np.split(order, [len(order) // 2])
    tested = tested[np.isin(labels[tested], labels[train])]
    if len(np.unique(labels[train])) < 2 or not len(tested):
        raise UserError(f'{len(labels):,} images are too few for probes; raise --num_images')

    def accuracies(features: Float[np.ndarray, 'i d']) -> list[float]:
        test = Labeled(features[tested], labels[tested])
        result = ridge.few_shot(
            labels[train],
            test,
            features_of=features[train].__getitem__,
            l2=ridge.L2,
            shots=[_SHOTS],
            seeds=_SEEDS,
        )
        return [*result.accuracies.values()]

    by_series: dict[str, list[tuple[float, float]]] = {}
    for model in models:
        for layer in _features(images, model):
            for kind, samples in layer.items():
                of_draws = np.mean([accuracies(one) for one in samples.swapaxes(0, 1)], axis=0)
                series = by_series.setdefault(f'{model.name}: {kind}', [])
                series.append((of_draws.mean(), sample_deviation(of_draws) or 0.0))
    values = np.full((len(by_series), max(map(len, by_series.values())), 2), np.nan)
    for row, series in zip(values, by_series.values(), strict=True):
        row[: len(series)] = series
    return {
        'accuracy': values[..., 0],
        'deviation': values[..., 1],
        'series': np.array([*by_series]),
        'shots': np.array(_SHOTS),
        'classes': np.array(len(np.unique(labels[train]))),
        'tested': np.array(len(tested)),
    }


def _features(
    images: Images, model: PlacedModel
) -> list[dict[str, Float[np.ndarray, 'i samples d']]]:
    """Returns the features of each layer by kind. Each sample of an image is probed separately."""
    config = model.loaded.config
    vit = None if isinstance(config, ResNetConfig) else config
    kind = 'patches' if vit else 'positions'

    def select(x: Float[Array, 'b ... d']) -> dict[str, Array]:
        places = x[:, vit.num_prefix_tokens :] if vit else x.reshape(len(x), -1, x.shape[-1])
        samples = {
            f'mean of {kind}': places.mean(axis=1, keepdims=True),
            f'single {kind}': places[:, _spread(vit.grid if vit else x.shape[1:3])],
        }
        return samples | ({'class token': x[:, :1]} if vit and vit.num_class_tokens else {})

    chosen = layers.output_layers(config)
    captures = images.capture(model, layers.same_reduction(chosen, select), _MOST_IMAGES)
    batches = [layers.select_layers(captured, chosen) for captured in captures]
    return [
        {kind: np.concatenate([part[kind] for part in parts]) for kind in sorted(parts[0])}
        for parts in zip(*batches, strict=True)
    ]


def _spread(grid: tuple[int, ...]) -> Int[np.ndarray, 's']:
    """Returns distinct indices into a grid, evenly spread over rows and columns."""
    rows, columns = (np.unique(np.linspace(0, n - 1, _ALONG + 2)[1:-1].round()) for n in grid)
    return np.add.outer(rows * grid[1], columns).ravel().astype(int)


def draw(numbers: Numbers) -> style.Drawing:
    """Draws a line per series, with the sample standard deviation over draws."""
    shots, classes, tested = (int(numbers[name]) for name in ('shots', 'classes', 'tested'))
    title = f'Probes of each layer: {classes} classes with at most {shots} training images each, '
    lines = []
    for name, accuracy, deviation in zip(
        numbers['series'].tolist(), numbers['accuracy'], numbers['deviation'], strict=True
    ):
        exists = ~np.isnan(accuracy)
        depth = np.linspace(0, 1, np.count_nonzero(exists))
        lines.append(curves.MeanCurve(name, depth, accuracy[exists], deviation[exists]))
    return curves.draw_means(
        f'{title}{tested:,} test images',
        lines,
        x='relative depth (0 is next to the image)',
        y='accuracy',
        percent=True,
    )


def finding(numbers: Numbers) -> str:
    """Returns the accuracy of the last layer of each series."""
    last = [row[~np.isnan(row)][-1] for row in numbers['accuracy']]
    pairs = [f'{name} {x:.1%}' for name, x in zip(numbers['series'].tolist(), last, strict=True)]
    return f'Accuracy at the last layer: {", ".join(pairs)}.'


FIGURE = Figure(__doc__, compute, draw, finding, compares_models=True)
