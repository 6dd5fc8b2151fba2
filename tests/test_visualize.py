"""The page of figures as the program writes it: of any networks and images; what it refuses."""

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
from vit_jax.models import Backbone, ResNetConfig

RESNET = ResNetConfig(
    image_size=(16, 16), backbone=Backbone(blocks=(1, 1), width=32), num_classes=tiny.CLASSES
)
SMALL = 'filters,positions,attention_distance,cka,localisation,probes'
full = pytest.mark.full


def run(*arguments):
    return visualize.main(visualize.make_parser().parse_args([str(a) for a in arguments]))


def saved(folder, name, config, **card):
    vit_jax.save(loaded(config, **card), folder / name, 'vit_jax')
    return folder / name


def text_of(folder):
    """What a person reads on the page, as one line."""
    page = re.sub('<style>.*</style>', '', (folder / 'index.html').read_text(), flags=re.DOTALL)
    return ' '.join(html.unescape(re.sub('<[^>]*>', ' ', page)).split())


def photos(folder, count=6):
    """Photos of several sizes and kinds, and one that cannot be read."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(count):
        shape = (20 + 3 * index, 30 - index, 3) if index else (9, 40)
        name = f'{index} <b>&.{"png" if index % 2 else "jpg"}'
        cv2.imwrite(str(folder / name), rng.integers(0, 256, shape, np.uint8))
    (folder / 'broken.jpg').write_bytes(b'no image')
    return folder


@full
def test_a_vit_and_a_resnet_beside_each_other(tmp_path, capsys):
    networks = saved(tmp_path, 'vit', tiny.model()), saved(tmp_path, 'resnet', RESNET)
    names = 'filters,positions,cka,skip_removal,head_subsets,residuals,probes,training_data'
    options = (
        '--images=digits',
        '--num_images=64',
        f'--figures={names}',
        f'--out={tmp_path / "out"}',
    )
    assert run(*networks, *options) == 0
    text = text_of(tmp_path / 'out')
    assert 'resnet: a ResNet has neither tokens nor attention.' in text
    assert 'no other network has the architecture of vit' in text
    for kind in visualize.select_figures(names):
        assert kind.text in text
    made = {path.name for path in (tmp_path / 'out').iterdir()}
    stems = {name.removesuffix('.npz') for name in made if name.endswith('.npz')}
    assert stems >= {'cka', 'head_subsets', 'probes', 'residuals-resnet', 'residuals-vit'}
    assert made >= {f'{stem}.png' for stem in stems}
    with np.load(tmp_path / 'out' / 'cka.npz') as numbers:
        assert numbers['cka'].shape == (20 + 17, 20 + 17)


@full
def test_photos_without_labels_of_any_size_and_one_that_is_broken(tmp_path, capsys):
    network = saved(tmp_path, 'hybrid', HYBRID)
    out, images = tmp_path / 'out', photos(tmp_path / 'photos')
    assert run(network, f'--images={images}', f'--out={out}', f'--figures={SMALL}') == 1
    text = text_of(out)
    assert (
        'the images have no labels.' in text
        and 'Images: 6 images of' in text
        and '1 cannot be read' in text
    )
    assert 'broken.jpg' in capsys.readouterr().err


@full
def test_one_image_leaves_out_what_needs_several(tmp_path):
    network = saved(tmp_path, 'vit', tiny.model(pool='gap', positions='none'))
    out, images = tmp_path / 'out', photos(tmp_path / 'photos', 1)
    names = f'{SMALL},rollout,attention_maps,residuals,receptive_fields'
    assert run(network, f'--images={images}', f'--out={out}', f'--figures={names}') == 1
    text = text_of(out)
    assert text.count('CKA needs at least 4 images; there is 1.') == 2
    assert 'vit: the network has no position embeddings.' in text
    assert (out / 'rollout-vit.png').exists() and (out / 'receptive_fields-vit.png').exists()


@full
def test_where_nan_begins_is_said_and_the_parameters_are_drawn(tmp_path):
    network = loaded(tiny.model())
    name = 'encoder/block/norm2/bias'
    leaf = tree_names.named_leaves(network.params)[name].copy()
    leaf[2] = 1e38  # finite, as a checkpoint's numbers must be; its square is not
    params = tree_names.map_named(lambda n, old: leaf if n == name else old, network.params)
    vit_jax.save(changed(network, params=params), tmp_path / 'bad', 'vit_jax')
    good = saved(tmp_path, 'good', tiny.model())
    out = tmp_path / 'out'
    run(tmp_path / 'bad', good, '--images=digits', f'--out={out}', f'--figures={SMALL}')
    text = text_of(out)
    assert 'bad computes NaN or infinity: it begins in block2/mlp hidden' in text
    assert (out / 'filters-bad.png').exists() and (out / 'localisation-good.png').exists()
    assert not (out / 'localisation-bad.png').exists()
    assert {*np.load(out / 'cka.npz')['networks']} == {'good'}


@pytest.mark.parametrize(
    'options, message',
    [
        (('--figures=ckaa',), "no figure 'ckaa'; did you mean 'cka'"),
        (('--images=nothing',), "data='nothing': no such folder"),
        (('--out=/dev/null/x',), '/dev/null'),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(options, message, tmp_path):
    network = saved(tmp_path, 'vit', tiny.model())
    with pytest.raises(UserError, match=message):
        run(network, '--images=digits', f'--out={tmp_path / "out"}', *options)
