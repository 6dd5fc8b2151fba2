"""Short names of the checkpoints of two papers, such as `augreg:B/16` and `vit:L/16-in21k`.

The suffix -in21k denotes a model pre-trained on ImageNet-21k. Models without it were then
fine-tuned on ImageNet, at 384 pixels or at the size in the name. The addresses are from the README
of vision_transformer. Its bucket has returned HTTP 403 for everyone since February 2026
(vision_transformer issue 321). 19 of 36 names also have a copy in timm's or transformers' format.

The index of AugReg ("How to train your ViT?") lists 50,000 more files.
"""

import csv
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.base import MissingFile, records, require, usable

AUGREG_FOLDER = 'gs://vit_models/augreg'


class Published(NamedTuple):
    """Addresses and size of a published checkpoint."""

    address: str
    mebibytes: int  # from the README; 4 bytes per parameter
    copy: str | None = None  # a Hub repository with the same model; its digest is unknown


# "How to train your ViT?" (Steiner et al.): for each variant the options of pre-training in the
# file name and the MiB of the file; then learning rate and MiB of the fine-tuned model.
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
# "An Image is Worth 16x16 Words" (Dosovitskiy et al.): MiB of the pre-trained and of the fine-tuned
# file, by file name.
_VIT: dict[str, tuple[int | None, int | None]] = {
    'ViT-B_8': (394, 335),
    'ViT-B_16': (394, 331),
    'ViT-B_16-224': (None, 330),
    'ViT-B_32': (400, 337),
    'ViT-L_16': (1246, 1162),
    'ViT-L_16-224': (None, 1161),
    'ViT-L_32': (1255, 1170),
    'ViT-H_14': (2519, None),
    'R26+ViT-B_32': (450, None),
    'R50+ViT-B_16': (440, 378),
    'R50+ViT-L_32': (1341, None),
}
_VIT_FOLDERS = {'-in21k': 'imagenet21k', '': 'imagenet21k+imagenet2012'}


# Copies on the Hugging Face Hub. For AugReg, only models that timm converted from exactly these
# files according to its source (timm 1.0.31); its other AugReg models have other hyperparameters.
# A commit is given if a page of the Hub shows that it contains the weights.
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
    # These copies have no head; the heads in the papers' files are all zeros.
    'vit:B/16-in21k': 'google/vit-base-patch16-224-in21k@8146525ca503690e7719cca453d932123c9c1eaa',
    'vit:B/32-in21k': 'google/vit-base-patch32-224-in21k',
    'vit:L/16-in21k': 'google/vit-large-patch16-224-in21k',
    'vit:L/32-in21k': 'google/vit-large-patch32-224-in21k',
    'vit:H/14-in21k': 'google/vit-huge-patch14-224-in21k',
}


def _files() -> dict[str, Published]:
    files = {}
    for variant, (recipe, size, tuned) in _AUGREG.items():
        stem = variant.translate(str.maketrans('/+', '__'))
        address = f'{AUGREG_FOLDER}/{stem}-i21k-300ep-lr_0.001-{recipe}'
        files[f'augreg:{variant}-in21k'] = Published(f'{address}.npz', size)
        if tuned is not None:
            rate, size = tuned
            address += f'--imagenet2012-steps_20k-lr_{rate}-res_384.npz'
            files[f'augreg:{variant}'] = Published(address, size)
    for file, sizes in _VIT.items():
        variant = file.replace('ViT-', '').replace('_', '/')
        for (ending, folder), mebibytes in zip(_VIT_FOLDERS.items(), sizes, strict=True):
            if mebibytes is not None:
                address = f'gs://vit_models/{folder}/{file}.npz'
                files[f'vit:{variant}{ending}'] = Published(address, mebibytes)
    for name, repository in _COPIES.items():
        files[name] = files[name]._replace(copy=f'hf:{repository}')
    return files


FILES = _files()  # by name


def find_published(name: str) -> Published:
    """Returns the file for a short name. Raises MissingFile for an unknown name."""
    if name not in FILES:
        raise MissingFile(f'unknown name (see `vit_jax augreg`); {records.closest(name, FILES)}')
    return FILES[name]


class Row(NamedTuple):
    """A row of the AugReg index: a pre-trained checkpoint and one fine-tuned version of it.

    The names of the fields are the names of the columns.
    """

    ds: str  # the data set of pre-training
    filename: str  # of the pre-trained checkpoint, without `.npz`
    final_val: float  # its validation accuracy
    adapt_ds: str  # the data set of fine-tuning; empty if the row has no fine-tuned version
    adapt_resolution: str
    adapt_filename: str
    adapt_final_val: float
    adapt_final_test: float


def read_index(path: str) -> list[Row]:
    """Reads the AugReg index, a CSV file."""
    with usable(path, 'the AugReg index, a CSV file'), open(path, newline='') as file:
        return [_row(values) for values in csv.DictReader(file)]


def _row(values: dict[str, str]) -> Row:
    return Row._make(float(values[n] or 'nan') if 'final_' in n else values[n] for n in Row._fields)


def list_variant(rows: Sequence[Row], variant: str) -> list[Row]:
    """Returns a row for each pre-trained checkpoint of a variant, best accuracy first."""
    # A file of `R50+L/32`, or `R50+ViT-L_32`, starts with `R50_L_32-`.
    stem = variant.replace('ViT-', '').replace('/', '_').replace('+', '_')
    stems = {row.filename.split('-')[0] for row in rows}
    require(stem in stems, f'no variant {variant!r} in the index; {records.closest(stem, stems)}')
    chosen = {row.filename: row for row in rows if row.filename.split('-')[0] == stem}
    return sorted(chosen.values(), key=lambda row: row.final_val, reverse=True)


def pick_checkpoint(rows: Sequence[Row], variant: str) -> Row:
    """Returns the recommended checkpoint: the best one on ImageNet-21k's validation set."""
    candidates = [row for row in list_variant(rows, variant) if row.ds == 'i21k']
    # The last of several equal ones, as in the published code.
    return max(reversed(candidates), key=lambda row: row.final_val)


def list_fine_tunings(rows: Sequence[Row], filename: str) -> list[Row]:
    """Returns the fine-tuned versions of a checkpoint, by data set, then best accuracy first."""
    chosen = [row for row in rows if row.filename == filename and row.adapt_filename]
    return sorted(chosen, key=lambda row: (row.adapt_ds, -row.adapt_final_val))
