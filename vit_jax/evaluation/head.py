"""Evaluates a checkpoint with its own head on labeled images: overall, per class, per image."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import Batch, Bool, Float, Int, Num, Params, UserError, plural, require
from vit_jax.data import loading
from vit_jax.data.image_preprocessing import normalize
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.base import Source, renumber_classes
from vit_jax.distributed import meshes
from vit_jax.evaluation import calibration
from vit_jax.evaluation.calibration import Calibration
from vit_jax.evaluation.evaluator import (
    Evaluation,
    WrapBatches,
    batches_on_all_devices,
    make_evaluator,
)
from vit_jax.models import with_highest_precision
from vit_jax.pretrained import LoadedModel
from vit_jax.training import losses, metrics
from vit_jax.training.metrics import Metric, MetricFunction

# Logit of a class that cannot be predicted. With -inf, the loss would be NaN.
_EXCLUDED = -1e30


class Prediction(NamedTuple):
    """The prediction for one image."""

    number: int  # index of the image in the source
    path: str  # name of the image
    label: str  # its class; several classes are separated by semicolons
    predicted: str  # the most probable class
    probability: float  # probability of this class
    correct: bool


class HeadReport(NamedTuple):
    """Metrics over the readable images, overall, per class and per image."""

    num_images: int  # number of readable images
    metrics: dict[str, float]  # mean loss and metrics, by name
    classes: list[dict[str, Any]]  # `class`, `images` and metrics of each class with images
    names: list[str]  # classes of the rows and columns of `confusion`
    confusion: Int[np.ndarray, 'k k'] | None  # images by (class, prediction); None: multi-label
    predictions: list[Prediction]  # of the readable images, in order
    calibration: Calibration | None  # None: multi-label, one image, or not requested

    def confusions(self) -> list[dict[str, Any]]:
        """Lists pairs of confused classes (`class`, `predicted`, `images`), most frequent first."""
        if self.confusion is None:
            return []
        errors = self.confusion * ~np.eye(len(self.names), dtype=bool)
        pairs = np.argwhere(errors)
        order = np.argsort(-errors[tuple(pairs.T)], kind='stable')
        return [
            {'class': self.names[i], 'predicted': self.names[j], 'images': int(errors[i, j])}
            for i, j in pairs[order].tolist()
        ]


def make_model_reader(loaded: LoadedModel, source: Source, **options: Any) -> ImageReader:
    """Makes a reader that preprocesses images for the model, and skips unreadable images.

    Args:
      loaded: Checkpoint.
      source: Images.
      options: Further fields of `ImageReader`.

    Raises:
      UserError: If the model has outputs per token (`pool=none`) instead of one per image.
    """
    if getattr(loaded.config, 'pool', None) == 'none':
        raise UserError(
            'pool=none: the model has outputs per token; expected a model with outputs per image'
        )
    options = {'on_unreadable': 'skip'} | options
    return loading.make_reader(source, loaded.preprocessing, loaded.config.image_size, **options)


def match_classes(source: Source, loaded: LoadedModel, *, by_order: bool) -> Source:
    """Returns the images with the class numbers of the model.

    Classes are matched by name. They are matched by order if `by_order` is True, or if the
    checkpoint has no class names; the data set then needs as many classes as the model.

    Raises:
      UserError: If the classes cannot be matched.
    """
    num_outputs = loaded.config.num_classes
    has_same_number = len(source.class_names) == num_outputs
    if loaded.class_names and not by_order:
        try:
            return renumber_classes(source, loaded.class_names)
        except UserError as error:
            hint = '; pass --by_order to match classes by order' if has_same_number else ''
            raise UserError(f'{error}{hint}') from error
    require(
        has_same_number,
        f'the checkpoint has {num_outputs:,} outputs, the data set has '
        f'{plural(len(source.class_names), "class")}; expected equal numbers to match by order',
    )
    return source


def evaluate_head(
    loaded: LoadedModel,
    reader: ImageReader,
    *,
    batch_size: int,
    relabeled: bool = False,
    only_data_classes: bool = False,
    calibrate: bool = True,
    further_metrics: Sequence[str | Metric | MetricFunction] = (),
    wrap: WrapBatches = iter,
) -> HeadReport:
    """Evaluates the predictions of a checkpoint.

    The loss is sigmoid cross-entropy if the checkpoint was trained with it, and otherwise softmax
    cross-entropy, without label smoothing.

    Images with several classes are evaluated in one of two ways. If the labels are `relabeled`, or
    the model was trained with softmax, predicting any of the classes is correct, and metrics of the
    whole data set are not measured. Otherwise they include the mean average precision.

    Args:
      loaded: Checkpoint.
      reader: Images with the classes of the model (see `make_model_reader`, `match_classes`).
      batch_size: Images per batch.
      relabeled: Whether the labels are several correct classes for images of a data set with one
        class per image, as in ReaL.
      only_data_classes: Whether to predict only classes that occur in the data, as usual for
        ImageNet-A and ImageNet-R, which have 200 of 1,000 classes.
      calibrate: Whether to compute the calibration, for which the logits of all images are kept.
      further_metrics: Metrics of the whole data set besides those of a training run, as in
        `config.metrics`.
      wrap: Wraps the iterator of batches, for example to show progress.

    Raises:
      UserError: If no image can be read, no image has a class, or the checkpoint has no trained
        classifier.
    """
    loaded.require_head()
    source = reader.source
    kind: losses.LossKind = 'sigmoid' if loaded.card.loss == 'sigmoid' else 'softmax'
    loss = losses.make_loss(losses.LossConfig(kind=kind))
    any_is_right = source.multi_label and (relabeled or loaded.card.loss == 'softmax')
    if any_is_right:
        require(not further_metrics, 'metrics: not defined if an image has several correct classes')
        loss = losses.with_scaled_targets(loss)
    measured = metrics.OF_SEVERAL_CLASSES if source.multi_label else metrics.OF_ONE_CLASS
    of_set = []
    if not any_is_right:
        of_set = metrics.combine_metrics(measured, further_metrics, multi_label=source.multi_label)
    names = {'labels', *(name for metric in of_set for name in metric.outputs)}
    if calibrate and not source.multi_label:
        names.add('logits')
    absent = find_absent_classes(source) if only_data_classes else None

    def sums(params: Params, batch: Batch) -> losses.BatchSums:
        images = normalize(batch['images'], preprocessing=loaded.preprocessing)
        logits = with_highest_precision(loaded.model.apply)(params, images)
        if absent is not None:
            logits = jnp.where(absent, _EXCLUDED, logits)
        targets = losses.make_targets(batch['labels'], logits.shape[-1])
        examples = metrics.example_metrics(logits, targets)
        outputs = {
            **metrics.compute_outputs(sorted(names), logits, batch['labels']),
            **examples,
            'best': logits.argmax(axis=-1),
            'probability': loaded.card.probabilities(logits).max(axis=-1),
        }
        values = {'loss': loss(logits, targets)} | examples
        return losses.sum_examples(values, batch['mask'], outputs)

    evaluator = make_evaluator(sums, batches_on_all_devices(reader, batch_size), of_set)
    params = jax.device_put(loaded.params, meshes.replicated(evaluator.batches.mesh))
    return _make_report(evaluator.evaluate(params, reader, wrap=wrap), source)


def find_absent_classes(source: Source) -> Bool[np.ndarray, 'k']:
    """Returns whether each class of a source has no image."""
    numbers = np.nonzero(source.labels)[1] if source.multi_label else source.labels
    return ~np.isin(np.arange(len(source.class_names)), numbers)


def _make_report(evaluation: Evaluation, source: Source) -> HeadReport:
    """Adds predictions and metrics per class. Raises UserError if no image has a class."""
    outputs = evaluation.outputs
    names = source.class_names
    labels = outputs['labels']
    num_infinite = int((~np.isfinite(outputs['probability'])).sum())
    require(
        num_infinite == 0,
        f'the outputs of {num_infinite:,} of {evaluation.num_images:,} images are not finite: '
        'the checkpoint is damaged, or its values are too large',
    )
    of_class = functools.partial(class_means, num_classes=len(names))
    by_class = {
        name: of_class(outputs[name], labels) for name in evaluation.metrics if name in outputs
    }
    confused_names: list[str] = []
    confusion = None
    calibrated = None
    if 'mean_average_precision' in evaluation.metrics:
        by_class['average_precision'] = metrics.average_precisions(outputs['logits'], labels)
    if not source.multi_label:
        by_class['recall'] = by_class.pop('accuracy')
        by_class['precision'] = of_class(outputs['accuracy'], outputs['best'])
        confused_names, confusion = _confusion(labels, outputs['best'], names)
        if 'logits' in outputs and evaluation.num_images > 1:
            calibrated = calibration.evaluate(outputs['logits'], labels)
    classes = _list_classes(names, labels, by_class)
    require(bool(classes), f'none of {evaluation.num_images:,} images has a class')
    return HeadReport(
        num_images=evaluation.num_images,
        metrics=evaluation.metrics,
        classes=classes,
        names=confused_names,
        confusion=confusion,
        predictions=_list_predictions(evaluation, source),
        calibration=calibrated,
    )


def _list_predictions(evaluation: Evaluation, source: Source) -> list[Prediction]:
    """Lists the prediction for each readable image."""
    names = source.class_names
    images = np.flatnonzero(evaluation.readable).tolist()
    paths = source.read_names(images)
    targets = evaluation.outputs['labels']
    predicted = evaluation.outputs['best'].tolist()
    probabilities = evaluation.outputs['probability'].tolist()
    predictions = []
    for row, (image, path) in enumerate(zip(images, paths, strict=True)):
        target = targets[row]
        labels = np.flatnonzero(target).tolist() if target.ndim else [int(target)]
        predictions.append(
            Prediction(
                number=image,
                path=path,
                label='; '.join(names[number] for number in labels),
                predicted=names[predicted[row]],
                probability=probabilities[row],
                correct=predicted[row] in labels,
            )
        )
    return predictions


def _list_classes(
    names: Sequence[str], targets: Num[np.ndarray, 'n ...'], metrics: dict[str, Any]
) -> list[dict[str, Any]]:
    """Lists the metrics of each class with images, as JSON; undefined metrics are None."""
    multi_label = targets.ndim == 2
    images = targets.sum(axis=0) if multi_label else np.bincount(targets, minlength=len(names))
    classes = []
    for number in np.flatnonzero(images).tolist():
        row: dict[str, Any] = {'class': names[number], 'images': int(images[number])}
        for name, by_class in metrics.items():
            value = by_class[number]
            row[name] = float(value) if np.isfinite(value) else None
        classes.append(row)
    return classes


def _confusion(
    labels: Int[np.ndarray, 'n'], predicted: Int[np.ndarray, 'n'], class_names: Sequence[str]
) -> tuple[list[str], Int[np.ndarray, 'k k']]:
    """Returns classes with images or predictions, and their confusion matrix (rows: labels)."""
    from sklearn.metrics import confusion_matrix

    numbers = np.unique([labels, predicted])
    matrix = confusion_matrix(labels, predicted, labels=numbers)
    return [class_names[number] for number in numbers], matrix


def class_means(
    values: Num[np.ndarray, 'n'], targets: Num[np.ndarray, 'n ...'], *, num_classes: int
) -> Float[np.ndarray, 'k']:
    """Computes the mean value over the images of each class; NaN for classes without images.

    `targets` are class numbers (n) or multi-hot rows (n k).
    """
    if targets.ndim == 2:
        images, labels = np.nonzero(targets)
    else:
        images = np.arange(len(values))
        labels = targets
    totals = np.bincount(labels, weights=values[images], minlength=num_classes)
    with np.errstate(invalid='ignore'):
        return totals / np.bincount(labels, minlength=num_classes)
