"""Pictures and their page: all that is written can be read, equal numbers make equal bytes."""

import base64
import html.parser
import io
import itertools
import re

import jax
import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from tests.figures import made_up
from vit_jax.figures import bitmaps, drawing, style
from vit_jax.figures.page import Picture, Section, page

PICTURES = sorted(made_up.arguments(blocks=1, heads=1, grid=(1, 1), patch=2))
SIZES = {
    'smallest': {'blocks': 1, 'heads': 1, 'grid': (1, 1), 'patch': 2, 'networks': 1, 'channels': 1},
    'small': {'blocks': 2, 'heads': 3, 'grid': (7, 5), 'patch': 4, 'name': 'Ti/16'},
    'base': {'blocks': 12, 'heads': 12, 'grid': (14, 14), 'patch': 8},
    'large': {'blocks': 24, 'heads': 16, 'grid': (24, 16), 'patch': 8, 'networks': 3},
    'largest': {'blocks': 48, 'heads': 16, 'grid': (32, 32), 'patch': 4, 'networks': 6},
    'wide': {'blocks': 2, 'heads': 16, 'grid': (1, 32), 'patch': 4, 'networks': 2},
    'high': {'blocks': 24, 'heads': 1, 'grid': (32, 1), 'patch': 4, 'networks': 2},
}


def texts(figure, monkeypatch):
    """What is written in the picture, each with its place in pixels."""
    written, draw = [], Text.draw

    def recorded(self, renderer):
        draw(self, renderer)
        if self.get_visible() and self.get_text().strip():
            written.append((self.get_text(), self.get_window_extent(renderer)))

    monkeypatch.setattr(Text, 'draw', recorded)
    figure.canvas.draw()
    return written


