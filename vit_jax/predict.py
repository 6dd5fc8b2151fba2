"""Names what is in images: python -m vit_jax.predict CHECKPOINT IMAGE...

CHECKPOINT is of any kind that vit_jax.load reads, an IMAGE is a file or a folder. Every image gets
its most probable classes: the first five, or, of a network that was trained with sigmoid, all above
50 %. --output=FILE.csv or --format=csv gives lines of path, class, probability, one for each of
these classes, FILE.jsonl or --format=jsonl an object an image. --features=OUT.npz keeps what the
head is given, with the paths of the images that could be read.
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import io
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from vit_jax.base import (
    Bool,
    Float,
    UserError,
    atomic_write,
    counted,
    require_regular,
    require_writable,
    usable,
)
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.cli import app, output
from vit_jax.data.image_decoding import formats_by_ending
from vit_jax.data.image_preprocessing import normalize
from vit_jax.data.reading import ImageReader
from vit_jax.data.sources.folders import unlabelled
from vit_jax.distributed import meshes
from vit_jax.evaluation import head
from vit_jax.evaluation.evaluator import batches_on_all_devices
from vit_jax.pretrained import Loaded, OutputName, load

Found = list[tuple[str, float]]  # classes and their probabilities, the most probable first
_MANY, _LIKELY = 5, 0.5  # classes, where one is right; a probability, where several may be


def main(arguments: argparse.Namespace) -> int:
    """Says what is in each image; 1 where some cannot be read, 0 otherwise."""
    form = _choose_format(arguments.format, arguments.output)
    kept = pathlib.Path(arguments.features or 'unused.npz')
    if kept.suffix != '.npz' or not kept.parent.is_dir():
        raise UserError(f'--features={kept}: expected NAME.npz in a directory that exists')
    if arguments.features:
        require_writable(kept)
    for path in filter(None, (arguments.output, arguments.features)):
        if pathlib.Path(path).is_file() and not arguments.overwrite:
            raise UserError(f'{path}: exists already; --overwrite replaces it')
    if arguments.features or arguments.output:
        output.outlive_readers()
    first = pathlib.Path(arguments.checkpoint)
    if first.suffix.lower() in formats_by_ending() and first.is_file():
        raise UserError(f'{first} is an image; expected the checkpoint first: CHECKPOINT IMAGE...')
    source = unlabelled(arguments.images)
    loaded = load(arguments.checkpoint, **app.overrides(arguments))
    print('\n'.join(loaded.report), file=sys.stderr)
    skipped = list[str]()
    options = {'max_pixels': arguments.max_pixels, 'on_skipped': skipped.append}
    reader = head.reader_for(loaded, source, **options)
    names = _class_names(loaded, arguments.class_names)
    names = _first_words(names) if form == 'text' else names
    if not arguments.features:
        loaded.require_head()
    several = loaded.card.loss == 'sigmoid'
    wanted: list[OutputName] = ['probabilities'] if loaded.predicts else []
    wanted += ['features'] if arguments.features else []
    paths: list[str] = []
    rows, unreadable, index = [], 0, 0
    with _opened(arguments.output) as file:
        if form == 'csv':
            print('path,class,probability', file=file)
        for mask, outputs in _outputs(loaded, reader, wanted, arguments.batch_size):
            for position, readable in enumerate(mask):
                unreadable += not readable
                if readable and loaded.predicts:
                    shares = outputs['probabilities'][position]
                    found = _found(shares, names, arguments.top, several=several)
                    print(_formatted(source.name_of(index), found, form), file=file)
                index += 1
            if arguments.features:
                rows.append(outputs['features'][mask])
                paths += [
                    source.name_of(index - len(mask) + i) for i in np.flatnonzero(mask).tolist()
                ]
            (file or sys.stdout).flush()
            while skipped:  # threads that read the next batch may append meanwhile
                print(f'unreadable: {output.printable(skipped.pop(0))}', file=sys.stderr)
    if arguments.features:
        arrays = {'paths': np.array(paths, str), 'features': np.concatenate(rows)}
        write_npz(pathlib.Path(arguments.features), arrays)
        print(f'features of {counted(len(paths), "image")}: {arguments.features}', file=sys.stderr)
    if arguments.output:
        print(f'written: {arguments.output}', file=sys.stderr)
    if unreadable:
        print(f'{unreadable:,} of {len(source):,} images cannot be read', file=sys.stderr)
    return 1 if unreadable else 0


def _outputs(
    loaded: Loaded, reader: ImageReader, wanted: Sequence[OutputName], batch_size: int
) -> Iterator[tuple[Bool[np.ndarray, 'b'], dict[OutputName, np.ndarray]]]:
    """Batch by batch, under a bar: which images could be read, and the outputs by name."""
    batches = batches_on_all_devices(reader, batch_size)
    params = jax.device_put(loaded.params, meshes.replicated(batches.mesh))
    on_devices, left = dataclasses.replace(loaded, params=params), len(reader.source)
    # Lines go to the screen through the bar, and past it where they are piped elsewhere.
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    shown, redirected = sys.stderr.isatty(), sys.stdout.isatty()
    with Progress(console=console, disable=not shown, redirect_stdout=redirected) as bar:
        task = bar.add_task('images', total=left)
        for batch in batches.read(reader):
            images = normalize(batch['images'], loaded.preprocessing)
            outputs = on_devices.outputs(images, *wanted)
            mask = np.asarray(batch['mask'])[:left]
            yield mask, {n: rows[:left] for n, rows in zip(wanted, outputs, strict=True)}
            left -= len(mask)
            bar.update(task, advance=len(mask))


def _choose_format(given: str | None, output: str | None) -> str:
    """Returns the given format, or the one that the file's ending names."""
    ending = pathlib.Path(output or '').suffix.lower()
    formats = {'': 'text', '.txt': 'text', '.csv': 'csv', '.jsonl': 'jsonl'}
    if given is None and ending not in formats:
        raise UserError(
            f'--output={output}: expected FILE.csv, FILE.jsonl or FILE.txt, or --format'
        )
    if given and ending and given != formats.get(ending, given):
        raise UserError(f'--output={output}: expected {formats[ending]}; got --format={given}')
    return given or formats[ending]


