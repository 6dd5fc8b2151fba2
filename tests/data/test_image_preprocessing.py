import io
import struct
import typing
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.base import UserError
from vit_jax.data import image_decoding, image_preprocessing, sampling

PHOTO = np.kron(np.random.default_rng(0).integers(0, 256, (6, 9, 3)), np.ones((8, 8, 1))).astype(
    np.uint8
)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(stored, exif_rotation=True):
    return image_decoding.decode(stored, exif_rotation=exif_rotation)


@pytest.mark.parametrize('mode', ['PNG RGB', 'PNG L', 'PNG P', 'PNG RGBA', 'JPEG L', 'JPEG CMYK'])
def test_an_image_of_any_mode_is_the_rgb_that_pillow_reads(mode):
    kind, mode = mode.split()
    stored = encoded(Image.fromarray(PHOTO).convert(mode), kind, quality=95)
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
    np.testing.assert_array_equal(
        image_decoding.decode_pillow(opened, exif_rotation=True), expected
    )


def test_16_bits_of_a_bmp_and_premultiplied_alpha_are_those_of_pillow():
    """Five bits of blue, green and red are scaled to 8 bits."""
    values = np.arange(32, dtype='<u2')
    pixels = (values | values << 5 | values[::-1] << 10).tobytes()
    header = struct.pack('<IiiHHIIiiII', 40, 32, 1, 1, 16, 0, len(pixels), 0, 0, 0, 0)
    stored = b'BM' + struct.pack('<IHHI', 54 + len(pixels), 0, 0, 54) + header + pixels
    expected = np.asarray(Image.open(io.BytesIO(stored)).convert('RGB'))
    assert expected[0, 31, 2] == expected[0, 31, 1] == 255
    np.testing.assert_array_equal(decoded(stored), expected)
    image = Image.fromarray(PHOTO[..., 0]).convert('LA').convert('La')
    found = image_decoding.decode_pillow(image, exif_rotation=True)
    np.testing.assert_array_equal(found, PHOTO[..., :1].repeat(3, axis=-1))


@pytest.mark.parametrize('kind', ['PNG', 'TIFF', 'JPEG2000'])
def test_16_bits_are_the_high_byte_through_each_door(kind):
    stored = encoded(Image.fromarray((PHOTO[..., 0].astype(np.uint16) << 8) + 200), kind)
    opened = Image.open(io.BytesIO(stored))
    for found in decoded(stored), image_decoding.decode_pillow(opened, exif_rotation=True):
        np.testing.assert_array_equal(found, np.repeat(PHOTO[..., :1], 3, axis=-1))


