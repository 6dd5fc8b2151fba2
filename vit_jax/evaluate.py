"""Measures a checkpoint on labelled images: python -m vit_jax.evaluate CHECKPOINT --data=DATA.

CHECKPOINT is of any kind that vit_jax.load reads, DATA of any kind that a configuration takes; no
training is done. Classes are matched by name where the checkpoint has names. A checkpoint in the
work directory of a run is measured on the images that the run held out, unless flags say otherwise.
--out=DIR keeps evaluation.json (all numbers, of each class too), confusion.npz and its picture,
confusion.png.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from vit_jax.base import UserError, atomic_write, counted, records, usable, write_json
from vit_jax.checkpoints.formats import array_files
from vit_jax.checkpoints.names import shown
from vit_jax.cli import app, output
from vit_jax.data.sources.opening import HeldOut, Opener, make_opener
from vit_jax.evaluation import head
from vit_jax.evaluation.head import HeadReport
from vit_jax.experiment import source_run
from vit_jax.experiment.source_run import SourceRun
from vit_jax.figures import bitmaps
from vit_jax.pretrained import Loaded, load

NUMBERS, MATRIX, PICTURE = 'evaluation.json', 'confusion.npz', 'confusion.png'
_SHOWN = 10  # classes, and confusions, on the screen
_TOP5_CLASSES = 20  # five guesses among fewer classes are too easy to report
_FEW = 10  # images of a class: one image changes the accuracy by 10 % or more


def main(arguments: argparse.Namespace) -> int:
    """Prints the metrics, the classes with the lowest ones, and the most frequent confusions.

    Returns 1 if some images cannot be read, which are left out, 0 otherwise.
    """
    if arguments.out:
        output.outlive_readers()
    origin = source_run.find_source_run(arguments.checkpoint)
    held_out, split = _default_part(arguments, origin)
    loaded = load(arguments.checkpoint, **app.overrides(arguments))
    print('\n'.join(loaded.report))
    loaded.require_head()
    opened = make_opener(held_out)
    source = opened(arguments.data, split, arguments.labels)
    trained = origin.count_trained(source) if origin else 0
    source = head.match_classes(source, loaded, by_number=arguments.by_number)
    if arguments.out:
        with usable(arguments.out):
            pathlib.Path(arguments.out).mkdir(parents=True, exist_ok=True)
    unreadable = list[str]()
    options = {'max_pixels': arguments.max_pixels, 'on_skipped': unreadable.append}
    reader = head.reader_for(loaded, source, **options)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        total = -(-len(source) // arguments.batch_size)
        report = head.evaluate_head(
            loaded,
            reader,
            batch_size=arguments.batch_size,
            relabelled=_are_relabelled(opened, arguments, split),
            watch=functools.partial(bar.track, total=total, description='batches'),
        )
    images, classes = counted(report.images, 'image'), counted(len(report.classes), 'class')
    print(f'{arguments.data}, {split}: {images} of {classes}')
    if arguments.by_number or not loaded.class_names:
        print(f'classes matched by order: {_order(source.class_names)}')
    if trained:
        text = 'the run was trained on %s of these %s: their accuracy is not that of new images'
        print(f'warning: {text % (f"{trained:,}", counted(len(source), "image"))}')
    print()
    print('\n'.join(_lines(report, loaded.config.num_classes or 0)))
    if arguments.out:
        measured = {'split': split, 'trained_on': trained if origin else None}
        _write(pathlib.Path(arguments.out), report, loaded, arguments, measured)
    for problem in sorted(unreadable):
        print(f'unreadable: {output.printable(problem)}', file=sys.stderr)
    if unreadable:
        text = f'{len(unreadable):,} of {len(source):,} images cannot be read, left out'
        print(text, file=sys.stderr)
    return 1 if unreadable else 0


def _default_part(arguments: argparse.Namespace, origin: SourceRun | None) -> tuple[HeldOut, str]:
    """Returns what is held out, and the split: the given ones, else those of the run."""
    held_out = origin.held_out if origin else HeldOut()
    if arguments.held_out is not None:
        held_out = dataclasses.replace(held_out, fraction=arguments.held_out)
    if arguments.held_out_seed is not None:
        held_out = dataclasses.replace(held_out, seed=arguments.held_out_seed)
    split = origin.split_of(arguments.data) if origin else 'test'
    return held_out, arguments.split or split


def _order(class_names: Sequence[str]) -> str:
    """The first classes and the last one with their outputs."""
    pairs = [f'{number} = {output.printable(name)}' for number, name in enumerate(class_names)]
    return ', '.join([*pairs[:3], '...', pairs[-1]] if len(pairs) > 4 else pairs)


def _are_relabelled(opened: Opener, arguments: argparse.Namespace, split: str) -> bool:
    """Are these other labels for images of one class each, as far as their own are known?"""
    if arguments.labels is None:
        return False
    try:
        return not opened(arguments.data, split).multi_label
    except UserError:  # data of TFDS whose labels must be chosen
        return True


def _lines(found: HeadReport, num_classes: int) -> list[str]:
    """The means, the classes with the lowest numbers, the most frequent confusions."""
    left_out = {'loss', *(['top5_accuracy'] if num_classes < _TOP5_CLASSES else [])}
    means = {name: value for name, value in found.means.items() if name not in left_out}
    lines = [f'{_label(name):<24}{value:8.2%}' for name, value in means.items()]
    lines.append(f'{"loss":<24}{found.means["loss"]:8.4f}')
    name = 'average_precision' if 'average_precision' in found.classes[0] else 'accuracy'
    worst = sorted(found.classes, key=lambda one: one[name])[:_SHOWN]
    fewer = ', the lowest' if len(worst) < len(found.classes) else ''
    lines.append(f'\n{_label(name)} of each class{fewer}:')
    lines += [
        f'  {one[name]:8.2%} of {one["images"]:,}  {output.printable(one["class"])}'
        for one in worst
    ]
    if any(one['images'] < _FEW for one in worst):
        lines.append(f'  (the percentage of fewer than {_FEW} images is rough)')
    if found.confusion is None:
        return lines
    wrong = head.list_confusions(found.confusion, found.names)
    lines += ['', 'most often confused:'] if wrong else []
    for one in wrong[:_SHOWN]:
        pair = output.printable(f'{one["class"]}, taken for {one["taken_for"]}')
        lines.append(f'  {one["images"]:>6,}  {pair}')
    return lines


def _label(name: str) -> str:
    return name.replace('top5', 'top-5').replace('_', ' ')


def _write(
    folder: pathlib.Path,
    found: HeadReport,
    loaded: Loaded,
    arguments: argparse.Namespace,
    measured: dict[str, Any],
) -> None:
    """Writes all that was found, and what was evaluated how."""
    values = {'data': arguments.data, 'labels': arguments.labels, **measured} | {
        'checkpoint': shown(arguments.checkpoint),
        'origin': loaded.origin,
        'image_size': list(loaded.config.image_size),
        'preprocessing': records.to_dict(loaded.preprocessing),
        'images': found.images,
        'means': {n: x if math.isfinite(x) else None for n, x in found.means.items()},
        'classes': found.classes,
    }
    written = [NUMBERS]
    if found.confusion is not None:
        values['confusions'] = head.list_confusions(found.confusion, found.names)
        matrix = {'confusion': found.confusion, 'class_names': np.array(found.names)}
        array_files.write_npz(folder / MATRIX, matrix)
        with atomic_write(folder / PICTURE) as partial:
            bitmaps.confusion_matrix(found.confusion, found.names).save(partial, 'PNG')
        written += [MATRIX, PICTURE]
    write_json(folder / NUMBERS, values)
    print(f'\nwritten: {", ".join(str(folder / name) for name in written)}')


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('evaluate', __doc__)
    parser.add_argument('checkpoint', metavar='CHECKPOINT')
    text = 'a folder, FILE.csv, FILE.jsonl, FILE.npz, tfds:NAME, digits'
    parser.add_argument('--data', required=True, metavar='DATA', help=text)
    text = "its images, perhaps a slice: train[90%%:] (the run's own test split, else test)"
    parser.add_argument('--split', metavar='NAME', help=text)
    text = "other labels for them, such as ReaL's real.json"
    parser.add_argument('--labels', metavar='FILE.json', help=text)
    text = "the data's first class is output 0, and so on, whatever their names"
    parser.add_argument('--by_number', action='store_true', help=text)
    text = "of each class of data without splits, for the split test (the run's own, else 0.1)"
    parser.add_argument('--held_out', type=float, metavar='FRACTION', help=text)
    text = "which ones (the run's own, else 0)"
    parser.add_argument('--held_out_seed', type=int, metavar='N', help=text)
    text = 'keep all numbers and the picture'
    parser.add_argument('--out', type=app.local_path, metavar='DIR', help=text)
    app.add_reading(parser)
    app.add_overrides(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True)
