import io
import struct
import typing
import zlib

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from vit_jax.base import UserError
from vit_jax.data import image_decoding, image_preprocessing

PHOTO = np.kron(np.random.default_rng(0).integers(0, 256, (6, 9, 3)), np.ones((8, 8, 1))).astype(
    np.uint8
)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(stored, exif_rotation=True):
    return image_decoding.decode(stored, exif_rotation=exif_rotation)


@pytest.mark.parametrize('mode', ['RGB', 'L', 'P', 'RGBA'])
def test_png_of_any_mode_is_the_rgb_that_pillow_reads(mode):
    image = Image.fromarray(PHOTO).convert(mode)
    np.testing.assert_array_equal(decoded(encoded(image, 'PNG')), np.asarray(image.convert('RGB')))


@pytest.mark.parametrize('mode', ['RGB', 'L', 'CMYK'])
def test_jpeg_of_any_mode_is_what_pillow_reads(mode):
    stored = encoded(Image.fromarray(PHOTO).convert(mode), 'JPEG', quality=95)
    expected = np.asarray(Image.open(io.BytesIO(stored)).convert('RGB'))
    np.testing.assert_array_equal(decoded(stored), expected)


LOSSLESS = {'PNG': {}, 'TIFF': {}, 'GIF': {}, 'BMP': {}, 'PPM': {}, 'JPEG2000': {}}
LOSSLESS['WEBP'] = {'lossless': True, 'exact': True}
LZW = {'compression': 'tiff_lzw'}


@pytest.mark.parametrize('alpha', [0, 1, 128, 255])
@pytest.mark.parametrize(
    'kind, options', [*LOSSLESS.items(), ('TIFF', LZW)], ids=lambda part: str(part)
)
def test_each_door_gives_the_stored_color_whatever_the_transparency(kind, options, alpha, tmp_path):
    rgba = np.concatenate([PHOTO, np.full_like(PHOTO[..., :1], alpha)], -1)
    image = Image.fromarray(rgba)
    if kind == 'GIF':  # one color of a palette, which is transparent or not
        image = Image.new('P', (8, 8), 0)
        image.putpalette([200, 100, 50, 255, 0, 0] + [0] * 762)
        options = {'background': 1} | ({'transparency': 0} if alpha < 255 else {})
    elif kind in ('BMP', 'PPM'):
        image = image.convert('RGB')
    stored = encoded(image, kind, **options)
    expected = np.full((8, 8, 3), (200, 100, 50)) if kind == 'GIF' else PHOTO
    np.testing.assert_array_equal(decoded(stored), expected)
    opened = Image.open(io.BytesIO(stored))
    np.testing.assert_array_equal(image_decoding.to_rgb(opened, exif_rotation=True), expected)


@pytest.mark.parametrize('kind', ['PNG', 'TIFF', 'JPEG2000'])
def test_16_bits_are_the_high_byte_through_each_door(kind):
    stored = encoded(Image.fromarray((PHOTO[..., 0].astype(np.uint16) << 8) + 200), kind)
    opened = Image.open(io.BytesIO(stored))
    for found in decoded(stored), image_decoding.to_rgb(opened, exif_rotation=True):
        np.testing.assert_array_equal(found, np.repeat(PHOTO[..., :1], 3, axis=-1))


@pytest.mark.parametrize('kind', [np.float32, np.int32, np.int16])
def test_what_is_not_supported_is_told_from_what_is_damaged(kind):
    stored = encoded(Image.fromarray(PHOTO[..., 0].astype(np.int32).astype(kind)), 'TIFF')
    with pytest.raises(UserError, match='not supported; expected 8 or 16 bits'):
        decoded(stored)
    with pytest.raises(UserError, match='not a whole image'):
        decoded(encoded(Image.fromarray(PHOTO), 'TIFF')[:-100])