def common(one, other):
    """How many pixels wide and high, at least, the part is that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return min(width, height)


def assert_readable(figure, monkeypatch):
    """All that is written is inside the picture and covers nothing else that is."""
    written = texts(figure, monkeypatch)
    assert len(written) > 2
    for text, box in written:
        assert figure.bbox.padded(1).fully_contains(*box.min), text
        assert figure.bbox.padded(1).fully_contains(*box.max), text
    for (text, box), (other, place) in itertools.combinations(written, 2):
        assert common(box, place) < 1, f'{text!r} and {other!r} overlap'
    assert max(figure.get_size_inches()) < 16


@pytest.mark.full
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('picture', PICTURES)
def test_all_that_is_written_is_inside_the_picture_and_covers_nothing_written(
    picture, size, monkeypatch
):
    assert_readable(made_up.draw(picture, **SIZES[size]), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize('taps', [(74, 370), (7, 370, 2), (14, 7), (70, 400, 70)])
def test_networks_of_very_different_depth_stand_side_by_side_readably(taps, monkeypatch):
    layers = np.concatenate([made_up.unit_names(60)[:count] for count in taps])
    networks = np.repeat([f'{made_up.LONG} {place}' for place in range(len(taps))], taps)
    figure = drawing.cka(np.eye(sum(taps)), layers, networks, removed=[3])
    assert_readable(figure, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize('picture', PICTURES)
def test_numbers_that_are_none_leave_their_place_empty(picture, monkeypatch):
    """A network with a NaN is drawn as far as it goes."""
    made = made_up.arguments

    def with_nan(**sizes):
        return jax.tree.map(_spoiled, made(**sizes))

    monkeypatch.setattr(made_up, 'arguments', with_nan)
    figure = made_up.draw(picture, **SIZES['small'])
    assert style.png(figure)
    images = [image for axes in figure.axes for image in axes.images]
    assert all(np.isfinite(image.get_clim()).all() for image in images)


def test_the_last_layer_of_every_network_stands_at_relative_depth_one():
    accuracy = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, np.nan]])
    figure = drawing.probes(accuracy, ['deep', 'shallow'])
    deep, shallow = (line.get_xydata().tolist() for line in figure.axes[0].lines)
    assert deep == [[0, 10], [0.5, 20], [1, 30]] and shallow == [[0, 40], [1, 50]]


@pytest.mark.full
@pytest.mark.parametrize('name', ['$\\frac{$', '_hidden', '\udc80\n', '\u732b' * 200, 'W' * 200])
def test_a_name_is_written_as_it_is(name, monkeypatch):
    figure = drawing.probes(np.eye(2), [name, name])
    assert_readable(figure, monkeypatch)
    assert len(figure.legends[0].get_texts()) == 2 and style.png(figure)


def _spoiled(values):
    """The latter half of what is computed is NaN."""
    if not isinstance(values, np.ndarray) or values.dtype != float or len(values) < 2:
        return values
    spoiled = values.copy()
    spoiled[len(values) // 2 :] = np.nan
    return spoiled


@pytest.mark.full
@pytest.mark.parametrize('picture', PICTURES)
def test_equal_numbers_make_equal_bytes_which_say_nothing_of_when_or_by_what(picture):
    one, other = (style.png(made_up.draw(picture, **SIZES['small'])) for _ in range(2))
    assert one == other
    chunks = {'tEXt', 'iTXt', 'tIME', 'zTXt'}
    assert not any(chunk.encode() in one for chunk in chunks)


@pytest.mark.full
def test_a_users_own_matplotlib_settings_change_no_picture():
    before = style.png(made_up.draw('probes', **SIZES['small']))
    with matplotlib.rc_context({'font.size': 30, 'axes.facecolor': 'red', 'savefig.dpi': 20}):
        assert style.png(made_up.draw('probes', **SIZES['small'])) == before
        assert matplotlib.rcParams['font.size'] == 30


SCRIPTS = {
    'Latin': 'aäáàâãåæçéèêëğıíłñöøœőßşüžÄÖÜİ',
    'Vietnamese': 'ăâđêôơưếộ',
    'Greek': 'αβγδεζηθλμξπσφχψωΓΔΘΛΞΠΣΦΨΩ',
    'Cyrillic': 'абвгджзийлпуфцчшщыэюяЖЩЮЯ',
    'Chinese': '猫狗船鳥',
    'Japanese': 'ねこイヌ',
    'Korean': '고양이개',
    'Hebrew': 'אבגדש',
    'Arabic': 'قطجع',
}
LARGE = [pytest.param(*c, marks=pytest.mark.full) for c in ((100, 20), (1000, 2), (5000, 1))]


def drawn(text):
    image = bitmaps._blank(40, 400)
    bitmaps._write(image, text, (5, 20))
    return image


@pytest.mark.parametrize('letters', SCRIPTS.values(), ids=SCRIPTS)
def test_each_letter_of_a_script_is_drawn_and_none_as_a_box(letters):
    pictures = {drawn(letter).tobytes() for letter in letters}
    assert len(pictures) == len(letters)
    assert not pictures & {drawn(text).tobytes() for text in (' ', '\U0010ffff', '?')}


@pytest.mark.parametrize('name', ['caf\udce9', 'a\nb', 'a\x1b[2J', '', '\u202ecat', 40 * 'ü', '🐈'])
def test_any_name_is_drawn_within_its_room(name):
    tile = np.zeros((8, 8, 3), np.uint8)
    sheet = np.asarray(bitmaps.contact_sheet([(name, [tile])], ['evaluation']))
    frame = bitmaps._HEAD_HEIGHT + bitmaps._FRAME
    assert (sheet[frame:, bitmaps._NAME_WIDTH - 4 : bitmaps._NAME_WIDTH] == 255).all()
    assert (sheet[frame + 2 : -frame, bitmaps._NAME_WIDTH + bitmaps._FRAME :][:50, :50] == 0).all()
    assert (
        np.argwhere(drawn(name) < 255)[:, 1] <= 5 + bitmaps._text_width(name)
    ).all() or name == '🐈'
    bitmaps.confusion_matrix(np.eye(2, dtype=int), [name, 'Straßenbahn'])


@pytest.mark.parametrize('classes, cell', [(1, 48), (10, 48), *LARGE])
def test_the_matrix_shows_every_class_and_every_error(classes, cell):
    """On the diagonal dark, one error of one image visible, elsewhere white."""
    matrix = 20 * np.eye(classes, dtype=int)
    matrix[0, -1] += 1
    image = bitmaps.confusion_matrix(matrix, [f'class {i}' for i in range(classes)])
    assert max(image.size) < 2300
    pixels = np.asarray(image).astype(int)
    side = cell * -(-classes // max(1, -(-classes // 2000)))
    margin = image.height - side - 2 * bitmaps._LINE
    inside = pixels[margin : margin + side, margin : margin + side, 0]
    assert inside.shape == (side, side)
    assert inside[1 % cell, 1 % cell] < 40
    if classes > 1:
        assert 40 < inside[1 % cell, side - 1] < 200
        assert inside[side - 1, 1 % cell] == 255


HOSTILE = '</title></style><script>alert(1)</script> "\' onerror=x & &lt; {title} $x$ é 猫 \u202e'


def image(width=2000, height=60):
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width), np.uint8)).save(file, 'png')
    return file.getvalue()


def a_page(text):
    pictures = [Picture(image(), text, text)] * 2
    sections = [Section(text, text, pictures), Section(text, text, left_out=text)]
    return page(text, [text, text], sections)


class Reader(html.parser.HTMLParser):
    """The tags with their attributes, and the text between them."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, [name for name, _ in attributes]))
        self.texts += [value for name, value in attributes if name == 'alt']

    def handle_data(self, text):
        self.texts.append(text)


def test_no_text_changes_what_the_page_is():
    page_of_hostile, plain = Reader(a_page(HOSTILE)), Reader(a_page('plain'))
    assert page_of_hostile.tags == plain.tags
    written = HOSTILE.replace('\u202e', '\ufffd')
    expected = [written if text == 'plain' else text for text in plain.texts]
    assert page_of_hostile.texts == expected and expected.count(written) > 10
    assert a_page(HOSTILE).isascii()


def test_every_title_is_in_the_contents_and_every_picture_is_there_to_the_byte():
    source = a_page('plain')
    assert re.findall(r'href="#(\w+)"', source) == re.findall(r'<section id="(\w+)"', source)
    pictures = re.findall(r'base64,([^"]+)"', source)
    assert [base64.b64decode(picture) for picture in pictures] == [image()] * 2
