"""Checks a data set before training: python -m vit_jax.inspect_data --config=FILE --workdir=DIR.

Prints splits, classes, counts, image sizes, unreadable files, duplicate images, and every problem
that would stop training. DIR/data.json receives the same information. DIR/data.png shows images as
evaluation and training see them. --config.data=DATA selects the data.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import jax
import numpy as np
from rich.markup import escape

from vit_jax.base import UserError, atomic_write, make_folder, plural, require, storage, write_json
from vit_jax.base.progress import progress_bar
from vit_jax.base.records import text_of
from vit_jax.cli import app
from vit_jax.config import TrainConfig
from vit_jax.data import inspection, loading
from vit_jax.data.augmentation import augment, host_crop
from vit_jax.data.inspection import ImageInfo, SplitReport
from vit_jax.data.sampling import Examples
from vit_jax.data.sources.base import Source, split_names
from vit_jax.data.sources.opening import (
    Opener,
    find_split,
    make_opener,
    open_splits,
    require_outside,
)
from vit_jax.experiment.build import make_readers, open_start, resolve_preprocessing
from vit_jax.figures import bitmaps
from vit_jax.tasks.making import make_task, needs_classes
from vit_jax.training.duration import make_train_length
from vit_jax.training.losses import make_targets
from vit_jax.training.update import AUGMENT, make_purpose_key

SHEET = 'data.png'
SUMMARY = 'data.json'
_ROWS = 8  # images in the sheet
_EPOCHS = 7  # columns of the sheet with augmented images
_DEFAULT_SIZE = 224, 224
_SHOWN = 5  # printed entries of a long list
_LISTS = {  # lists of a Scan, and the text after their counts
    'duplicates': ' (equal files):',
    'contradictory': ' (equal files in different classes):',
    'unreadable': '',
}


class Problems(list[str]):
    """Reasons why training would stop, without repetitions."""

    def catch(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls the function and returns its result. Appends a UserError and returns None."""
        try:
            return function(*arguments, **options)
        except UserError as error:
            self += [line for line in str(error).split('\n  ') if line not in self]


def main(arguments: argparse.Namespace) -> int:
    """Scans every split, prints a summary and draws images. Returns 1 if there are problems."""
    config = arguments.config
    folder = storage.resolve_folder(arguments.workdir)
    require_outside(arguments.workdir, config.data)
    make_folder(folder)
    opener = make_opener(config.held_out, needs_classes=needs_classes(config))
    problems = Problems()
    train, tests = _open_parts(config, opener, problems)
    sources = _open_splits(config, [config.train_split, *tests], opener, problems)
    start = problems.catch(open_start, config)
    preprocessing = resolve_preprocessing(config, start)
    model = config.model or (start.card.model if start else None)
    size = config.image_size or (model.image_size if model else _DEFAULT_SIZE)
    reader_of = make_readers(config, preprocessing, size)
    scans, readable_images = _scan(sources, reader_of)
    parts = config.train_split, *tests
    used = {find_split(name, scans) for part in parts for name in split_names(part)}
    unreadable = sum(len(scan.unreadable) for split, scan in scans.items() if split in used)
    if unreadable and config.loader.on_unreadable != 'skip':
        remedy = 'repair or remove them, or pass --config.loader.on_unreadable=skip'
        problems.append(f'{plural(unreadable, "image")} cannot be read: {remedy}')
    shared = list[str]()
    if train is not None:
        crop = host_crop(config.augmentation, preprocessing)
        evaluated = reader_of(train)
        trained = reader_of(train, crop=crop)
        problems.catch(_write_sheet, folder / SHEET, config, evaluated, trained, readable_images)
        if isinstance(config.data, str):
            shared += _describe_shared(train, tests)
        if warning := inspection.check_order(train, config.loader, config.batch_size):
            print(f'order          {warning}')
    for line in shared:
        print(f'shared         {line}; their accuracy says nothing about new images')
    splits = {split: dataclasses.asdict(scan) for split, scan in scans.items()}
    contents = {
        'data': text_of(config.data),
        'problems': problems,
        'splits': splits,
        'shared': shared,
    }
    write_json(folder / SUMMARY, contents)
    print(f'details        {folder / SUMMARY}')
    if not problems:
        print('no problems')
        return 0
    print('\n  '.join(['training would stop with:', *problems]))
    return 1


def _open_parts(
    config: TrainConfig, opener: Opener, problems: Problems
) -> tuple[Source | None, dict[str, Source]]:
    """Opens the training images and the evaluated splits as a run does. Lists problems."""
    open_split = functools.partial(problems.catch, opener, config.data, classes=config.classes)
    train = open_split(config.train_split)
    tests = {}
    for evaluation in config.evaluations.values():
        if evaluation.data is None:
            source = open_split(evaluation.split)
            if source is not None:
                tests[evaluation.split] = source
    if train is not None:
        task = make_task(config, num_classes=len(train.class_names), multi_label=train.multi_label)
        problems += task.check_data(config, train, tests)
        problems.catch(loading.check_balance, train, config.loader)
        if config.total is not None:
            sizes = {'batch_size': config.batch_size, 'num_images': len(train)}
            problems.catch(make_train_length, config.total, **sizes)
    return train, tests


