"""The list of ImageNet's classes, held against what is known of it from elsewhere."""

import pytest

from vit_jax.data import imagenet_classes


def test_classes_are_numbered_in_the_order_of_their_ids():
    ids = imagenet_classes.ids()
    assert len(set(ids)) == 1000 and list(ids) == sorted(ids)
    # Of the two called crane 517 is the machine.
    some = {0: 'tench', 207: 'golden retriever', 517: 'crane', 817: 'sports car'}
    assert {i: imagenet_classes.names()[i].split(', ')[0] for i in some} == some
    assert [ids[i] for i in some] == ['n01440764', 'n02099601', 'n03126707', 'n04285008']


def test_a_list_is_known_by_most_of_its_names():
    names = list(imagenet_classes.names())
    own = ['Great White Shark' if i == 2 else f'{i}' if i < 300 else n for i, n in enumerate(names)]
    assert imagenet_classes.match(names) and imagenet_classes.match(own)
    assert imagenet_classes.match([name.split(', ')[-1] for name in names])
    assert not imagenet_classes.match(names[::-1])
    assert not imagenet_classes.match(names[:999])


@pytest.mark.parametrize(
    'name, said',
    [
        ('gs://x/R_Ti_16-i21k-300ep--imagenet2012-steps_20k-lr_0.03-res_384.npz', True),
        ('gs://vit_models/imagenet21k/ViT-B_16.npz', False),
        ('hf:timm/vit_base_patch16_224.augreg_in21k_ft_in1k', True),
        ('BiT-M-R50x1-ILSVRC2012.npz', True),
        ('tuned.npz', False),
    ],
)
def test_a_name_says_of_which_classes_a_model_is(name, said):
    assert imagenet_classes.is_in_name(name) == said
