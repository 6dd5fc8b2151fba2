"""Renders pictures and tables as one self-contained HTML file without scripts."""

import base64
import html
import pathlib
from collections.abc import Iterable, Sequence
from string import Template
from typing import NamedTuple

_PAGE = pathlib.Path(__file__).with_name('page.html')
_SECTION = Template(
    '<section id="s$number"><h2>$title</h2>\n<p>$paragraph</p>\n$content\n</section>'
)
_FIGURE = Template(
    '<figure><label><input type="checkbox" aria-label="full size"><span>'
    '<img src="data:image/png;base64,$data" alt="$alt"></span></label>'
    '<figcaption>$caption</figcaption></figure>'
)
_TABLE = Template('<div class="table" tabindex="0"><table>\n<tr>$head</tr>\n$rows\n</table></div>')


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
        facts=_joined(f'<p>{html.escape(line)}</p>' for line in lines),
        contents=_joined(f'<li><a href="#s{i}">{name}</a></li>' for i, name in titles),
        sections=_joined(_section(i, section) for i, section in enumerate(sections)),
    )
    return text.encode('ascii', 'xmlcharrefreplace').decode()


def _section(number: int, section: Section) -> str:
    content = []
    if section.left_out:
        content.append(f'<p class="out">{html.escape(section.left_out)}</p>')
    if section.table:
        content.append(_table(section.table))
    for picture in section.pictures:
        data = base64.b64encode(picture.png).decode()
        texts = {'alt': html.escape(picture.alt), 'caption': html.escape(picture.caption)}
        content.append(_FIGURE.substitute(texts, data=data))
    texts = {'title': html.escape(section.title), 'paragraph': html.escape(section.paragraph)}
    return _SECTION.substitute(texts, number=number, content=_joined(content))


def _table(table: Table) -> str:
    head = ''.join(f'<th scope="col">{html.escape(name)}</th>' for name in table.columns)
    rows = []
    for first, *others in table.rows:
        cells = ''.join(f'<td>{html.escape(cell)}</td>' for cell in others)
        rows.append(f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>')
    return _TABLE.substitute(head=head, rows=_joined(rows))


def _joined(parts: Iterable[str]) -> str:
    return '\n'.join(parts)
