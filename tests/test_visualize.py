"""The page of figures as the program writes it: of any networks and images; what it rejects."""

import dataclasses
import html
import itertools
import re

import cv2
import matplotlib.style
import numpy as np
import pytest
from matplotlib.text import Text

import vit_jax
from tests import tiny
from tests.networks import HYBRID, changed, loaded
from vit_jax import visualize
from vit_jax.base import UserError, tree_names
from vit_jax.figures import style
from vit_jax.figures.figure import NAMES, find_figure
from vit_jax.models import Backbone, ResNetConfig

VIT = tiny.model()
MANY = tiny.model(depth=13, width=34, num_heads=17)  # more blocks and heads than are shown
RESNET = ResNetConfig(
    image_size=(16, 16), backbone=Backbone(blocks=(1,), width=32), num_classes=tiny.CLASSES
)
LONG = 'experiments of 2026-vit_$b$_16 trained on & off-checkpoints-000120000'


def run(*arguments):
    return visualize.main(visualize.make_parser().parse_args([str(a) for a in arguments]))


def saved(folder, name, config):
    vit_jax.save(loaded(config), folder / name, 'vit_jax')
    return folder / name


def text_of(folder):
    """What a person reads on the page, as one line."""
    page = re.sub('<style>.*</style>', '', (folder / 'index.html').read_text(), flags=re.DOTALL)
    return ' '.join(html.unescape(re.sub('<[^>]*>', ' ', page)).split())


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp('report')
    out = folder / 'out'
    cut = dataclasses.replace(VIT, blocks_without_skips=(1,))
    configs = {LONG: MANY, 'resnet': RESNET, 'vit': VIT, 'cut': cut, 'again': VIT}
    long, resnet, *small = (saved(folder, name, config) for name, config in configs.items())
    options = '--images=digits', '--num_images=32', f'--out={out}'
    several = 'skip_removal', 'training_data'
    alone = ','.join(name for name in NAMES if name not in several)
    assert run(*small, *options, f'--figures={",".join(several)}') == 0
    texts = [text_of(out)]
    assert run(long, resnet, *options, f'--figures={alone}') == 0
    return out, ' '.join([*texts, text_of(out)])


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
def test_every_figure_is_explained_and_all_its_text_can_be_read(name, report, monkeypatch):
    figure, (folder, text) = find_figure(name), report
    assert f'{figure.title} {figure.caption}' in text
    written, draw = [], Text.draw

    def recorded(self, renderer):
        draw(self, renderer)
        if self.get_visible() and self.get_text().strip():
            written.append((self.get_text(), self.get_window_extent(renderer)))

    monkeypatch.setattr(Text, 'draw', recorded)
    files = [*folder.glob(f'{name}*.npz')]
    assert files
    for file in files:
        assert file.with_suffix('.png').exists()
        written.clear()
        with np.load(file) as numbers, matplotlib.style.context(style.SETTINGS, True):
            figure.draw(dict(numbers)).canvas.draw()
        assert len(written) > 2
        for (text, one), (other, two) in itertools.combinations(written, 2):
            width = min(one.x1, two.x1) - max(one.x0, two.x0)
            height = min(one.y1, two.y1) - max(one.y0, two.y0)
            assert min(width, height) < 1, f'{text!r} and {other!r} overlap'


@pytest.mark.full
@pytest.mark.parametrize('count', [1, 6])
def test_photos_of_any_size_without_labels_one_of_which_is_broken(count, tmp_path, capsys):
    """Figures that need labels or several images are left out, with the reason."""
    network, out, images = saved(tmp_path, 'hybrid', HYBRID), tmp_path / 'out', tmp_path / 'photos'
    images.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        picture = rng.integers(0, 256, (20 + 3 * i, 30 - i, 3), np.uint8)
        cv2.imwrite(str(images / f'{i} <b>&.{"png" if i % 2 else "jpg"}'), picture)
    (images / 'broken.jpg').write_bytes(b'no image')
    names = '--figures=filters,cka,rollout,probes'
    assert run(network, f'--images={images}', f'--out={out}', names) == 1
    text = text_of(out)
    assert '; 1 ' in text and 'label' in text
    assert 'broken.jpg' in capsys.readouterr().err
    assert (out / 'filters-hybrid.png').exists() and (out / 'rollout-hybrid.png').exists()
    assert (out / 'cka.png').exists() == (count > 1)


@pytest.mark.full
def test_a_network_that_computes_nan_is_named(tmp_path):
    network = loaded(tiny.model())
    leaf = tree_names.named_leaves(network.params)['encoder/block/norm2/bias'].copy()
    leaf[2] = 1e38  # finite, as a checkpoint's numbers must be; its square is not
    params = tree_names.map_named(
        lambda name, old: leaf if name == 'encoder/block/norm2/bias' else old, network.params
    )
    vit_jax.save(changed(network, params=params), tmp_path / 'bad', 'vit_jax')
    with pytest.raises(UserError, match='bad'):
        run(tmp_path / 'bad', '--images=digits', '--num_images=8', f'--out={tmp_path / "out"}')


@pytest.mark.parametrize(
    'options, what',
    [
        (('--figures=ckaa',), "'cka'"),
        (('--images=nothing',), 'nothing'),
        (('--out=/dev/null/x',), '/dev/null'),
    ],
)
def test_a_value_that_cannot_be_used_is_named(options, what, tmp_path):
    network = saved(tmp_path, 'vit', tiny.model())
    with pytest.raises(UserError, match=what):
        run(network, '--images=digits', f'--out={tmp_path / "out"}', *options)


@pytest.mark.parametrize('text', ['0.5', '0.5,1.5', '-0.1,0', 'left,top', '0.1,0.2,0.3', 'nan,0'])
def test_a_place_outside_the_image_is_rejected(text, capsys):
    flags = ['vit', '--images=digits', '--out=out']
    assert visualize.make_parser().parse_args([*flags, '--patch=0,0.25']).patch == (0, 0.25)
    with pytest.raises(SystemExit):
        visualize.make_parser().parse_args([*flags, f'--patch={text}'])
    assert f'{text!r}: expected X,Y' in capsys.readouterr().err
