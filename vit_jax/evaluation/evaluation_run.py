"""Evaluates a checkpoint's own head on labelled images: as while training, and class by class."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Array, Batch, Float, Int, UserError, require
from vit_jax.data.image_preprocessing import normalize
from vit_jax.data.reading import ImageReader
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.relabelling import renumbered
from vit_jax.distributed import meshes
from vit_jax.evaluation import classification, confusion, prediction
from vit_jax.models import with_exact_products
from vit_jax.pretrained import Loaded
from vit_jax.training.losses import LossConfig, make_loss, of_any
from vit_jax.training.metrics import predictions, scores
from vit_jax.training.update import make_loss_sums


class Evaluation(NamedTuple):
    """What was found in the images that could be read."""

    images: int
    means: dict[str, float]  # over all images: the metrics by name
    classes: list[dict[str, Any]]  # of each class that has images: `class`, `images`, metrics
    names: list[str]  # of the classes that have images or were predicted
    confusion: Int[np.ndarray, 'k k'] | None  # images by true class and prediction; None: several
    unreadable: Sequence[int]  # the images that could not be read, by their place in the source


def matched(source: Source, loaded: Loaded, *, by_number: bool) -> Source:
    """The images with the network's classes: by their names, or by their order.

    By order where it is asked for or where the checkpoint has no names, if the data have as many.
    Raises UserError where it is not known which output is which class.
    """
    names, count = loaded.class_names, loaded.config.num_classes
    if names and not by_number:
        try:
            return renumbered(source, names)
        except UserError as error:
            fits = len(source.class_names) == count
            same = '; --by_number takes them in their order' if fits else ''
            raise UserError(f'{error}{same}') from error
    if len(source.class_names) != count:
        why = 'of which is not known which is which class' if not names else 'by their order'
        raise UserError(
            f'the network has {count:,} outputs, {why}; the data have '
            f'{len(source.class_names):,} classes'
        )
    return source


def evaluate(
    loaded: Loaded,
    reader: ImageReader,
    *,
    batch_size: int,
    relabelled: bool = False,
    watched: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
) -> Evaluation:
    """The head's predictions of images, whose classes are the network's (see `matched`).

    The loss is the one of the training, softmax where that is not known, without smoothed labels.
    Where images have several classes, any of them is right if these are other labels for images of
    one class each (`relabelled`, as ReaL's) or the network knows one class an image; otherwise the
    average precision is measured. The batches go through `watched` one after the other. Raises
    UserError where no image can be read, or none has a class.
    """
    loaded.require_head()
    source = reader.source
    loss = make_loss(LossConfig(kind='sigmoid' if loaded.card.loss == 'sigmoid' else 'softmax'))
    several = source.multi_label
    any_right = several and (relabelled or loaded.card.loss == 'softmax')
    step = make_loss_sums(
        with_exact_products(loaded.model.apply),
        of_any(loss) if any_right else loss,
        functools.partial(normalize, preprocessing=loaded.preprocessing),
        rows_of=_rows_of_several if several else predictions,
    )
    mesh = meshes.make_mesh(meshes.MeshConfig())
    params, batches = prediction.on_devices(loaded, reader, batch_size, mesh)
    masks: list[np.ndarray] = []

    def noted() -> Iterator[Batch]:
        for batch in watched(batches):
            masks.append(np.asarray(batch['mask']))
            yield batch

    means, read, rows = classification.measure(
        meshes.jit_on(step, mesh), params, noted(), count=len(source), may_lack=True
    )
    unreadable = np.flatnonzero(~np.concatenate(masks)[: len(source)]).tolist()
    classes = len(source.class_names)
    targets = rows['targets'] if several else rows['label']
    of_class = functools.partial(confusion.class_means, classes=classes)
    numbers = {name: of_class(rows[name], targets) for name in means if name in rows}
    if several and not any_right:
        found = classification.average_precisions(rows['logits'], rows['targets'])
        means['mean_average_precision'] = float(np.nanmean(found))
        numbers = {'average_precision': found}
    if several:
        by_class = _by_class(source, targets.sum(axis=0), numbers)
        require(bool(by_class), f'none of {read:,} images has a class')
        return Evaluation(read, means, by_class, [], None, unreadable)
    numbers['precision'] = of_class(rows['accuracy'], rows['predicted'])
    images = np.bincount(targets, minlength=classes)
    seen, pairs = np.unique([rows['label'], rows['predicted']], return_inverse=True)
    matrix = confusion.confusion_matrix(*pairs.reshape(2, -1), classes=len(seen))
    names = [source.class_names[number] for number in seen]
    by_class = _by_class(source, images, numbers)
    return Evaluation(read, means, by_class, names, matrix, unreadable)


def _rows_of_several(logits: Float[Array, 'b k'], targets: Float[Array, 'b k']) -> dict[str, Array]:
    return scores(logits, targets) | predictions(logits, targets)


def _by_class(
    source: Source, images: np.ndarray, numbers: dict[str, Float[np.ndarray, 'k']]
) -> list[dict[str, Any]]:
    """The numbers of each class that has images, as JSON; None where one is not defined."""
    return [
        {'class': source.class_names[i], 'images': int(images[i])}
        | {name: float(of[i]) if np.isfinite(of[i]) else None for name, of in numbers.items()}
        for i in np.flatnonzero(images).tolist()
    ]
