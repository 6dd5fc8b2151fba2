"""Looks at images before training: python -m vit_jax.inspect_data --config=... --config.data=DATA.

Prints splits, classes, counts, sizes, unreadable files, images that are stored twice, and all that
would stop a training. Writes it to WORKDIR/data.json, and draws some images in WORKDIR/data.png, as
evaluation and training see them.
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures

import jax
import numpy as np
from PIL import Image
from rich.markup import escape

from vit_jax.base import UserError, atomic_write, counted, require, storage, usable, write_json
from vit_jax.base.records import text_of, to_dict
from vit_jax.cli import app, output
from vit_jax.config import TrainConfig
from vit_jax.data import inspection, loading
from vit_jax.data.augmentation import augment, host_crop
from vit_jax.data.inspection import Known, Scan
from vit_jax.data.sources.base import Source, split_names
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
_LISTS = {  # the lists of a Scan, and what is printed after their counts
    'misnamed': ', readable with the ending of another format:',
    'duplicates': ', the same bytes twice:',
    'contradictory': ', the same bytes in two classes:',
    'unreadable': '',
}


def main(arguments: argparse.Namespace) -> int:
    """Scans every split, prints a summary, draws images; returns 1 if training would fail."""
    config, folder = arguments.config, storage.folder(arguments.workdir)
    workdirs.require_apart(arguments.workdir, to_dict(config))
    if not storage.is_remote(folder):
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
    opener, problems = make_opener(config.held_out), list[str]()
    sources = _open_sources(config, opener, problems)
    start = None
    with _collecting(problems):
        start = open_start(config)
    preprocessing = preprocessing_of(config, start)
    model = config.model or (start.card.model if start else None)
    size = config.image_size or (model.image_size if model else _DEFAULT_SIZE)
    reader_of = reader_for(config, preprocessing, size)
    scans, readable_images = _scan(sources, reader_of)
    unreadable = sum(len(scan.unreadable) for scan in scans.values())
    if unreadable and config.loader.on_unreadable != 'skip':
        remedy = 'repair or remove, or leave out by --config.loader.on_unreadable=skip'
        problems.append(f'{counted(unreadable, "image")} cannot be read: {remedy}')
    with _collecting(problems):
        source = opener(config.data, config.train_split, classes=config.classes)
        names = source.read_names(range(len(source)))
        readable = [index for index, name in enumerate(names) if name in readable_images]
        require(bool(readable), f'none of {len(source)} training images can be read')
        crop = host_crop(config.augmentation, preprocessing)
        sheet = _draw_sheet(
            config, reader_of(source), reader_of(source, crop=crop), readable[:_ROWS]
        )
        with atomic_write(folder / SHEET) as partial:
            sheet.save(partial, 'PNG')
        print(f'pictures       {folder / SHEET}')
    splits = {split: dataclasses.asdict(scan) for split, scan in scans.items()}
    values = {'data': text_of(config.data), 'problems': problems, 'splits': splits}
    write_json(folder / SUMMARY, values)
    print(f'details        {folder / SUMMARY}')
    if problems:
        print('\n  '.join(['training would be rejected:', *problems]))
    return 1 if problems else 0


@contextlib.contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    """Appends the lines of a UserError that are new, instead of raising it."""
    try:
        yield
    except UserError as error:
        problems += [line for line in str(error).split('\n  ') if line not in problems]


def _open_sources(config: TrainConfig, opener: Opener, problems: list[str]) -> dict[str, Source]:
    """Opens all splits, the training split first; appends why training would be rejected."""
    data, sources = config.data, dict[str, Source]()
    own = [one.split for one in config.evaluations.values() if one.data is None]
    first = split_names(config.train_split)
    with _collecting(problems):
        # A function cannot list its splits.
        every: Iterable[str] = [config.train_split, *own]
        every = open_splits(data, config.held_out) if isinstance(data, str) else every
        for name in sorted({*every} - {'all'}, key=lambda name: (name not in first, name)):
            with _collecting(problems):
                sources[name] = opener(data, name)
    if problems:
        return sources
    parts = dict[str, Source]()
    for split in [config.train_split, *own]:
        with _collecting(problems):
            parts[split] = opener(data, split, classes=config.classes)
    if (train := parts.pop(config.train_split, None)) is not None:
        problems += label_problems(config, train, parts)
        with _collecting(problems):
            if config.total is not None:
                size, images = config.batch_size, len(train)
                make_train_length(config.total, batch_size=size, num_images=images)
    return sources


def _scan(
    sources: dict[str, Source], reader_of: Callable[..., loading.ImageReader]
) -> tuple[dict[str, Scan], dict[str, Known]]:
    """Scans and prints every split, under a progress bar; also returns the readable images."""
    scans, readable_images = dict[str, Scan](), dict[str, Known]()
    with futures.ThreadPoolExecutor(loading.cores()) as pool, output.progress() as bar:
        for split, source in sources.items():
            done = functools.partial(bar.advance, bar.add_task(escape(split), total=len(source)))
            scans[split] = inspection.scan(reader_of(source), pool, done, known=readable_images)
            print(f'{split}: {counted(len(source), "image")}')
            print('\n'.join(_describe(scans[split])))
    return scans, readable_images


def _describe(scan: Scan) -> Iterator[str]:
    """Yields the lines about a split, the long lists cut short."""
    if scan.classes:
        names = [*scan.classes]
        more = f', ... {names[-1]}' if len(names) > _SHOWN else ''
        yield f'  classes      {len(names)}: {", ".join(names[:_SHOWN])}{more}'
        fewest, most = (choose(names, key=scan.classes.__getitem__) for choose in (min, max))
        images = counted(scan.classes[fewest], 'image')
        if scan.classes[fewest] < scan.classes[most]:
            images += f' ({fewest}) to {scan.classes[most]:,} ({most})'
        yield f'  a class has  {images}'
    formats = ', '.join(f'{count:,} {kind}' for kind, count in scan.formats.items())
    yield f'  stored as    {formats or "nothing that can be read"}'
    if scan.height:
        height, width = ('/'.join(map(str, side)) for side in (scan.height, scan.width))
        yield f'  pixels       height {height}, width {width} (minimum/median/maximum)'
    for name, text in _LISTS.items():
        images = getattr(scan, name)
        if images or name == 'unreadable':
            yield f'  {name:<12} {len(images):,}{text}'
            yield from (f'    {image}' for image in images[:_SHOWN])


def _draw_sheet(
    config: TrainConfig,
    evaluated: loading.ImageReader,
    trained: loading.ImageReader,
    indices: Sequence[int],
) -> Image.Image:
    """Draws training images as evaluation sees them, and as training does in its first epochs."""
    source = evaluated.source
    examples = [evaluated.example(loading.ExampleRef(index)) for index in indices]
    columns = [[image for image, _ in examples]]
    targets = functools.partial(targets_of, num_classes=len(source.class_names))
    augmented = jax.jit(functools.partial(augment, config=config.augmentation, targets_of=targets))
    key = purpose_key(config.seed, AUGMENT)
    with futures.ThreadPoolExecutor() as pool:
        for epoch in range(_EPOCHS):
            refs = [loading.ExampleRef(i, epoch) for i in indices]
            batch = augmented(key, trained.examples(refs, pool))
            columns.append(list(np.asarray(batch['images']).round().astype(np.uint8)))
    numbers = [np.flatnonzero(x) if source.multi_label else [int(x)] for _, x in examples]
    names = [', '.join(source.class_names[n] for n in of_image) for of_image in numbers]
    rows = list(zip(names, zip(*columns, strict=True), strict=True))
    return bitmaps.contact_sheet(rows, ['evaluation', *(f'epoch {e}' for e in range(_EPOCHS))])


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('inspect_data', __doc__)
    app.add_config(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser())
