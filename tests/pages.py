"""The code blocks of README.md and docs/, and the commands that their shell blocks come down to."""

import json
import os
import pathlib
import re
import subprocess
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').rglob('*.md'))]
NOTEBOOKS = sorted((ROOT / 'docs/notebooks').glob('*.ipynb'))

# What the shell does not find it reports, word by word; it looks for no program at all.
_REPORT = r"""
PATH=/nowhere
command_not_found_handle() { printf '%s\0' "$@" $'\n' >> "$COMMANDS"; }
cd() { :; }
exec() { "$@"; }
source() { :; }
"""


class Block(NamedTuple):
    """A block of a page, as the page shows it."""

    page: pathlib.Path
    line: int  # of its first line of code, from 1
    language: str
    text: str
    excuse: str | None  # why it is not run

    def __str__(self) -> str:
        return f'{self.page.relative_to(ROOT)}:{self.line}'


def blocks(page: pathlib.Path) -> list[Block]:
    """The blocks of a page in their order; <!-- not run: REASON --> stands before some."""
    found, excuse = [], None
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == 'html_block':
            excuse = re.fullmatch(r'<!-- not run: (.+?) -->', token.content.strip(), re.DOTALL)
        elif token.type == 'fence':
            reason = excuse and excuse[1]
            found.append(Block(page, token.map[0] + 2, token.info, token.content, reason))
            excuse = None
        else:
            excuse = None
    return found


def cells(notebook: pathlib.Path) -> list[Block]:
    """The code cells of a notebook, which train for a third of their steps."""
    found = json.loads(notebook.read_text())['cells']
    texts = [''.join(cell['source']) for cell in found if cell['cell_type'] == 'code']
    length = re.compile(r'(?<=total=Duration\(steps=)\d+')
    short = [length.sub(lambda steps: str(int(steps[0]) // 3), text) for text in texts]
    return [Block(notebook, number, 'python', text, None) for number, text in enumerate(short, 1)]


def inline(page: pathlib.Path) -> list[tuple[str, str]]:
    """(place, text) of each `code` within the sentences and tables of a page."""
    tokens = MarkdownIt().enable('table').parse(page.read_text())
    found, line = [], 0
    for token in tokens:
        line = token.map[0] + 1 if token.map else line
        for child in token.children or ():
            if child.type == 'code_inline':
                found.append((f'{page.relative_to(ROOT)}:{line}', child.content))
    return found


def commands(text: str, folder: pathlib.Path) -> list[list[str]]:
    """The commands of a shell block with their arguments, as the shell would start them.

    Variables, loops, functions and continued lines are the shell's. A command within an argument of
    another one (ssh) is one too; a line of flags alone are those of `flags`. Nothing is started.
    """
    report = folder / 'commands'
    report.write_text('')
    text = text.replace('.venv/bin/', '').replace('.ci/', '').replace('/tmp/vit', str(folder))
    text = re.sub('^(?=--config[.])', 'flags ', text, flags=re.MULTILINE)
    text = re.sub(' &$', ';', text, flags=re.MULTILINE)  # two at once would mix their words
    environment = os.environ | {'COMMANDS': str(report)}
    shell = ['/bin/bash', '-c', f'{_REPORT}\n{text}']
    done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
    assert not re.search('syntax error|No such file', done.stderr), done.stderr
    found = [line.split('\0')[:-1] for line in report.read_text().split('\n\0') if line]
    for words in [*found]:
        for word in words:
            if re.search(r'-m vit_jax\b|^vit_jax ', word):
                found += commands(word, folder)
    return found