@contextlib.contextmanager
def _opened(path: str | None) -> Iterator[TextIO | None]:
    """The file that takes the place of `path` when all is written; None: the standard output.

    A pipe, a device or a link stays what it is. A .csv file begins with a byte order mark: without
    it Excel does not read UTF-8.
    """
    if path is None:
        yield None
        return
    place = pathlib.Path(path)
    special = place.exists() and not place.is_file()
    written = contextlib.nullcontext(place) if special else atomic_write(place.resolve())
    encoding = 'utf-8-sig' if place.suffix.lower() == '.csv' and not special else 'utf-8'
    with usable(path), written as target:
        with target.open('w', encoding=encoding, errors='surrogateescape') as file:
            yield file


def _found(
    shares: Float[np.ndarray, 'k'], names: Sequence[str], top: int | None, *, several: bool
) -> Found:
    """The `top` most probable; by default five classes, where several may be right the likely."""
    likely = int((shares > _LIKELY).sum()) if several else _MANY
    best = np.argsort(-shares)[: likely if top is None else top]
    return [(names[i], float(shares[i])) for i in best.tolist()]


def _formatted(path: str, found: Found, form: str) -> str:
    """What is in the image of a path: text, lines of CSV, or a line of JSON."""
    if form == 'jsonl':
        classes = [{'class': name, 'probability': share} for name, share in found]
        return json.dumps({'path': path, 'classes': classes})
    if form == 'csv':
        lines = io.StringIO()
        table = csv.writer(lines, lineterminator='\n')  # an image without a likely class has a line
        rows: list[list[Any]] = [[path, *one] for one in found]
        table.writerows(rows or [[path, '', '']])
        return lines.getvalue().rstrip('\n')
    text = ', '.join(f'{name} {share:.1%}' for name, share in found)
    return output.printable(f'{path}  {text or f"nothing above {_LIKELY:.0%}"}')


def _class_names(loaded: Loaded, path: str | None) -> list[str]:
    """The names from a file of one a line, or those of the checkpoint, or numbers."""
    count = loaded.config.num_classes or 0
    if path is None:
        return list(loaded.class_names) or [f'class {i}' for i in range(count)]
    with usable(path):
        require_regular(path)
        names = pathlib.Path(path).read_text('utf-8-sig').rstrip().splitlines()
    if len(names) != count:
        raise UserError(f'--class_names={path}: {len(names)} lines for {count} classes')
    return names


def _first_words(names: Sequence[str]) -> list[str]:
    """Of names such as `tabby, tabby cat` what stands first, where no other begins with it."""
    first = [name.partition(', ')[0] for name in names]
    uses = collections.Counter(first)
    return [one if uses[one] == 1 else name for one, name in zip(first, names, strict=True)]


def _parser() -> argparse.ArgumentParser:
    parser = app.new_parser('predict', __doc__)
    parser.add_argument('checkpoint', metavar='CHECKPOINT')
    parser.add_argument('images', metavar='IMAGE', nargs='+', help='files or folders')
    text = 'classes of each image (5; after training with sigmoid those above 50%%)'
    parser.add_argument('--top', type=app.positive, metavar='N', help=text)
    text = "(that of FILE's ending, or text)"
    parser.add_argument('--format', choices=['text', 'csv', 'jsonl'], help=text)
    text = 'default: standard output'
    parser.add_argument('--output', type=app.local_path, metavar='FILE', help=text)
    text = "one name a line; default: the checkpoint's"
    parser.add_argument('--class_names', metavar='FILE', help=text)
    text = 'keep paths and features'
    parser.add_argument('--features', type=app.local_path, metavar='OUT.npz', help=text)
    text = 'replace FILE and OUT.npz where they exist'
    parser.add_argument('--overwrite', action='store_true', help=text)
    app.add_reading(parser)
    app.add_overrides(parser)
    return parser


if __name__ == '__main__':
    app.run(main, _parser(), only_prints=True)
