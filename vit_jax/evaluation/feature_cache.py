"""Features of whole splits, kept on disk: another evaluation of the same network reads them.

A file is named by a digest of network, preprocessing, names, labels and the bytes of all images.
"""

import hashlib
import itertools
import json
import logging
import pathlib
from concurrent import futures
from typing import Any

import numpy as np

from vit_jax.base import DAMAGED_NPZ, Float, Int, Params, UserError, records, tree_names, usable
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.reading import ImageReader, cores
from vit_jax.evaluation.probing import FeaturesOf
from vit_jax.models import ModelConfig


def cached(features_of: FeaturesOf, folder: pathlib.Path, network: str) -> FeaturesOf:
    """The same features, read from files in `folder` where they are there, else written there."""
    with usable(folder):
        folder.mkdir(parents=True, exist_ok=True)

    def from_cache(reader: ImageReader, indices: Int[np.ndarray, 'n']) -> Float[np.ndarray, 'n d']:
        read = reader.crop, reader.size, reader.exif_rotation
        preparation = repr((*read, reader.on_unreadable, reader.max_pixels))
        name = _digest(network, preparation, _digest_of_images(reader))
        path = folder / f'{name}.npz'
        try:  # every member of an npz has a checksum
            with np.load(path, allow_pickle=False) as file:
                return file['features'][indices]
        except FileNotFoundError:
            pass
        except DAMAGED_NPZ as error:
            logging.warning('%s: %s; computed anew', path, error)
        features = features_of(reader, np.arange(len(reader.source)))
        write_npz(path, {'features': features})
        return features[indices]

    return from_cache


def digest_of_network(
    model: ModelConfig, params: Params, *, preprocessing: Preprocessing, dtype: str
) -> str:
    """One name for a network: configuration, numbers, how pixels are scaled, precision."""
    scaling = preprocessing.mean, preprocessing.std, dtype
    leaves = itertools.chain(*tree_names.named_leaves(params).items())
    return _digest(json.dumps(records.to_dict(model)), repr(scaling), *leaves)


def _digest_of_images(reader: ImageReader) -> str:
    source = reader.source

    def of_image(index: int) -> str:
        try:
            return _digest(source.read(index)[0])
        except (ValueError, OSError) as error:
            if reader.on_unreadable == 'skip':
                return 'unreadable'
            raise UserError(f'{source.name_of(index)}: {error}') from error

    names = [source.name_of(i) for i in range(len(source))]
    with futures.ThreadPoolExecutor(cores()) as pool:
        images = pool.map(of_image, range(len(source)))
        return _digest(*names, source.labels, *images)


def _digest(*parts: Any) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        if not isinstance(data, bytes):
            data = np.ascontiguousarray(data).tobytes()
        total.update(len(data).to_bytes(8, 'little') + data)
    return total.hexdigest()
