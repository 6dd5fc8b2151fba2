import importlib.util
import io
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import image_decoding
from vit_jax.data.image_decoding import decode, decode_region
from vit_jax.data.image_preprocessing import InceptionCrop, decode_and_crop
from vit_jax.data.loading import ExampleRef, ImageReader
from vit_jax.data.sources.base import labeled_source

ROOT = pathlib.Path(__file__).parent.parent.parent
NOISE = np.random.default_rng(0).integers(0, 256, (12, 17, 3))
PHOTO = np.kron(NOISE, np.ones((11, 9, 1))).astype(np.uint8)  # of no whole number of blocks
SIZE = (24, 20)


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    """The decoder of regions, as `pip install` builds it here."""
    pytest.importorskip('setuptools')  # which Python 3.12 does not bring
    folder = tmp_path_factory.mktemp('built')
    options = [f'--build-{kind}={folder}' for kind in ('lib', 'temp')]
    command = [sys.executable, 'setup.py', '-q', 'build_ext', *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    files = [*folder.rglob('jpeg_region.*.so')]
    if not files:
        pytest.skip("no C compiler or headers of libjpeg-turbo's here")
    spec = importlib.util.spec_from_file_location('jpeg_region', files[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def with_decoder(monkeypatch, built):
    return lambda there: monkeypatch.setattr(
        image_decoding, 'region_decoder', lambda: built if there else None
    )


def encoded(mode='RGB', **options):
    file = io.BytesIO()
    Image.fromarray(PHOTO).convert(mode).save(file, 'JPEG', **options)
    return file.getvalue()


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def turned_by_six(order, *, kind=3, count=1):
    """As `turned(6)`, in either order of bytes, perhaps of another type than 16 bits."""
    begin, form = {'<': b'II*\0', '>': b'MM\0*'}[order], 'Hxx' if kind == 3 else 'I'
    entry = struct.pack(f'{order}HHI{form}', 0x0112, kind, count, 6)
    rest = struct.pack(f'{order}IH', 8, 1) + entry + bytes(4)
    return b'Exif\0\0' + begin + rest


def crops(stored, count=30, exif_rotation=True, size=SIZE, reduced=True):
    """Crops, or what is said where there are none, and what the generator gives after each."""
    found, crop = [], InceptionCrop(reduced=reduced)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        try:
            cut = decode_and_crop(stored, crop, size, rng, exif_rotation=exif_rotation)
        except ValueError as error:
            cut = str(error)
        found.append((cut if isinstance(cut, str) else cut.tobytes(), rng.random()))
    return found


KINDS = {
    '4:4:4': {'subsampling': 0},
    '4:2:2': {'subsampling': 1},
    '4:2:0': {'subsampling': 2},
    'progressive': {'progressive': True},
    'with restarts': {'restart_marker_blocks': 3},
    'gray': {'mode': 'L'},
    'gray and progressive': {'mode': 'L', 'progressive': True},
    'CMYK': {'mode': 'CMYK'},
    'RGB': {'keep_rgb': True},
    **{f'turned by {k}': {'exif': turned(k)} for k in range(10)},
    **{f'turned in order {order}': {'exif': turned_by_six(order)} for order in '<>'},
    **{f'turned by 32 bits {o}': {'exif': turned_by_six(o, kind=4)} for o in '<>'},
    'turned by two': {'exif': turned_by_six('>', count=2)},
}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'exif_rotation, size',
    [
        (True, SIZE),
        pytest.param(True, (4, 5), marks=pytest.mark.gate),  # needs every reduction
        pytest.param(False, SIZE, marks=pytest.mark.gate),
        pytest.param(False, (4, 5), marks=pytest.mark.nightly),
    ],
)
def test_crops_are_those_of_the_whole_image_to_the_bit(kind, exif_rotation, size, with_decoder):
    stored = encoded(**KINDS[kind])
    with_decoder(True)
    found = crops(stored, exif_rotation=exif_rotation, size=size)
    with_decoder(False)
    assert found == crops(stored, exif_rotation=exif_rotation, size=size)
    whole = decode(stored, exif_rotation=exif_rotation)
    for seed, (cut, _) in enumerate(crops(stored, 5, exif_rotation, size, reduced=False)):
        expected = InceptionCrop()(whole, size, np.random.default_rng(seed))
        assert cut == expected.tobytes()


@pytest.mark.parametrize('kind', ['4:2:0', 'progressive', 'gray', 'turned by 6', 'turned by 3'])
def test_a_fraction_shows_the_same_part(kind, with_decoder):
    """Of a picture without detail it is the same within two gray levels, at every edge."""
    across = np.linspace(0, 255, 643)
    smooth = np.stack(np.broadcast_arrays(across, across[:501, None], 128), axis=-1)
    file, options = io.BytesIO(), KINDS[kind] | {'quality': 98}
    image = Image.fromarray(smooth.astype(np.uint8)).convert(options.pop('mode', 'RGB'))
    image.save(file, 'JPEG', **options)
    stored = file.getvalue()
    with_decoder(True)
    region = 96, 160, 256, 128  # whole pixels of an eighth, in either direction
    whole = decode_region(stored, lambda found: (region, 1), exif_rotation=True)
    for n in 2, 4, 8:
        part = decode_region(stored, lambda found, n=n: (region, n), exif_rotation=True)
        means = whole.reshape(256 // n, n, 128 // n, n, 3).mean(axis=(1, 3))
        # Where the image was turned, an eighth begins at the other end: less than a pixel off.
        assert abs(part[: 256 // n, : 128 // n] - means).max() <= 2 + 0.5 * n


@pytest.mark.parametrize('kind', ['4:2:0', 'progressive'])
def test_damage_anywhere_in_a_file_is_met_as_by_the_decoder_of_whole_images(kind, with_decoder):
    stored, rng, refused = encoded(**KINDS[kind]), np.random.default_rng(1), 0
    for _ in range(60):
        damaged = bytearray(stored)
        place = int(rng.integers(620, len(stored)))
        if rng.random() < 0.3:
            del damaged[place:]
        else:
            damaged[place] ^= 1 << int(rng.integers(8))
        with_decoder(True)
        found = crops(bytes(damaged), count=2)
        with_decoder(False)
        assert found == crops(bytes(damaged), count=2)
        refused += isinstance(found[0][0], str)
    assert refused > 5


@pytest.mark.parametrize('on_unreadable', ['error', 'skip'])
def test_a_file_is_read_to_its_end_until_it_is_known_to_be_whole(on_unreadable, with_decoder):
    """Known from the first epoch, where an unreadable image ends the training."""
    with_decoder(True)
    short = encoded(quality=95)[:-300]
    source = labeled_source([short], [0], ['a'], read=lambda stored: stored)
    crop = InceptionCrop(area=(0.05, 0.1))
    reader = ImageReader(source, crop, SIZE, True, on_unreadable=on_unreadable)
    read = []
    for epoch in range(20):
        try:
            read.append(reader.example(ExampleRef(0, epoch))[0].any())
        except ValueError:
            read.append(False)
    assert not read[0] and any(read) == (on_unreadable == 'error')


def test_a_large_image_is_decoded_at_a_fraction_that_leaves_two_pixels_for_each():
    crop, size = InceptionCrop(), (224, 200)
    regions = (895, 3000), (896, 799), (896, 800), (1791, 2000), (1792, 1600), (5000, 3200)
    assert [crop.reduction(region, size) for region in regions] == [1, 1, 2, 2, 4, 8]
    assert InceptionCrop(reduced=False).reduction((5000, 5000), size) == 1


def test_no_memory_outside_of_the_region_is_read_or_written(built):
    for region in (-1, 0, 5, 5), (0, 0, 0, 5), (0, 0, 133, 5), (0, 150, 9, 9):
        rows, columns = (max(1, side) for side in region[2:])
        assert not built.decode_into(encoded(), bytearray(3 * rows * columns), region, 1, True)
    assert not built.decode_into(encoded(), bytearray(3 * 5 * 5 - 1), (0, 0, 5, 5), 1, True)
