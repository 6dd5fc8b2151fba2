"""What the header of an encoded image says, read before anything of it is decoded."""

import contextlib
import functools
import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from vit_jax.base.errors import UserError

# Formats that are read, by Pillow's names for them.
_FORMATS = 'JPEG', 'PNG', 'GIF', 'BMP', 'TIFF', 'WEBP', 'JPEG2000', 'PPM', 'AVIF', 'HEIF'
_BRANDS = {b'avif': 'AVIF', b'avis': 'AVIF'}  # of files that begin with `ftyp`
_BRANDS |= dict.fromkeys((b'heic', b'heix', b'heim', b'heis', b'hevc', b'mif1', b'msf1'), 'HEIF')
HEIC_REMEDY = 'pip install pillow-heif to read them, or convert them to JPEG'
_MISSING = {
    'AVIF': 'an AVIF image: pip install -U pillow to read them, or convert them to JPEG',
    'HEIF': f'a HEIC photo: {HEIC_REMEDY}',
}


class Header(NamedTuple):
    """Pillow's name of a format, and the size of the image in pixels, as it is stored."""

    kind: str
    height: int
    width: int
    color_space: str = ''  # of a JPEG that libjpeg can read

    @property
    def is_cmyk(self) -> bool:
        """Whether a JPEG has four colors, which each library turns into other RGB."""
        return self.color_space in ('CMYK', 'YCCK')


def read_header(stored: bytes) -> Header:
    """The header of an encoded file. Raises UserError where it is that of no format we read."""
    if stored.startswith(b'\xff\xd8'):
        import simplejpeg

        with contextlib.suppress(ValueError):  # Pillow judges what it cannot read
            return Header('JPEG', *simplejpeg.decode_jpeg_header(stored)[:3])
    known = 'not a whole image of a known format'
    for kind, (opened, accepts) in _openers().items():
        # Not Image.open: its own bound on pixels cannot be set for one image alone.
        try:
            if accepts(stored[:16]):
                width, height = opened(io.BytesIO(stored), '').size
                return Header(kind, height, width)
        except Exception as error:  # of many kinds
            # Of a mode that Pillow does not have, in a file that may be whole.
            if re.search('mode|samples', str(error)):
                channels = 'expected 1, 3 or 4 channels of 8 or 16 bits'
                known = f'a {kind} image of a kind that is not supported ({error}); {channels}'
    kind = _BRANDS.get(stored[8:12], '') if stored[4:8] == b'ftyp' else ''
    raise UserError(known if kind in _openers() else _MISSING.get(kind, known))


def open_with_pillow(stored: bytes, kind: str) -> Any:
    """Pillow's image of a file, which is decoded when its pixels are asked for."""
    opened, _ = _openers()[kind]
    return opened(io.BytesIO(stored), '')


def can_read(kind: str) -> bool:
    """Whether the package that a format needs is there."""
    return kind in _openers()


@functools.cache
def kinds_by_ending() -> dict[str, str]:
    """The formats by the endings of their files' names, `.jpg`."""
    from PIL import Image

    _openers()
    return {end: kind for end, kind in Image.registered_extensions().items() if kind in _FORMATS}


@functools.cache
def _openers() -> dict[str, tuple[Callable[..., Any], Callable[[bytes], Any]]]:
    """Of each format what opens a file, and what tells by its first bytes that it is one."""
    from PIL import Image

    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    Image.init()
    found = {kind: Image.OPEN[kind] for kind in _FORMATS if kind in Image.OPEN}
    return {kind: (opened, accepts) for kind, (opened, accepts) in found.items() if accepts}
