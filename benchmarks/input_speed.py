"""Measures images per second of each part of the input pipeline, and finds the bottleneck.

python -m benchmarks.input_speed --photos=FOLDER [--variant=Ti/16] [--batch_size=64] [--seconds=5]

`per core` is images per CPU second, on which other work on the machine has little influence. With
the extra `tf` installed, tf.data reads the same photos from a TFRecord file, in turns with the
pipeline, on one core and on all, each in its own process. The pipeline has two rows: in the first
epoch, files are also checked for damage. --alone=NAME measures only one part of all this;
`simulated` is everything but decoding: microseconds of each part, and the rate with many cores, for
which the decoder waits instead.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any
from unittest import mock

import cv2
import jax
import numpy as np
from jax.sharding import NamedSharding

from configs.pretrain import deit3, vit
from vit_jax.base import plural
from vit_jax.base.array_types import Batch
from vit_jax.cli import app
from vit_jax.config import TrainConfig
from vit_jax.data import image_decoding, image_preprocessing, loading, sampling
from vit_jax.data.augmentation import Augmentation, augment, augreg
from vit_jax.data.image_decoding import MAX_PIXELS, decode, is_jpeg
from vit_jax.data.image_preprocessing import (
    InceptionCrop,
    Resize,
    crop_jpegs,
    decode_and_crop,
)
from vit_jax.data.loading import ImageReader, LoaderConfig, count_cores
from vit_jax.data.sampling import Examples
from vit_jax.data.sources.base import Source, labeled_source, select
from vit_jax.data.sources.folders import unlabeled_source
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.experiment import training_run
from vit_jax.experiment.build import build_experiment
from vit_jax.models import variant
from vit_jax.planning.memory_plan import with_dummy_data
from vit_jax.training.duration import Duration
from vit_jax.training.loop import Clock
from vit_jax.training.losses import make_targets

SIMULATED_SECONDS = 1 / 600  # seconds per image on a simulated core
_SPREAD = -0.18, 0.6  # of a random factor with the mean 1
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


class SimulatedDecoder:
    """Chooses the regions of JPEGs, and then waits instead of decoding and resizing them.

    The time of an image is random, because photos differ.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds  # for an image, on average
        self.find_regions = image_decoding.region_decoder().find_regions

    def decode_regions(self, files: tuple[bytes, ...], regions: Any, pixels: Any) -> bytes:
        if self.seconds:
            time.sleep(self.seconds * sum(random.lognormvariate(*_SPREAD) for _ in files))
        return b'\1' * len(files)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the decoder and the resizing of whole images."""
        with contextlib.ExitStack() as stack:
            replace = functools.partial(mock.patch.object, image_preprocessing)
            stack.enter_context(replace('region_decoder', lambda: self))
            stack.enter_context(mock.patch.object(cv2, 'resize', lambda *arguments, **_: None))
            yield


def make_reading_step(reader: ImageReader, threads: int, batch_size: int) -> Callable[[], int]:
    """Returns a function that reads, decodes and crops one batch in threads."""
    pool = futures.ThreadPoolExecutor(threads)
    rng = np.random.default_rng(0)

    def step() -> int:
        drawn = rng.integers(0, len(reader.source), batch_size)
        reader.examples(Examples.of(drawn, epoch=1), pool)
        return batch_size

    return step


def tf_data(paths: list[pathlib.Path], size: tuple[int, int], batch_size: int) -> Iterator[int]:
    """Yields the sizes of batches from tf.data: TFRecord, shuffle, decode and crop, resize, batch.

    Uses big_vision's options. By default, TensorFlow decodes with libjpeg's faster, less exact
    method. It ignores the orientation in EXIF.
    """
    import tensorflow as tf

    tf.config.set_visible_devices([], 'GPU')
    options = tf.data.Options()
    options.threading.max_intra_op_parallelism = 1
    options.threading.private_threadpool_size = 48
    options.experimental_optimization.inject_prefetch = False
    with tempfile.NamedTemporaryFile(suffix='.tfrecord') as file:
        with tf.io.TFRecordWriter(file.name) as writer:
            jpegs = [path.read_bytes() for path in paths]
            jpegs = [jpeg for jpeg in jpegs if is_jpeg(jpeg)]
            for number in range(max(5000, len(jpegs))):  # many, so that the file rarely ends
                writer.write(jpegs[number % len(jpegs)])

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
            return tf.cast(tf.image.resize(image, size), tf.uint8)

        dataset = tf.data.TFRecordDataset(file.name).shuffle(250).repeat()
        dataset = dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE).with_options(options)
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


def photos_in_memory(source: Source) -> Source:
    """Returns the first photos that the decoder of regions reads, repeated, in memory."""
    files = [source.read(index)[0] for index in range(250)]
    regions = np.zeros((250, 7), np.int32)
    options = 0.05, 1.0, 0.75, 1.33, 224, 224, True, True, MAX_PIXELS
    keys = np.zeros(250, np.uint64)
    image_decoding.region_decoder().find_regions(tuple(files), keys, regions, options)
    plain = [file for file, region in zip(files, regions, strict=True) if region.any()]
    print(f'{len(plain)} of 250 photos are usual JPEGs; the others take the general path')
    return labeled_source(
        range(NUM_IMAGES), [0] * NUM_IMAGES, ('a',), read=lambda i: plain[i % len(plain)]
    )


def measure_simulated_cores(reader: ImageReader, seconds: float) -> None:
    """Measures how the rate grows with the number of cores until Python limits it.

    Everything is real except decoding and resizing: order, keys, headers, regions, labels, batches.
    """
    reader = dataclasses.replace(reader, source=photos_in_memory(reader.source))
    sharding = meshes.batch_sharding(meshes.make_mesh(meshes.MeshConfig()))

    def make_step(threads: int, batch_size: int = 1024) -> Callable[[], int]:
        batches = batches_of(reader, sharding, batch_size, config=LoaderConfig(threads=threads))
        return lambda: len(next(batches)['mask'])

    with SimulatedDecoder(SIMULATED_SECONDS).installed():
        for cores in 4, 8, 16, 32, 64:
            name = f'{cores} simulated cores of {1 / SIMULATED_SECONDS:.0f} images/s'
            print_rate(name, make_step(cores), seconds)
        for batch_size in 16, 128, 512:
            name = f'64 simulated cores, batches of {batch_size}'
            print_rate(name, make_step(64, batch_size), seconds)
    with SimulatedDecoder(0).installed():
        rate = print_rate('64 threads, decoding in no time', make_step(64), seconds)
        print(f'  {1e6 / rate.wall:.1f} microseconds per image, with contention for the lock')
    with SimulatedDecoder(SIMULATED_SECONDS).installed():
        clock = Clock()
        config = LoaderConfig(threads=64)
        loader = loading.make_loader(reader, config, sharding)
        sampler = sampling.shuffle(len(reader.source), seed=0)
        host_batches = loading.host_batches(loader, sampler, steps=range(400), batch_size=128)
        for step_number in range(400):
            if step_number == 100:
                clock.seconds.clear()
            with clock('data wait'):
                local = next(host_batches)
            with clock('step'):
                loading.to_devices(loader, local, 128)
                time.sleep(0.01)
        share = clock.seconds['data wait'] / sum(clock.seconds.values())
        print(f'64 simulated cores, batches of 128, steps of 10 ms: data wait {share:.1%}')


def measure_parts(reader: ImageReader) -> None:
    """Prints the CPU microseconds per image of all parts but decoding and resizing."""
    reader = dataclasses.replace(reader, source=photos_in_memory(reader.source))
    crop = reader.crop
    assert isinstance(crop, InceptionCrop)
    count = 1024
    positions = np.arange(count)
    sampler = sampling.shuffle(len(reader.source), seed=0)
    examples = Examples.of(sampler(positions).index, epoch=1)
    keys = sampling.example_keys(0, examples)
    files = [reader.source.read(int(index))[0] for index in examples.index]
    groups = [tuple(files[i : i + 16]) for i in range(0, count, 16)]
    regions = np.zeros((16, 7), np.int32)
    options = *crop.area, *crop.aspect, *reader.size, crop.reduced, True, MAX_PIXELS
    find_regions = image_decoding.region_decoder().find_regions
    pool = futures.ThreadPoolExecutor(1)
    general = dataclasses.replace(reader, crop=Resize())
    parts: dict[str, Callable[[], Any]] = {
        'order': lambda: sampler(positions),
        'keys': lambda: sampling.example_keys(0, examples),
        'regions, without the lock': lambda: [
            find_regions(group, keys[:16], regions, options) for group in groups
        ],
        'all of a batch': lambda: reader.examples(examples, pool),
        'all of a batch, general path': lambda: general.examples(examples, pool),
    }
    blank = np.zeros((*reader.size, 3), np.uint8)
    without_decoding = mock.patch('simplejpeg.decode_jpeg', lambda *_, **__: blank)
    without_resizing = mock.patch.object(image_preprocessing, '_resize', lambda *_: blank)
    with SimulatedDecoder(0).installed(), without_decoding, without_resizing:
        for name, part in parts.items():
            times = []
            for _ in range(10):
                began = time.process_time()
                part()
                times.append(time.process_time() - began)
            print(f'{name:<36}{1e6 * min(times) / count:>9.2f} microseconds per image')


def measure_recipe(
    name: str, config: TrainConfig, reader: ImageReader, batch_size: int, seconds: float
) -> None:
    """Measures reading and cropping on the host, and augmentation on the device."""
    assert config.model is not None and isinstance(config.augmentation, Augmentation)
    assert config.augmentation.crop is not None
    reader = dataclasses.replace(
        reader, crop=config.augmentation.crop, size=config.model.image_size
    )
    sharding = meshes.batch_sharding(meshes.make_mesh(meshes.MeshConfig()))
    batches = batches_of(reader, sharding, batch_size, config=config.loader)
    print_rate(f'{name}, on the host', lambda: len(next(batches)['mask']), seconds)
    batch = next(batches)
    targets = functools.partial(make_targets, num_classes=1000)
    augment_batch = functools.partial(augment, config=config.augmentation, targets_of=targets)
    compiled = jax.jit(augment_batch)

    def augmented() -> int:
        jax.block_until_ready(compiled(jax.random.key(0), batch))
        return batch_size

    print_rate(f'{name}, augmentation on the device', augmented, seconds)


def measure_recipes(reader: ImageReader, batch_size: int, seconds: float) -> None:
    """Measures the input of AugReg's and DeiT III's recipes."""
    augreg_recipe = vit.get_config('imagenet,B/16')
    augreg_recipe.augmentation = augreg('medium2')
    measure_recipe('AugReg', augreg_recipe, reader, batch_size, seconds)
    measure_recipe('DeiT III', deit3.get_config('B/16'), reader, batch_size, seconds)


def batches_of(
    reader: ImageReader,
    sharding: NamedSharding,
    batch_size: int,
    *,
    epoch: int = 1,
    config: LoaderConfig | None = None,
) -> Iterator[Batch]:
    """Yields batches on the devices, starting at an epoch (from 0)."""
    loader = loading.make_loader(reader, config, sharding)
    steps = range(epoch * (len(reader.source) // batch_size + 1), 10**9)
    return loading.training_batches(loader, steps=steps, batch_size=batch_size, seed=0)


def make_batches(
    photos: str, size: tuple[int, int], batch_size: int, config: LoaderConfig
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
    images = math.prod(reader.size) * 3 * batch_size / 2**20
    before = peak_mebibytes()
    if name == 'tf.data':
        counts = tf_data(list_files(photos), reader.size, batch_size)
    else:
        sharding = meshes.batch_sharding(meshes.make_mesh(meshes.MeshConfig()))
        epoch = 0 if name == 'first-epoch' else 1
        batches = batches_of(reader, sharding, batch_size, epoch=epoch)
        counts = (len(jax.block_until_ready(batch)['mask']) for batch in batches)
    rate = measure_rate(lambda: next(counts), seconds)
    added = peak_mebibytes() - before
    print(f'{name}: {added:,.0f} MiB more at its peak; the images of a batch are {images:,.0f} MiB')
    print(f'{name:<36}{rate}')


def peak_mebibytes() -> float:
    """Returns the most memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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
    keys = sampling.hash_numbers(np.arange(3))
    means = []
    for jpeg, seed in draws:
        image = decode(jpeg, exif_rotation=True)
        region = InceptionCrop().region(image.shape[:2], keys[seed])
        part = image_decoding.cut(image, region)
        means.append(cv2.resize(part, size[::-1], interpolation=cv2.INTER_AREA).astype(float))

    def crop_region(jpeg: bytes, seed: int, *, crop: InceptionCrop, to_end: bool) -> np.ndarray:
        result = np.empty((*size, 3), np.uint8)
        crop_jpegs(
            (jpeg,),
            crop,
            keys[[seed]],
            [result],
            exif_rotation=True,
            max_pixels=MAX_PIXELS,
            to_end=np.array([to_end]),
        )
        return result

    full_size = InceptionCrop(reduced=False)
    whole = functools.partial(decode_and_crop, crop=full_size, size=size, exif_rotation=True)
    crops: dict[str, Callable[[bytes, int], np.ndarray]] = {
        'whole photo': lambda jpeg, seed: whole(jpeg, key=keys[seed]),
        'only the crop': functools.partial(crop_region, crop=full_size, to_end=False),
        'reduced, first epoch': functools.partial(crop_region, crop=InceptionCrop(), to_end=True),
        'reduced': functools.partial(crop_region, crop=InceptionCrop(), to_end=False),
    }
    for name, crop_image in crops.items():
        began = time.process_time()
        cropped = [crop_image(jpeg, seed) for jpeg, seed in draws]
        milliseconds = 1e3 * (time.process_time() - began) / len(draws)
        error = np.mean([abs(x - mean).mean() for x, mean in zip(cropped, means, strict=True)])
        print(
            f'12 megapixels, decode {name:<21}{milliseconds:5.1f} ms, mean error {error:.2f} of 255'
        )


