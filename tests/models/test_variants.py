import functools

import jax
import pytest

from vit_jax.base.tree_names import named_leaves
from vit_jax.models import build, count_multiply_adds, count_params, variant
from vit_jax.models.variants import DEPTHS

# Without a head, and with a linear one of 1000 classes: the paper's table 1 and the public models.
PARAMETERS = {
    'Ti/16': (5_524_416, 5_717_416),
    'S/16': (21_665_664, 22_050_664),
    'S/32': (22_493_952, 22_878_952),
    'B/8': (None, 86_576_872),
    'B/16': (85_798_656, 86_567_656),
    'B/32': (87_455_232, 88_224_232),
    'L/16': (303_301_632, 304_326_632),
    'L/32': (305_510_400, 306_535_400),
    'H/14': (630_764_800, 632_045_800),
    'R+Ti/16': (None, 6_337_704),
    'R26+S/32': (None, 36_431_912),
    'R26+B/32': (None, 101_383_976),
    'R50+B/16': (None, 98_659_112),
    'R50+L/32': (None, 328_994_856),
    # A ResNet-50 without its last layer, as everywhere; GroupNorm has BatchNorm's parameters.
    'R50x1': (23_508_032, 23_508_032 + 2049 * 1000),
}

# Table 6: model, epochs on JFT-300M (303 million images), exaFLOPs.
COMPUTE = [
    ('B/16', 7, 224),
    ('L/16', 7, 783),
    ('H/14', 14, 4262),
    ('R50x1', 7, 50),
    ('R50x2', 7, 199),
    ('R152x2', 7, 563),
    ('R200x3', 14, 3306),
    ('R50+B/16', 7, 274),
    ('R50+L/32', 7, 246),
    ('R50+L/16', 7, 859),
]


QUICK = 'Ti/16', 'S/16', 'B/16', 'R+Ti/16', 'R50x1'
assert {*QUICK} <= {*PARAMETERS}


@pytest.mark.parametrize(
    'name', [n if n in QUICK else pytest.param(n, marks=pytest.mark.gate) for n in PARAMETERS]
)
def test_parameter_counts_are_the_published_ones_to_the_digit(name):
    body, with_head = PARAMETERS[name]
    if body is not None:
        assert count_params(variant(name)) == body
    assert count_params(variant(name, num_classes=1000)) == with_head


def by_tier(row):
    """The deep ResNets and hybrids take seconds each to trace."""
    large = row[0].startswith(('R101', 'R152', 'R200', 'R50+L', 'R50x2'))
    tier = pytest.mark.nightly if large else pytest.mark.gate
    return pytest.param(*row, marks=() if row[0] == 'B/16' else tier)


@functools.cache
def multiply_adds_of(name):
    return count_multiply_adds(variant(name))


@pytest.mark.parametrize('name, epochs, exaflops', [by_tier(row) for row in COMPUTE])
def test_exaflops_are_those_of_table_6(name, epochs, exaflops):
    flops = epochs * 303e6 * 3 * 2 * multiply_adds_of(name)
    # All are within 2.1 % but R50+L/16 after 7 epochs, which the paper gives as more than half of
    # what it gives for 14.
    assert flops / 1e18 == pytest.approx(exaflops, rel=0.032 if exaflops == 859 else 0.021)


def test_vit_22b_is_the_papers():
    """21,743 M parameters (table 1) in the kernels of blocks; of biases and norms there are few."""
    config = variant('22B/14')
    shapes = jax.eval_shape(build(config).init, jax.random.key(0))
    block = named_leaves(shapes['encoder']['block'])
    kernels = sum(leaf.size for name, leaf in block.items() if name.endswith('kernel'))
    assert round(kernels / 1e6) == 21_743
    assert {name for name in block if not name.endswith('kernel')} == {
        *('attention/key_norm/scale', 'attention/out/bias', 'attention/query_norm/scale'),
        *('mlp/dense1/bias', 'mlp/dense2/bias', 'norm1/scale'),
    }
    assert config.pool == 'map' and config.num_tokens == 256


@pytest.mark.parametrize(
    'name, message',
    [
        ('B16', 'SIZE/PATCH'),
        ('XL/16', 'XL'),
        ('R51+B/16', '51'),
        ('R50+B/14', '/16 or /32'),
        ('R34x1', '34'),
    ],
)
def test_an_unknown_name_is_explained(name, message):
    with pytest.raises(ValueError, match=message):
        variant(name)


def test_stages_of_resnets_are_those_of_their_papers():
    """He et al., "Deep Residual Learning", table 1; "Identity Mappings" for 200 layers."""
    stages = {'50': (3, 4, 6, 3), '101': (3, 4, 23, 3), '152': (3, 8, 36, 3), '200': (3, 24, 36, 3)}
    assert stages.items() <= DEPTHS.items()
