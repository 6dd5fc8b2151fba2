"""A page of pictures in one file: no network, no script, light and dark, on paper too."""

import base64
import html
from collections.abc import Sequence
from typing import NamedTuple


class Picture(NamedTuple):
    """A PNG, what it shows for those who do not see it, and what stands below."""

    png: bytes
    alt: str
    caption: str


class Table(NamedTuple):
    """Texts in rows, under the names of the columns; those of the first column name the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    """Pictures and a table under a title, with one paragraph; or why there are none or not all."""

    title: str
    paragraph: str
    pictures: Sequence[Picture] = ()
    left_out: str | None = None
    table: Table | None = None


def page(title: str, lines: Sequence[str], sections: Sequence[Section]) -> str:
    """The HTML: title, lines of facts, a table of contents, sections. ASCII alone.

    All text is escaped. A click on a picture shows it in full size, another one goes back.
    """
    contents = [
        f'<li><a href="#s{place}">{_text(section.title)}</a></li>'
        for place, section in enumerate(sections)
    ]
    facts = [f'<p>{_text(line)}</p>' for line in lines]
    parts = [_section(place, section) for place, section in enumerate(sections)]
    return '\n'.join(
        [
            _HEAD.format(title=_text(title), style=_STYLE),
            f'<header><h1>{_text(title)}</h1>',
            *facts,
            '</header>',
            '<nav aria-label="Contents"><ol>',
            *contents,
            '</ol></nav>',
            '<main>',
            *parts,
            '</main>',
            '</body>',
            '</html>',
            '',
        ]
    )


def _section(place: int, section: Section) -> str:
    left_out = [f'<p class="out">{_text(section.left_out)}</p>'] if section.left_out else []
    head = f'<section id="s{place}">', f'<h2>{_text(section.title)}</h2>'
    paragraph = f'<p>{_text(section.paragraph)}</p>'
    table = [] if section.table is None else [_table(section.table)]
    pictures = map(_figure, section.pictures)
    return '\n'.join([*head, paragraph, *left_out, *table, *pictures, '</section>'])


def _table(table: Table) -> str:
    """A table that scrolls by itself where the window is narrow."""
    names = ''.join(f'<th scope="col">{_text(name)}</th>' for name in table.columns)
    rows = [f'<tr>{names}</tr>']
    for first, *others in table.rows:
        cells = ''.join(f'<td>{_text(cell)}</td>' for cell in others)
        rows.append(f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>')
    return '\n'.join(['<div class="table" tabindex="0"><table>', *rows, '</table></div>'])


def _figure(picture: Picture) -> str:
    """A picture in a label of a hidden checkbox: checked, it fills the window."""
    data = base64.b64encode(picture.png).decode()
    return (
        '<figure><label><input type="checkbox" aria-label="full size"><span>'
        f'<img src="data:image/png;base64,{data}" alt="{_text(picture.alt)}"></span></label>'
        f'<figcaption>{_text(picture.caption)}</figcaption></figure>'
    )


def _text(text: str) -> str:
    """Text as it may stand in a page, attributes too; what cannot be shown as a question mark."""
    shown = ''.join(c if c.isprintable() else ' ' if c.isspace() else '\ufffd' for c in text)
    return html.escape(shown).encode('ascii', 'xmlcharrefreplace').decode()


_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>"""

_STYLE = """
:root { --paper: #fff; --ink: #1b1b1b; --faint: #5c5c5c; --line: #d8d8d8; --link: #0b57a4 }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --ink: #e4e4e4; --faint: #a5a5a5; --line: #3a3d42; --link: #8ab8f0 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; overflow-wrap: anywhere;
  background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 1rem 0 }
h2 { font-size: 1.25rem; line-height: 1.25; margin: 0 0 .5rem }
a { color: var(--link) }
p { max-width: 45rem; margin: .5rem 0 }
header p { color: var(--faint); margin: .1rem 0 }
nav { margin: 1.5rem 0; border: solid var(--line); border-width: 1px 0 }
nav ol { margin: .75rem 0; padding-left: 2rem; columns: 18rem auto; column-gap: 3rem }
section { padding: 1.5rem 0; border-bottom: 1px solid var(--line) }
.out { border-left: 4px solid #d55e00; padding-left: .75rem }
figure { margin: 1.25rem 0 }
figcaption { color: var(--faint); max-width: 45rem; font-size: .9rem }
img { display: block; max-width: 100%; height: auto; margin: 0 auto }
.table { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; vertical-align: top }
th { font-weight: 600 }
label span { display: block; padding: .5rem; border-radius: .4rem; background: #fff;
  border: 1px solid var(--line); cursor: zoom-in }
input { position: absolute; opacity: 0; pointer-events: none }
input:focus-visible + span { outline: 3px solid var(--link) }
input:checked + span { position: fixed; inset: 0; z-index: 1; overflow: auto; border-radius: 0;
  cursor: zoom-out }
input:checked + span img { max-width: none }
@media print {
  body { max-width: none; padding: 0 }
  section, figure { break-inside: avoid }
  img { max-height: 20cm; width: auto }
}
"""
