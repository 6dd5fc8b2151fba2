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
from vit_jax.checkpoints.formats import array_files
from vit_jax.checkpoints.remote import redact
from vit_jax.cli import app, output
from vit_jax.data.image_decoding import decode
from vit_jax.data.sources.base import Source, renumber_classes
from vit_jax.data.sources.opening import EXPECTED, Opener, make_opener, require_outside
from vit_jax.evaluation import head, imagenet_suite
from vit_jax.evaluation.head import HeadReport, Prediction
from vit_jax.experiment.data_manifest import find_source_run
from vit_jax.figures import bitmaps
from vit_jax.predict import open_output, require_new
from vit_jax.pretrained import LoadedModel, load
from vit_jax.training.metrics import SET_METRICS, find_metric, resolve_metrics

NUMBERS, MATRIX, PICTURE = 'evaluation.json', 'confusion.npz', 'confusion.png'
RELIABILITY, SUITE = 'reliability.png', 'suite.json'
MISTAKES, SHEET = 'mistakes.csv', 'mistakes.png'
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
    _check_flags(arguments)
    loaded = load(arguments.checkpoint, **app.checkpoint_options(arguments))
    print('\n'.join(loaded.report))
    loaded.require_head()
    evaluate = _evaluate_suite if arguments.suite else _evaluate_data
    return evaluate(loaded, arguments)


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raises UserError if flags do not fit together, or if outputs cannot be written there."""
    out, mistakes, predictions = arguments.out, arguments.mistakes, arguments.predictions
    if arguments.suite:
        unused = [n for n in _NOT_IN_SUITES if vars(arguments)[n]]
        wrong = f'--{"".join(unused[:1])}: not used with --suite; leave it out'
        require(not unused, wrong)
    for folder in filter(None, (out, mistakes)):
        if not arguments.suite:
            origin = find_source_run(arguments.checkpoint)
            require_outside(folder, arguments.data or (origin.data if origin else None))
        make_folder(folder)
    written = [SUITE] if arguments.suite else [NUMBERS, MATRIX, PICTURE, RELIABILITY]
    folders = (out, written), (mistakes, [MISTAKES, SHEET])
    files = [os.path.join(folder, name) for folder, names in folders if folder for name in names]
    if predictions:
        wrong = f'--predictions={predictions}: expected FILE.csv or FILE.jsonl'
        require(predictions.lower().endswith(('.csv', '.jsonl')), wrong)
        files.append(predictions)
    wrong = f'{predictions}: --predictions and --mistakes cannot share a file'
    require(len({*map(os.path.realpath, files)}) == len(files), wrong)
    require_new(files, overwrite=arguments.overwrite)


def _evaluate_data(loaded: LoadedModel, arguments: argparse.Namespace) -> int:
    """Prints the metrics, the worst classes and the most frequent confusions; writes files."""
    origin = find_source_run(arguments.checkpoint)
    data: str = arguments.data or (origin.data if origin else '')
    require(bool(data), f'--data: missing; expected labeled images: {EXPECTED}')
    own_split = origin.find_split(data) if origin else None
    split: str = arguments.split or own_split or 'test'
    open_split = make_opener(origin.held_out if origin else None)
    source = open_split(data, split, arguments.labels)
    source = head.match_classes(source, loaded, by_order=arguments.by_order)
    trained = len(origin.find_training_images(source)) if origin else 0
    unreadable, total = list[str](), -(-len(source) // arguments.batch_size)
    options = {'max_pixels': arguments.max_pixels, 'on_skipped': unreadable.append}
    with output.progress_bar() as bar:
        report = head.evaluate_head(
            loaded,
            head.make_model_reader(loaded, source, **options),
            batch_size=arguments.batch_size,
            relabeled=_are_relabeled(open_split, data, split, arguments.labels),
            only_data_classes=arguments.only_data_classes,
            calibrate=len(source) * len(source.class_names) <= _MAX_LOGITS,
            further_metrics=arguments.metrics,
            watch=functools.partial(bar.track, total=total, description='batches'),
        )
    images, classes = plural(report.num_images, 'image'), plural(len(report.classes), 'class')
    print(f'{data}, {split}: {images} of {classes}')
    if origin and own_split and not arguments.split:
        print(f'{split}: the evaluated split of {origin.workdir}; --split=NAME selects another')
    if arguments.by_order or not loaded.class_names:
        pairs = [f'{number} = {name}' for number, name in enumerate(source.class_names)]
        pairs = pairs if len(pairs) < 5 else [*pairs[:3], '...', pairs[-1]]
        print(output.escape_controls(f'classes matched by order: {", ".join(pairs)}'))
    if trained:
        text = f'{trained:,} of these {plural(len(source), "image")} are training images'
        print(f'warning: {text}; their accuracy says nothing about new images')
    for gap in origin.gaps if origin else []:
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
        lines.append(f'{metric.label:<24}{metric.format(value):>8}')
    if (found := report.calibration) is not None:
        lines.append(f'{"negative log-likelihood":<24}{found.scores.nll:>8.4g}')
        lines.append(f'{"Brier score":<24}{found.scores.brier:>8.4g}')
        lines.append(f'{"calibration error (ECE)":<24}{found.scores.calibration_error:>8.2%}')
        lines.append(f'{"temperature":<24}{found.temperature:>8.3g}  fitted to a random half')
        before, after = found.before, found.after
        text = f'ECE {before.calibration_error:.2%} -> {after.calibration_error:.2%}'
        text += f', negative log-likelihood {before.nll:.4g} -> {after.nll:.4g}'
        lines.append(f'  on the other half: {text}')
    known = 'average_precision', 'recall', 'accuracy', 'precision'
    names = [name for name in known if name in report.classes[0]]
    worst = sorted(report.classes, key=lambda one: one[names[0]])[:_SHOWN]
    heads = [*(name.replace('_', ' ') for name in names), 'images']
    fewer = f' ({_SHOWN} with the lowest {heads[0]})' if _SHOWN < len(report.classes) else ''
    lines.append(f'\n  {"  ".join(f"{head:>7}" for head in heads)}  class{fewer}')
    for one in worst:
        values = ['-' if one[name] is None else f'{one[name]:.2%}' for name in names]
        cells = zip(heads, [*values, f'{one["images"]:,}'], strict=True)
        row = '  '.join(f'{text:>{max(7, len(head))}}' for head, text in cells)
        lines.append(f'  {row}  {output.escape_controls(one["class"])}')
    confusions = report.confusions()[:_SHOWN]
    lines += ['', 'most frequent confusions:'] if confusions else []
    for one in confusions:
        pair = output.escape_controls(f'{one["class"]}, predicted as {one["predicted"]}')
        lines.append(f'  {one["images"]:>6,}  {pair}')
    return lines


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
    values = settings | {
        'images': report.num_images,
        'metrics': {n: x if math.isfinite(x) else None for n, x in report.metrics.items()},
        'classes': report.classes,
    }
    names = [NUMBERS]
    if report.confusion is not None:
        values['confusions'] = report.confusions()
        matrix = {'confusion': report.confusion, 'class_names': np.array(report.names)}
        array_files.write_npz(folder / MATRIX, matrix)
        with atomic_write(folder / PICTURE) as file:
            bitmaps.draw_confusion_matrix(report.confusion, report.names).save(file, 'PNG')
        names += [MATRIX, PICTURE]
    if (found := report.calibration) is not None:
        values['calibration'] = dataclasses.asdict(found)
        if importlib.util.find_spec('matplotlib'):
            from vit_jax.figures import curves, style

            write_bytes(folder / RELIABILITY, style.png(curves.draw_reliability, found))
            names.append(RELIABILITY)
        else:
            print(f"{RELIABILITY} needs matplotlib: pip install 'vit_jax[plots]'")
    write_json(folder / NUMBERS, values)
    return [folder / name for name in names]


def _write_predictions(path: pathlib.Path, rows: Sequence[Prediction]) -> pathlib.Path:
    """Writes predictions as JSON lines if the path ends with .jsonl, else as CSV."""
    form, names = 'jsonl' if path.suffix.lower() == '.jsonl' else 'csv', Prediction._fields[1:]
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
    folder, max_pixels = pathlib.Path(arguments.mistakes), arguments.max_pixels
    wrong = [one for one in report.predictions if one.label and not one.correct]
    wrong.sort(key=lambda one: -one.probability)
    written, tiles = [_write_predictions(folder / MISTAKES, wrong)], []
    for one in wrong[:_TILES]:
        name = os.path.basename(one.path)
        lines = f'true: {one.label}', f'{one.probability:.0%}: {one.predicted}', name
        image = source.read(one.number)[0]
        tiles.append((decode(image, exif_rotation=True, max_pixels=max_pixels), lines))
    (folder / SHEET).unlink(missing_ok=True)
    if tiles:
        with atomic_write(folder / SHEET) as file:
            bitmaps.draw_contact_sheet(tiles).save(file, 'PNG')
        written.append(folder / SHEET)
    return written


def _evaluate_suite(loaded: LoadedModel, arguments: argparse.Namespace) -> int:
    """Prints a line per test set, and how to get the missing ones; writes suite.json."""
    class_names = imagenet_suite.get_class_names(loaded)
    root, unreadable = pathlib.Path(arguments.data or '.'), list[str]()
    measured = dict[str, dict[str, float]]()
    missing = dict[str, str]()
    mce = None
    options = {'batch_size': arguments.batch_size, 'max_pixels': arguments.max_pixels}
    options['on_skipped'] = unreadable.append
    for test_set in imagenet_suite.TEST_SETS:
        try:
            source = renumber_classes(test_set.open(root), class_names)
            with output.progress_bar() as bar:
                total = -(-len(source) // arguments.batch_size)
                watch = functools.partial(bar.track, total=total, description=test_set.name)
                found = imagenet_suite.evaluate(test_set, loaded, source, watch=watch, **options)
        except UserError as error:
            if not isinstance(error, MissingFile) or test_set.command not in missing.values():
                print(f'{test_set.name}: skipped ({error}); in {root}, run: {test_set.command}')
            missing[test_set.name] = test_set.command
        else:
            numbers = found.metrics
            measured[test_set.name] = numbers | {'images': found.num_images}
            metrics = [(find_metric(name), value) for name, value in numbers.items()]
            texts = [f'{metric.label} {metric.format(value)}' for metric, value in metrics]
            images = plural(found.num_images, 'image')
            print(f'{test_set.name:<22}{", ".join([*texts, images])}', flush=True)
        mce = imagenet_suite.mean_corruption_error(measured)
        if arguments.out and measured:
            values = {'data': str(root), 'sets': measured, 'mCE': mce, 'missing': missing}
            values |= _describe_settings(loaded, arguments)
            write_json(pathlib.Path(arguments.out, SUITE), values)
    require(bool(measured), f'{root}: none of the test sets was evaluated')
    if missing_c := [name for name in missing if name.startswith('c/')]:
        print(f'{"c":<22}no mCE: {plural(len(missing_c), "corruption")} missing')
    else:
        print(f'{"c":<22}mCE {mce:.2%}')
    if arguments.out:
        print(f'\nwritten: {os.path.join(arguments.out, SUITE)}')
    readable = sum(int(each['images']) for each in measured.values())
    return output.report_unreadable(unreadable, readable + len(unreadable))


def _split_names(text: str) -> tuple[str, ...]:
    """Returns the names of metrics in a list with commas. Raises UserError for an unknown name."""
    names = tuple(name.strip() for name in text.split(',') if name.strip())
    resolve_metrics(names)
    return names


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('evaluate', __doc__)
    add = parser.add_argument
    add('checkpoint', metavar='CHECKPOINT', help='file, directory or augreg:NAME')
    text = f'labeled images: {EXPECTED}; default: the data of the run of CHECKPOINT'
    add('--data', metavar='DATA', help=text)
    text = 'split or slice, such as train[90%%:]; default: as in the run of CHECKPOINT, else test'
    add('--split', metavar='NAME', help=text)
    text = "file with labels that replace the data's labels, such as ReaL's real.json"
    add('--labels', metavar='FILE.json', help=text)
    text = "match classes by order instead of by name: the data's first class is output 0"
    add('--by_order', action='store_true', help=text)
    text = 'predict only classes that occur in the data, as usual for ImageNet-A and -R'
    add('--only_data_classes', action='store_true', help=text)
    text = f'further metrics of the whole data set: {", ".join(SET_METRICS)}'
    add('--metrics', type=_split_names, default=(), metavar='NAME,...', help=text)
    text = 'evaluate on a suite of test sets, in subfolders of --data'
    add('--suite', choices=['imagenet'], help=text)
    text = 'directory for metrics, confusion matrix and reliability diagram; default: not written'
    add('--out', type=app.local_path, metavar='DIR', help=text)
    text = 'file for the prediction for each image, .csv or .jsonl; default: not written'
    add('--predictions', type=app.local_path, metavar='FILE.csv', help=text)
    text = 'directory for the wrong predictions and a contact sheet; default: not written'
    add('--mistakes', type=app.local_path, metavar='DIR', help=text)
    add('--overwrite', action='store_true', help='replace existing files')
    app.add_image_flags(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True)
