"""Pictures without matplotlib: every letter can be read, every class and every error is seen."""

import numpy as np
import pytest

from vit_jax.figures import bitmaps

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
