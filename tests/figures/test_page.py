"""The page of pictures: whatever a file is called, it is text; and what a browser says of it."""

import base64
import functools
import html.parser
import http.server
import io
import re
import shutil
import subprocess
import threading

import numpy as np
import pytest
from PIL import Image

from tests.figures import made_up
from vit_jax.figures import style
from vit_jax.figures.page import Picture, Section, page

BROWSER = shutil.which('chromium') or shutil.which('google-chrome')
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


def visited(folder, script):
    """What the script made of page.html in a frame 360 pixels wide, and what the browser said."""
    frame = '<title></title><iframe src="page.html" style="width:360px;height:640px"></iframe>'
    look = 'onload = () => { const frame = document.querySelector("iframe").contentWindow; '
    look += f'document.title = JSON.stringify({script}) }}'
    (folder / 'frame.html').write_text(f'<!DOCTYPE html>{frame}<script>{look}</script>')
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(
        ('127.0.0.1', 0), functools.partial(Handler, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f'http://127.0.0.1:{server.server_port}/frame.html'
        command = [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom']
        command += ['--enable-logging=stderr', f'--user-data-dir={folder / "profile"}']
        run = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
        server.shutdown()
    title = html.unescape(re.search('<title>(.*?)</title>', run.stdout)[1])
    said = [line for line in run.stderr.splitlines() if 'CONSOLE' in line]
    return title, said, [path for path in asked if path not in ('/frame.html', '/favicon.ico')]


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason='no chromium here: apt-get install chromium')
def test_a_browser_shows_it_on_a_telephone_with_no_complaint_network_or_sideways_scrolling(
    tmp_path,
):
    picture = Picture(style.png(made_up.draw('cka')), 'CKA', made_up.LONG)
    sections = [
        Section(made_up.LONG * 3, HOSTILE * 9, [picture, Picture(image(), 'wide', HOSTILE)]),
        Section('nothing', 'M' * 500, left_out='m' * 500),
    ]
    (tmp_path / 'page.html').write_text(page(made_up.LONG, [HOSTILE, 'W' * 300], sections))
    images = '[...frame.document.images]'
    root = 'frame.document.documentElement'
    script = f'[frame.innerWidth, {root}.scrollWidth <= {root}.clientWidth, '
    script += f'{images}.every(i => i.naturalWidth > 0), '
    script += f'Math.max(...{images}.map(i => i.getBoundingClientRect().right)) <= 360, '
    script += 'frame.document.querySelector("input").click() || '
    script += f'{images}[0].getBoundingClientRect().width == {images}[0].naturalWidth]'
    title, said, asked = visited(tmp_path, script)
    assert title == '[360,true,true,true,true]'
    assert not said and asked == ['/page.html']