@pytest.mark.parametrize('most', [1, 100, 255, 256, 1023, 65535])
@pytest.mark.parametrize('channels', [1, 3])
def test_the_largest_value_of_a_ppm_is_white_through_each_door(most, channels):
    kind = '>u2' if most > 255 else 'u1'
    values = np.array([0, most // 2, most]).repeat(channels).astype(kind)
    stored = b'P%d 3 1 %d\n' % (5 if channels == 1 else 6, most) + values.tobytes()
    expected = np.array([0, most // 2 / most * 255, 255])[:, None].repeat(3, axis=1)
    opened = Image.open(io.BytesIO(stored))
    for found in decoded(stored), image_decoding.to_rgb(opened, exif_rotation=True):
        np.testing.assert_allclose(found[0], expected, atol=1)  # rounded


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'TIFF', 'WEBP', 'AVIF'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_each_door_turns_an_image_or_leaves_it(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {'lossless': True} if kind == 'WEBP' else {'quality': 95}
    image = Image.fromarray(PHOTO)
    plain, turned = encoded(image, kind, **options), encoded(image, kind, exif=exif, **options)
    pixels = np.asarray(Image.open(io.BytesIO(plain)).convert('RGB'))
    moved = {2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1]}
    moved |= {5: pixels.swapaxes(0, 1), 6: np.rot90(pixels, -1), 8: np.rot90(pixels)}
    moved |= {1: pixels, 7: pixels[::-1, ::-1].swapaxes(0, 1)}
    for upright, expected in (True, moved[orientation]), (False, pixels):
        opened = Image.open(io.BytesIO(turned))
        found = decoded(turned, upright), image_decoding.to_rgb(opened, exif_rotation=upright)
        for each in found:
            np.testing.assert_array_equal(each, expected)


KINDS = [(5, 8, 1), (2, 32, 1), (1, 64, 1), (3, 32, 1), (7, 16, 1), (1, 16, 0)]


@pytest.mark.parametrize('channels, bits, photometric', KINDS)
def test_tiffs_of_kinds_that_are_read_wrongly_are_not_called_damaged(channels, bits, photometric):
    """One pixel, of tags as in the specification: size, bits, no compression, where it is."""
    tags = {256: 1, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: channels}
    tags |= {278: 1, 279: channels * bits // 8}
    entries = b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags.items())
    pixels = bytes(channels * bits // 8)
    header = b'II*\0' + struct.pack('<I', 8 + len(pixels))
    stored = header + pixels + struct.pack('<H', len(tags)) + entries + bytes(4)
    with pytest.raises(UserError, match='not supported'):
        decoded(stored)


@pytest.mark.parametrize(
    'stored, message',
    [
        (b'', 'the file is empty'),
        (b'hello, I am a cat', 'not a whole image'),
        (encoded(Image.fromarray(PHOTO), 'PNG')[:60], 'not a whole image|not a readable image'),
    ],
)
def test_what_is_no_image_is_an_error(stored, message):
    with pytest.raises(ValueError, match=message):
        decoded(stored)


def test_a_truncated_jpeg_is_an_error_and_not_half_a_grey_image():
    stored = encoded(Image.fromarray(PHOTO), 'JPEG', quality=95)
    for part in 0.3, 0.6, 0.9:
        with pytest.raises(ValueError, match='not a whole image'):
            decoded(stored[: int(len(stored) * part)])


FORMATS = 'JPEG', 'PNG', 'GIF', 'BMP', 'TIFF', 'WEBP', 'JPEG2000', 'PPM', 'AVIF'


@pytest.mark.parametrize('kind', FORMATS)
def test_the_start_of_an_image_is_named_with_its_format_and_what_is_wrong(kind):
    stored = encoded(Image.fromarray(PHOTO), kind)
    with pytest.raises(UserError, match=f'a kind of {kind} that is not supported: ..'):
        decoded(stored[:24])


@pytest.mark.parametrize('kind', FORMATS)
def test_the_bound_that_pillow_has_for_the_process_stays_and_is_not_ours(kind, monkeypatch):
    stored = encoded(Image.fromarray(PHOTO), kind)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 10)
    if kind in ('TIFF', 'WEBP'):
        with pytest.raises(UserError, match=r'exceeds.*Set PIL.Image.MAX_IMAGE_PIXELS higher'):
            decoded(stored)
    else:
        assert decoded(stored).shape == PHOTO.shape
    assert Image.MAX_IMAGE_PIXELS == 10


@pytest.mark.parametrize('kind', FORMATS)
@pytest.mark.parametrize('turned', [False, True])
def test_pixels_are_bounded_before_anything_is_decoded(kind, turned, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {'exif': exif} if turned and kind in ('JPEG', 'PNG', 'WEBP') else {}
    options |= {'progressive': turned} if kind == 'JPEG' else {}
    stored, (height, width) = encoded(Image.fromarray(PHOTO), kind, **options), PHOTO.shape[:2]
    found = image_decoding.decode(stored, exif_rotation=True, max_pixels=height * width)
    assert sorted(found.shape) == sorted(PHOTO.shape)

    def never(*arguments, **options):
        raise AssertionError('decoded')

    for module, name in (cv2, 'imdecode'), (simplejpeg, 'decode_jpeg'), (Image.Image, 'convert'):
        monkeypatch.setattr(module, name, never)
    message = f'{width} x {height} pixels, more than max_pixels={height * width - 1:,}'
    with pytest.raises(ValueError, match=message):
        image_decoding.decode(stored, exif_rotation=True, max_pixels=height * width - 1)


def test_a_format_whose_package_is_missing_says_what_to_do(monkeypatch):
    image_decoding.formats_by_ending()  # registers it, where it is installed
    monkeypatch.delitem(Image.OPEN, 'HEIF', raising=False)
    heic = b'\0\0\0\x18ftypheic' + bytes(16)
    with pytest.raises(ValueError, match='^a HEIC photo: pip install pillow-heif to read them, or'):
        decoded(heic)


@pytest.mark.parametrize('kind', ['AVIF', 'HEIF'])
def test_photos_of_telephones_are_what_pillow_reads(kind):
    if kind not in image_decoding.formats_by_ending().values():
        pytest.skip(f'Pillow has no {kind} here')
    stored = encoded(Image.fromarray(PHOTO), kind, quality=95)
    opened = Image.open(io.BytesIO(stored))
    np.testing.assert_array_equal(decoded(stored), np.asarray(opened.convert('RGB')))
    assert np.abs(decoded(stored).astype(int) - PHOTO).mean() < 8
    for part in 0.3, 0.9, 0.99:
        with pytest.raises(ValueError, match='not a whole image'):
            decoded(stored[: int(len(stored) * part)])


def bomb():
    """A PNG of 32,000 x 32,000 pixels: the first rows of 3 GB."""
    size = struct.pack('>IIBBBBB', 32000, 32000, 8, 2, 0, 0, 0)
    packed = zlib.compressobj(1)
    row = bytes(1 + 3 * 32000)
    data = b''.join(packed.compress(row) for _ in range(8)) + packed.flush()
    chunks = (b'IHDR', size), (b'IDAT', data), (b'IEND', b'')
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        struct.pack('>I', len(c)) + kind + c + struct.pack('>I', zlib.crc32(kind + c))
        for kind, c in chunks
    )


def test_a_bomb_is_refused_and_a_photo_of_200_megapixels_is_not():
    with pytest.raises(
        ValueError, match='32,000 x 32,000 pixels, more than max_pixels=268,435,456'
    ):
        decoded(bomb())
    assert 16384 * 12288 < image_decoding.MAX_PIXELS  # the largest of today's telephones


def test_grey_arrays_become_rgb():
    assert decoded(PHOTO[..., 0]).shape == decoded(PHOTO[..., :1]).shape == PHOTO.shape


@pytest.mark.parametrize('crop', [image_preprocessing.Resize(), image_preprocessing.CentralCrop()])
def test_crops_give_the_size_asked_for(crop):
    for size in (5, 9), (48, 72), (100, 30):
        assert crop(PHOTO, size, None).shape == (*size, 3)
    np.testing.assert_array_equal(image_preprocessing.Resize()(PHOTO, (48, 72), None), PHOTO)


def test_a_central_crop_is_the_middle_with_its_aspect():
    image = np.zeros((40, 80, 3), np.uint8)
    image[10:30, 30:50] = 255
    cut = image_preprocessing.CentralCrop(scale=2.0)(image, (20, 20), None)
    assert cut.min() == 255


def test_a_random_crop_is_decided_by_its_generator():
    crop = image_preprocessing.RandomCrop(scale=2.0)

    def cut(seed):
        return crop(PHOTO, (16, 16), np.random.default_rng(seed))

    np.testing.assert_array_equal(cut(1), cut(1))
    assert len({cut(seed).tobytes() for seed in range(10)}) > 5


@pytest.mark.parametrize('size', [(24, 24), (70, 90), (11, 60), (60, 11)])
def test_each_way_to_resize_is_a_function_of_a_library(size):
    image = np.random.default_rng(0).integers(0, 256, (50, 37, 3), dtype=np.uint8)
    pillow = Image.fromarray(image)
    expected = {
        'bilinear': cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR),
        'bilinear_antialias': pillow.resize(size[::-1], Image.Resampling.BILINEAR),
        'bicubic_antialias': pillow.resize(size[::-1], Image.Resampling.BICUBIC),
        'lanczos_antialias': pillow.resize(size[::-1], Image.Resampling.LANCZOS),
    }
    assert {*expected} == {*typing.get_args(image_preprocessing.ResizeMethod)}
    for method, result in expected.items():
        ours = image_preprocessing.Resize(resize=method)(image, size, None)
        np.testing.assert_array_equal(ours, result)


def test_a_central_crop_may_squeeze_first():
    squeezed = image_preprocessing.Resize()(PHOTO, (32, 32), None)
    cut = image_preprocessing.CentralCrop(scale=32 / 28, keep_aspect=False)(PHOTO, (28, 28), None)
    np.testing.assert_array_equal(cut, squeezed[2:30, 2:30])


def coordinates(height, width):
    """An image whose red and green say how far down and how far right a pixel is, 0 to 255."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * y / (height - 1), 255 * x / (width - 1), 0 * x], -1).astype(np.uint8)


def test_inception_crops_have_areas_and_aspects_of_their_range_and_lie_anywhere():
    image, rng = coordinates(375, 500), np.random.default_rng(0)
    crop = image_preprocessing.InceptionCrop(area=(0.1, 0.6))
    shares, aspects, tops = [], [], []
    for _ in range(400):
        cut = crop(image, (16, 16), rng).astype(float)
        # 15 of 16 pixel distances lie between the middles of the outermost pixels
        rows, columns = (np.ptp(cut[..., c]) / 255 * 16 / 15 for c in (0, 1))
        shares.append(rows * columns)
        aspects.append(columns * 500 / (rows * 375))
        if rows < 0.8:  # the first pixel lies half a pixel within the cut
            tops.append((cut[0, 0, 0] / 255 - rows / 32) / (1 - rows))
    # a grey level of 255 is 0.4 %: 2 % of the smallest side
    assert 0.095 < min(shares) < 0.13 and 0.5 < max(shares) < 0.62
    assert 0.72 < min(aspects) < 0.79 and 1.28 < max(aspects) < 1.37
    assert 0.4 < np.mean(tops) < 0.6 and min(tops) < 0.1 and max(tops) > 0.9


@pytest.mark.parametrize('shape', [(1, 65_500), (65_500, 1), (1, 10**6), (3, 10**5), (10**6, 2)])
@pytest.mark.parametrize('size', [(224, 224), (16, 512)])
@pytest.mark.parametrize('kind', ['Resize', 'CentralCrop', 'RandomCrop', 'InceptionCrop'])
def test_no_shape_makes_a_crop_take_all_memory(kind, size, shape, monkeypatch):
    resized, resize = [], cv2.resize

    def noted(image, size, **options):
        resized.append(size[0] * size[1])
        return resize(image, size, **options)

    monkeypatch.setattr(cv2, 'resize', noted)
    crop = getattr(image_preprocessing, kind)()
    try:
        cut = crop(np.zeros((*shape, 3), np.uint8), size, np.random.default_rng(0))
        assert cut.shape == (*size, 3)
    except UserError as error:
        assert kind in ('CentralCrop', 'RandomCrop') and 'too long and thin' in str(error)
    assert max(resized, default=0) <= image_preprocessing.MOST_RESIZED


@pytest.mark.parametrize('shape', [(1, 1), (2, 300), (300, 2), (1, 500), (7, 5)])
def test_an_inception_crop_of_any_image_has_its_size(shape):
    image, rng = np.full((*shape, 3), 9, np.uint8), np.random.default_rng(0)
    for _ in range(20):
        assert (
            image_preprocessing.InceptionCrop()(image, (4, 6), rng) == np.full((4, 6, 3), 9)
        ).all()


def test_no_inception_crop_is_smaller_than_its_least_area():
    """On few pixels, where rounding the sides could make it so."""
    crop, rng = image_preprocessing.InceptionCrop(area=(0.5, 0.9)), np.random.default_rng(0)
    for _ in range(300):
        top, left, height, width = crop.region((10, 10), rng)
        assert 50 <= height * width <= 90
        assert 0 <= top <= 10 - height and 0 <= left <= 10 - width


@pytest.mark.parametrize(
    'record, values, message',
    [
        ('CentralCrop', {'scale': 0.9}, 'scale=0.9: expected at least 1'),
        ('RandomCrop', {'scale': 0.5}, 'scale=0.5: expected at least 1'),
        ('InceptionCrop', {'area': (0.0, 1.0)}, 'area=.*: expected more than 0 and at most 1'),
        ('InceptionCrop', {'area': (0.5, 0.4)}, 'area=.*: expected the smaller number first'),
        ('InceptionCrop', {'aspect': (2.0, 1.0)}, 'aspect=.*: expected the smaller number first'),
        ('Preprocessing', {'std': (1.0, 0.0, 1.0)}, 'std=.*: expected at least 0.1'),
        ('Preprocessing', {'mean': (0.485, 0.456, 0.406)}, 'mean=.*multiply by 255'),
        ('Preprocessing', {'std': (0.9, 0.5, 0.5)}, 'std=.*multiply by 255'),
    ],
)
def test_preprocessing_that_makes_no_sense_is_refused(record, values, message):
    with pytest.raises(ValueError, match=f'{record}.{message}'):
        getattr(image_preprocessing, record)(**values)
