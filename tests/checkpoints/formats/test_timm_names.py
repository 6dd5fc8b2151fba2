"""Every ViT that timm 1.0.31 publishes: read right, or refused by the name of what it has.

`timm_names.json.gz` holds for each name what timm itself says of the network that it builds: its
config.json on the hub, the shapes of its arrays (those of the first block), and what its modules
compute: heads, activation, epsilon, kind of norm, block and attention.
"""

import numpy as np
import pytest

from tests import reference
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.card import Hints
from vit_jax.checkpoints.formats.array_files import FileContents, JsonObject, LazyArray
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.checkpoints.formats.opening import match_arrays
from vit_jax.checkpoints.formats.timm import TIMM

NAMES = reference.timm_names()
GELUS = {"GELU(approximate='none')": 'exact', 'GELUTanh()': 'tanh', 'QuickGELU()': 'quick'}
MATCHED = set()  # many names have the same model
POOLS = {'token': ('cls', 'cls_dist'), 'avg': ('gap',), 'map': ('map',)}
# Blocks and attention that compute what ours do; Eva's rotates, where ours is to rotate as well.
OURS = ('Block', 'Attention'), ('EvaBlock', 'EvaAttention')


def arrays_of(said):
    """The arrays of all blocks, without content."""
    arrays = {}
    for name, shape in said['shapes'].items():
        first = name.startswith('blocks.0.')
        for block in range(said['depth'] if first else 1):
            array = LazyArray(tuple(shape), np.dtype('float32'), lambda: np.zeros(0))
            arrays[name.replace('blocks.0.', f'blocks.{block}.') if first else name] = array
    return arrays


def parse(said, hints):
    arrays = arrays_of(said)
    if not TIMM.matches(arrays):
        raise UserError('the arrays of no known ViT')
    described = {'config.json': JsonObject(said['config'], 'config.json')}
    parsed = TIMM.parse(FileContents(arrays, descriptions=described), hints)
    key = repr((parsed.config, parsed.layout, said['shapes']))
    if key not in MATCHED:
        match_arrays(TIMM, parsed, arrays)
        MATCHED.add(key)
    return parsed


def require_right(said, found):
    config, declared = found.config, said['config']['pretrained_cfg']
    assert (said['block'], said['attention']) in OURS
    assert config.num_heads == said['heads']
    assert config.gelu == GELUS.get(said['act'])  # None: SwiGLU
    if config.backbone is None:  # whose norms have an epsilon of their own
        assert said['norm'] == ['LayerNorm'] and said['eps'] == [config.layer_norm_epsilon]
    # Registers with positions are class tokens that no pool reads.
    rows = {
        n: s for n, s in said['shapes'].items() if n in ('cls_token', 'dist_token', 'reg_token')
    }
    assert config.num_prefix_tokens == sum(shape[1] for shape in rows.values())
    assert config.pool in POOLS[said['config']['global_pool']]
    assert (config.num_classes or 0) == said['config']['num_classes']
    assert config.image_size == tuple(declared['input_size'][1:])
    crop, how = found.preprocessing.crop, found.preprocessing
    size = config.image_size[0]
    assert crop.resized_size((size, size), (size, size))[0] == int(
        size / declared['crop_pct'] + 1e-9
    )
    assert crop.resize == f'{declared["interpolation"]}_antialias'
    assert crop.keep_aspect == (declared['crop_mode'] == 'center')
    np.testing.assert_allclose(
        [how.mean, how.std], 255 * np.array([declared['mean'], declared['std']])
    )


def is_read(name):
    """Is the network read, and then rightly? Only its GELU may have to be said."""
    said = NAMES[name]
    try:
        try:
            found = parse(said, Hints())
        except NeedsHint as error:
            assert said['quick'] or name.startswith('test_'), (name, error)
            said = said | {'act': 'QuickGELU()'}
            found = parse(said, Hints(gelu='quick'))
    except UserError:
        return False
    require_right(said, found)
    return True


@pytest.mark.gate
def test_published_names_are_read_right_or_refused():
    assert 0 < sum(map(is_read, sorted(NAMES)[::48])) < 10


@pytest.mark.nightly
def test_every_published_name_is_read_right_or_refused_and_most_are_read():
    assert (sum(map(is_read, NAMES)), len(NAMES)) == (331, 466)
