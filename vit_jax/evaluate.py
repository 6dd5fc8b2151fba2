"""Evaluates a classifier on labeled images: python -m vit_jax.evaluate CHECKPOINT --data=DATA.

CHECKPOINT has any format that vit_jax.load reads, or is a name such as augreg:B/16 or
hf:OWNER/NAME (docs/checkpoint_names.md). DATA is any value of --config.data. Classes are matched by
name if the checkpoint has class names, otherwise by order. If CHECKPOINT is in the work directory
of a run, DATA is by default the run's config.data, and the split is the one that the run evaluated.

--out=DIR writes evaluation.json (all metrics, also per class), confusion.npz, confusion.png and
reliability.png. --predictions=FILE.csv or FILE.jsonl writes the prediction for each image.
--mistakes=DIR writes the wrong predictions: mistakes.csv has all, the most confident first, and
mistakes.png shows the first 48. --suite=imagenet evaluates on the ImageNet validation set, ReaL,
V2, A, R, Sketch, ObjectNet and C in the folder DATA; --out=DIR then writes suite.json.
"""

import argparse
import csv
import dataclasses
import functools
import importlib.util
import json
import math
import operator
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.base import (
    MissingFile,
    UserError,
    atomic_write,
    make_folder,
    plural,
    records,
    require,
    write_bytes,
    write_json,
)
from vit_jax.base.progress import progress_bar
from vit_jax.checkpoints.formats import array_files
from vit_jax.checkpoints.remote import redact
from vit_jax.cli import app, output
from vit_jax.data.image_decoding import decode
from vit_jax.data.sources.base import Source, renumber_classes
from vit_jax.data.sources.opening import EXPECTED, Opener, make_opener, require_outside
from vit_jax.evaluation import head, imagenet_suite
from vit_jax.evaluation.calibration import Calibration
from vit_jax.evaluation.head import HeadReport, Prediction
from vit_jax.experiment.data_manifest import SourceRun, find_source_run
from vit_jax.figures import bitmaps
from vit_jax.predict import open_output, require_new
from vit_jax.pretrained import LoadedModel, load
from vit_jax.training.metrics import SET_METRICS, find_metric, resolve_metrics

NUMBERS = 'evaluation.json'
MATRIX = 'confusion.npz'
PICTURE = 'confusion.png'
RELIABILITY = 'reliability.png'
SUITE = 'suite.json'
MISTAKES = 'mistakes.csv'
SHEET = 'mistakes.png'
_NOT_IN_SUITES = (
    'split',
    'labels',
    'mistakes',
    'predictions',
    'by_order',
    'only_data_classes',
    'metrics',
)
_MAX_LOGITS = 2**29  # logits that are kept for the calibration: 2 GiB
_SHOWN = 10  # printed classes, and printed confusions
_TILES = 48  # images in the contact sheet of mistakes


def main(arguments: argparse.Namespace) -> int:
    """Evaluates the checkpoint on a data set or a suite. Returns 1 if an image is unreadable."""
    if arguments.out or arguments.predictions or arguments.mistakes:
        output.ignore_closed_pipes()
    origin = None if arguments.suite else find_source_run(arguments.checkpoint)
    _check_flags(arguments, origin)
    loaded = load(arguments.checkpoint, **app.checkpoint_options(arguments))
    print('\n'.join(loaded.report))
    loaded.require_head()
    if arguments.suite:
        return _evaluate_suite(loaded, arguments)
    return _evaluate_data(loaded, origin, arguments)


def _check_flags(arguments: argparse.Namespace, origin: SourceRun | None) -> None:
    """Raises UserError if flags do not fit together, or if outputs cannot be written there."""
    if arguments.suite:
        for name in _NOT_IN_SUITES:
            require(not vars(arguments)[name], f'--{name}: not used with --suite; leave it out')
    for folder in filter(None, (arguments.out, arguments.mistakes)):
        if not arguments.suite:
            require_outside(folder, arguments.data or (origin.data if origin else None))
        make_folder(folder)
    files = []
    if arguments.out:
        names = [SUITE] if arguments.suite else [NUMBERS, MATRIX, PICTURE, RELIABILITY]
        files += [os.path.join(arguments.out, name) for name in names]
    if arguments.mistakes:
        files += [os.path.join(arguments.mistakes, name) for name in (MISTAKES, SHEET)]
    predictions = arguments.predictions
    if predictions:
        require(
            predictions.lower().endswith(('.csv', '.jsonl')),
            f'--predictions={predictions}: expected FILE.csv or FILE.jsonl',
        )
        files.append(predictions)
    require(
        len({*map(os.path.realpath, files)}) == len(files),
        f'{predictions}: --predictions and --mistakes cannot share a file',
    )
    require_new(files, overwrite=arguments.overwrite)


