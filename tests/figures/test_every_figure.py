"""Each figure: its docstring, its row in the documentation, and its picture of any models."""

import dataclasses
import functools
import io
import itertools
import pathlib
import re

import matplotlib.style
import numpy as np
import pytest
from matplotlib.text import Text

from tests import tiny
from tests.figures.test_figures import opened
from vit_jax.base import UserError
from vit_jax.figures import style
from vit_jax.figures.figure import NAMES, find_figure
from vit_jax.models import Backbone, ResNetConfig

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'visualize.md'
DOCSTRING = re.compile(r'\S[^(]* \([^)]+\)\.\s.+', re.DOTALL)  # TITLE (SOURCE). TEXT
LONG = 'experiments of 2026-vit_$b$_16 trained on & off-checkpoints-000120000'
ROOT_AND_UNIT = Backbone(blocks=(1,), width=32)
RESNET = ResNetConfig(image_size=(8, 8), backbone=ROOT_AND_UNIT, num_classes=tiny.CLASSES)
SMALL = tiny.model(depth=2)
# Models that are compared; each is also drawn alone. A figure is drawn of the first models that it
# accepts. To add models that a figure needs, add a row.
MODELS = [
    (tiny.model(depth=13, width=34, num_heads=17), RESNET),  # more blocks and heads than are shown
    (SMALL, dataclasses.replace(SMALL, blocks_without_skips=(1,)), SMALL),
]


@functools.cache
def placed(row):
    """7 images, which are one batch on one device, and the models of a row with long names."""
    images, *models = opened(*MODELS[row], images=7)
    return images, [dataclasses.replace(one, name=f'{LONG}-{one.name}') for one in models]


def numbers_of(figure):
    """The numbers of each picture of the first models that the figure accepts."""
    for row in range(len(MODELS)):
        (images, models), found = placed(row), []
        for compared in [models] if figure.compares_models else [[one] for one in models]:
            try:
                found.append(figure.compute(images, *compared))
            except UserError:  # says why the figure has no picture of this model
                continue
        if found:
            return found
    return []


def stored(numbers):
    """The numbers as they come out of their file."""
    file = io.BytesIO()
    np.savez(file, **numbers)
    file.seek(0)
    with np.load(file, allow_pickle=False) as again:
        return dict(again)


@pytest.mark.gate
@pytest.mark.parametrize('name', NAMES)
def test_a_figure_draws_any_models_or_says_why_not_and_its_text_can_be_read(name, monkeypatch):
    figure, written, draw = find_figure(name), [], Text.draw

    def record(self, renderer):
        draw(self, renderer)
        if self.get_visible() and self.get_text().strip():
            written.append((self.get_text(), self.get_window_extent(renderer)))

    monkeypatch.setattr(Text, 'draw', record)
    pictures = numbers_of(figure)
    where = 'MODELS, tests/figures/test_every_figure.py'
    assert pictures, f'{name}: cannot be drawn of any models in {where}; add models that it needs'
    for numbers in pictures:
        assert isinstance(figure.finding(numbers), str)
        written.clear()
        with matplotlib.style.context(style.SETTINGS, after_reset=True):
            figure.draw(stored(numbers)).canvas.draw()
        assert len(written) > 2
        for (text, one), (other, two) in itertools.combinations(written, 2):
            width = min(one.x1, two.x1) - max(one.x0, two.x0)
            height = min(one.y1, two.y1) - max(one.y0, two.y0)
            assert min(width, height) < 1, f'{text!r} and {other!r} overlap'


@pytest.mark.parametrize('name', NAMES)
def test_a_figure_has_a_title_a_source_and_one_row_in_the_documentation(name):
    start = find_figure(name).docstring.partition('\n')[0]
    assert DOCSTRING.fullmatch(find_figure(name).docstring), (
        f'figures/{name}.py: docstring {start!r}; expected TITLE (SOURCE). TEXT'
    )
    count = rows().count(name)
    assert count == 1, (
        f'{name}: {count} rows in docs/visualize.md; expected one, | `{name}` | CONTENT | SOURCE |'
    )


def rows():
    """The figures in the table of the documentation."""
    page = PAGE.read_text().partition('| figure | content | source |')[2]
    return re.findall(r'^\| `(\w+)` \| .+ \| .+ \|$', page.partition('\n\n')[0], re.MULTILINE)


def test_each_row_in_the_documentation_is_a_figure():
    assert {*rows()} <= {*NAMES}
