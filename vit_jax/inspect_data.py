"""Looks at images before training: python -m vit_jax.inspect_data --config=... --config.data=DATA.

Says what was found: splits, classes, counts, sizes, files that cannot be read. Writes the whole of
it to WORKDIR/data.json, and to WORKDIR/data.png some images as evaluation and as training see them.
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from concurrent import futures

import cv2
import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from vit_jax.base.atomic_files import write_json
from vit_jax.base.errors import UserError
from vit_jax.command_line import app
from vit_jax.config import TrainConfig
from vit_jax.data import inspection, loading
from vit_jax.data.augmentation import augment
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.inspection import Scan
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.opening import make_opener, open_splits
from vit_jax.parallel.processes import Job
from vit_jax.runs import setups
from vit_jax.training.losses import targets_of
from vit_jax.training.update import AUGMENT, purpose_key

SHEET, SUMMARY = 'data.png', 'data.json'
_ROWS, _EPOCHS, _DEFAULT_SIZE = 8, 7, (224, 224)
_SHOWN = 5  # of a long list


def run(config: TrainConfig, workdir: str, accept_changes: bool, job: Job) -> None:
    """Scans every split, prints what a person should know, draws the sheet."""
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    opened = make_opener(config.held_out)
    sheet = _sheet(config, opened)
    cv2.imwrite(str(folder / SHEET), sheet[..., ::-1])
    found = {}
    with (
        futures.ThreadPoolExecutor(loading.cores()) as pool,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar,
    ):
        for split in open_splits(config.data, config.held_out):
            source = opened(config.data, split)
            task = bar.add_task(split, total=len(source))
            scan = inspection.scan(source, pool, functools.partial(bar.advance, task))
            print(f'{split}: {len(source):,} images\n' + '\n'.join(_lines(scan)))
            found[split] = scan.values()
    write_json(folder / SUMMARY, {'data': config.data, 'splits': found})
    print(f'all of it      {folder / SUMMARY}\na look at it   {folder / SHEET}')


def _lines(scan: Scan) -> list[str]:
    """What was found in a split, the long lists cut short."""
    counts = sorted(scan.class_counts.items(), key=lambda item: item[1])
    values = scan.values()
    lines = [f'  classes      {len(counts)}: {_some(list(scan.class_counts))}']
    if counts:
        (fewest, few), (most, many) = counts[0], counts[-1]
        lines.append(f'  a class has  {few:,} images ({fewest}) to {many:,} ({most})')
    formats = ', '.join(f'{count:,} {kind}' for kind, count in scan.formats.items())
    lines.append(f'  stored as    {formats or "nothing that can be read"}')
    if scan.heights:
        sides = [f'{name} {"/".join(map(str, values[name]))}' for name in ('height', 'width')]
        lines.append(f'  pixels       {", ".join(sides)} (least/median/greatest)')
    if scan.misnamed:
        lines.append(f'  misnamed     {len(scan.misnamed):,}, read all the same:')
        lines += [f'    {name}' for name in scan.misnamed[:_SHOWN]]
    lines.append(f'  unreadable   {len(scan.unreadable):,}')
    lines += [f'    {name}' for name in scan.unreadable[:_SHOWN]]
    return lines


def _some(names: list[str]) -> str:
    shown = ', '.join(names[:_SHOWN])
    return shown + (f', ... {names[-1]}' if len(names) > _SHOWN else '')


def _sheet(config: TrainConfig, opened: Callable[[str, str], Source]) -> np.ndarray:
    """Training images: as evaluation sees them, and as training does in its first epochs."""
    source = opened(config.data, config.train_split)
    size, preprocessing = _seen_by_model(config)
    readers = {
        crop: loading.ImageReader(
            source=source,
            crop=kind,
            size=size,
            exif_rotation=preprocessing.exif_rotation,
            seed=config.seed,
        )
        for crop, kind in (
            ('evaluation', preprocessing.crop),
            ('training', config.augmentation.crop or preprocessing.crop),
        )
    }
    indices = _readable(readers['evaluation'])
    columns = [[readers['evaluation'].example(loading.ExampleRef(i))[0] for i in indices]]
    targets = functools.partial(targets_of, num_classes=len(source.class_names))
    changed = jax.jit(functools.partial(augment, config=config.augmentation, targets_of=targets))
    key = purpose_key(config.seed, AUGMENT)
    with futures.ThreadPoolExecutor() as pool:
        for epoch in range(_EPOCHS):
            draws = [loading.ExampleRef(i, epoch) for i in indices]
            batch = changed(key, readers['training'].examples(draws, pool))
            columns.append(list(np.asarray(batch['images']).round().astype(np.uint8)))
    names = [_class_name(source, i) for i in indices]
    rows = list(zip(names, zip(*columns, strict=True), strict=True))
    heads = ['evaluation', *(f'epoch {epoch}' for epoch in range(_EPOCHS))]
    return inspection.contact_sheet(rows, heads)


def _seen_by_model(config: TrainConfig) -> tuple[tuple[int, int], Preprocessing]:
    """Size and preprocessing of the images that the configured network takes."""
    origin = setups.read_origin(config)
    model = config.model or (origin.card.model if origin else None)
    size = config.image_size or (model.image_size if model else _DEFAULT_SIZE)
    return size, setups.preprocessing_of(config, origin)


def _readable(reader: loading.ImageReader) -> list[int]:
    """The first few images that can be read. Raises UserError where there is none."""
    indices: list[int] = []
    for index in range(len(reader.source)):
        try:
            reader.example(loading.ExampleRef(index))
        except ValueError:
            continue
        indices.append(index)
        if len(indices) == _ROWS:
            break
    if not indices:
        raise UserError(f'none of {len(reader.source)} training images can be read')
    return indices


def _class_name(source: Source, index: int) -> str:
    label = source.read(index)[1]
    numbers = np.flatnonzero(label) if source.multi_label else [int(label)]
    return ', '.join(source.class_names[number] for number in numbers)


if __name__ == '__main__':
    app.train(run, __doc__ or '')
