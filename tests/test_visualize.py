"""The page of figures as the program writes it: of any networks and images; what it rejects."""

import html
import re

import cv2
import numpy as np
import pytest

import vit_jax
from tests import tiny
from tests.networks import HYBRID, changed, loaded
from vit_jax import visualize
from vit_jax.base import UserError, tree_names
from vit_jax.figures.figure import find_figure


def run(*arguments):
    return visualize.main(visualize.make_parser().parse_args([str(a) for a in arguments]))


def saved(folder, name, config):
    vit_jax.save(loaded(config), folder / name, 'vit_jax')
    return folder / name


def text_of(folder):
    """What a person reads on the page, as one line."""
    page = re.sub('<style>.*</style>', '', (folder / 'index.html').read_text(), flags=re.DOTALL)
    return ' '.join(html.unescape(re.sub('<[^>]*>', ' ', page)).split())


@pytest.mark.parametrize(
    'count', [pytest.param(1, marks=pytest.mark.nightly), pytest.param(6, marks=pytest.mark.gate)]
)
def test_photos_of_any_size_without_labels_one_of_which_is_broken(count, tmp_path, capsys):
    """Figures that need labels or several images are left out, with the reason."""
    network, out, images = saved(tmp_path, 'hybrid', HYBRID), tmp_path / 'out', tmp_path / 'photos'
    images.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        picture = rng.integers(0, 256, (20 + 3 * i, 30 - i, 3), np.uint8)
        cv2.imwrite(str(images / f'{i} <b>&.{"png" if i % 2 else "jpg"}'), picture)
    (images / 'broken.jpg').write_bytes(b'no image')
    names = 'filters', 'cka', 'rollout', 'probes'
    figures = f'--figures={",".join(names)}'
    assert run(network, f'--images={images}', f'--out={out}', figures) == 1
    text = text_of(out)
    for figure in map(find_figure, names):
        assert f'{figure.title} {figure.caption}' in text
    assert '; 1 ' in text and 'label' in text
    assert 'broken.jpg' in capsys.readouterr().err
    assert (out / 'filters-hybrid.png').exists() and (out / 'rollout-hybrid.png').exists()
    assert (out / 'cka.png').exists() == (count > 1)


@pytest.mark.gate
@pytest.mark.parametrize('options', [(), ('--split=train[:4]',)])
def test_splits_of_photos_without_class_folders(options, tmp_path):
    """Only `probes` needs classes."""
    rng = np.random.default_rng(0)
    for split in 'train', 'test':
        (tmp_path / 'photos' / split).mkdir(parents=True)
        for i in range(4):
            picture = rng.integers(0, 256, (20, 30, 3), np.uint8)
            cv2.imwrite(str(tmp_path / 'photos' / split / f'{i}.png'), picture)
    model = saved(tmp_path, 'vit', tiny.model())
    out = tmp_path / 'out'
    images = f'--images={tmp_path / "photos"}'
    assert run(model, images, f'--out={out}', '--figures=attention_distance', *options) == 0
    assert (out / 'attention_distance-vit.png').exists()


@pytest.mark.gate
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
