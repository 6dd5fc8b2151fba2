"""Features of whole data sets, optionally cached on disk.

The name of a cache file is a digest of model, preprocessing, and the names, labels and bytes of all
images.
"""

import pathlib
from collections.abc import Callable
from concurrent import futures

import numpy as np

from vit_jax.base import Batch, Float, Int, Params, UserError, make_folder, usable
from vit_jax.checkpoints.digests import digest_values
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.data.loading import ImageReader, count_cores
from vit_jax.evaluation.evaluator import BatchMaker, Evaluator, Watch, make_evaluator
from vit_jax.models import Model, ViTConfig
from vit_jax.training.losses import BatchSums

# Maps a reader and image indices to features (n d) in host memory; NaN for unreadable images.
FeatureFn = Callable[[ImageReader, Int[np.ndarray, 'n']], Float[np.ndarray, 'n d']]


def make_feature_evaluator(
    model: Model, preprocessing: Preprocessing, batches: BatchMaker
) -> Evaluator:
    """Makes an evaluator whose outputs are `features`.

    Raises:
      UserError: If the model has no features of the whole image.
    """
    if isinstance(model.config, ViTConfig) and model.config.pool == 'none':
        raise UserError('fewshot: pool=none has features per token; expected one vector per image')

    def sums(params: Params, batch: Batch) -> BatchSums:
        images = normalize(batch['images'], preprocessing)
        return BatchSums({}, batch['mask'].sum(), {'features': model.features(params, images)})

    return make_evaluator(sums, batches)


def make_feature_function(evaluator: Evaluator, params: Params, watch: Watch = iter) -> FeatureFn:
    """Returns a function (reader, indices) -> features (n d) in host memory.

    It computes the features on each call, without a cache. They are NaN for unreadable images. It
    raises UserError if the features of an image are not finite.
    """

    def compute(reader: ImageReader, indices: Int[np.ndarray, 'n']) -> Float[np.ndarray, 'n d']:
        evaluation = evaluator.evaluate(params, reader, indices, watch=watch)
        rows = evaluation.outputs['features']
        if not (finite := np.isfinite(rows).all(axis=1)).all():
            name = reader.source.name_of(int(indices[evaluation.readable][finite.argmin()]))
            raise UserError(f'{name}: the features of this image are not finite')
        features = np.full((len(indices), rows.shape[1]), np.nan, rows.dtype)
        features[evaluation.readable] = rows
        return features

    return compute


def cache(features_of: FeatureFn, folder: pathlib.Path, model_digest: str) -> FeatureFn:
    """Returns a function that caches the features of whole data sets in files in `folder`."""
    make_folder(folder)

    def read_or_compute(
        reader: ImageReader, indices: Int[np.ndarray, 'n']
    ) -> Float[np.ndarray, 'n d']:
        options = reader.crop, reader.size, reader.exif_rotation
        options_text = repr((*options, reader.on_unreadable, reader.max_pixels))
        path = folder / f'{digest_values(model_digest, options_text, _digest_images(reader))}.npz'
        if path.exists():
            expected = 'features written by vit_jax; remove the file'
            with usable(path, expected), np.load(path, allow_pickle=False) as file:
                return file['features'][indices]
        features = features_of(reader, np.arange(len(reader.source)))
        write_npz(path, {'features': features})
        return features[indices]

    return read_or_compute


def _digest_images(reader: ImageReader) -> str:
    source = reader.source

    def of_image(index: int) -> str:
        try:
            return digest_values(source.read(index)[0])
        except (ValueError, OSError):  # reported when features are computed
            return 'unreadable'

    names = [source.name_of(i) for i in range(len(source))]
    with futures.ThreadPoolExecutor(count_cores()) as pool:
        images = pool.map(of_image, range(len(source)))
        return digest_values(*names, source.labels, *images)
