"""Names what is in images: python -m vit_jax.predict CHECKPOINT IMAGE...

CHECKPOINT is of any kind that vit_jax.load reads, an IMAGE is a file or a folder. Every image gets
its most probable classes: the first five, or, if the model was trained with sigmoid, all above
50 %. --output=FILE.csv or --format=csv gives lines of path, class, probability, one for each of
these classes, FILE.jsonl or --format=jsonl an object for each image. --features=OUT.npz keeps the
input of the head, with the paths of the images that could be read.
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

from vit_jax.base import (
    Float,
    atomic_write,
    counted,
    require,
    require_regular,
    require_writable,
    usable,
)
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.cli import app, output
from vit_jax.data.image_preprocessing import normalize
from vit_jax.data.reading import ImageReader
from vit_jax.data.sources.folders import is_image, unlabelled
from vit_jax.distributed import meshes
from vit_jax.evaluation import head
from vit_jax.evaluation.evaluator import batches_on_all_devices
from vit_jax.pretrained import Loaded, OutputName, load

FORMATS = {'': 'text', '.txt': 'text', '.csv': 'csv', '.jsonl': 'jsonl'}  # by ending of --output
_MANY, _LIKELY = 5, 0.5  # classes, if one is right; a probability, if several may be


def main(arguments: argparse.Namespace) -> int:
    """Prints or writes the classes of each image; returns 1 if some images cannot be read."""
    suffix = pathlib.Path(arguments.output or '').suffix.lower()
    form: str = arguments.format or FORMATS.get(suffix, '')
    expected = 'expected FILE.csv, FILE.jsonl or FILE.txt, or --format'
    require(bool(form), f'--output={arguments.output}: {expected}')
    _check_paths(arguments)
    if arguments.output or arguments.features:
        output.outlive_readers()
    source = unlabelled(arguments.images)
    loaded = load(arguments.checkpoint, **app.overrides(arguments))
    print('\n'.join(loaded.report), file=sys.stderr)
    skipped = list[str]()
    options = {'max_pixels': arguments.max_pixels, 'on_skipped': skipped.append}
    reader = head.reader_for(loaded, source, **options)
    names = _class_names(loaded, arguments.class_names)
    names = first_words(names) if form == 'text' else names
    if not arguments.features:
        loaded.require_head()
    wanted: list[OutputName] = ['probabilities'] if loaded.predicts else []
    wanted += ['features'] if arguments.features else []
    paths, features, unreadable = list[str](), list[np.ndarray](), 0
    with open_output(arguments.output, form) as file:
        if form == 'csv':
            print('path,class,probability', file=file)
        every = _outputs(loaded, reader, wanted, arguments.batch_size)
        for index, outputs in enumerate(every):
            path = source.name_of(index)
            while skipped:  # threads that read the next batch may append meanwhile
                print(f'unreadable: {output.printable(skipped.pop(0))}', file=sys.stderr)
            if outputs is None:
                unreadable += 1
                continue
            if 'probabilities' in outputs:
                likely = int((outputs['probabilities'] > _LIKELY).sum())
                default = likely if loaded.card.loss == 'sigmoid' else _MANY
                best = most_probable(outputs['probabilities'], names, arguments.top or default)
                print(format_classes(path, best, form), file=file, flush=True)
            if 'features' in outputs:
                paths.append(path)
                features.append(outputs['features'])
    if arguments.features:
        arrays = {'paths': np.array(paths, str), 'features': np.array(features)}
        write_npz(pathlib.Path(arguments.features), arrays)
        print(f'features of {counted(len(paths), "image")}: {arguments.features}', file=sys.stderr)
    if arguments.output:
        print(f'written: {arguments.output}', file=sys.stderr)
    if unreadable:
        print(f'{unreadable:,} of {len(source):,} images cannot be read', file=sys.stderr)
    return 1 if unreadable else 0


def _check_paths(arguments: argparse.Namespace) -> None:
    """Raises UserError for a path that cannot be used, before anything is read."""
    for path in filter(None, (arguments.output, arguments.features)):
        is_there = pathlib.Path(path).is_file() and not arguments.overwrite
        require(not is_there, f'{path}: exists already; --overwrite replaces it')
    if arguments.features:
        kept = pathlib.Path(arguments.features)
        fits = kept.suffix == '.npz' and kept.parent.is_dir()
        require(fits, f'--features={kept}: expected NAME.npz in a directory that exists')
        require_writable(kept)
    first = pathlib.Path(arguments.checkpoint)
    is_photo = is_image(first.name) and first.is_file()
    require(not is_photo, f'{first} is an image; expected CHECKPOINT IMAGE..., in this order')


def _outputs(
    loaded: Loaded, reader: ImageReader, wanted: Sequence[OutputName], batch_size: int
) -> Iterator[dict[OutputName, np.ndarray] | None]:
    """Yields the outputs of each image by name, under a bar; None for an unreadable image."""
    batches = batches_on_all_devices(reader, batch_size)
    params = jax.device_put(loaded.params, meshes.replicated(batches.mesh))
    on_devices, left = dataclasses.replace(loaded, params=params), len(reader.source)
    # Lines go to the screen through the bar, and past it where they are piped elsewhere.
    with output.progress(redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task('images', total=left)
        for batch in batches.read(reader):
            images = normalize(batch['images'], loaded.preprocessing)
            outputs = on_devices.outputs(images, *wanted)
            for place, is_readable in enumerate(np.asarray(batch['mask'])[:left]):
                rows = {name: rows[place] for name, rows in zip(wanted, outputs, strict=True)}
                yield rows if is_readable else None
                bar.advance(task)
            left -= len(images)


@contextlib.contextmanager
def open_output(path: str | None, form: str) -> Iterator[TextIO | None]:
    """Opens a file that replaces `path` when it is complete; None is the standard output.

    A pipe or a device stays one, and a link is followed. A table begins with a byte order mark,
    without which Excel does not read UTF-8.
    """
    if path is None:
        yield None
        return
    place = pathlib.Path(path)
    special = place.exists() and not place.is_file()
    written = contextlib.nullcontext(place) if special else atomic_write(place.resolve())
    encoding = 'utf-8-sig' if form == 'csv' and not special else 'utf-8'
    with usable(path), written as target:
        with target.open('w', encoding=encoding, errors='surrogateescape') as file:
            yield file


def most_probable(
    probabilities: Float[np.ndarray, 'k'], names: Sequence[str], count: int
) -> list[tuple[str, float]]:
    """Returns the names and probabilities of the `count` most probable classes, best first."""
    best = np.argsort(-probabilities)[:count]
    return [(names[i], float(probabilities[i])) for i in best.tolist()]


def format_classes(path: str, classes: Sequence[tuple[str, float]], form: str) -> str:
    """Returns the classes of an image as text, as lines of CSV, or as a line of JSON."""
    if form == 'jsonl':
        values = [{'class': name, 'probability': share} for name, share in classes]
        return json.dumps({'path': path, 'classes': values})
    if form == 'csv':
        lines = io.StringIO()
        rows: list[tuple[str, str, Any]] = [(path, *one) for one in classes]
        rows = rows or [(path, '', '')]  # each image has a line
        csv.writer(lines, lineterminator='\n').writerows(rows)
        return lines.getvalue().rstrip('\n')
    text = ', '.join(f'{name} {share:.1%}' for name, share in classes)
    return output.printable(f'{path}  {text or f"nothing above {_LIKELY:.0%}"}')


def _class_names(loaded: Loaded, path: str | None) -> list[str]:
    """Returns the names in a file of one per line, or the checkpoint's, or numbers."""
    count = loaded.config.num_classes or 0
    if path is None:
        return list(loaded.class_names) or [f'class {i}' for i in range(count)]
    with usable(path):
        require_regular(path)
        names = pathlib.Path(path).read_text('utf-8-sig').rstrip().splitlines()
    require(len(names) == count, f'--class_names={path}: {len(names)} lines for {count} classes')
    return names


def first_words(names: Sequence[str]) -> list[str]:
    """Shortens names such as `tabby, tabby cat` to their first synonym if it is unique."""
    first = [name.partition(', ')[0] for name in names]
    uses = collections.Counter(first)
    return [one if uses[one] == 1 else name for one, name in zip(first, names, strict=True)]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('predict', __doc__)
    add = parser.add_argument
    add('checkpoint', metavar='CHECKPOINT')
    add('images', metavar='IMAGE', nargs='+', help='files or folders')
    text = 'classes of each image (5; after training with sigmoid those above 50%%)'
    add('--top', type=app.positive, metavar='N', help=text)
    add('--format', choices=['text', 'csv', 'jsonl'], help="(that of FILE's ending, or text)")
    add('--output', type=app.local_path, metavar='FILE', help='default: standard output')
    add('--class_names', metavar='FILE', help="one name per line; default: the checkpoint's")
    add('--features', type=app.local_path, metavar='OUT.npz', help='keep paths and features')
    add('--overwrite', action='store_true', help='replace FILE and OUT.npz if they exist')
    app.add_reading(parser)
    app.add_overrides(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True)
