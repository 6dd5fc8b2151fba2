"""Pictures: every letter can be read, colours mean what the bar says, equal numbers equal bytes."""

import itertools

import jax
import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text

from tests.figures import made_up
from vit_jax.figures import drawing, style

PICTURES = sorted(made_up.arguments(blocks=1, heads=1, grid=(1, 1), patch=2))
SIZES = {
    'smallest': {'blocks': 1, 'heads': 1, 'grid': (1, 1), 'patch': 2, 'networks': 1, 'channels': 1},
    'small': {'blocks': 2, 'heads': 3, 'grid': (7, 5), 'patch': 4, 'name': 'Ti/16'},
    'base': {'blocks': 12, 'heads': 12, 'grid': (14, 14), 'patch': 8},
    'large': {'blocks': 24, 'heads': 16, 'grid': (24, 16), 'patch': 8, 'networks': 3},
    'largest': {'blocks': 48, 'heads': 16, 'grid': (32, 32), 'patch': 4, 'networks': 6},
    'wide': {'blocks': 2, 'heads': 16, 'grid': (1, 32), 'patch': 4, 'networks': 2},
    'high': {'blocks': 24, 'heads': 1, 'grid': (32, 1), 'patch': 4, 'networks': 2},
}


def texts(figure, monkeypatch):
    """What is written in the picture, each with its place in pixels."""
    written, draw = [], Text.draw

    def recorded(self, renderer):
        draw(self, renderer)
        if self.get_visible() and self.get_text().strip():
            written.append((self.get_text(), self.get_window_extent(renderer)))

    monkeypatch.setattr(Text, 'draw', recorded)
    figure.canvas.draw()
    return written


def common(one, other):
    """How many pixels wide and high, at least, the part is that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return min(width, height)


def assert_readable(figure, monkeypatch):
    """All that is written is inside the picture and covers nothing else that is."""
    written = texts(figure, monkeypatch)
    assert len(written) > 2
    for text, box in written:
        assert figure.bbox.padded(1).fully_contains(*box.min), text
        assert figure.bbox.padded(1).fully_contains(*box.max), text
    for (text, box), (other, place) in itertools.combinations(written, 2):
        assert common(box, place) < 1, f'{text!r} and {other!r} overlap'
    assert max(figure.get_size_inches()) < 16


@pytest.mark.full
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('picture', PICTURES)
def test_all_that_is_written_is_inside_the_picture_and_covers_nothing_written(
    picture, size, monkeypatch
):
    assert_readable(made_up.draw(picture, **SIZES[size]), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize('taps', [(74, 370), (7, 370, 2), (14, 7), (70, 400, 70)])
def test_networks_of_very_different_depth_stand_side_by_side_readably(taps, monkeypatch):
    layers = np.concatenate([made_up.unit_names(60)[:count] for count in taps])
    networks = np.repeat([f'{made_up.LONG} {place}' for place in range(len(taps))], taps)
    figure = drawing.cka(np.eye(sum(taps)), layers, networks, removed=[3])
    assert_readable(figure, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize('picture', PICTURES)
def test_numbers_that_are_none_leave_their_place_empty(picture, monkeypatch):
    """A network with a NaN is drawn as far as it goes."""
    made = made_up.arguments

    def with_nan(**sizes):
        return jax.tree.map(_spoiled, made(**sizes))

    monkeypatch.setattr(made_up, 'arguments', with_nan)
    figure = made_up.draw(picture, **SIZES['small'])
    assert style.png(figure)
    images = [image for axes in figure.axes for image in axes.images]
    assert all(np.isfinite(image.get_clim()).all() for image in images)


def test_the_last_layer_of_every_network_stands_at_relative_depth_one():
    accuracy = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, np.nan]])
    figure = drawing.probes(accuracy, ['deep', 'shallow'])
    deep, shallow = (line.get_xydata().tolist() for line in figure.axes[0].lines)
    assert deep == [[0, 10], [0.5, 20], [1, 30]] and shallow == [[0, 40], [1, 50]]


@pytest.mark.full
@pytest.mark.parametrize('name', ['$\\frac{$', '_hidden', '\udc80\n', '\u732b' * 200, 'W' * 200])
def test_a_name_is_written_as_it_is(name, monkeypatch):
    figure = drawing.probes(np.eye(2), [name, name])
    assert_readable(figure, monkeypatch)
    assert len(figure.legends[0].get_texts()) == 2 and style.png(figure)


def _spoiled(values):
    """The latter half of what is computed is NaN."""
    if not isinstance(values, np.ndarray) or values.dtype != float or len(values) < 2:
        return values
    spoiled = values.copy()
    spoiled[len(values) // 2 :] = np.nan
    return spoiled


@pytest.mark.full
@pytest.mark.parametrize('picture', PICTURES)
def test_equal_numbers_make_equal_bytes_which_say_nothing_of_when_or_by_what(picture):
    one, other = (style.png(made_up.draw(picture, **SIZES['small'])) for _ in range(2))
    assert one == other
    chunks = {'tEXt', 'iTXt', 'tIME', 'zTXt'}
    assert not any(chunk.encode() in one for chunk in chunks)


@pytest.mark.full
def test_a_users_own_matplotlib_settings_change_no_picture():
    before = style.png(made_up.draw('probes', **SIZES['small']))
    with matplotlib.rc_context({'font.size': 30, 'axes.facecolor': 'red', 'savefig.dpi': 20}):
        assert style.png(made_up.draw('probes', **SIZES['small'])) == before
        assert matplotlib.rcParams['font.size'] == 30
