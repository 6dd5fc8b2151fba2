import importlib.util
import io
import pathlib
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.data import image_decoding, image_preprocessing, loading, sampling
from vit_jax.data.image_decoding import decode, decode_region
from vit_jax.data.image_preprocessing import InceptionCrop
from vit_jax.data.loading import ImageReader
from vit_jax.data.sampling import Examples
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
        image_preprocessing, 'region_decoder', lambda: built if there else None
    )


def encoded(mode='RGB', *, sampling=None, without_last_scan=False, **options):
    if sampling is not None:
        return cv2.imencode('.jpg', PHOTO, [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling])[
            1
        ].tobytes()
    if without_last_scan:
        return encoded(mode, **options).rpartition(b'\xff\xda')[0] + b'\xff\xd9'
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
    """The crops of the reader, or what it says where there are none."""
    source = labeled_source([stored], [0], ['a'], read=lambda stored: stored)
    crop = InceptionCrop(reduced=reduced)
    found = []
    with ThreadPoolExecutor(1) as pool:
        reader = ImageReader(
            source, crop, size, exif_rotation, on_unreadable='skip', on_skipped=found.append
        )
        batch = reader.examples(Examples(np.zeros(count, int), np.arange(count)), pool)
    return [*found, batch['mask'].tobytes(), *(image.tobytes() for image in batch['images'])]


