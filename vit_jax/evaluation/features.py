"""Features of whole data sets."""

from collections.abc import Callable

import numpy as np

from vit_jax.base import Batch, Float, Int, Params, UserError
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.data.loading import BatchSource, ImageReader
from vit_jax.evaluation.evaluator import Evaluator, WrapBatches, make_evaluator
from vit_jax.models import Model, ViTConfig
from vit_jax.training.losses import BatchSums

# Maps a reader and image indices to features (n d) in host memory; NaN for unreadable images.
FeatureFn = Callable[[ImageReader, Int[np.ndarray, 'n']], Float[np.ndarray, 'n d']]


def make_feature_evaluator(
    model: Model, preprocessing: Preprocessing, batches: BatchSource
) -> Evaluator:
    """Makes an evaluator whose outputs are `features`.

    Raises:
      UserError: If the model has no features of the whole image.
    """
    return make_evaluator(make_feature_sums(model, preprocessing), batches)


def make_feature_sums(
    model: Model, preprocessing: Preprocessing
) -> Callable[[Params, Batch], BatchSums]:
    """Makes the function of an evaluator whose outputs are `features`.

    Raises:
      UserError: If the model has no features of the whole image.
    """
    if isinstance(model.config, ViTConfig) and model.config.pool == 'none':
        raise UserError('fewshot: pool=none has features per token; expected one vector per image')

    def sums(params: Params, batch: Batch) -> BatchSums:
        images = normalize(batch['images'], preprocessing)
        return BatchSums({}, batch['mask'].sum(), {'features': model.features(params, images)})

    return sums


def make_feature_function(
    evaluator: Evaluator, params: Params, wrap: WrapBatches = iter
) -> FeatureFn:
    """Returns a function (reader, indices) -> features (n d) in host memory.

    Features are NaN for unreadable images. The function raises UserError if the features of a
    readable image are not finite.
    """

    def compute(reader: ImageReader, indices: Int[np.ndarray, 'n']) -> Float[np.ndarray, 'n d']:
        evaluation = evaluator.evaluate(params, reader, indices, wrap=wrap)
        rows = evaluation.outputs['features']
        is_finite = np.isfinite(rows).all(axis=1)
        if not is_finite.all():
            first = indices[evaluation.readable][is_finite.argmin()]
            name = reader.source.name_of(int(first))
            raise UserError(f'{name}: the features of this image are not finite')
        features = np.full((len(indices), rows.shape[1]), np.nan, rows.dtype)
        features[evaluation.readable] = rows
        return features

    return compute
