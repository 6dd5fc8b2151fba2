"""Looks at images before training: python -m vit_jax.inspect_data --config=... --config.data=DATA.

Prints splits, classes, counts, sizes, files that cannot be read, and everything that would stop a
training. Writes it to WORKDIR/data.json, and to WORKDIR/data.png some images as
evaluation and as training see them.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures

import jax
import numpy as np
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from vit_jax.base import UserError, atomic_write, counted, storage, usable, write_json
from vit_jax.base.records import text_of, to_dict
from vit_jax.cli import app
from vit_jax.config import TrainConfig
from vit_jax.data import inspection, reading
from vit_jax.data.augmentation import augment, host_crop
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.inspection import Known, Scan
from vit_jax.data.sources import folders, tables
from vit_jax.data.sources.base import Label, Source, split_names
from vit_jax.data.sources.opening import Opener, make_opener, open_splits
from vit_jax.experiment import workdirs
from vit_jax.experiment.build import label_problems, open_start, preprocessing_of, reader_for
from vit_jax.figures import bitmaps
from vit_jax.training.duration import make_train_length
from vit_jax.training.losses import targets_of
from vit_jax.training.update import AUGMENT, purpose_key

SHEET, SUMMARY = 'data.png', 'data.json'
_ROWS, _EPOCHS, _DEFAULT_SIZE = 8, 7, (224, 224)
_SHOWN = 5  # of a long list
_NEW = 'their accuracy is not that of new images'


def main(arguments: argparse.Namespace) -> int:
    """Scans every split, prints a summary, draws images; 1 where training would be refused."""
    config, folder = arguments.config, storage.folder(arguments.workdir)
    workdirs.require_apart(arguments.workdir, to_dict(config))
    if not storage.is_remote(folder):
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
    opened = make_opener(config.held_out)
    sources, problems = _sources(config, opened)
    found: dict[str, Scan] = {}
    known: dict[str, Known] = {}
    reader_of = _make_readers(config)
    progress = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
    with futures.ThreadPoolExecutor(reading.cores()) as pool, progress as bar:
        for split, source in sources.items():
            done = functools.partial(bar.advance, bar.add_task(escape(split), total=len(source)))
            scan = inspection.scan(reader_of(source), pool, done, known=known)
            print(f'{split}: {counted(len(source), "image")}\n' + '\n'.join(_lines(scan)))
            found[split] = scan
    unreadable = sum(len(scan.unreadable) for scan in found.values())
    if unreadable and config.loader.on_unreadable != 'skip':
        remedy = 'mend or remove, or leave out by --config.loader.on_unreadable=skip'
        problems.append(f'{counted(unreadable, "image")} cannot be read: {remedy}')
    if any(source.class_names for source in sources.values()):
        try:
            sheet = _sheet(config, opened)
            with atomic_write(folder / SHEET) as partial:
                sheet.save(partial, 'PNG')
            print(f'pictures       {folder / SHEET}')
        except UserError as error:
            problems.append(str(error))
    shared = _shared(config, opened, known)
    for name, (count, total) in shared.items():
        print(
            f'shared         {count:,} of {total:,} {name} images are also training images: {_NEW}'
        )
    splits = {split: dataclasses.asdict(scan) for split, scan in found.items()}
    values = {'data': text_of(config.data), 'problems': problems, 'splits': splits}
    values['shared'] = {name: count for name, (count, _) in shared.items()}
    write_json(folder / SUMMARY, values)
    print(f'details        {folder / SUMMARY}')
    if problems:
        print('\n'.join(['training would be refused:', *(f'  {line}' for line in problems)]))
    return 1 if problems else 0


def _shared(
    config: TrainConfig, opened: Opener, known: dict[str, Known]
) -> dict[str, tuple[int, int]]:
    """Of each evaluation that has any, the images whose bytes are trained on too, and all."""

    def of(split: str) -> list[bytes | None]:
        source = opened(config.data, split, classes=config.classes)
        names = source.read_names(range(len(source)))
        return [known[name].digest if name in known else None for name in names]

    found: dict[str, tuple[int, int]] = {}
    if not isinstance(config.data, str):  # whose images may have any names
        return found
    with contextlib.suppress(UserError):  # which is among the problems
        trained = {*of(config.train_split)} - {None}
        for name, one in config.evaluations.items():
            tested = of(one.split) if one.data is None else []
            if count := sum(digest in trained for digest in tested):
                found[name] = count, len(tested)
    return found


def _sources(config: TrainConfig, opened: Opener) -> tuple[dict[str, Source], list[str]]:
    """The splits by name, those of training first, and why training would be refused.

    Of a folder or table whose splits cannot be opened it is all images, whatever their classes.
    """
    data, problems = config.data, list[str]()
    # A function is asked for the splits of the configuration: it cannot list its own.
    own = [one for one in config.evaluations.values() if one.data is None]
    splits = [config.train_split, *(one.split for one in own)]
    names: Iterable[str] = splits
    sources = dict[str, Source]()
    with _listing(problems):
        names = open_splits(data, config.held_out) if isinstance(data, str) else splits
    for name in sorted(names, key=lambda name: name not in split_names(config.train_split)):
        if name != 'all':  # of which the others are parts
            with _listing(problems):
                sources[name] = opened(data, name)
    if problems:
        sources = {}
        if isinstance(data, str) and os.path.isdir(data):
            with contextlib.suppress(UserError):
                sources = {'all images': folders.unlabelled([data])}
        elif isinstance(data, str) and data.endswith(('.csv', '.jsonl')) and os.path.isfile(data):
            with contextlib.suppress(UserError):
                sources = {'all images': tables.unlabelled(data)}
        return sources, [*dict.fromkeys(problems)]
    parts = {}
    for split in splits:
        try:
            parts[split] = opened(data, split, classes=config.classes)
        except UserError as error:
            problems.append(str(error))
    if (train := parts.pop(config.train_split, None)) is not None:
        problems += label_problems(config, train, parts)
        if config.total is not None:
            size, images = config.batch_size, len(train)
            try:
                make_train_length(config.total, batch_size=size, num_images=images)
            except UserError as error:
                problems.append(str(error))
    return sources, problems


@contextlib.contextmanager
def _listing(problems: list[str]) -> Iterator[None]:
    """Appends the lines of a UserError instead of raising it."""
    try:
        yield
    except UserError as error:
        problems += str(error).split('\n  ')


def _lines(scan: Scan) -> list[str]:
    """What was found in a split, the long lists cut short."""
    names, counts = list(scan.classes), sorted(scan.classes.items(), key=lambda item: item[1])
    more = f', ... {names[-1]}' if len(names) > _SHOWN else ''
    lines = [f'  classes      {len(names)}: {", ".join(names[:_SHOWN])}{more}'] if names else []
    if counts:
        (fewest, few), (most, many) = counts[0], counts[-1]
        images = f'{counted(few, "image")} ({fewest}) to {many:,} ({most})'
        lines.append(f'  a class has  {counted(few, "image") if few == many else images}')
    formats = ', '.join(f'{count:,} {kind}' for kind, count in scan.formats.items())
    lines.append(f'  stored as    {formats or "nothing that can be read"}')
    if scan.height:
        height, width = ('/'.join(map(str, side)) for side in (scan.height, scan.width))
        lines.append(f'  pixels       height {height}, width {width} (minimum/median/maximum)')
    if scan.misnamed:
        lines.append(f'  misnamed     {len(scan.misnamed):,}, read all the same:')
        lines += [f'    {name}' for name in scan.misnamed[:_SHOWN]]
    if scan.duplicates:
        lines.append(f'  duplicates   {len(scan.duplicates):,}, the same bytes twice:')
        lines += [f'    {name}' for name in scan.duplicates[:_SHOWN]]
    if scan.contradictory:
        text = f'{len(scan.contradictory):,}, the same bytes in two classes:'
        lines.append(f'  contradiction {text}')
        lines += [f'    {name}' for name in scan.contradictory[:_SHOWN]]
    lines.append(f'  unreadable   {len(scan.unreadable):,}')
    return lines + [f'    {name}' for name in scan.unreadable[:_SHOWN]]


def _make_readers(config: TrainConfig) -> Callable[..., reading.ImageReader]:
    """Returns what makes readers of images as the configuration's evaluations see them.

    If the checkpoint that training starts from cannot be read, images are only resized.
    """
    try:
        origin = open_start(config)
    except UserError:  # `_sheet` raises it
        return reader_for(config, config.preprocessing or Preprocessing(), _DEFAULT_SIZE)
    model = config.model or (origin.card.model if origin else None)
    size = config.image_size or (model.image_size if model else _DEFAULT_SIZE)
    return reader_for(config, preprocessing_of(config, origin), size)


def _sheet(config: TrainConfig, opened: Opener) -> Image.Image:
    """Training images as evaluation sees them, and as training does in its first epochs."""
    source = opened(config.data, config.train_split, classes=config.classes)
    preprocessing = preprocessing_of(config, open_start(config))
    reader = _make_readers(config)
    trained = reader(source, crop=host_crop(config.augmentation, preprocessing))
    examples = _readable(reader(source))
    columns = [[image for image, _ in examples.values()]]
    targets = functools.partial(targets_of, num_classes=len(source.class_names))
    changed = jax.jit(functools.partial(augment, config=config.augmentation, targets_of=targets))
    key = purpose_key(config.seed, AUGMENT)
    with futures.ThreadPoolExecutor() as pool:
        for epoch in range(_EPOCHS):
            refs = [reading.ExampleRef(i, epoch) for i in examples]
            batch = changed(key, trained.examples(refs, pool))
            columns.append(list(np.asarray(batch['images']).round().astype(np.uint8)))
    numbers = [np.flatnonzero(x) if source.multi_label else [int(x)] for _, x in examples.values()]
    names = [', '.join(source.class_names[n] for n in of_image) for of_image in numbers]
    rows = list(zip(names, zip(*columns, strict=True), strict=True))
    return bitmaps.contact_sheet(rows, ['evaluation', *(f'epoch {e}' for e in range(_EPOCHS))])


def _readable(reader: reading.ImageReader) -> dict[int, tuple[np.ndarray, Label]]:
    """The first few examples that can be read, by index. UserError if there are none."""
    found: dict[int, tuple[np.ndarray, Label]] = {}
    for index in range(len(reader.source)):
        with contextlib.suppress(UserError):
            found[index] = reader.example(reading.ExampleRef(index))
        if len(found) == _ROWS:
            break
    if not found:
        raise UserError(f'none of {len(reader.source)} training images can be read')
    return found


if __name__ == '__main__':
    parser = app.new_parser('inspect_data', __doc__)
    app.add_config(parser)
    app.run(main, parser)
