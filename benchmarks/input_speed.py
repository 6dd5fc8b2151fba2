"""Measures images per second of each part of the input pipeline, and finds the bottleneck.

python -m benchmarks.input_speed --photos=FOLDER [--variant=Ti/16] [--batch_size=64] [--seconds=5]

`per core` is images per CPU second, on which other work on the machine has little influence. With
the extra `tf` installed, tf.data is measured on the same photos in a TFRecord file. Threads of both
compete; --alone=pipeline and --alone=tf.data measure each in its own process. The pipeline is
measured in the second epoch, in which files are not checked for damage again; --alone=first-epoch
measures the first epoch.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import pathlib
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import cv2
import jax
import numpy as np
from jax.sharding import NamedSharding

from vit_jax.base import plural
from vit_jax.base.array_types import Batch
from vit_jax.cli import app
from vit_jax.config import TrainConfig
from vit_jax.data import image_decoding, loading
from vit_jax.data.augmentation import Augmentation, augment, augreg
from vit_jax.data.image_decoding import decode
from vit_jax.data.image_preprocessing import InceptionCrop, RandomCrop, decode_and_crop
from vit_jax.data.loading import ExampleRef, ImageReader, count_cores
from vit_jax.data.sources.base import Source, labeled_source, select
from vit_jax.data.sources.folders import unlabeled_source
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import variant
from vit_jax.planning.memory_plan import with_dummy_data
from vit_jax.training.duration import Duration
from vit_jax.training.losses import make_targets

SIMULATED_SECONDS = 1 / 600  # seconds per image on a simulated core
NUM_IMAGES = 100_000  # images, by repeating photos: shuffling few images costs more per image
ROUNDS = 3  # alternating measurements of both pipelines, as the speed of a machine varies


@dataclasses.dataclass
class Rate:
    """Images per second, and images per CPU second."""

    wall: float
    core: float

    def __str__(self) -> str:
        return f'{self.wall:>9,.0f} images/s {self.core:>9,.0f} per core'


def measure_rate(step: Callable[[], int], seconds: float) -> Rate:
    """Measures a function that returns a number of images, after two calls to warm up."""
    step()
    step()
    wall = time.perf_counter()
    core = time.process_time()
    images = 0
    while time.perf_counter() - wall < seconds:
        images += step()
    return Rate(images / (time.perf_counter() - wall), images / (time.process_time() - core))


def undecoded_images(count: int) -> Source:
    """Returns images that need no decoding, to measure the overhead of Python."""
    image = np.zeros((224, 224, 3), np.uint8)
    return labeled_source(range(count), [0] * count, ('a',), read=lambda i: image)


def slow_images(count: int, seconds: float) -> Source:
    """Returns images that take `seconds` to read without using a core, to simulate cores."""
    image = np.zeros((224, 224, 3), np.uint8)

    def read(index: int) -> np.ndarray:
        time.sleep(seconds)
        return image

    return labeled_source(range(count), [0] * count, ('a',), read=read)


def make_reading_step(reader: ImageReader, threads: int, batch_size: int) -> Callable[[], int]:
    """Returns a function that reads, decodes and crops one batch in threads."""
    pool = futures.ThreadPoolExecutor(threads)
    rng = np.random.default_rng(0)

    def step() -> int:
        drawn = rng.integers(0, len(reader.source), batch_size)
        reader.examples([ExampleRef(int(i), epoch=1) for i in drawn], pool)
        return batch_size

    return step


def tf_data(paths: list[pathlib.Path], size: tuple[int, int], batch_size: int) -> Iterator[int]:
    """Does the same with tf.data: TFRecord, shuffle, decode and crop, resize, flip, batch."""
    import tensorflow as tf

    tf.config.set_visible_devices([], 'GPU')
    with tempfile.NamedTemporaryFile(suffix='.tfrecord') as file:
        with tf.io.TFRecordWriter(file.name) as writer:
            for path in paths:
                if path.read_bytes()[:2] == b'\xff\xd8':
                    writer.write(path.read_bytes())

        def example(stored: 'tf.Tensor') -> 'tf.Tensor':
            shape = tf.io.extract_jpeg_shape(stored)
            begin, extent, _ = tf.image.sample_distorted_bounding_box(
                shape,
                tf.zeros((0, 0, 4)),
                area_range=(0.05, 1.0),
                min_object_covered=0,
                use_image_if_no_bounding_boxes=True,
            )
            window = tf.stack([begin[0], begin[1], extent[0], extent[1]])
            image = tf.io.decode_and_crop_jpeg(stored, window, channels=3)
            image = tf.cast(tf.image.resize(image, size), tf.uint8)
            return tf.image.random_flip_left_right(image)

        dataset = tf.data.TFRecordDataset(file.name).shuffle(250).repeat()
        dataset = dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE)
        for batch in dataset.batch(batch_size).prefetch(2).as_numpy_iterator():
            yield len(batch)


def print_rate(name: str, step: Callable[[], int], seconds: float) -> Rate:
    """Measures a function and prints its rate."""
    measured = measure_rate(step, seconds)
    print(f'{name:<36}{measured}')
    return measured


def measure_host(reader: ImageReader, batch_size: int, seconds: float) -> None:
    """Measures reading, decoding and cropping."""
    undecoded = dataclasses.replace(reader, source=undecoded_images(250))
    print_rate(
        'Python overhead without decoding', make_reading_step(undecoded, 1, batch_size), seconds / 2
    )
    for threads in sorted({1, 2, count_cores()}):
        name = f'decode and crop, {plural(threads, "thread")}'
        print_rate(name, make_reading_step(reader, threads, batch_size), seconds)


def measure_simulated_cores(reader: ImageReader, seconds: float) -> None:
    """Measures how the rate grows with the number of cores until Python limits it."""
    simulated = dataclasses.replace(
        reader, crop=RandomCrop(scale=1.0), source=slow_images(10_000, SIMULATED_SECONDS)
    )
    for count in 4, 8, 16, 32, 64:
        name = f'{count} simulated cores of {1 / SIMULATED_SECONDS:.0f} images/s'
        print_rate(name, make_reading_step(simulated, count, 1024), seconds)


def measure_augmentation(reader: ImageReader, batch_size: int, seconds: float) -> None:
    """Measures augmentation on the device: AugReg's level medium2, and DeiT III's."""
    refs = [ExampleRef(i) for i in range(batch_size)]
    images = reader.examples(refs, futures.ThreadPoolExecutor(1))
    key = jax.random.key(0)
    targets = functools.partial(make_targets, num_classes=1000)
    deit3 = Augmentation(flip=True, three_augment=True, color_jitter=0.3, mixup=0.8, cutmix=1.0)
    configs = {'RandAugment and MixUp': augreg('medium2'), '3-Augment, MixUp and CutMix': deit3}
    for name, config in configs.items():
        function = functools.partial(augment, key, config=config, targets_of=targets)
        augment_images = jax.jit(function)

        def augmented(augment_images: Any = augment_images) -> int:
            jax.block_until_ready(augment_images(images))
            return batch_size

        print_rate(f'{name} on the device', augmented, seconds)


def batches_of(
    reader: ImageReader, sharding: NamedSharding, batch_size: int, *, epoch: int = 1
) -> Iterator[Batch]:
    """Yields batches on the devices, starting at an epoch (from 0)."""
    loader = loading.make_loader(reader, loading.LoaderConfig(), sharding)
    steps = range(epoch * (len(reader.source) // batch_size + 1), 10**9)
    return loading.training_batches(loader, steps=steps, batch_size=batch_size, seed=0)


def make_batches(
    photos: str, size: tuple[int, int], batch_size: int, config: loading.LoaderConfig
) -> Iterator[Batch]:
    """Yields batches of random crops of the photos in a folder, on the devices, without end."""
    source = unlabeled_source([photos])
    source = select(source, np.arange(NUM_IMAGES) % len(source))
    reader = ImageReader(source, InceptionCrop(), size, exif_rotation=True)
    sharding = meshes.batch_sharding(meshes.make_mesh(meshes.MeshConfig()))
    loader = loading.make_loader(reader, config, sharding)
    return loading.training_batches(loader, steps=range(10**9), batch_size=batch_size, seed=0)


def measure_alone(
    name: str, reader: ImageReader, photos: str, batch_size: int, seconds: float
) -> None:
    """Measures our pipeline or tf.data in a process that does nothing else."""
    if name == 'tf.data':
        counts = tf_data(list_files(photos), reader.size, batch_size)
        print_rate('tf.data, end to end', lambda: next(counts), seconds)
        return
    mesh = meshes.make_mesh(meshes.MeshConfig())
    epoch = 0 if name == 'first-epoch' else 1
    batches = batches_of(reader, meshes.batch_sharding(mesh), batch_size, epoch=epoch)

    def to_device() -> int:
        jax.block_until_ready(next(batches))
        return batch_size

    print_rate(f'{name} to the device'.replace('-', ' '), to_device, seconds)


def measure_large_photos(photos: str, size: tuple[int, int]) -> None:
    """Measures CPU time and error of crops from photos of 12 megapixels, by decoding method.

    The error is the mean difference from the crop at full size, resized by averaging areas.
    """
    cv2.setNumThreads(1)
    rng = np.random.default_rng(0)
    jpegs = []
    for path in list_files(photos)[:60:8]:
        pixels = cv2.resize(cv2.imread(str(path)), (4000, 3000), interpolation=cv2.INTER_CUBIC)
        noisy = np.clip(pixels + rng.normal(0, 6, pixels.shape), 0, 255).astype(np.uint8)
        jpegs.append(cv2.imencode('.jpg', noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    draws = [(jpeg, seed) for seed in range(3) for jpeg in jpegs]
    means = []
    for jpeg, seed in draws:
        image = decode(jpeg, exif_rotation=True)
        top, left, h, w = InceptionCrop().region(image.shape[:2], np.random.default_rng(seed))
        part = image[top : top + h, left : left + w]
        means.append(cv2.resize(part, size[::-1], interpolation=cv2.INTER_AREA).astype(float))
    crops: dict[str, Callable[[bytes, np.random.Generator], np.ndarray]] = {
        'whole photo': lambda x, rng: InceptionCrop()(decode(x, exif_rotation=True), size, rng)
    }
    parts: dict[str, dict[str, Any]] = {
        'only the crop': {'crop': InceptionCrop(reduced=False), 'to_end': False},
        'reduced, first epoch': {'crop': InceptionCrop()},
        'reduced': {'crop': InceptionCrop(), 'to_end': False},
    }
    for name, options in parts.items():
        crops[name] = functools.partial(
            lambda x, rng, crop, **o: decode_and_crop(x, crop, size, rng, exif_rotation=True, **o),
            **options,
        )
    for name, crop_image in crops.items():
        began = time.process_time()
        cropped = [crop_image(x, np.random.default_rng(seed)) for x, seed in draws]
        milliseconds = 1e3 * (time.process_time() - began) / len(draws)
        error = np.mean([abs(x - mean).mean() for x, mean in zip(cropped, means, strict=True)])
        print(
            f'12 megapixels, decode {name:<21}{milliseconds:5.1f} ms, mean error {error:.2f} of 255'
        )


def list_files(folder: str) -> list[pathlib.Path]:
    """Lists all files in a folder and its subfolders."""
    return sorted(path for path in pathlib.Path(folder).rglob('*') if path.is_file())


def measure_with_model(
    reader: ImageReader, name: str, batch_size: int, seconds: float
) -> Callable[[], int]:
    """Measures pipeline, training step, and both together; returns the function of the pipeline."""
    model = variant(name, num_classes=1000)
    config = TrainConfig(
        data='photos',
        model=model,
        augmentation=Augmentation(crop=InceptionCrop(), flip=True),
        batch_size=batch_size,
        total=Duration(steps=1000),
    )
    experiment = build_experiment(with_dummy_data(config, num_classes=1000, num_images=1000))
    abstract = training_run.abstract_state(experiment)
    step = training_run.lower_update(experiment, abstract).compile()
    sharding = meshes.batch_sharding(experiment.mesh)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = batches_of(reader, sharding, batch_size)

    def to_device() -> int:
        jax.block_until_ready(next(batches))
        return batch_size

    pipeline = print_rate('pipeline to the device', to_device, seconds)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    batch_mebibytes = batch_size * math.prod(reader.size) * 3 / 2**20
    text = f'a batch has {batch_mebibytes:.0f} MiB, at most 5 are in memory'
    print(f'  the pipeline adds {peak:,.0f} MiB of peak memory; {text}')
    shardings = sharding_rules.get_shardings(abstract)
    init = meshes.jit(experiment.functions.init, experiment.mesh, out_shardings=shardings)
    state = init(experiment.values)
    batch = next(batches)

    def update(batch: Batch) -> int:
        nonlocal state
        state, metrics = step(state, batch, experiment.values, None, math.inf)
        jax.block_until_ready(metrics)
        return batch_size

    step_alone = print_rate(f'step of {name} alone', lambda: update(batch), seconds)
    print_rate('both together', lambda: update(next(batches)), seconds)
    slower = 'the input' if pipeline.wall < step_alone.wall else 'the step'
    print(f'the bottleneck is {slower}: {min(pipeline.wall, step_alone.wall):,.0f} images/s alone')
    return to_device


def compare_with_tf_data(
    to_device: Callable[[], int], counts: Iterator[int], seconds: float
) -> None:
    """Measures our pipeline and tf.data in turns."""
    ratios = []
    for _ in range(ROUNDS):
        ours = print_rate('pipeline to the device', to_device, seconds)
        tf_data_rate = print_rate('tf.data, end to end', lambda: next(counts), seconds)
        ratios.append(ours.core / tf_data_rate.core)
    turns = ', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))
    print(f'images/s per core, vit_jax / tf.data, in {ROUNDS} turns: {turns}')


def main() -> None:
    """Prints the rates and the bottleneck."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--photos', required=True)
    parser.add_argument('--variant', default='Ti/16')
    parser.add_argument('--batch_size', type=app.positive_int, default=64)
    parser.add_argument('--seconds', type=float, default=5.0)
    parser.add_argument('--alone', choices=['pipeline', 'first-epoch', 'tf.data', 'large'])
    arguments = parser.parse_args()
    size = (224, 224)
    batch_size = arguments.batch_size
    seconds = arguments.seconds
    source = unlabeled_source([arguments.photos])
    stored = [len(source.read(i)[0]) for i in range(len(source))]
    print(f'{len(source)} photos of {np.mean(stored) / 1e3:.0f} kB; {count_cores()} cores')
    print(image_decoding.describe_decoder())
    source = select(source, np.arange(NUM_IMAGES) % len(source))
    cv2.setNumThreads(1)  # as the pipeline does
    reader = ImageReader(source, InceptionCrop(), size, exif_rotation=True)
    if arguments.alone == 'large':
        return measure_large_photos(arguments.photos, reader.size)
    if arguments.alone:
        return measure_alone(arguments.alone, reader, arguments.photos, batch_size, seconds)
    measure_host(reader, batch_size, seconds)
    measure_simulated_cores(reader, seconds)
    measure_augmentation(reader, batch_size, seconds)
    to_device = measure_with_model(reader, arguments.variant, batch_size, seconds)
    if importlib.util.find_spec('tensorflow'):
        counts = tf_data(list_files(arguments.photos), size, batch_size)
        compare_with_tf_data(to_device, counts, seconds)
    versions = ', '.join(
        f'{name} {importlib.metadata.version(name)}' for name in ('jax', 'opencv-python-headless')
    )
    print(f'{jax.devices()[0].device_kind}, {versions}')


if __name__ == '__main__':
    main()
