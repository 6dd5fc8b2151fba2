"""The page of pictures: whatever a file is called, it is text; and what a browser says of it."""

import base64
import html.parser
import io
import re

import numpy as np
from PIL import Image

from vit_jax.figures.page import Picture, Section, page

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
