"""Short names of the checkpoints of two papers, such as `augreg:B/16` and `vit:L/16-in21k`.

The suffix -in21k denotes a model pre-trained on ImageNet-21k. Models without it were then
fine-tuned on ImageNet, at 384 pixels or at the size in the name. The addresses are from the README
of vision_transformer. Its bucket has returned HTTP 403 for everyone since February 2026
(vision_transformer issue 321).

published.csv lists the addresses, with the sizes from that README. 19 of 36 names also have a copy
on the Hugging Face Hub, in timm's or transformers' format. An AugReg name has a copy only
if timm converted exactly this file, according to timm's source (1.0.31); timm's other AugReg models
have other hyperparameters. The copies of vit:...-in21k have no head; the heads in the paper's
files are all zeros. The address of a copy has a commit if a page of the Hub shows that this commit
contains the weights.
"""

import csv
import pathlib
from typing import NamedTuple

from vit_jax.base import MissingFile, records


class Published(NamedTuple):
    """Addresses and size of a published checkpoint."""

    address: str
    mebibytes: int  # from the README; 4 bytes per parameter
    copy: str | None = None  # a Hub repository with the same model; its digest is unknown


_TABLE = pathlib.Path(__file__).with_suffix('.csv').read_text(encoding='utf-8').splitlines()
FILES = {  # by name
    row['name']: Published(row['address'], int(row['mebibytes']), row['copy'] or None)
    for row in csv.DictReader(_TABLE)
}


def find_published(name: str) -> Published:
    """Returns the file for a short name. Raises MissingFile for an unknown name."""
    if name not in FILES:
        raise MissingFile(
            f'unknown name; {records.closest(name, FILES)} (docs/checkpoint_names.md lists all)'
        )
    return FILES[name]
