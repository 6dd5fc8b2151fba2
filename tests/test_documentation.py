"""The site is whole, and what README and documentation tell people to type works."""

import ast
import contextlib
import functools
import html.parser
import importlib
import io
import re
import shlex
import subprocess
import sys
import urllib.parse

import pytest

from docs import configuration, layers
from tests.pages import NOTEBOOKS, PAGES, ROOT, blocks, cells, commands, inline
from tests.workplace import workplace
from vit_jax.__main__ import find_programs
from vit_jax.base import UserError, records
from vit_jax.checkpoints.remote import PUBLISHED
from vit_jax.cli import config_files, config_help
from vit_jax.config import TrainConfig
from vit_jax.studies.config import Study

LANGUAGES = (
    'sh',
    'python',
    'text',
    'yaml',
    '{eval-rst}',
    '{toctree}',
    '{include} ../CONTRIBUTING.md',
)


def name(page):
    return str(page.relative_to(ROOT))


def parser_of(program):
    return importlib.import_module(f'vit_jax.{program}').make_parser()


def problem(program, arguments):
    """What is wrong with the arguments of a program, or None; nothing is run."""
    if program not in find_programs():
        return f'no program {program!r}'
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            parser_of(program).parse_args(arguments)
        except SystemExit:  # after --help without an error
            return errors.getvalue() or None
        except UserError as error:
            return str(error)
    return None


def program_of(words):
    """The program of vit_jax that a command starts, and its arguments; None for other commands."""
    if words[0] == 'vit_jax':
        return words[1], words[2:]
    if words[0] == 'flags':  # for any training
        return 'train', ['--config=configs/quickstart.py', '--workdir=DIR', *words[1:]]
    for place, word in enumerate(words[1:]):
        if words[place] == '-m' and word.startswith('vit_jax'):
            rest = words[place + 2 :]
            return (word.removeprefix('vit_jax.'), rest) if '.' in word else (rest[0], rest[1:])
    return None


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_every_command_of_a_page_can_be_typed(page, tmp_path):
    wrong = []
    for block in blocks(page):
        assert block.language in LANGUAGES, f'{block}: as what would this be checked?'
        if block.language == 'python':
            ast.parse(block.text, str(block))
        for words in commands(block.text, tmp_path) if block.language == 'sh' else ():
            found = program_of(words)
            error = problem(*found) if found else None
            if error:
                wrong.append(f'{block}: {" ".join(words)}\n{error}')
    assert not wrong, '\n'.join(wrong)


@functools.cache
def fields():
    """All fields of configurations, and the records that hold them; NAME is any name in a dict."""
    found = {*config_help.field_paths(TrainConfig), *config_help.field_paths(Study)}
    return found | {path.rpartition('.')[0] for path in found}


def is_field(path):
    """Is there a field of this path, where a word may be a name that somebody gave, or FIELD?"""
    words = [word for word in path.split('.') if not word.isupper()]
    named = (['NAME' if i == place else word for i, word in enumerate(words)] for place in range(9))
    return any('.'.join(one) in fields() for one in named)


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_what_a_sentence_names_is_there(page):
    wrong = []
    for place, text in inline(page):
        own = re.match(r'(?:python -m vit_jax\.|vit_jax )(\w+)', text)
        if own and own[1] not in find_programs():
            wrong.append(f'{place}: no program {own[1]!r}')
        elif own:
            known = parser_of(own[1])._option_string_actions
            flags = re.findall(r'(?<= )--(?!config\.)[a-z_]+', text)
            wrong += [f'{place}: {own[1]} has no {flag}' for flag in flags if flag not in known]
        for path in re.findall(r'--(config\.[a-z][\w.]*\w)', text):
            if not is_field(path):
                wrong.append(f'{place}: no field {path}')
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_tests_that_a_sentence_names_are_there(page):
    """The files, and a test for each word of `-k`."""
    for place, text in inline(page):
        words = shlex.split(text) if text.startswith(('pytest', 'python -m pytest')) else []
        files = [
            file for word in words if word.startswith('tests') for file in find_test_files(word)
        ]
        selected = words[words.index('-k') + 1].split() if '-k' in words else []
        sources = '\n'.join(file.read_text() for file in files)
        names = ' '.join(re.findall('^def (test_.*)[(]', sources, re.MULTILINE))
        for word in {*selected} - {'or', 'and', 'not'}:
            assert word in names, f'{place}: -k {word} selects no test of {files}'


def find_test_files(path):
    """The test files of a path in a command; fails if there are none."""
    found = [*(ROOT / path).rglob('test_*.py')] if (ROOT / path).is_dir() else [ROOT / path]
    assert found and all(file.exists() for file in found), path
    return found


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_configurations_that_a_table_or_a_sentence_names_can_be_read(page):
    wrong = []
    for given in (*under_config(page), *in_flags(page)):
        try:
            config_files.read_config_file(given, records.Record)
        except UserError as error:
            wrong.append(f'{name(page)}: {error}')
    assert not wrong, '\n'.join(wrong)


