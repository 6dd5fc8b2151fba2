"""The files that two papers published, by short names: `augreg:B/16`, `vit:L/16-in21k`.

-in21k is a network that was pre-trained on ImageNet-21k; without it, one that was then fine-tuned
on ImageNet, at 384 pixels or those of its name. The addresses are of vision_transformer's README.
The bucket has answered 403 to everybody since February 2026 (vision_transformer issue 321), so that
a name also has the address of a copy in timm's or transformers' layout, where one is known.
"""

from typing import NamedTuple

from vit_jax.base import MissingFile, records
from vit_jax.base.errors import shown_url

AUGREG_FOLDER = 'gs://vit_models/augreg'


class Published(NamedTuple):
    """A file that anyone can download."""

    address: str
    mebibytes: int  # 4 bytes a parameter, as the README has them
    copy: str | None = None  # a repository of the hub with the same network; no digest is known


# "How to train your ViT?" (Steiner et al.): how each was pre-trained, and its size; the learning
# rate that it was fine-tuned with, and the size then.
_AUGREG: dict[str, tuple[str, int, tuple[str, int] | None]] = {
    'Ti/16': ('aug_none-wd_0.03-do_0.0-sd_0.0', 37, ('0.03', 22)),
    'S/16': ('aug_light1-wd_0.03-do_0.0-sd_0.0', 115, ('0.03', 85)),
    'S/32': ('aug_none-wd_0.1-do_0.0-sd_0.0', 118, ('0.01', 87)),
    'B/8': ('aug_medium2-wd_0.1-do_0.0-sd_0.0', 391, None),
    'B/16': ('aug_medium1-wd_0.1-do_0.0-sd_0.0', 391, ('0.03', 331)),
    'B/32': ('aug_light1-wd_0.1-do_0.0-sd_0.0', 398, ('0.01', 337)),
    'L/16': ('aug_strong1-wd_0.1-do_0.0-sd_0.0', 1243, ('0.01', 1162)),
    'R+Ti/16': ('aug_none-wd_0.03-do_0.0-sd_0.0', 40, ('0.03', 24)),
    'R26+S/32': ('aug_light1-wd_0.1-do_0.0-sd_0.0', 170, ('0.01', 139)),
    'R50+L/32': ('aug_medium1-wd_0.1-do_0.1-sd_0.1', 1337, ('0.01', 1255)),
}
# "An Image is Worth 16x16 Words" (Dosovitskiy et al.): files by their own names.
_VIT = {
    'imagenet21k': {
        'ViT-B_8': 394,
        'ViT-B_16': 394,
        'ViT-B_32': 400,
        'ViT-L_16': 1246,
        'ViT-L_32': 1255,
        'ViT-H_14': 2519,
        'R26+ViT-B_32': 450,
        'R50+ViT-B_16': 440,
        'R50+ViT-L_32': 1341,
    },
    'imagenet21k+imagenet2012': {
        'ViT-B_8': 335,
        'ViT-B_16': 331,
        'ViT-B_16-224': 330,
        'ViT-B_32': 337,
        'ViT-L_16': 1162,
        'ViT-L_16-224': 1161,
        'ViT-L_32': 1170,
        'R50+ViT-B_16': 378,
    },
}


# Copies on the Hugging Face Hub. Of AugReg those that timm converted from exactly these files, as
# its source says (timm 1.0.31); its other ones were trained with other values. A commit is there
# where a page of the hub shows that it holds the weights.
_COPIES = {
    'augreg:Ti/16': 'timm/vit_tiny_patch16_384.augreg_in21k_ft_in1k',
    'augreg:Ti/16-in21k': 'timm/vit_tiny_patch16_224.augreg_in21k',
    'augreg:S/16': 'timm/vit_small_patch16_384.augreg_in21k_ft_in1k'
    '@3fe0b849c2d906a2bbcd18e064f37bc2872aaf69',
    'augreg:S/16-in21k': 'timm/vit_small_patch16_224.augreg_in21k',
    'augreg:B/16-in21k': 'timm/vit_base_patch16_224.augreg_in21k',
    'augreg:R+Ti/16': 'timm/vit_tiny_r_s16_p8_384.augreg_in21k_ft_in1k',
    'augreg:R+Ti/16-in21k': 'timm/vit_tiny_r_s16_p8_224.augreg_in21k',
    'vit:B/16': 'timm/vit_base_patch16_384.orig_in21k_ft_in1k'
    '@a9c045638f0ae6090b6e601ea6e4965ef52cd140',
    'vit:B/16-224': 'google/vit-base-patch16-224@8a8c79fdc0b3073f653ccf0f0932e3cc0977e16a',
    'vit:B/32': 'google/vit-base-patch32-384',
    'vit:L/16': 'google/vit-large-patch16-384',
    'vit:L/16-224': 'google/vit-large-patch16-224',
    'vit:L/32': 'google/vit-large-patch32-384',
    'vit:R50+B/16': 'timm/vit_base_r50_s16_384.orig_in21k_ft_in1k'
    '@de1802dabe5c370db01958230454061757dea669',
    # These have no head: that of the papers' files is all zeros.
    'vit:B/16-in21k': 'google/vit-base-patch16-224-in21k@8146525ca503690e7719cca453d932123c9c1eaa',
    'vit:B/32-in21k': 'google/vit-base-patch32-224-in21k',
    'vit:L/16-in21k': 'google/vit-large-patch16-224-in21k',
    'vit:L/32-in21k': 'google/vit-large-patch32-224-in21k',
    'vit:H/14-in21k': 'google/vit-huge-patch14-224-in21k',
}


def _files() -> dict[str, Published]:
    found = {}
    for variant, (recipe, size, tuned) in _AUGREG.items():
        stem = variant.translate(str.maketrans('/+', '__'))
        address = f'{AUGREG_FOLDER}/{stem}-i21k-300ep-lr_0.001-{recipe}'
        found[f'augreg:{variant}-in21k'] = Published(f'{address}.npz', size)
        if tuned is not None:
            rate, size = tuned
            address += f'--imagenet2012-steps_20k-lr_{rate}-res_384.npz'
            found[f'augreg:{variant}'] = Published(address, size)
    for data, sizes_by_file in _VIT.items():
        for file, size in sizes_by_file.items():
            name = file.replace('ViT-', '').replace('_', '/')
            name += '-in21k' if data == 'imagenet21k' else ''
            found[f'vit:{name}'] = Published(f'gs://vit_models/{data}/{file}.npz', size)
    for name, repository in _COPIES.items():
        found[name] = found[name]._replace(copy=f'hf:{repository}')
    return found


FILES = _files()  # by name


def published(name: str) -> Published:
    """The file of a short name. Raises MissingFile for one that is not in the table."""
    if name not in FILES:
        listing = '`python -m vit_jax.augreg` lists all'
        same = next((known for known in FILES if known.lower() == name.lower()), name)
        meant = records.nearest(same, FILES)
        raise MissingFile(f'{shown_url(name)}: no such published file; {meant}; {listing}')
    return FILES[name]