KINDS = {
    '4:4:4': {'subsampling': 0},
    '4:2:2': {'subsampling': 1},
    '4:2:0': {'subsampling': 2},
    '4:4:0': {'sampling': cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440},
    '4:1:1': {'sampling': cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411},
    'progressive': {'progressive': True},
    'progressive, without the last scan': {'progressive': True, 'without_last_scan': True},
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


def test_crops_do_not_depend_on_how_many_are_decoded_at_once(with_decoder, monkeypatch):
    with_decoder(True)
    together = crops(encoded())
    monkeypatch.setattr(image_preprocessing, '_MOST_PIXELS', PHOTO.size // 12)
    assert crops(encoded()) == together


def test_files_that_the_decoder_can_read_are_decoded_once(with_decoder, monkeypatch):
    with_decoder(True)
    expected = crops(encoded())
    monkeypatch.delattr(loading, 'decode_and_crop')
    assert crops(encoded()) == expected


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
    assert len(found) == 31  # nothing was skipped
    whole = decode(stored, exif_rotation=exif_rotation)
    keys = sampling.example_keys(0, Examples(np.zeros(5, int), np.arange(5)))
    regions = [InceptionCrop().region(whole.shape[:2], key) for key in keys]
    cuts = [image_decoding.cut(whole, region) for region in regions]
    expected = [cv2.resize(part, size[::-1]).tobytes() for part in cuts]
    assert crops(stored, 5, exif_rotation, size, reduced=False)[1:] == expected


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
        refused += isinstance(found[0], str)
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
            with ThreadPoolExecutor(1) as pool:
                read.append(reader.examples(Examples.of(0, epoch), pool)['images'].any())
        except ValueError:
            read.append(False)
    assert not read[0] and any(read) == (on_unreadable == 'error')


def mixed_source():
    """Files that C crops, and files that it cannot crop, in no order."""
    png = io.BytesIO()
    Image.fromarray(PHOTO[:40]).save(png, 'PNG')
    large = io.BytesIO()
    Image.fromarray(np.zeros((300, 400, 3), np.uint8)).save(large, 'JPEG')
    files = [
        encoded(exif=turned(6)),
        png.getvalue(),
        encoded(mode='CMYK'),
        encoded()[:-900],
        None,  # missing
        encoded(exif=turned(3), quality=50),
        large.getvalue(),
        PHOTO,  # pixels
        encoded(exif=turned(8), progressive=True),
        encoded(mode='L'),
    ]

    def read(index):
        if files[index] is None:
            raise FileNotFoundError(2, 'No such file')
        return files[index]

    return labeled_source(range(10), range(1, 11), [*'abcdefghijk'], read=read)


@pytest.mark.parametrize('there', [True, False])
def test_a_row_does_not_depend_on_the_rows_beside_it(there, with_decoder):
    with_decoder(there)
    said = []
    reader = ImageReader(
        *(mixed_source(), InceptionCrop(), SIZE, True),
        on_unreadable='skip',
        max_pixels=110_000,
        on_skipped=said.append,
    )
    rng = np.random.default_rng(0)
    examples = Examples(rng.integers(-1, 10, 64), rng.integers(0, 2, 64))
    with ThreadPoolExecutor(3) as pool:
        batch = reader.examples(examples, pool)
        for row in range(64):
            one = Examples(examples.index[[row]], examples.epoch[[row]])
            for name, values in reader.examples(one, pool).items():
                np.testing.assert_array_equal(values[0], batch[name][row], err_msg=name)
    is_readable = np.isin(examples.index, [0, 1, 2, 5, 7, 8, 9])
    np.testing.assert_array_equal(batch['mask'], is_readable)
    np.testing.assert_array_equal(batch['labels'], np.where(is_readable, examples.index + 1, 0))
    assert {text.partition(':')[0] for text in said} == {'3', '4', '6'}


@pytest.mark.parametrize('index, message', [(3, 'damaged'), (4, '4: No such'), (6, 'max_pixels')])
def test_an_unreadable_row_is_named_as_without_the_decoder(index, message, with_decoder):
    reader = ImageReader(mixed_source(), InceptionCrop(), SIZE, True, max_pixels=110_000)
    said = []
    for there in True, False:
        with_decoder(there)
        with pytest.raises(ValueError, match=message) as error, ThreadPoolExecutor(2) as pool:
            reader.examples(Examples.of(np.array([0, 1, index, 4, 6])), pool)
        said.append(str(error.value))
    assert said[0] == said[1]


CROP = InceptionCrop()


def find_regions(built, files, crop=CROP, keys=None):
    """The regions (top, left, rows, columns, reduction, to_end, orientation) of files."""
    regions = np.ones((len(files), 7), np.int32)
    if keys is None:
        keys = sampling.hash_numbers(np.arange(len(files)))
    options = *crop.area, *crop.aspect, *SIZE, crop.reduced, True, 1e6
    built.find_regions(tuple(files), keys, regions, options)
    return regions


def test_a_damaged_entry_before_the_orientation_is_left_to_python(built):
    """Pillow stops reading there."""
    entries = struct.pack('>HHII', 0x010F, 2, 20, 5000) + struct.pack('>HHIHxx', 0x0112, 3, 1, 6)
    exif = b'Exif\0\0MM\0*' + struct.pack('>IH', 8, 2) + entries + bytes(4)
    assert not find_regions(built, [encoded(exif=exif)]).any()


@pytest.mark.parametrize('shape', [(375, 500), (7, 900), (2000, 30), (1, 1), (12, 12)])
@pytest.mark.parametrize('area', [(0.05, 1.0), (0.4, 0.5)])
def test_regions_in_c_are_those_of_python(shape, area, built):
    file = io.BytesIO()
    Image.fromarray(np.zeros(shape, np.uint8)).save(file, 'JPEG')
    crop = InceptionCrop(area=area, reduced=False)
    keys = sampling.hash_numbers(np.arange(50))
    found = find_regions(built, [file.getvalue()] * 50, crop, keys)
    assert found[:, :4].tolist() == [[*crop.region(shape, key)] for key in keys]


def test_a_large_image_is_decoded_at_a_fraction_that_leaves_two_pixels_for_each():
    crop, size = InceptionCrop(), (224, 200)
    sizes = (895, 3000), (896, 799), (896, 800), (1791, 2000), (1792, 1600), (5000, 3200)
    assert [crop.reduction(region, size) for region in sizes] == [1, 1, 2, 2, 4, 8]
    assert InceptionCrop(reduced=False).reduction((5000, 5000), size) == 1


def test_no_memory_outside_of_the_region_is_read_or_written(built):
    impossible = (-1, 0, 5, 5), (0, 0, 0, 5), (0, 0, 133, 5), (0, 150, 9, 9)
    regions = np.array([(*region, 1, 1, 1) for region in (*impossible, (0, 0, 5, 5))], np.int32)
    arrays = [bytearray(3 * max(1, x[2]) * max(1, x[3])) for x in regions.tolist()]
    files = (encoded(),) * 5
    assert built.decode_regions(files, regions, tuple(arrays)) == b'\0\0\0\0\1'
    arrays[4] = arrays[4][:-1]
    assert built.decode_regions(files, regions, tuple(arrays)) == bytes(5)
    for wrong in (files[:4], regions, tuple(arrays)), (files, regions[:4], tuple(arrays)):
        with pytest.raises(ValueError):
            built.decode_regions(*wrong)
    with pytest.raises(ValueError):
        find_regions(built, files, keys=np.zeros(4, np.uint64))
    for wrong in (files, regions, (*arrays[:4], None)), ((*files[:4], 'x'), regions, tuple(arrays)):
        with pytest.raises(TypeError):
            built.decode_regions(*wrong)


@pytest.mark.parametrize('kind', KINDS)
def test_orientations_in_c_are_those_of_python_or_left_to_it(kind, built):
    stored = encoded(**KINDS[kind])
    found = find_regions(built, [stored, b'no JPEG'])
    assert not found[1].any()
    is_left = kind in ('CMYK', 'turned by two') or '32 bits' in kind or kind.endswith((' 0', ' 9'))
    assert found[0, 6] == (0 if is_left else image_decoding.read_orientation(stored))