def _open_splits(
    config: TrainConfig, used: Iterable[str], opener: Opener, problems: Problems
) -> dict[str, Source]:
    """Opens all splits, the training split first. Opens only `used` if data is a function."""
    names = used
    if isinstance(config.data, str):
        names = problems.catch(open_splits, config.data, config.held_out) or used
    train_splits = split_names(config.train_split)
    ordered = sorted({*names} - {'all'}, key=lambda name: (name not in train_splits, name))
    sources = {name: problems.catch(opener, config.data, name) for name in ordered}
    return {name: source for name, source in sources.items() if source is not None}


def _describe_shared(train: Source, tests: dict[str, Source]) -> Iterator[str]:
    """Yields a line for each split that shares image names with the training split."""
    trained = {*train.read_names(range(len(train)))}
    for split, source in tests.items():
        count = len(trained.intersection(source.read_names(range(len(source)))))
        if count:
            yield f'{count:,} of {len(source):,} {split} images are also training images'


def _scan(
    sources: dict[str, Source], reader_of: Callable[..., loading.ImageReader]
) -> tuple[dict[str, SplitReport], dict[str, ImageInfo]]:
    """Scans and prints every split. Returns the scans and the readable images."""
    scans = dict[str, SplitReport]()
    readable_images = dict[str, ImageInfo]()
    with futures.ThreadPoolExecutor(loading.count_cores()) as pool, progress_bar() as bar:
        for split, source in sources.items():
            task = bar.add_task(escape(split), total=len(source))
            done = functools.partial(bar.advance, task)
            scans[split] = inspection.scan(
                reader_of(source), pool, done, images_by_name=readable_images
            )
            print(f'{split}: {plural(len(source), "image")}')
            print('\n'.join(_describe(scans[split])))
    return scans, readable_images


def _describe(scan: SplitReport) -> Iterator[str]:
    """Yields the lines about a split, with at most `_SHOWN` entries of each list."""
    if scan.classes:
        names = [*scan.classes]
        more = f', ... {names[-1]}' if len(names) > _SHOWN else ''
        yield f'  classes      {len(names)}: {", ".join(names[:_SHOWN])}{more}'
        fewest = min(names, key=scan.classes.__getitem__)
        most = max(names, key=scan.classes.__getitem__)
        images = plural(scan.classes[fewest], 'image')
        if scan.classes[fewest] < scan.classes[most]:
            images += f' ({fewest}) to {scan.classes[most]:,} ({most})'
        yield f'  class size   {images}'
    formats = ', '.join(f'{count:,} {kind}' for kind, count in scan.formats.items())
    yield f'  formats      {formats or "no readable image"}'
    if scan.height:
        height, width = ('/'.join(map(str, side)) for side in (scan.height, scan.width))
        yield f'  pixels       height {height}, width {width} (min/median/max)'
    for name, explanation in _LISTS.items():
        entries = getattr(scan, name)
        if entries or name == 'unreadable':
            yield f'  {name:<12} {len(entries):,}{explanation}'
            yield from (f'    {entry}' for entry in entries[:_SHOWN])


def _write_sheet(
    path: storage.Path,
    config: TrainConfig,
    evaluated: loading.ImageReader,
    trained: loading.ImageReader,
    readable_images: dict[str, ImageInfo],
) -> None:
    """Draws training images as evaluation and the first epochs of training see them.

    Raises UserError if no image is readable.
    """
    source = evaluated.source
    names = source.read_names(range(len(source)))
    indices = [index for index, name in enumerate(names) if name in readable_images][:_ROWS]
    require(bool(indices), f'none of {len(source)} training images is readable')
    examples = [evaluated.example(index) for index in indices]
    columns = [[image for image, _ in examples]]
    targets = functools.partial(make_targets, num_classes=len(source.class_names))
    augmented = jax.jit(functools.partial(augment, config=config.augmentation, targets_of=targets))
    key = make_purpose_key(config.seed, AUGMENT)
    with futures.ThreadPoolExecutor() as pool:
        for epoch in range(_EPOCHS):
            examples_of_epoch = Examples.of(np.array(indices), epoch)
            batch = augmented(key, trained.examples(examples_of_epoch, pool))
            columns.append(list(np.asarray(batch['images']).round().astype(np.uint8)))
    numbers = [np.flatnonzero(x) if source.multi_label else [int(x)] for _, x in examples]
    class_names = source.class_names or ('',)  # images without classes have the label 0
    classes = [', '.join(class_names[n] for n in of_image) for of_image in numbers]
    titles = ['evaluation', *(f'training {use}' for use in range(1, _EPOCHS + 1))]
    tiles = []
    for name, images in zip(classes, zip(*columns, strict=True), strict=True):
        tiles += [(image, (name, title)) for title, image in zip(titles, images, strict=True)]
    with atomic_write(path) as file:
        bitmaps.draw_contact_sheet(tiles, len(titles)).save(file, 'PNG')
    print(f'pictures       {path}')


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('inspect_data', __doc__)
    app.add_config_flags(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser())