def _evaluate_data(
    loaded: LoadedModel, origin: SourceRun | None, arguments: argparse.Namespace
) -> int:
    """Prints the metrics, the worst classes and the most frequent confusions; writes files."""
    data: str = arguments.data or (origin.data if origin else '')
    require(bool(data), f'--data: missing; expected labeled images: {EXPECTED}')
    own_split = origin.find_split(data) if origin else None
    split: str = arguments.split or own_split or 'test'
    open_split = make_opener(origin.held_out if origin else None)
    source = open_split(data, split, arguments.labels)
    source = head.match_classes(source, loaded, by_order=arguments.by_order)
    trained = len(origin.find_training_images(source)) if origin else 0
    unreadable = list[str]()
    num_batches = -(-len(source) // arguments.batch_size)
    options = {'max_pixels': arguments.max_pixels, 'on_skipped': unreadable.append}
    with progress_bar() as bar:
        report = head.evaluate_head(
            loaded,
            head.make_model_reader(loaded, source, **options),
            batch_size=arguments.batch_size,
            relabeled=_are_relabeled(open_split, data, split, arguments.labels),
            only_data_classes=arguments.only_data_classes,
            calibrate=len(source) * len(source.class_names) <= _MAX_LOGITS,
            further_metrics=arguments.metrics,
            wrap=functools.partial(bar.track, total=num_batches, description='batches'),
        )
    images = plural(report.num_images, 'image')
    classes = plural(len(report.classes), 'class')
    print(f'{data}, {split}: {images} of {classes}')
    if origin and own_split and not arguments.split:
        print(f'{split}: the evaluated split of {origin.workdir}; --split=NAME selects another')
    if arguments.by_order or not loaded.class_names:
        pairs = [f'{number} = {name}' for number, name in enumerate(source.class_names)]
        if len(pairs) >= 5:
            pairs = [*pairs[:3], '...', pairs[-1]]
        print(output.escape_controls(f'classes matched by order: {", ".join(pairs)}'))
    if trained:
        print(
            f'warning: {trained:,} of these {plural(len(source), "image")} are training images; '
            'their accuracy says nothing about new images'
        )
    if origin:
        for gap in origin.gaps:
            print(f'warning: {gap}; some images may be undetected training images')
    print('\n' + '\n'.join(_describe_report(report)))
    written = list[pathlib.Path]()
    if arguments.out:
        settings = {'data': data, 'split': split, 'trained_on': trained if origin else None}
        settings |= _describe_settings(loaded, arguments)
        written += _write_report(pathlib.Path(arguments.out), report, settings)
    if arguments.predictions:
        path = pathlib.Path(arguments.predictions)
        written.append(_write_predictions(path, report.predictions))
    if arguments.mistakes:
        written += _write_mistakes(arguments, report, source)
    if written:
        print(f'\nwritten: {", ".join(map(str, written))}')
    return output.report_unreadable(unreadable, len(source))


def _are_relabeled(open_split: Opener, data: str, split: str, labels: str | None) -> bool:
    """Returns whether --labels replaces labels of one class per image.

    True if the data has several labels to choose from, so that its own labels are unknown.
    """
    if labels is None:
        return False
    try:
        return not open_split(data, split).multi_label
    except UserError:  # TFDS data whose labels must be chosen
        return True


def _describe_report(report: HeadReport) -> list[str]:
    """Formats the metrics, the worst classes and the most frequent confusions."""
    lines = []
    for name, value in report.metrics.items():
        metric = find_metric(name)
        lines.append(f'{metric.title:<24}{metric.format(value):>8}')
    if report.calibration is not None:
        lines += _describe_calibration(report.calibration)
    lines += ['', *_describe_worst_classes(report.classes)]
    confusions = report.confusions()[:_SHOWN]
    if confusions:
        lines += ['', 'most frequent confusions:']
    for confusion in confusions:
        pair = f'{confusion["class"]}, predicted as {confusion["predicted"]}'
        lines.append(f'  {confusion["images"]:>6,}  {output.escape_controls(pair)}')
    return lines


def _describe_calibration(calibration: Calibration) -> list[str]:
    scores = calibration.scores
    before = calibration.before
    after = calibration.after
    calibration_errors = f'{before.calibration_error:.2%} -> {after.calibration_error:.2%}'
    likelihoods = f'{before.nll:.4g} -> {after.nll:.4g}'
    return [
        f'{"negative log-likelihood":<24}{scores.nll:>8.4g}',
        f'{"Brier score":<24}{scores.brier:>8.4g}',
        f'{"calibration error (ECE)":<24}{scores.calibration_error:>8.2%}',
        f'{"temperature":<24}{calibration.temperature:>8.3g}  fitted to a random half',
        f'  on the other half: ECE {calibration_errors}, negative log-likelihood {likelihoods}',
    ]


def _describe_worst_classes(classes: list[dict[str, Any]]) -> list[str]:
    """Formats a table of the classes with the lowest values of the first per-class metric."""
    per_class_metrics = 'average_precision', 'recall', 'accuracy', 'precision'
    names = [name for name in per_class_metrics if name in classes[0]]
    headings = [*(name.replace('_', ' ') for name in names), 'images']
    widths = [max(7, len(heading)) for heading in headings]
    fewer = f' ({_SHOWN} with the lowest {headings[0]})' if _SHOWN < len(classes) else ''
    lines = [f'  {_align_right(headings, widths)}  class{fewer}']
    for scores in sorted(classes, key=operator.itemgetter(names[0]))[:_SHOWN]:
        cells = ['-' if scores[name] is None else f'{scores[name]:.2%}' for name in names]
        cells.append(f'{scores["images"]:,}')
        class_name = output.escape_controls(scores['class'])
        lines.append(f'  {_align_right(cells, widths)}  {class_name}')
    return lines


def _align_right(cells: Sequence[str], widths: Sequence[int]) -> str:
    return '  '.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=True))


