"""Evaluates a classifier on labeled images: python -m vit_jax.evaluate CHECKPOINT --data=DATA.

CHECKPOINT has any format that vit_jax.load reads, or is a name such as augreg:B/16 (vit_jax augreg
lists these) or hf:OWNER/NAME. DATA is any value of --config.data. Classes are matched by name if
the checkpoint has class names, otherwise by order. If CHECKPOINT is in the work directory of a run,
and DATA is its config.data, the default split is the one that the run evaluated. --out=DIR writes
evaluation.json (all metrics, also per class), confusion.npz and confusion.png.
"""

import argparse
import functools
import math
import pathlib
from typing import Any

import numpy as np

from vit_jax.base import UserError, atomic_write, make_folder, plural, records, write_json
from vit_jax.checkpoints.formats import array_files
from vit_jax.checkpoints.remote import redact
from vit_jax.cli import app, output
from vit_jax.data.sources.opening import EXPECTED, Opener, make_opener
from vit_jax.evaluation import head
from vit_jax.evaluation.head import HeadReport
from vit_jax.figures import bitmaps
from vit_jax.pretrained import LoadedModel, load
from vit_jax.studies import lineage, results

NUMBERS, MATRIX, PICTURE = 'evaluation.json', 'confusion.npz', 'confusion.png'
_SHOWN = 10  # printed classes, and printed confusions


def main(arguments: argparse.Namespace) -> int:
    """Prints the metrics, the worst classes and the most frequent confusions.

    Unreadable images are skipped. Returns 1 if there are any, else 0.
    """
    if arguments.out:
        output.ignore_closed_pipes()
    origin = lineage.find_source_run(arguments.checkpoint)
    split = arguments.split or (origin.choose_split(arguments.data) if origin else 'test')
    loaded = load(arguments.checkpoint, **app.checkpoint_options(arguments))
    print('\n'.join(loaded.report))
    loaded.require_head()
    open_split = make_opener(origin.held_out if origin else None)
    source = open_split(arguments.data, split, arguments.labels)
    trained = len(origin.find_training_images(source)) if origin else 0
    source = head.match_classes(source, loaded, by_order=arguments.by_order)
    if arguments.out:
        make_folder(arguments.out)
    unreadable = list[str]()
    options = {'max_pixels': arguments.max_pixels, 'on_skipped': unreadable.append}
    reader, size = head.make_model_reader(loaded, source, **options), arguments.batch_size
    with output.progress_bar() as bar:
        total = -(-len(source) // size)
        report = head.evaluate_head(
            loaded,
            reader,
            batch_size=size,
            relabeled=_are_relabeled(open_split, arguments, split),
            watch=functools.partial(bar.track, total=total, description='batches'),
        )
    images, classes = plural(report.num_images, 'image'), plural(len(report.classes), 'class')
    print(f'{arguments.data}, {split}: {images} of {classes}')
    if arguments.by_order or not loaded.class_names:
        pairs = [f'{number} = {name}' for number, name in enumerate(source.class_names)]
        pairs = pairs if len(pairs) < 5 else [*pairs[:3], '...', pairs[-1]]
        print(output.escape_controls(f'classes matched by order: {", ".join(pairs)}'))
    if trained:
        text = f'{trained:,} of these {plural(len(source), "image")} are training images'
        print(f'warning: {text}; their accuracy says nothing about new images')
    for gap in origin.gaps if origin else []:
        print(f'warning: {gap}; some images may be undetected training images')
    print()
    print('\n'.join(_describe_report(report)))
    if arguments.out:
        measured = {'split': split, 'trained_on': trained if origin else None}
        _write_files(pathlib.Path(arguments.out), report, loaded, arguments, measured)
    return output.report_unreadable(unreadable, len(source))


def _are_relabeled(open_split: Opener, arguments: argparse.Namespace, split: str) -> bool:
    """Returns whether --labels replaces labels of one class per image.

    True if the data has several labels to choose from, so that its own labels are unknown.
    """
    if arguments.labels is None:
        return False
    try:
        return not open_split(arguments.data, split).multi_label
    except UserError:  # TFDS data whose labels must be chosen
        return True


def _describe_report(report: HeadReport) -> list[str]:
    """Formats the metrics, the worst classes and the most frequent confusions."""
    lines = [f'{_format_name(n):<24}{results.text_of(n, x):>8}' for n, x in report.means.items()]
    name = 'average_precision' if 'average_precision' in report.classes[0] else 'accuracy'
    worst = sorted(report.classes, key=lambda one: one[name])[:_SHOWN]
    fewer = f' (lowest {_SHOWN})' if len(worst) < len(report.classes) else ''
    lines.append(f'\n{_format_name(name)} per class{fewer}:')
    lines += [
        f'  {one[name]:8.2%} of {one["images"]:,}  {output.escape_controls(one["class"])}'
        for one in worst
    ]
    confusions = report.confusions()[:_SHOWN]
    lines += ['', 'most frequent confusions:'] if confusions else []
    for one in confusions:
        pair = output.escape_controls(f'{one["class"]}, predicted as {one["predicted"]}')
        lines.append(f'  {one["images"]:>6,}  {pair}')
    return lines


def _format_name(name: str) -> str:
    return name.replace('top5', 'top-5').replace('_', ' ')


def _write_files(
    folder: pathlib.Path,
    report: HeadReport,
    loaded: LoadedModel,
    arguments: argparse.Namespace,
    measured: dict[str, Any],
) -> None:
    """Writes the metrics with the evaluation settings, and the confusion matrix."""
    values = {'data': arguments.data, 'labels': arguments.labels, **measured} | {
        'checkpoint': redact(arguments.checkpoint),
        'origin': loaded.origin,
        'image_size': list(loaded.config.image_size),
        'preprocessing': records.to_dict(loaded.preprocessing),
        'images': report.num_images,
        'means': {n: x if math.isfinite(x) else None for n, x in report.means.items()},
        'classes': report.classes,
    }
    written = [NUMBERS]
    if report.confusion is not None:
        values['confusions'] = report.confusions()
        matrix = {'confusion': report.confusion, 'class_names': np.array(report.names)}
        array_files.write_npz(folder / MATRIX, matrix)
        with atomic_write(folder / PICTURE) as partial:
            bitmaps.draw_confusion_matrix(report.confusion, report.names).save(partial, 'PNG')
        written += [MATRIX, PICTURE]
    write_json(folder / NUMBERS, values)
    print(f'\nwritten: {", ".join(str(folder / name) for name in written)}')


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('evaluate', __doc__)
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='file, directory or augreg:NAME')
    parser.add_argument('--data', required=True, metavar='DATA', help=f'labeled images: {EXPECTED}')
    text = 'split or slice, such as train[90%%:]; default: as in the run of CHECKPOINT, else test'
    parser.add_argument('--split', metavar='NAME', help=text)
    text = "file with labels that replace the data's labels, such as ReaL's real.json"
    parser.add_argument('--labels', metavar='FILE.json', help=text)
    text = "match classes by order instead of by name: the data's first class is output 0"
    parser.add_argument('--by_order', action='store_true', help=text)
    text = 'directory for evaluation.json, confusion.npz and confusion.png; default: not written'
    parser.add_argument('--out', type=app.local_path, metavar='DIR', help=text)
    app.add_image_flags(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True)
