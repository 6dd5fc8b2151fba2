"""Drawings, bitmaps and their page: equal numbers give equal bytes, any name can be drawn."""

import base64
import html
import io
import re

import matplotlib
import numpy as np
import pytest
from PIL import Image

from vit_jax.figures import bitmaps, outliers, style
from vit_jax.figures.page import Picture, Section, Table, render_page
from vit_jax.figures.probes import FIGURE


def probes(*rows):
    """The numbers of the figure `probes`, of series of these accuracies."""
    accuracy = np.array(rows, float)
    series = np.array([f'$series$_{i}' for i in range(len(rows))])
    counts = {name: np.array(10) for name in ('shots', 'classes', 'tested')}
    return {'accuracy': accuracy, 'deviation': accuracy / 10, 'series': series, **counts}


def test_the_last_layer_of_every_network_is_at_relative_depth_one():
    drawing = FIGURE.draw(probes([0.1, 0.2, 0.3], [0.4, 0.5, np.nan]))
    deep, shallow = (bars[0].get_xydata().tolist() for bars in drawing.axes[0].containers)
    assert deep == [[0, 0.1], [0.5, 0.2], [1, 0.3]] and shallow == [[0, 0.4], [1, 0.5]]


def test_equal_numbers_give_equal_bytes_whatever_the_users_settings_of_matplotlib():
    numbers = probes([0.1, 0.2, 0.3])
    before = style.png(FIGURE.draw, numbers)
    with matplotlib.rc_context({'font.size': 30, 'axes.facecolor': 'red', 'savefig.dpi': 20}):
        assert style.png(FIGURE.draw, numbers) == before
        assert matplotlib.rcParams['font.size'] == 30
    assert not any(chunk in before for chunk in (b'tEXt', b'iTXt', b'tIME', b'zTXt'))


def pixels(draw, numbers):
    return np.asarray(Image.open(io.BytesIO(style.png(draw, numbers))).convert('RGB')).astype(int)


def test_outliers_are_red_in_the_photos():
    """One outlier of 2x4 patches in the first photo of two, which are blue."""
    marked = np.zeros((3, 2, 4), bool)
    marked[0, 1, 2] = marked[2] = True  # there is no third photo
    numbers = {'names': np.array(['a']), 'patches0': np.eye(3) + 1, 'outliers0': marked}
    photos = np.zeros((2, 10, 20, 3)) + np.array([0, 0, 1])
    image = pixels(outliers.FIGURE.draw, numbers | {'photos0': photos})
    red, blue = (np.argwhere((image == c).all(axis=-1)) for c in ([255, 0, 0], [0, 0, 255]))
    corner, size = blue.min(axis=0), np.ptp(blue, axis=0)
    start, end = ((edge - corner) / size for edge in (red.min(axis=0), red.max(axis=0)))
    np.testing.assert_allclose([*start, *end], [1 / 2, 2 / 8, 1, 3 / 8], atol=0.02)  # of 100 rows


SCRIPTS = {
    'Latin': 'aäåæçéğıñöøœßÄÖÜ',
    'Greek': 'αβγδλπσωΓΔΩ',
    'Cyrillic': 'абвгджйщыэюяЖ',
    'Chinese': '猫狗船鳥',
    'Japanese': 'ねこイヌ',
    'Korean': '고양이개',
    'Hebrew': 'אבגדש',
    'Arabic': 'قطجع',
}


def drawn(text):
    image = bitmaps._blank(40, 400)
    bitmaps._write(image, text, 5, 20)
    return image


@pytest.mark.parametrize('letters', SCRIPTS.values(), ids=SCRIPTS)
def test_each_letter_of_a_script_is_drawn_and_none_as_a_box(letters):
    pictures = {drawn(letter).tobytes() for letter in letters}
    assert len(pictures) == len(letters)
    assert not pictures & {drawn(text).tobytes() for text in (' ', '\U0010ffff', '?')}


@pytest.mark.parametrize('name', ['caf\udce9', 'a\nb', '', 40 * 'ü'])
def test_any_name_is_drawn_within_its_room(name):
    tile = np.zeros((8, 4, 3), np.uint8)
    sheet = np.asarray(bitmaps.draw_contact_sheet([(tile, (name, 'x'))] * 3, columns=2))
    side, gap = bitmaps._TILE, bitmaps._GAP
    assert sheet.shape == (2 * (side + 2 * bitmaps._LINE + gap) + gap, 2 * (side + gap) + gap, 3)
    assert (sheet[:, side + gap : side + 2 * gap] == 255).all()  # between the columns
    assert (sheet[gap : gap + side, gap + side // 4 : gap + side * 3 // 4] == 0).all()
    bitmaps.draw_confusion_matrix(np.eye(2, dtype=int), [name, 'Straßenbahn'])


LARGE = [pytest.param(*c, marks=pytest.mark.gate) for c in ((100, 20), (5000, 1))]


@pytest.mark.parametrize('classes, cell', [(1, 48), (10, 48), *LARGE])
def test_the_matrix_shows_every_class_and_every_error(classes, cell):
    """The diagonal is dark, one error of one image is visible, the rest is white."""
    matrix = 20 * np.eye(classes, dtype=int)
    matrix[0, -1] += 1
    image = bitmaps.draw_confusion_matrix(matrix, [f'class {i}' for i in range(classes)])
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


def test_text_is_escaped_and_every_picture_is_on_the_page_to_the_byte():
    hostile = '</title></style><script>alert(1)</script> "\' onerror=x & &lt; $title {title} é 猫'
    file = io.BytesIO()
    Image.fromarray(np.zeros((6, 20), np.uint8)).save(file, 'png')

    def written(text):
        pictures, table = [Picture(file.getvalue(), text, text)] * 2, Table([text], [[text, text]])
        sections = [Section(text, text, pictures), Section(text, text, (), text, table)]
        return render_page(text, [text, text], sections)

    source = written(hostile)
    tags, plain = (
        re.findall('<[^>]*>', re.sub('alt="[^"]*"', '', s)) for s in (source, written('plain'))
    )
    assert tags == plain and source.isascii()
    assert source.count(html.escape(hostile).encode('ascii', 'xmlcharrefreplace').decode()) > 10
    assert re.findall(r'href="#(\w+)"', source) == re.findall(r'<section id="(\w+)"', source)
    found = re.findall(r'base64,([^"]+)"', source)
    assert [base64.b64decode(picture) for picture in found] == [file.getvalue()] * 2