@pytest.mark.parametrize('most', [1, 100, 255, 256, 1023, 65535])
@pytest.mark.parametrize('channels', [1, 3])
def test_the_largest_value_of_a_ppm_is_white_through_each_door(most, channels):
    kind = '>u2' if most > 255 else 'u1'
    values = np.array([0, most // 2, most]).repeat(channels).astype(kind)
    stored = b'P%d 3 1 %d\n' % (5 if channels == 1 else 6, most) + values.tobytes()
    expected = np.array([0, most // 2 / most * 255, 255])[:, None].repeat(3, axis=1)
    opened = Image.open(io.BytesIO(stored))
    for found in decoded(stored), image_decoding.decode_pillow(opened, exif_rotation=True):
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
        found = (
            decoded(turned, upright),
            image_decoding.decode_pillow(opened, exif_rotation=upright),
        )
        for each in found:
            np.testing.assert_array_equal(each, expected)


def exif_of(kind='H', order='<', prefix=b'Exif\0\0'):
    """Returns EXIF that holds the orientation 6 as BYTE (B), SHORT (H), LONG (I) or ASCII (s)."""
    value = struct.pack(order + kind, b'6' if kind == 's' else 6).ljust(4, b'\0')
    entry = struct.pack(f'{order}HHI', 0x0112, {'B': 1, 's': 2, 'H': 3, 'I': 4}[kind], 1) + value
    start = struct.pack(f'{order}2sHI', b'II' if order == '<' else b'MM', 42, 8)
    return prefix + start + struct.pack(f'{order}H', 1) + entry + bytes(4)


def xmp_of(text):
    return b'<x:xmpmeta><rdf:Description ' + text + b'</rdf:Description></x:xmpmeta>'


def with_segments(*segments):
    """Returns a JPEG with these segments of APP1, or other markers, after its start."""
    stored = encoded(Image.fromarray(PHOTO), 'JPEG', quality=95)
    marked = [(0xE1, each) if isinstance(each, bytes) else each for each in segments]
    parts = [struct.pack('>BBH', 255, m, len(data) + 2) + data for m, data in marked]
    return stored[:2] + b''.join(parts) + stored[2:]


def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))


def with_chunks(*chunks, last=False):
    """Returns a PNG with these chunks before its pixels, or after them."""
    stored = encoded(Image.fromarray(PHOTO), 'PNG')
    place = len(stored) - 12 if last else 33
    return stored[:place] + b''.join(chunk(*each) for each in chunks) + stored[place:]


def raw_profile(name, data):
    return f'Raw profile type {name}'.encode(), f'\n{name}\n{len(data):8}\n{data.hex()}\n'.encode()


def webp_with(kind, data):
    """Returns an extended WebP with this chunk."""
    plain = encoded(Image.fromarray(PHOTO), 'WEBP', lossless=True)[12:]
    size = (PHOTO.shape[1] - 1).to_bytes(3, 'little') + (PHOTO.shape[0] - 1).to_bytes(3, 'little')
    chunks = b'VP8X\x0a\0\0\0' + bytes([0x08 if kind == b'EXIF' else 0x04, 0, 0, 0]) + size + plain
    chunks += kind + len(data).to_bytes(4, 'little') + data + b'\0' * (len(data) % 2)
    return b'RIFF' + (len(chunks) + 4).to_bytes(4, 'little') + b'WEBP' + chunks


def tiff_with(kind, order='<', big=False):
    """Returns a TIFF whose orientation has another type."""
    stored = encoded(Image.fromarray(PHOTO), 'TIFF', tiffinfo={0x0112: 6}, big_tiff=big)
    assert order == '<' and stored.count(struct.pack('<HH', 0x0112, 3)) == 1
    number = {'B': 1, 'H': 3, 'I': 4}[kind]
    return stored.replace(struct.pack('<HH', 0x0112, 3), struct.pack('<HH', 0x0112, number))


XMP = b'http://ns.adobe.com/xap/1.0/\0'
ATTRIBUTE, ELEMENT = xmp_of(b'tiff:Orientation="6">'), xmp_of(b'><tiff:Orientation>6</x>')
KEYWORD = b'XML:com.adobe.xmp\0'
TURNED = {  # every place and type that can hold the orientation 6
    'jpeg': with_segments(exif_of()),
    'jpeg, big-endian': with_segments(exif_of(order='>')),
    'jpeg, BYTE': with_segments(exif_of('B')),
    'jpeg, LONG': with_segments(exif_of('I')),
    'jpeg, ASCII': with_segments(exif_of('s')),
    'jpeg, two values': with_segments(exif_of().replace(b'\3\0\1\0', b'\3\0\2\0')),
    'jpeg, EXIF of 0': with_segments(
        exif_of().replace(b'\1\0\0\0\6', b'\1\0\0\0\0'), XMP + ELEMENT
    ),
    'jpeg, behind 120 kB': with_segments(*[(0xE2, bytes(60_000))] * 2, exif_of()),
    'jpeg, behind XMP': with_segments(XMP + xmp_of(b'>'), exif_of()),
    'jpeg, behind a comment': with_segments((0xFE, b'comment'), exif_of()),
    'jpeg, EXIF and not XMP': with_segments(XMP + ATTRIBUTE.replace(b'6', b'3'), exif_of()),
    'jpeg, XMP': with_segments(XMP + ATTRIBUTE),
    'jpeg, element of XMP': with_segments(XMP + ELEMENT),
    'jpeg, quotes of XMP': with_segments(XMP + xmp_of(b"tiff:Orientation = '6'>")),
    'jpeg, EXIF without it': with_segments(
        exif_of().replace(b'\x12\x01', b'\x13\x01'), XMP + ELEMENT
    ),
    'png': with_chunks((b'eXIf', exif_of(prefix=b''))),
    'png, with a prefix': with_chunks((b'eXIf', exif_of())),
    'png, last': with_chunks((b'eXIf', exif_of(prefix=b'')), last=True),
    'png, tEXt': with_chunks((b'tEXt', b'\0'.join(raw_profile('exif', exif_of())))),
    'png, APP1': with_chunks((b'tEXt', b'\0'.join(raw_profile('APP1', exif_of())))),
    'png, raw XMP': with_chunks((b'tEXt', b'\0'.join(raw_profile('xmp', ATTRIBUTE)))),
    'png, EXIF and not XMP': with_chunks(
        (b'iTXt', KEYWORD + bytes(4) + ATTRIBUTE.replace(b'6', b'3')),
        (b'eXIf', exif_of(prefix=b'')),
    ),
    'png, XMP': with_chunks((b'iTXt', KEYWORD + bytes(4) + ATTRIBUTE)),
    'png, compressed XMP': with_chunks(
        (b'iTXt', KEYWORD + b'\1\0\0\0' + zlib.compress(ELEMENT)), last=True
    ),
    'webp': webp_with(b'EXIF', exif_of()),
    'webp, without a prefix': webp_with(b'EXIF', exif_of(prefix=b'')),
    'webp, XMP': webp_with(b'XMP ', ATTRIBUTE),
    'tiff': tiff_with('H'),
    'tiff, LONG': tiff_with('I'),
    'tiff, BYTE': tiff_with('B'),
    'big tiff': tiff_with('H', big=True),
    'tiff, XMP': encoded(Image.fromarray(PHOTO), 'TIFF', tiffinfo={700: ATTRIBUTE}),
    'avif': encoded(Image.fromarray(PHOTO), 'AVIF', quality=100, exif=exif_of()),
}
for name, keyword in ('png, zTXt', 'exif'), ('png, zTXt of APP1', 'APP1'):
    KEY, TEXT = raw_profile(keyword, exif_of())
    TURNED[name] = with_chunks((b'zTXt', KEY + b'\0\0' + zlib.compress(TEXT)))


@pytest.mark.parametrize('name', TURNED)
def test_the_orientation_is_found_wherever_it_is(name, tmp_path):
    stored = TURNED[name]
    plain = decoded(stored, exif_rotation=False)
    assert plain.shape == PHOTO.shape and np.abs(plain.astype(int) - PHOTO).mean() < 20
    (path := tmp_path / 'image').write_bytes(stored)
    doors = {
        'bytes': decoded(stored),
        'Pillow': image_decoding.decode_pillow(Image.open(path), exif_rotation=True),
        'region': image_decoding.decode_region(
            stored, lambda shape: ((0, 0, *shape), 1), exif_rotation=True
        ),
    }
    for door, found in doors.items():
        np.testing.assert_array_equal(found, np.rot90(plain, -1), err_msg=door)


@pytest.mark.parametrize(
    'stored',
    [
        with_segments(exif_of()[:12]),
        with_segments(exif_of().replace(b'\6\0\0\0\0', b'\x09\0\0\0\0')),
        with_segments(XMP + xmp_of(b'drone:GimbalOrientation="6">')),
        with_segments((0xFE, b'Exif\0 Orientation="6"')),
        with_chunks((b'zTXt', b'Raw profile type exif\0\0damaged')),
        with_chunks((b'tEXt', b'Raw profile type exif\0not hex')),
        with_chunks((b'eXIf', b'damaged')),
    ],
)
def test_an_orientation_that_is_damaged_or_none_turns_nothing(stored):
    np.testing.assert_array_equal(decoded(stored), decoded(stored, exif_rotation=False))


@pytest.mark.gate
def test_a_png_of_very_many_chunks_is_rejected():
    stored = with_chunks(*[(b'teSt', b'')] * image_decoding.Limit.PNG_CHUNKS)
    with pytest.raises(UserError, match='262,144 chunks'):
        decoded(stored)


def test_a_png_that_is_cut_off_causes_no_message_of_a_library(capfd):
    noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
    stored = encoded(Image.fromarray(noise), 'PNG')
    for count in 1, 12:  # all pixels are there
        np.testing.assert_array_equal(decoded(stored[:-count]), noise)
    for count in 2000, len(stored) // 2:
        with pytest.raises(UserError):
            decoded(stored[:-count])
    assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize('orientation', range(1, 9))
def test_a_16_bit_tiff_is_turned_as_one_of_8_bits(orientation):
    gray = PHOTO[..., 0]
    tag = {0x0112: orientation}
    wide = encoded(Image.fromarray(gray.astype(np.uint16) << 8), 'TIFF', tiffinfo=tag)
    narrow = encoded(Image.fromarray(gray), 'TIFF', tiffinfo=tag)
    for turns in True, False:
        np.testing.assert_array_equal(decoded(wide, turns), decoded(narrow, turns))
        image = Image.open(io.BytesIO(wide))
        found = image_decoding.decode_pillow(image, exif_rotation=turns)
        np.testing.assert_array_equal(found, decoded(narrow, turns))


def test_the_image_of_the_caller_is_not_changed():
    stored = TURNED['tiff']
    image = Image.open(io.BytesIO(stored))
    first, second = (image_decoding.decode_pillow(image, exif_rotation=True) for _ in range(2))
    np.testing.assert_array_equal(first, decoded(stored))
    np.testing.assert_array_equal(second, first)


@pytest.mark.parametrize('default_image', [False, True])
def test_an_animation_is_the_image_that_it_shows_without_animation(default_image):
    frames = [Image.fromarray(255 - PHOTO), Image.fromarray(PHOTO // 2)]
    options = {'save_all': True, 'append_images': frames, 'default_image': default_image}
    stored = encoded(Image.fromarray(PHOTO), 'PNG', **options)
    np.testing.assert_array_equal(decoded(stored), PHOTO)


MANY = zlib.compress(bytes(2**22))  # the limit of Pillow is 1 MB after decompression


@pytest.mark.parametrize(
    'chunks',
    [
        [(b'zTXt', b'Comment\0\0' + MANY)],
        [(b'iTXt', b'Comment\0\1\0\0\0' + MANY)],
        [(b'iCCP', b'profile\0\0' + MANY)],
        [(b'tEXt', b'Comment\0' + b'a' * 2**21)] * 40,
        [(b'tEXt', b'%d\0a' % i) for i in range(3000)],
        [(b'zTXt', b'Comment\0\0damaged')],
        [(b'iCCP', b'profile\0\0damaged')],
        [(b'zTXt', KEY + b'\0\0' + zlib.compress(bytes(2**26)))],
    ],
    ids=['zTXt', 'iTXt', 'iCCP', 'much', 'many', 'damaged', 'damaged profile', 'bomb'],
)
@pytest.mark.parametrize('last', [False, True])
def test_texts_and_profiles_of_a_png_do_not_matter(chunks, last):
    stored = with_chunks(*chunks, last=last)
    assert image_decoding.read_header(stored)[:3] == ('PNG', *PHOTO.shape[:2])
    np.testing.assert_array_equal(decoded(stored), PHOTO)
    with pytest.raises(UserError, match='damaged'):
        decoded(stored[: stored.index(b'IDAT') + 20])


def test_an_image_is_not_resized_to_more_pixels_than_the_limit():
    """The shorter side of a panorama becomes as long as a side of the model's images."""
    crop = image_preprocessing.CentralCrop(scale=1.0)
    most = image_preprocessing.Limit.RESIZED_PIXELS
    longest = most // 256**2
    with pytest.raises(UserError, match=f'1 x {longest + 1:,} pixels.* at most {most:,} pixels'):
        crop(np.zeros((longest + 1, 1, 3), np.uint8), (256, 256), None)
    with pytest.raises(UserError, match='65,500 x 1 pixels'):
        crop(np.zeros((1, 65500, 3), np.uint8), (256, 256), None)
    assert crop(np.zeros((longest // 16, 1, 3), np.uint8), (256, 256), None).shape == (256, 256, 3)


FORMATS = 'JPEG', 'PNG', 'GIF', 'BMP', 'TIFF', 'WEBP', 'JPEG2000', 'PPM', 'AVIF'


@pytest.mark.parametrize('kind', FORMATS)
def test_a_part_of_an_image_is_an_error_and_more_pixels_than_allowed_are_not_decoded(kind):
    stored, (height, width) = encoded(Image.fromarray(PHOTO), kind), PHOTO.shape[:2]
    for length in 0, 24, len(stored) // 3, len(stored) * 9 // 10:
        with pytest.raises(UserError):
            decoded(stored[:length])
    limits = {'exif_rotation': True, 'max_pixels': height * width}
    assert image_decoding.decode(stored, **limits).shape == PHOTO.shape
    limits['max_pixels'] -= 1
    with pytest.raises(UserError, match='max_pixels'):
        image_decoding.decode(stored, **limits)


@pytest.mark.parametrize('kind', [np.float32, np.int32, np.int16])
def test_numbers_that_are_no_pixels_are_rejected(kind):
    stored = encoded(Image.fromarray(PHOTO[..., 0].astype(np.int32).astype(kind)), 'TIFF')
    with pytest.raises(UserError, match='mode [FI]'):
        decoded(stored)


def test_a_format_whose_package_is_missing_says_what_to_do(monkeypatch):
    image_decoding.formats_by_extension()  # registers it, where it is installed
    monkeypatch.delitem(Image.OPEN, 'HEIF', raising=False)
    heic = b'\0\0\0\x18ftypheic' + bytes(16)
    with pytest.raises(ValueError, match='pillow-heif'):
        decoded(heic)


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
    # a gray level of 255 is 0.4 %: 2 % of the smallest side
    assert 0.095 < min(shares) < 0.13 and 0.5 < max(shares) < 0.62
    assert 0.72 < min(aspects) < 0.79 and 1.28 < max(aspects) < 1.37
    assert 0.4 < np.mean(tops) < 0.6 and min(tops) < 0.1 and max(tops) > 0.9


def test_a_simple_random_crop_lies_anywhere_in_the_mirrored_image():
    image, rng = coordinates(30, 24), np.random.default_rng(0)
    crop = image_preprocessing.SimpleRandomCrop(padding=2)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode='reflect')
    places = {padded[y : y + 24, x : x + 24].tobytes() for y in range(11) for x in range(5)}
    assert {crop(image, (24, 24), rng).tobytes() for _ in range(600)} == places


@pytest.mark.parametrize('shape', [(1, 1), (2, 300), (300, 2), (10, 10)])
def test_an_inception_crop_of_any_image_has_its_size_and_its_area(shape):
    image, rng = np.full((*shape, 3), 9, np.uint8), np.random.default_rng(0)
    crop = image_preprocessing.InceptionCrop(area=(0.5, 0.9))
    for _ in range(100):
        assert (crop(image, (4, 6), rng) == np.full((4, 6, 3), 9)).all()
    for key in sampling.hash_numbers(np.arange(100)):
        top, left, height, width = crop.region(shape, key)
        assert 0 <= top <= shape[0] - height and 0 <= left <= shape[1] - width
        assert shape != (10, 10) or 50 <= height * width <= 90


@pytest.mark.parametrize(
    'record, values',
    [
        ('CentralCrop', {'scale': 0.9}),
        ('RandomCrop', {'scale': 0.5}),
        ('SimpleRandomCrop', {'padding': -1}),
        ('InceptionCrop', {'area': (0.0, 1.0)}),
        ('InceptionCrop', {'area': (0.5, 0.4)}),
        ('InceptionCrop', {'aspect': (2.0, 1.0)}),
        ('Preprocessing', {'std': (1.0, 0.0, 1.0)}),
        ('Preprocessing', {'mean': (0.485, 0.456, 0.406)}),
        ('Preprocessing', {'std': (0.9, 0.5, 0.5)}),
    ],
)
def test_a_value_that_makes_no_sense_is_named(record, values):
    with pytest.raises(UserError, match=f'{record}.{[*values][0]}'):
        getattr(image_preprocessing, record)(**values)


@pytest.mark.parametrize('before', [b'', b'\xff\xda and \xff\xd9 of a small picture', b'\xff' * 5])
def test_an_orientation_is_found_behind_other_segments(before):
    """Such as the thumbnail of Photoshop, which is a JPEG in a segment."""
    stored = cv2.imencode('.jpg', np.zeros((4, 6, 3), np.uint8))[1].tobytes()
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    segments = b''
    for marker, content in (b'\xff\xed', before), (b'\xff\xe1', xmp):
        segments += marker + (len(content) + 2).to_bytes(2, 'big') + content
    turned = stored[:2] + segments + b'\xff\xff' + stored[2:]
    assert image_decoding.read_orientation(turned) == 6
    assert image_decoding.read_orientation(stored + xmp) == 1
