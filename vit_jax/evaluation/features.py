"""Features of whole data sets, which may be cached on disk for later evaluations of the same model.

A cached file is named by a digest of model, preprocessing, names, labels and bytes of all images.
"""

import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np

from vit_jax.base import (
    Batch,
    Float,
    Int,
    Params,
    UserError,
    make_folder,
    records,
    tree_names,
    usable,
)
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.data.loading import ImageReader, cores
from vit_jax.evaluation.evaluator import Batches, Evaluator, Watch, make_evaluator
from vit_jax.models import Model, ModelConfig, ViTConfig, with_exact_products
from vit_jax.training.losses import BatchSums

# Features (n d) in host memory of these images of a reader; NaN for those that cannot be read.
FeaturesOf = Callable[[ImageReader, Int[np.ndarray, 'n']], Float[np.ndarray, 'n d']]


def make_feature_evaluator(
    model: Model, preprocessing: Preprocessing, batches: Batches, *, exact: bool = False
) -> Evaluator:
    """Makes the evaluator whose rows are `features`, with `exact` in full float32 precision.

    Raises UserError for a model that has no features of an image.
    """
    if isinstance(model.config, ViTConfig) and model.config.pool == 'none':
        raise UserError('fewshot: pool=none gives features of every token, not of the image')
    features = with_exact_products(model.features) if exact else model.features

    def rows(params: Params, batch: Batch) -> BatchSums:
        images = normalize(batch['images'], preprocessing)
        return BatchSums({}, batch['mask'].sum(), {'features': features(params, images)})

    return make_evaluator(rows, batches)


def features_by(evaluator: Evaluator, params: Params, watch: Watch = iter) -> FeaturesOf:
    """Returns a function that computes features each time it is called.

    It raises UserError, with the name of the image, for features that are not finite.
    """

    def compute(reader: ImageReader, indices: Int[np.ndarray, 'n']) -> Float[np.ndarray, 'n d']:
        evaluation = evaluator.evaluate(params, reader, indices, watch=watch)
        rows = evaluation.rows['features']
        if not (finite := np.isfinite(rows).all(axis=1)).all():
            name = reader.source.name_of(int(indices[evaluation.readable][finite.argmin()]))
            raise UserError(f'{name}: its features are not finite')
        features = np.full((len(indices), rows.shape[1]), np.nan, rows.dtype)
        features[evaluation.readable] = rows
        return features

    return compute


def cached(features_of: FeaturesOf, folder: pathlib.Path, model_digest: str) -> FeaturesOf:
    """Returns a function that reads features from files in `folder`, or writes them there."""
    make_folder(folder)

    def read_or_compute(
        reader: ImageReader, indices: Int[np.ndarray, 'n']
    ) -> Float[np.ndarray, 'n d']:
        options = reader.crop, reader.size, reader.exif_rotation
        options_text = repr((*options, reader.on_unreadable, reader.max_pixels))
        path = folder / f'{_digest(model_digest, options_text, _digest_images(reader))}.npz'
        if path.exists():
            expected = 'features that this program wrote; remove the file'
            with usable(path, expected), np.load(path, allow_pickle=False) as file:
                return file['features'][indices]
        features = features_of(reader, np.arange(len(reader.source)))
        write_npz(path, {'features': features})
        return features[indices]

    return read_or_compute


def digest_model(
    config: ModelConfig, params: Params, *, preprocessing: Preprocessing, dtype: str
) -> str:
    """Returns a digest of architecture, parameters, pixel scaling and precision."""
    scaling = preprocessing.mean, preprocessing.std, dtype
    leaves = itertools.chain(*tree_names.named_leaves(params).items())
    return _digest(json.dumps(records.to_dict(config)), repr(scaling), *leaves)


def _digest_images(reader: ImageReader) -> str:
    source = reader.source

    def of_image(index: int) -> str:
        try:
            return _digest(source.read(index)[0])
        except (ValueError, OSError):  # computing features reports it
            return 'unreadable'

    names = [source.name_of(i) for i in range(len(source))]
    with futures.ThreadPoolExecutor(cores()) as pool:
        images = pool.map(of_image, range(len(source)))
        return _digest(*names, source.labels, *images)


def _digest(*parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = np.asarray(part).tobytes()
        total.update(len(data).to_bytes(8, 'little') + data)
    return total.hexdigest()
