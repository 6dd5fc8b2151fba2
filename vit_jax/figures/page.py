"""Renders pictures and tables as one self-contained HTML file without scripts."""

import base64
import html
import pathlib
from collections.abc import Sequence
from string import Template
from typing import NamedTuple

_PAGE = pathlib.Path(__file__).with_name('page.html')


class Picture(NamedTuple):
    """A PNG with its alternative text and its caption."""

    png: bytes
    alt: str
    caption: str


class Table(NamedTuple):
    """A table of texts. The first cell of a row is its header."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    """A section of the page."""

    title: str
    paragraph: str
    pictures: Sequence[Picture] = ()
    left_out: str | None = None  # why pictures are missing
    table: Table | None = None


def render_page(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """Renders title, lines, table of contents and sections as HTML. Escapes all texts."""
    titles = enumerate(html.escape(section.title) for section in sections)
    text = Template(_PAGE.read_text(encoding='utf-8')).substitute(
        title=html.escape(title),
        facts='\n'.join(f'<p>{html.escape(line)}</p>' for line in lines),
        contents='\n'.join(f'<li><a href="#s{i}">{name}</a></li>' for i, name in titles),
        sections='\n'.join(_section(i, section) for i, section in enumerate(sections)),
    )
    return text.encode('ascii', 'xmlcharrefreplace').decode()


def _section(number: int, section: Section) -> str:
    content = [
        f'<section id="s{number}"><h2>{html.escape(section.title)}</h2>',
        f'<p>{html.escape(section.paragraph)}</p>',
    ]
    if section.left_out:
        content.append(f'<p class="out">{html.escape(section.left_out)}</p>')
    if section.table:
        content.append(_table(section.table))
    for png, alt, caption in section.pictures:
        content.append(
            '<figure><label><input type="checkbox" aria-label="full size"><span>'
            f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}" '
            f'alt="{html.escape(alt)}"></span></label>'
            f'<figcaption>{html.escape(caption)}</figcaption></figure>'
        )
    return '\n'.join([*content, '</section>'])


def _table(table: Table) -> str:
    head = ''.join(f'<th scope="col">{html.escape(name)}</th>' for name in table.columns)
    rows = ['<div class="table" tabindex="0"><table>', f'<tr>{head}</tr>']
    for first, *others in table.rows:
        cells = ''.join(f'<td>{html.escape(cell)}</td>' for cell in others)
        rows.append(f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>')
    return '\n'.join([*rows, '</table></div>'])