def list_files(folder: str) -> list[pathlib.Path]:
    """Lists all files in a folder and its subfolders."""
    return sorted(path for path in pathlib.Path(folder).rglob('*') if path.is_file())


def measure_with_model(reader: ImageReader, name: str, batch_size: int, seconds: float) -> None:
    """Measures pipeline, training step, and both together."""
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
    batches = batches_of(reader, sharding, batch_size)

    def to_device() -> int:
        jax.block_until_ready(next(batches))
        return batch_size

    pipeline = print_rate('pipeline to the device', to_device, seconds)
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


def _measure_in_process(name: str, command: list[str]) -> float:
    """Runs --alone=NAME and prints what it printed. Returns its images per second and core."""
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}  # this process may hold all other devices
    done = subprocess.run(
        [*command, f'--alone={name}'],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    *_, memory, rate = done.stdout.splitlines()
    print(f'{memory}\n{rate}')
    per_core = rate.removesuffix(' per core').split()[-1]
    return float(per_core.replace(',', ''))


def compare_with_tf_data(arguments: list[str], cores: int) -> None:
    """Measures tf.data and both epochs of the pipeline on the first cores, in turns.

    Args:
      arguments: The command line of this program, for the process of each measurement.
      cores: The number of cores.
    """
    command = [sys.executable, '-m', 'benchmarks.input_speed', *arguments]
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:cores])  # processes inherit it
    ratios: dict[str, list[float]] = {'first-epoch': [], 'pipeline': []}
    try:
        for turn in range(ROUNDS):
            names = collections.deque(['tf.data', *ratios])
            names.rotate(turn)
            rates = {name: _measure_in_process(name, command) for name in names}
            for name, turns in ratios.items():
                turns.append(rates[name] / rates['tf.data'])
    finally:
        os.sched_setaffinity(0, allowed)
    for name, turns in ratios.items():
        of_turns = ', '.join(f'{ratio:.2f}' for ratio in sorted(turns))
        print(
            f'{name}, {plural(cores, "core")}: images/s per core, vit_jax / tf.data: median '
            f'{statistics.median(turns):.2f} of {of_turns}'
        )


