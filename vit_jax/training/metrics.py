"""Metrics: what is measured, in which unit, and whether less of it is better.

A metric is a mean over examples, which a task sums on the devices, or a number of a whole data set
(`Metric.of_set`), which the evaluator computes on the host from the outputs of all images.

To add a metric, extend `_OF_SETS`, or `_MEANS` and `example_metrics` for a mean over examples.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from vit_jax.base import Array, Bool, Float, Int, Num, UserError, records, require

# Arrays of all images: logits (n k), class numbers (n) or rows of 0 and 1 (n k), and predictions
# of the same shape as the labels.
OutputName = Literal['logits', 'labels', 'predicted']
MetricFunction = Callable[..., Any]  # maps (logits, labels) of all images to a number
_SPELLINGS = {'top5': 'top-5', 'f1': 'F1', 'auroc': 'AUROC'}  # of words in names


@dataclasses.dataclass(kw_only=True)
class Metric(records.Record):
    """A number that evaluations measure.

    `of_set` gets the `outputs` of all images that could be read, as read-only numpy arrays, and
    returns a number. `logits` has a row per image. `labels` are class numbers, or rows of 0 and 1
    if images have several classes. `predicted` are the classes with the highest logit, or rows that
    are True where the logit is positive.
    """

    name: str  # name in metrics.jsonl
    unit: Literal['number', 'percent'] = 'number'  # percent: 0.5 is shown as 50.00%
    lower_is_better: bool = False  # direction, for keep_best and patience
    of_set: Callable[..., Any] | None = None  # f(*outputs) -> number; None: mean over examples
    outputs: tuple[OutputName, ...] = ('logits', 'labels')  # arguments of of_set
    labels: Literal['one', 'several', 'any'] = 'any'  # classes per image for which it is defined

    @property
    def title(self) -> str:
        """The name for tables and messages."""
        return ' '.join(_SPELLINGS.get(word, word) for word in self.name.split('_'))

    def format(self, value: float) -> str:
        """Formats a value with its unit."""
        if self.unit == 'percent':
            return f'{value:.2%}'
        return f'{value:,.0f}' if 1000 <= abs(value) < 1e9 else f'{value:.4g}'

    def describe(self, value: float) -> str:
        """Formats a value with title and unit."""
        return f'{self.title} {self.format(value)}'

    def supports(self, multi_label: bool) -> bool:
        """Returns whether it is defined for images with one class, or with several."""
        return self.labels in ('any', 'several' if multi_label else 'one')

    def is_better(self, value: float, other: float) -> bool:
        """Returns whether a value is better than another one."""
        return value < other if self.lower_is_better else value > other

    def measure(self, outputs: Mapping[str, Any]) -> float:
        """Computes the metric of a whole data set from the outputs of its images by name.

        Returns NaN if an output is not finite. Raises UserError if a function of the user does not
        return a number.
        """
        assert self.of_set is not None
        arrays = [outputs[name] for name in self.outputs]
        if not all(np.isfinite(array).all() for array in arrays):  # scikit-learn would raise errors
            return math.nan
        value = self.of_set(*arrays)
        if np.ndim(value) != 0 or np.asarray(value).dtype.kind not in 'biuf':
            text = ' '.join(repr(value).split())
            raise UserError(f'metric {self.name}: got {text:.80}; expected a number')
        return float(value)


def example_metrics(
    logits: Float[Array, 'b k'], targets: Float[Array, 'b k']
) -> dict[str, Float[Array, 'b']]:
    """Computes metrics of each example by name. Training and evaluation report their means.

    `accuracy` is the target of the class with the highest logit. `top5_accuracy` is the sum of the
    targets of the five highest, at most 1. Both are 0 or 1 for one-hot and multi-hot targets, and
    between 0 and 1 for the mixed targets of MixUp and CutMix.
    """
    # XLA would gather the logits of all devices for jax.lax.top_k (jax 0.10.2).
    rest = jax.lax.stop_gradient(logits)
    hits = []
    for _ in range(5):  # highest logit first; the first of equal logits counts as higher
        best = jax.nn.one_hot(rest.argmax(axis=-1), rest.shape[-1])
        hits.append((best * targets).sum(axis=-1))
        rest = jnp.where(best > 0, -jnp.inf, rest)
    metrics = {'accuracy': hits[0]}
    if logits.shape[-1] > 5:  # otherwise it would always be 1
        metrics['top5_accuracy'] = jnp.minimum(1.0, sum(hits))
    return metrics


def compute_outputs(
    names: Iterable[OutputName], logits: Float[Array, 'b k'], labels: Num[Array, 'b ...']
) -> dict[str, Array]:
    """Computes the outputs of each example that metrics of whole data sets need, by name."""
    predicted = logits.argmax(axis=-1) if labels.ndim == 1 else logits > 0
    outputs = {'logits': logits, 'labels': labels, 'predicted': predicted}
    return {name: outputs[name] for name in names}


def random_outputs(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    """Returns random outputs of two examples of each class, with the shapes of a batch's outputs.

    Labels cycle through the classes.
    """
    num_classes = next((shape.shape[1] for shape in shapes.values() if shape.ndim == 2), 2)
    is_multi_label = any(shape.ndim == 2 for name, shape in shapes.items() if name != 'logits')
    classes = np.arange(2 * num_classes) % num_classes
    logits = np.random.default_rng(0).normal(size=(len(classes), num_classes)).astype(np.float32)
    labels = np.eye(num_classes, dtype=np.int32)[classes] if is_multi_label else classes
    predicted = logits > 0 if is_multi_label else logits.argmax(axis=-1)
    outputs = {'logits': logits, 'labels': labels, 'predicted': predicted}
    for array in outputs.values():
        array.setflags(write=False)
    return outputs


def balanced_accuracy(predicted: Int[np.ndarray, 'n'], labels: Int[np.ndarray, 'n']) -> float:
    """Computes the mean of the accuracies of all classes with images."""
    images = np.bincount(labels)
    hits = np.bincount(labels[predicted == labels], minlength=len(images))
    return float(np.mean(hits[images > 0] / images[images > 0]))


def macro_f1(
    predicted: Int[np.ndarray, 'n'] | Bool[np.ndarray, 'n k'], labels: Num[np.ndarray, 'n ...']
) -> float:
    """Computes the mean F1 score of all classes with images or predictions.

    F1 is 2 h / (l + p) for l images of a class, p predictions of it, and h correct ones.
    """
    if labels.ndim == 1:
        classes = 1 + max(predicted.max(), labels.max())
        hits = np.bincount(labels[predicted == labels], minlength=classes)
        images = np.bincount(labels, minlength=classes)
        predictions = np.bincount(predicted, minlength=classes)
    else:
        hits = (predicted & (labels > 0)).sum(axis=0)
        images = labels.sum(axis=0)
        predictions = predicted.sum(axis=0)
    counts = images + predictions
    return float(np.mean(2 * hits[counts > 0] / counts[counts > 0])) if counts.any() else 0.0


def average_precisions(
    logits: Float[np.ndarray, 'n k'], labels: Num[np.ndarray, 'n ...']
) -> Float[np.ndarray, 'k']:
    """Computes the average precision of each class; NaN for classes without images.

    Raises:
      UserError: If no image has a class.
    """
    from sklearn.metrics import average_precision_score

    scores, targets = _score_classes(logits, labels)
    precisions = np.full(targets.shape[1], np.nan)
    present = targets.any(axis=0)
    require(bool(present.any()), f'none of {len(targets):,} images has a class')
    precisions[present] = average_precision_score(
        targets[:, present], scores[:, present], average=None
    )
    return precisions


def mean_average_precision(
    logits: Float[np.ndarray, 'n k'], labels: Num[np.ndarray, 'n ...']
) -> float:
    """Computes the mean of the average precisions of all classes with images."""
    return float(np.nanmean(average_precisions(logits, labels)))


def auroc(logits: Float[np.ndarray, 'n k'], labels: Num[np.ndarray, 'n ...']) -> float:
    """Computes the mean area under the ROC curves of all classes, each against all others.

    Classes that no image has, or all images have, are left out. The area is NaN without a class.
    """
    from sklearn.metrics import roc_auc_score

    scores, targets = _score_classes(logits, labels)
    varies = targets.any(axis=0) & ~targets.all(axis=0)
    if not varies.any():
        return math.nan
    return float(roc_auc_score(targets[:, varies], scores[:, varies], average='macro'))


def _score_classes(
    logits: Float[np.ndarray, 'n k'], labels: Num[np.ndarray, 'n ...']
) -> tuple[Float[np.ndarray, 'n k'], Bool[np.ndarray, 'n k']]:
    """Returns scores by which the images of a class can be ranked, and whether they belong to it.

    With one class per image, the scores are log-odds, log(p / (1 - p)) of the softmax probability
    p: logits of different images are equivalent if they differ by a constant, and p itself would be
    rounded to 1 for confident models.
    """
    if labels.ndim == 2:
        return logits, labels > 0
    is_member = labels[:, None] == np.arange(logits.shape[1])
    if logits.shape[1] == 1:
        return logits, is_member
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    best = np.arange(len(scores)), scores.argmax(axis=1)
    scores[best] = -np.inf
    powers = np.exp(scores)  # of the best class: 0 here, and 1 in the sum of the other classes
    odds = scores - np.log1p(powers.sum(axis=1, keepdims=True) - powers)
    odds[best] = -scipy.special.logsumexp(scores, axis=1)
    return odds.astype(np.float32), is_member  # float32, because equal odds are rounded differently


_LOSSES = [
    Metric(name=name, lower_is_better=True) for name in ('loss', 'task_loss', 'distillation_loss')
]
_MEANS = [Metric(name=name, unit='percent') for name in ('accuracy', 'top5_accuracy')]
_OF_SETS = [
    Metric(
        name='balanced_accuracy',
        unit='percent',
        of_set=balanced_accuracy,
        outputs=('predicted', 'labels'),
        labels='one',
    ),
    Metric(name='macro_f1', unit='percent', of_set=macro_f1, outputs=('predicted', 'labels')),
    Metric(name='mean_average_precision', unit='percent', of_set=mean_average_precision),
    Metric(name='auroc', unit='percent', of_set=auroc),
]
SET_METRICS = {metric.name: metric for metric in _OF_SETS}
METRICS = {metric.name: metric for metric in (*_LOSSES, *_MEANS, *_OF_SETS)}
# Metrics of whole data sets that are always measured on images with one class, or with several.
OF_ONE_CLASS = 'balanced_accuracy', 'macro_f1'
OF_SEVERAL_CLASSES = 'mean_average_precision', 'macro_f1'
# Names of other numbers in a line of metrics.jsonl.
RESERVED_NAMES = 'kind', 'step', 'time', 'run', 'seconds', 'count', 'unreadable'


def resolve_metrics(given: Sequence[str | Metric | MetricFunction]) -> list[Metric]:
    """Returns metrics of whole data sets, given as names, metrics or functions.

    A function f(logits, labels) -> number has its own name, and more is better.

    Raises:
      UserError: For an unknown or repeated name.
    """
    by_name: dict[str, Metric] = {}
    for one in given:
        if isinstance(one, str):
            require(
                one in SET_METRICS,
                f'metrics: no metric {one!r}; {records.closest(one, SET_METRICS)}',
            )
            metric = SET_METRICS[one]
        elif isinstance(one, Metric):
            metric = one
            require(
                metric.of_set is not None,
                f'metrics: {metric.name}: of_set is not set; expected a function',
            )
        else:
            name = re.split(r'[:.]', records.text_of(one))[-1]
            metric = Metric(name=name, of_set=one)
        require(
            re.fullmatch(r'[A-Za-z]\w*', metric.name) is not None,
            f'metrics: {metric.name!r}: expected a name such as macro_f1',
        )
        is_own = not isinstance(one, str)
        require(
            not (is_own and metric.name in (*METRICS, *RESERVED_NAMES)),
            f'metrics: {metric.name}: the name of another number in metrics.jsonl; rename it',
        )
        require(metric.name not in by_name, f'metrics: got {metric.name} two times')
        by_name[metric.name] = metric
    return [*by_name.values()]


def combine_metrics(
    measured: Sequence[str],
    further: Sequence[str | Metric | MetricFunction],
    *,
    multi_label: bool,
) -> list[Metric]:
    """Returns metrics by name, then further ones of `resolve_metrics`, without repetition.

    Raises UserError if a further metric is not defined for images with one, or several, classes.
    """
    by_name = {name: METRICS[name] for name in measured}
    for metric in resolve_metrics(further):
        if not metric.supports(multi_label):
            needed = 'one class' if metric.labels == 'one' else 'several classes'
            raise UserError(f'metrics: {metric.name}: only for images with {needed}; leave it out')
        by_name[metric.name] = metric
    return [*by_name.values()]


def find_metric(name: str, own: Iterable[Metric] = ()) -> Metric:
    """Finds the unit and direction of a number, for example of a line in metrics.jsonl.

    Args:
      name: NAME or KIND/NAME, such as test/accuracy.
      own: Metrics of the user.
    """
    name = name.rpartition('/')[2]
    known = METRICS | {metric.name: metric for metric in own}
    if name in known:
        return known[name]
    is_few_shot = name.endswith('_accuracy')  # such as 10_shot_accuracy
    return Metric(name=name, unit='percent' if is_few_shot else 'number')
