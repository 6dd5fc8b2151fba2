import pytest

from vit_jax.models import SIZES, multiply_adds, parameter_count, variant

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
}

# Table 6: model, epochs on JFT-300M (303 million images), exaFLOPs.
COMPUTE = [
    ('B/32', 7, 55),
    ('B/16', 7, 224),
    ('L/32', 7, 196),
    ('L/16', 7, 783),
    ('L/16', 14, 1567),
    ('H/14', 14, 4262),
]


@pytest.mark.parametrize('name', PARAMETERS)
def test_parameter_counts_are_the_published_ones_to_the_digit(name):
    body, with_head = PARAMETERS[name]
    if body is not None:
        assert parameter_count(variant(name)) == body
    assert parameter_count(variant(name, num_classes=1000)) == with_head


@pytest.mark.parametrize('name, epochs, exaflops', COMPUTE)
def test_exaflops_are_those_of_table_6(name, epochs, exaflops):
    flops = epochs * 303e6 * 3 * 2 * multiply_adds(variant(name))
    assert flops / 1e18 == pytest.approx(exaflops, rel=0.03)


def test_every_size_builds_with_any_patch():
    for size in SIZES:
        config = variant(f'{size}/14', image_size=(28, 42))
        assert config.grid == (2, 3)
        assert parameter_count(config) > 12 * config.depth * config.width**2 * 0.6
    assert variant('B/16x8').patch_size == (16, 8)


@pytest.mark.parametrize(
    'name, message', [('B16', 'SIZE/PATCH'), ('b/16', "mean 'B'|known"), ('XL/16', 'no size')]
)
def test_an_unknown_name_is_explained(name, message):
    with pytest.raises(ValueError, match=message):
        variant(name)