def _describe_settings(loaded: LoadedModel, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the checkpoint, how images are prepared for it, and flags, as JSON."""
    flags = 'head', 'labels', 'by_order', 'only_data_classes'
    return {name: vars(arguments)[name] for name in flags} | {
        'checkpoint': redact(arguments.checkpoint),
        'origin': loaded.origin,
        'model': records.to_dict(loaded.config),
        'preprocessing': records.to_dict(loaded.preprocessing),
    }


def _write_report(
    folder: pathlib.Path, report: HeadReport, settings: dict[str, Any]
) -> list[pathlib.Path]:
    """Writes the metrics with the settings, the confusion matrix and the reliability diagram."""
    metrics = {
        name: value if math.isfinite(value) else None for name, value in report.metrics.items()
    }
    contents = settings | {
        'images': report.num_images,
        'metrics': metrics,
        'classes': report.classes,
    }
    names = [NUMBERS]
    if report.confusion is not None:
        contents['confusions'] = report.confusions()
        matrix = {'confusion': report.confusion, 'class_names': np.array(report.names)}
        array_files.write_npz(folder / MATRIX, matrix)
        with atomic_write(folder / PICTURE) as file:
            bitmaps.draw_confusion_matrix(report.confusion, report.names).save(file, 'PNG')
        names += [MATRIX, PICTURE]
    calibration = report.calibration
    if calibration is not None:
        contents['calibration'] = dataclasses.asdict(calibration)
        if importlib.util.find_spec('matplotlib'):
            from vit_jax.figures import curves, style

            write_bytes(folder / RELIABILITY, style.png(curves.draw_reliability, calibration))
            names.append(RELIABILITY)
        else:
            print(f"{RELIABILITY} needs matplotlib: pip install 'vit_jax[plots]'")
    write_json(folder / NUMBERS, contents)
    return [folder / name for name in names]


def _write_predictions(path: pathlib.Path, rows: Sequence[Prediction]) -> pathlib.Path:
    """Writes predictions as JSON lines if the path ends with .jsonl, else as CSV."""
    form = 'jsonl' if path.suffix.lower() == '.jsonl' else 'csv'
    names = Prediction._fields[1:]
    with open_output(str(path), form) as file:
        if form == 'jsonl':
            lines = (dict(zip(names, row[1:], strict=True)) for row in rows)
            file.writelines(f'{json.dumps(line)}\n' for line in lines)
        else:
            csv.writer(file, lineterminator='\n').writerows([names, *(row[1:] for row in rows)])
    return path


def _write_mistakes(
    arguments: argparse.Namespace, report: HeadReport, source: Source
) -> list[pathlib.Path]:
    """Writes the wrong predictions, most confident first, and a contact sheet of the first ones."""
    folder = pathlib.Path(arguments.mistakes)
    mistakes = [
        prediction
        for prediction in report.predictions
        if prediction.label and not prediction.correct
    ]
    mistakes.sort(key=lambda mistake: -mistake.probability)
    written = [_write_predictions(folder / MISTAKES, mistakes)]
    tiles = []
    for mistake in mistakes[:_TILES]:
        lines = (
            f'true: {mistake.label}',
            f'{mistake.probability:.0%}: {mistake.predicted}',
            os.path.basename(mistake.path),
        )
        stored, _ = source.read(mistake.number)
        image = decode(stored, exif_rotation=True, max_pixels=arguments.max_pixels)
        tiles.append((image, lines))
    (folder / SHEET).unlink(missing_ok=True)
    if tiles:
        with atomic_write(folder / SHEET) as file:
            bitmaps.draw_contact_sheet(tiles).save(file, 'PNG')
        written.append(folder / SHEET)
    return written


def _evaluate_suite(loaded: LoadedModel, arguments: argparse.Namespace) -> int:
    """Prints a line per test set, and how to get the missing ones; writes suite.json."""
    class_names = imagenet_suite.get_class_names(loaded)
    root = pathlib.Path(arguments.data or '.')
    unreadable = list[str]()
    measured = dict[str, dict[str, float]]()
    missing = dict[str, str]()
    mce = None
    options = {'batch_size': arguments.batch_size, 'max_pixels': arguments.max_pixels}
    options['on_skipped'] = unreadable.append
    for test_set in imagenet_suite.TEST_SETS:
        try:
            source = renumber_classes(test_set.open(root), class_names)
            with progress_bar() as bar:
                total = -(-len(source) // arguments.batch_size)
                wrap = functools.partial(bar.track, total=total, description=test_set.name)
                report = imagenet_suite.evaluate(test_set, loaded, source, wrap=wrap, **options)
        except UserError as error:
            if not isinstance(error, MissingFile) or test_set.command not in missing.values():
                print(f'{test_set.name}: skipped ({error}); in {root}, run: {test_set.command}')
            missing[test_set.name] = test_set.command
        else:
            measured[test_set.name] = report.metrics | {'images': report.num_images}
            results = []
            for name, value in report.metrics.items():
                results.append(find_metric(name).describe(value))
            results.append(plural(report.num_images, 'image'))
            print(f'{test_set.name:<22}{", ".join(results)}', flush=True)
        mce = imagenet_suite.mean_corruption_error(measured)
        if arguments.out and measured:
            contents = {'data': str(root), 'sets': measured, 'mCE': mce, 'missing': missing}
            contents |= _describe_settings(loaded, arguments)
            write_json(pathlib.Path(arguments.out, SUITE), contents)
    require(bool(measured), f'{root}: none of the test sets was evaluated')
    missing_c = [name for name in missing if name.startswith('c/')]
    if missing_c:
        print(f'{"c":<22}no mCE: {plural(len(missing_c), "corruption")} missing')
    else:
        print(f'{"c":<22}mCE {mce:.2%}')
    if arguments.out:
        print(f'\nwritten: {os.path.join(arguments.out, SUITE)}')
    readable = sum(int(metrics['images']) for metrics in measured.values())
    return output.report_unreadable(unreadable, readable + len(unreadable))


def _metric_names(text: str) -> tuple[str, ...]:
    """Parses the names of metrics in a list with commas."""
    names = tuple(name.strip() for name in text.split(',') if name.strip())
    try:
        resolve_metrics(names)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('evaluate', __doc__)
    add = parser.add_argument
    add('checkpoint', metavar='CHECKPOINT', help='file, directory or augreg:NAME')
    add(
        '--data',
        metavar='DATA',
        help=f'labeled images: {EXPECTED}; default: the data of the run of CHECKPOINT',
    )
    add(
        '--split',
        metavar='NAME',
        help='split or slice, such as train[90%%:]; '
        'default: as in the run of CHECKPOINT, else test',
    )
    add(
        '--labels',
        metavar='FILE.json',
        help="file with labels that replace the data's labels, such as ReaL's real.json",
    )
    add(
        '--by_order',
        action='store_true',
        help="match classes by order instead of by name: the data's first class is output 0",
    )
    add(
        '--only_data_classes',
        action='store_true',
        help='predict only classes that occur in the data, as usual for ImageNet-A and -R',
    )
    add(
        '--metrics',
        type=_metric_names,
        default=(),
        metavar='NAME,...',
        help=f'further metrics of the whole data set: {", ".join(SET_METRICS)}',
    )
    add(
        '--suite',
        choices=['imagenet'],
        help='evaluate on a suite of test sets, in subfolders of --data',
    )
    add(
        '--out',
        type=app.local_path,
        metavar='DIR',
        help='directory for metrics, confusion matrix and reliability diagram; '
        'default: not written',
    )
    add(
        '--predictions',
        type=app.local_path,
        metavar='FILE.csv',
        help='file for the prediction for each image, .csv or .jsonl; default: not written',
    )
    add(
        '--mistakes',
        type=app.local_path,
        metavar='DIR',
        help='directory for the wrong predictions and a contact sheet; default: not written',
    )
    add('--overwrite', action='store_true', help='replace existing files')
    app.add_image_flags(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True)