def main() -> None:
    """Prints the rates and the bottleneck."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--photos', required=True)
    parser.add_argument('--variant', default='Ti/16')
    parser.add_argument('--batch_size', type=app.positive_int, default=64)
    parser.add_argument('--seconds', type=float, default=5.0)
    parser.add_argument(
        '--alone', choices=['pipeline', 'first-epoch', 'tf.data', 'large', 'simulated']
    )
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
    if arguments.alone == 'simulated':
        measure_parts(reader)
        return measure_simulated_cores(reader, seconds)
    if arguments.alone:
        return measure_alone(arguments.alone, reader, arguments.photos, batch_size, seconds)
    measure_host(reader, batch_size, seconds)
    if image_decoding.region_decoder() is not None:
        measure_parts(reader)
        measure_simulated_cores(reader, seconds)
    measure_recipes(reader, batch_size, seconds)
    measure_with_model(reader, arguments.variant, batch_size, seconds)
    if importlib.util.find_spec('tensorflow'):
        for cores in sorted({1, count_cores()}):
            compare_with_tf_data(sys.argv[1:], cores)
    versions = ', '.join(
        f'{name} {importlib.metadata.version(name)}' for name in ('jax', 'opencv-python-headless')
    )
    print(f'{jax.devices()[0].device_kind}, {versions}')


if __name__ == '__main__':
    main()
