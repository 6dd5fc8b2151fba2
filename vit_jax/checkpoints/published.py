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

The index of AugReg ("How to train your ViT?") lists 50,000 more files.
"""

import csv
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.base import MissingFile, records, require, usable

AUGREG_FOLDER = 'gs://vit_models/augreg'


class Published(NamedTuple):
    """Addresses and size of a published checkpoint."""

    address: str
    mebibytes: int  # from the README; 4 bytes per parameter
    copy: str | None = None  # a Hub repository with the same model; its digest is unknown


def _read_files() -> dict[str, Published]:
    with pathlib.Path(__file__).with_suffix('.csv').open(newline='') as file:
        return {
            row['name']: Published(row['address'], int(row['mebibytes']), row['copy'] or None)
            for row in csv.DictReader(file)
        }


FILES = _read_files()  # by name


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
