"""Sphinx configuration; build with python -m sphinx -W --keep-going docs build/docs."""

import importlib.metadata
import pathlib
import re
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # docs.api

project = 'vit_jax'
author = 'The vit_jax authors'
release = importlib.metadata.version('vit_jax')

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'docs.api.as_written',
]
default_role = 'literal'  # `x` in a docstring is code
viewcode_follow_imported_members = False  # otherwise source pages have dead links
autodoc_member_order = 'bysource'
autodoc_inherit_docstrings = False
maximum_signature_line_length = 88

html_theme = 'sphinx_book_theme'
html_title = 'vit_jax'
html_theme_options: dict[str, Any] = {'navbar_persistent': []}  # the search is in the sidebar
html_static_path = ['_static']
html_css_files = ['site.css']

# Anchors of headings are GitHub's, so links work there too.
myst_heading_anchors = 4

# Changed notebooks are executed; -D nb_execution_mode=off uses their stored outputs.
nb_execution_mode = 'cache'
nb_execution_raise_on_error = True
nb_execution_timeout = 600

_OUTSIDE = re.compile(r'\[([^]]*)\]\(((?:\.\./)+[\w./-]*)\)')


def link_files(app: Any, docname: str, source: list[str]) -> None:
    """Makes links to files outside docs/ downloads, and links to folders plain text."""
    here = pathlib.Path(app.env.doc2path(docname)).parent

    def linked(match: re.Match[str]) -> str:
        text, path = match.groups()
        if (here / path).resolve().is_relative_to(app.srcdir):
            return match[0]
        return text if (here / path).is_dir() else f'[{text}](path:{path})'

    source[0] = _OUTSIDE.sub(linked, source[0])


def setup(app: Any) -> None:
    """Registers `link_files`; called by Sphinx."""
    app.connect('source-read', link_files)
