"""Names what is in images: python -m vit_jax.predict CHECKPOINT IMAGE...

CHECKPOINT is of any kind that vit_jax.load reads, an IMAGE is a file or a folder. Prints the five
most probable classes of each image, or, if the model was trained with sigmoid, all above 50 %.
--output=FILE.csv or --format=csv writes a line of path, class and probability for each class;
FILE.jsonl or --format=jsonl writes an object for each image. --features=OUT.npz writes the input of
the head, with the paths of the images.
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Batch, Float, atomic_write, counted, require, usable
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.cli import app, output
from vit_jax.data.image_preprocessing import normalize
from vit_jax.data.sources.folders import unlabeled
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
    source = unlabeled(arguments.images)
    loaded = load(arguments.checkpoint, **app.overrides(arguments))
    print('\n'.join(loaded.report), file=sys.stderr)
    unreadable = list[str]()
    options = {'max_pixels': arguments.max_pixels, 'on_skipped': unreadable.append}
    reader = head.reader_for(loaded, source, **options)
    names = _read_class_names(loaded, arguments.class_names)
    names = shorten_names(names) if form == 'text' else names
    if not arguments.features:
        loaded.require_head()
    wanted: list[OutputName] = ['probabilities'] if loaded.predicts else []
    wanted += ['features'] if arguments.features else []
    paths, features = list[str](), list[np.ndarray]()
    batches = batches_on_all_devices(reader, arguments.batch_size)
    # A terminal shows printed lines above the bar.
    bar = output.progress(redirect_stdout=sys.stdout.isatty())
    with bar, open_output(arguments.output, form) as file:
        if form == 'csv':
            print('path,class,probability', file=file)
        total = -(-len(source) // batches.batch_size)
        tracked = bar.track(batches.read(reader), total=total, description='batches')
        for index, outputs in _compute_outputs(loaded, wanted, batches.mesh, tracked):
            path = source.name_of(index)
            if 'probabilities' in outputs:
                likely = int((outputs['probabilities'] > _LIKELY).sum())
                default = likely if loaded.card.loss == 'sigmoid' else _MANY
                best = most_probable(outputs['probabilities'], names, arguments.top or default)
                write_classes(file, path, best, form)
            if 'features' in outputs:
                paths.append(path)
                features.append(outputs['features'])
    if arguments.features:
        arrays = {'paths': np.array(paths, str), 'features': np.array(features)}
        write_npz(pathlib.Path(arguments.features), arrays)
        print(f'features of {counted(len(paths), "image")}: {arguments.features}', file=sys.stderr)
    if arguments.output:
        print(f'written: {arguments.output}', file=sys.stderr)
    return output.report_unreadable(unreadable, len(source))


def _check_paths(arguments: argparse.Namespace) -> None:
    """Raises UserError for a path that cannot be used, before anything is read."""
    for path in filter(None, (arguments.output, arguments.features)):
        exists = os.path.exists(path) and not arguments.overwrite
        require(not exists, f'{path}: exists already; --overwrite replaces it')
        can_write = os.access(pathlib.Path(path).absolute().parent, os.W_OK)
        require(can_write, f'{path}: expected a file in an existing folder that can be written')


def _compute_outputs(
    loaded: Loaded, wanted: Sequence[OutputName], mesh: Mesh, batches: Iterable[Batch]
) -> Iterator[tuple[int, dict[OutputName, np.ndarray]]]:
    """Yields the index and the outputs of each image that can be read."""
    params = jax.device_put(loaded.params, meshes.replicated(mesh))
    on_devices = dataclasses.replace(loaded, params=params)
    for batch in batches:
        images = normalize(batch['images'], loaded.preprocessing)
        outputs = dict(zip(wanted, on_devices.outputs(images, *wanted), strict=True))
        indices = np.asarray(batch['example'])
        for row in np.flatnonzero(batch['mask']).tolist():
            yield int(indices[row]), {name: values[row] for name, values in outputs.items()}


@contextlib.contextmanager
def open_output(path: str | None, form: str) -> Iterator[Any]:
    """Opens stdout (None), or a file that replaces `path` when it is complete.

    Tables in files start with a byte order mark, which Excel needs for UTF-8.
    """
    if path is None:
        yield sys.stdout
        return
    encoding = 'utf-8-sig' if form == 'csv' else 'utf-8'
    with (
        atomic_write(pathlib.Path(path)) as partial,
        open(partial, 'w', encoding=encoding, errors='surrogateescape') as file,
    ):
        yield file


def most_probable(
    probabilities: Float[np.ndarray, 'k'], names: Sequence[str], count: int
) -> list[tuple[str, float]]:
    """Returns the names and probabilities of the `count` most probable classes, best first."""
    best = np.argsort(-probabilities)[:count]
    return [(names[i], float(probabilities[i])) for i in best.tolist()]


def write_classes(file: Any, path: str, classes: Sequence[tuple[str, float]], form: str) -> None:
    """Writes the classes of an image as text, as lines of CSV, or as a line of JSON."""
    if form == 'csv':
        rows = [[path, name, str(share)] for name, share in classes]
        csv.writer(file, lineterminator='\n').writerows(rows or [[path, '', '']])
    elif form == 'jsonl':
        values = [{'class': name, 'probability': share} for name, share in classes]
        print(json.dumps({'path': path, 'classes': values}), file=file)
    else:
        text = ', '.join(f'{name} {share:.1%}' for name, share in classes)
        line = f'{path}  {text or f"nothing above {_LIKELY:.0%}"}'
        print(output.printable(line), file=file)
    file.flush()


def _read_class_names(loaded: Loaded, path: str | None) -> list[str]:
    """Returns the names in a file of one per line, or the checkpoint's, or numbers."""
    count = loaded.config.num_classes or 0
    if path is None:
        return list(loaded.class_names) or [f'class {i}' for i in range(count)]
    with usable(path):
        names = pathlib.Path(path).read_text('utf-8-sig').rstrip().splitlines()
    require(len(names) == count, f'--class_names={path}: {len(names)} lines for {count} classes')
    return names


def shorten_names(names: Sequence[str]) -> list[str]:
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
    text = 'classes of each image (5; of a model trained with sigmoid those above 50%%)'
    add('--top', type=app.positive, metavar='N', help=text)
    add('--format', choices=['text', 'csv', 'jsonl'], help="(that of FILE's ending, or text)")
    add('--output', type=app.local_path, metavar='FILE', help='default: standard output')
    add('--class_names', metavar='FILE', help="one name per line; default: the checkpoint's")
    add('--features', type=app.local_path, metavar='OUT.npz', help='write paths and features')
    add('--overwrite', action='store_true', help='replace FILE and OUT.npz if they exist')
    app.add_reading(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True)