def under_config(page):
    """The values in the first column of tables that begin with `--config=`."""
    found, inside = [], False
    for line in page.read_text().splitlines():
        inside = line.startswith('| `--config=` |') or (inside and line.startswith('|'))
        found += re.findall('`([^`]+)`', line.split('|')[1]) if inside else []
    return [given for given in found if given != '--config=']


def in_flags(page):
    """What stands after `--config=` within sentences, of a file in configs/."""
    found = (re.search(r'--config=(configs/[\w./]+\.py\S*)', text) for _, text in inline(page))
    return [match[1] for match in found if match]


def test_published_checkpoints_that_are_named_exist():
    """In sentences, blocks and notebooks; a row of the table of all is both kinds of a network."""
    wrong = []
    for page in (*PAGES, *NOTEBOOKS):
        for line in page.read_text().splitlines():
            for found in re.findall(r'\b(?:augreg|vit):[A-Z][\w+/-]*', line):
                row = f'{found}-in21k' in PUBLISHED and line.startswith(f'| `{found}` |')
                if found not in PUBLISHED and not row:
                    wrong.append(f'{name(page)}: {found}')
    assert not wrong, '\n'.join(wrong)


@pytest.mark.gate
def test_generated_pages_and_pictures_are_up_to_date():
    message = 'python -m docs.configuration and python -m docs.layers write them anew'
    assert configuration.PAGE.read_text() == configuration.page(), message
    assert layers.PICTURE.read_text() == layers.picture(), message


def anchor(heading):
    """The anchor of a heading, as Sphinx and GitHub make it."""
    return re.sub(r'[^\w\- ]', '', heading.lower()).strip().replace(' ', '-')


@functools.cache
def anchors(page):
    return {anchor(text) for text in re.findall(r'^#+ (.*)$', page.read_text(), re.MULTILINE)}


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_a_link_to_a_page_or_a_heading_leads_there(page):
    """The nightly builds the site, and follows all its links."""
    dead = []
    for target in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
        file, _, fragment = target.partition('#')
        there = page.parent / file if file else page
        if ':' in target or '`' in target:
            continue
        if not there.exists() or (fragment and fragment not in anchors(there)):
            dead.append(target)
    assert not dead, f'{name(page)}: {dead}'


class Links(html.parser.HTMLParser):
    """Where a page of the site leads, what it shows, and the places in it that can be led to."""

    def __init__(self, page):
        super().__init__()
        self.targets, self.places = [], {''}
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.places |= {values[key] for key in ('id', 'name') if values.get(key)}
        self.targets += [values[key] for key in ('href', 'src') if values.get(key)]


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning_and_all_its_links_lead_somewhere(tmp_path):
    """With the notebooks as they are: another test runs them."""
    site, options = tmp_path / 'site', ['-W', '--keep-going', '-q', '-D', 'nb_execution_mode=off']
    build = [sys.executable, '-m', 'sphinx', *options, ROOT / 'docs', site]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = functools.cache(Links)
    dead = []
    for page in site.rglob('*.html'):
        if page.relative_to(site).parts[0] in ('_downloads', '_static'):  # not written by Sphinx
            continue
        for target in read(page).targets:
            url = urllib.parse.urlsplit(target)
            file = page.parent / urllib.parse.unquote(url.path) if url.path else page
            alive = url.scheme or url.netloc or file.is_file()
            if file.suffix == '.html' and alive and not url.scheme:
                alive = url.fragment in read(file.resolve()).places
            if not alive:
                dead.append(f'{page.relative_to(site)}: {target}')
    assert not dead, '\n'.join(dead)


# Pages that share commands run in one workplace; each command runs once.
README = ROOT / 'README.md'
RUNS = [ROOT / f'docs/{page}.md' for page in ('evaluation', 'fault_tolerance', 'metrics')]
OTHERS = [[page] for page in (*PAGES, *NOTEBOOKS) if page not in (README, *RUNS)]
GROUPS = [
    pytest.param([README], marks=pytest.mark.gate),
    *(pytest.param(pages, marks=pytest.mark.nightly) for pages in (RUNS, *OTHERS)),
]


@pytest.mark.parametrize('pages', GROUPS, ids=lambda pages: name(pages[0]))
def test_what_a_page_shows_runs(pages, tmp_path):
    """In small, from its top to its end, but for what the page says why it is not."""
    with workplace(tmp_path) as place:
        for page in pages:
            for block in cells(page) if page in NOTEBOOKS else blocks(page):
                if block.excuse or block.language not in ('sh', 'python'):
                    continue
                if block.language == 'python':
                    error = place.python(block.text, str(block))
                else:
                    error = place.shell(block.text)
                assert error is None, f'{block}\n{block.text}\n{error}'
            place.turn_page()
