"""Classifies images: python -m vit_jax.predict CHECKPOINT IMAGE...

CHECKPOINT has any format that vit_jax.load reads, or is a name such as augreg:B/16 or
hf:OWNER/NAME (docs/checkpoint_names.md). IMAGE is a file or a folder. Prints the five most
probable classes of each image. If the model was trained with a sigmoid loss, it prints all classes
above 50 % instead.
--format=csv or --out=FILE.csv writes one line (path, class, probability) per class.
--format=jsonl or --out=FILE.jsonl writes one JSON object per image. --features=OUT.npz writes
the features (the input of the head) and the paths of the images.
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import io
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.base import Batch, Float, atomic_write, plural, require, usable
from vit_jax.base.files import ESCAPE, is_special, read_text, would_replace
from vit_jax.base.progress import progress_bar
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.cli import app, output
from vit_jax.data.image_preprocessing import normalize
from vit_jax.data.loading import ImageReader
from vit_jax.data.sources.folders import unlabeled_source
from vit_jax.distributed import meshes
from vit_jax.evaluation import head
from vit_jax.evaluation.evaluator import batches_on_all_devices
from vit_jax.pretrained import LoadedModel, OutputName, load

FORMATS = {'': 'text', '.txt': 'text', '.csv': 'csv', '.jsonl': 'jsonl'}  # by suffix of --out
_TOP_K = 5  # number of classes for softmax
_THRESHOLD = 0.5  # minimal probability for sigmoid


def main(arguments: argparse.Namespace) -> int:
    """Prints or writes the classes of each image. Returns 1 if some images are unreadable."""
    suffix = pathlib.Path(arguments.out or '').suffix.lower()
    form: str = arguments.format or FORMATS.get(suffix, '')
    require(
        bool(form),
        f'--out={arguments.out}: unknown ending; '
        'expected FILE.csv, FILE.jsonl or FILE.txt, or --format',
    )
    require_new((arguments.out, arguments.features), overwrite=arguments.overwrite)
    if arguments.out or arguments.features:
        output.ignore_closed_pipes()
    source = unlabeled_source(arguments.images)
    loaded = load(arguments.checkpoint, **app.checkpoint_options(arguments))
    print('\n'.join(loaded.report), file=sys.stderr)
    unreadable: list[str] = []
    options = {'max_pixels': arguments.max_pixels, 'on_skipped': unreadable.append}
    reader = head.make_model_reader(loaded, source, **options)
    names = _read_class_names(loaded, arguments.class_names)
    if form == 'text':
        names = shorten_names(names)
    if not arguments.features:
        require(
            loaded.config.num_classes is not None,
            f'{arguments.checkpoint}: the checkpoint has no head; '
            'pass --features=OUT.npz to write features, or fine-tune it',
        )
        loaded.require_head()
    arrays = _write_outputs(loaded, reader, arguments, form=form, names=names)
    if arguments.features:
        write_npz(pathlib.Path(arguments.features), arrays)
        images = plural(len(arrays['paths']), 'image')
        print(f'features of {images}: {arguments.features}', file=sys.stderr)
    if arguments.out:
        print(f'written: {arguments.out}', file=sys.stderr)
    return output.report_unreadable(unreadable, len(source))


def _write_outputs(
    loaded: LoadedModel,
    reader: ImageReader,
    arguments: argparse.Namespace,
    *,
    form: str,
    names: Sequence[str],
) -> dict[str, np.ndarray]:
    """Prints or writes the classes of each readable image, if the model is a classifier.

    Returns the arrays `paths` and `features`, which are empty without --features.
    """
    wanted: list[OutputName] = []
    if loaded.is_classifier:
        wanted.append('probabilities')
    if arguments.features:
        wanted.append('features')
    paths: list[str] = []
    features: list[np.ndarray] = []
    batches = batches_on_all_devices(reader, arguments.batch_size)
    # On a terminal, printed lines appear above the progress bar.
    bar = progress_bar(redirect_stdout=sys.stdout.isatty())
    with bar, open_output(arguments.out, form) as file:
        if form == 'csv':
            print('path,class,probability', file=file)
        num_batches = -(-len(reader.source) // batches.batch_size)
        tracked = bar.track(batches.read(reader), total=num_batches, description='batches')
        for index, outputs in _compute_outputs(loaded, wanted, batches.mesh, tracked):
            path = reader.source.name_of(index)
            if 'probabilities' in outputs:
                probabilities = outputs['probabilities']
                likely = int((probabilities > _THRESHOLD).sum())
                default = likely if loaded.card.loss == 'sigmoid' else _TOP_K
                best = most_probable(probabilities, names, arguments.top or default)
                write_classes(file, path, best, form)
            if 'features' in outputs:
                paths.append(path)
                features.append(outputs['features'])
    return {'paths': np.array(paths, str), 'features': np.array(features)}


def require_new(paths: Iterable[str | None], *, overwrite: bool) -> None:
    """Raises UserError if an output file exists and `overwrite` is False, or is not writable."""
    given = [path for path in paths if path is not None]
    with usable(', '.join(given)):
        files = [os.path.realpath(path) for path in given if not is_special(path)]
    require(len({*files}) == len(files), f'{", ".join(given)}: expected distinct files')
    for path in given:
        require(not os.path.isdir(path), f'{path}: a folder; expected a file')
        exists = would_replace(path) and not overwrite
        require(not exists, f'{path}: exists already; pass --overwrite to replace it')
        written = path if is_special(path) else os.path.dirname(os.path.realpath(path))
        require(os.access(written, os.W_OK), f'{path}: its folder is missing or not writable')


def _compute_outputs(
    loaded: LoadedModel, wanted: Sequence[OutputName], mesh: Mesh, batches: Iterable[Batch]
) -> Iterator[tuple[int, dict[OutputName, np.ndarray]]]:
    """Yields the index and the outputs of each readable image."""
    params = jax.device_put(loaded.params, meshes.replicated(mesh))
    on_devices = dataclasses.replace(loaded, params=params)
    for batch in batches:
        images = normalize(batch['images'], loaded.preprocessing)
        outputs = dict(zip(wanted, on_devices.outputs(images, *wanted), strict=True))
        indices = np.asarray(batch['example'])
        for row in np.flatnonzero(batch['mask']).tolist():
            yield int(indices[row]), {name: batched[row] for name, batched in outputs.items()}


@contextlib.contextmanager
def open_output(path: str | None, output_format: str) -> Iterator[Any]:
    """Opens stdout if `path` is None, else a file that replaces `path` when it is complete.

    CSV files start with a byte order mark, which Excel needs to detect UTF-8.
    """
    if path is None:
        yield sys.stdout
        return
    encoding = 'utf-8-sig' if output_format == 'csv' else 'utf-8'
    with atomic_write(pathlib.Path(path)) as file:
        text_file = io.TextIOWrapper(file, encoding, errors=ESCAPE, write_through=True)
        yield text_file
        text_file.detach()  # `atomic_write` closes the file


def most_probable(
    probabilities: Float[np.ndarray, 'k'], names: Sequence[str], count: int
) -> list[tuple[str, float]]:
    """Returns the names and probabilities of the `count` most probable classes, best first."""
    best = np.argsort(-probabilities)[:count]
    return [(names[i], float(probabilities[i])) for i in best.tolist()]


def write_classes(file: Any, path: str, classes: Sequence[tuple[str, float]], form: str) -> None:
    """Writes the classes of one image as one line of text, CSV lines, or one line of JSON."""
    if form == 'csv':
        rows = [[path, name, str(share)] for name, share in classes]
        csv.writer(file, lineterminator='\n').writerows(rows or [[path, '', '']])
    elif form == 'jsonl':
        entries = [{'class': name, 'probability': share} for name, share in classes]
        print(json.dumps({'path': path, 'classes': entries}), file=file)
    else:
        shares = ', '.join(f'{name} {share:.1%}' for name, share in classes)
        line = f'{path}  {shares or f"nothing above {_THRESHOLD:.0%}"}'
        print(output.escape_controls(line), file=file)
    file.flush()


def _read_class_names(loaded: LoadedModel, path: str | None) -> list[str]:
    """Returns the class names in a file, else the checkpoint's, else `class 0`, `class 1`, ..."""
    count = loaded.config.num_classes or 0
    if path is None:
        return list(loaded.class_names) or [f'class {i}' for i in range(count)]
    names = read_lines(path)
    require(len(names) == count, f'--class_names={path}: got {len(names)} lines; expected {count}')
    return names


def read_lines(path: str) -> list[str]:
    """Reads the class names of --class_names. Raises UserError if the file is not in UTF-8."""
    with usable(path, 'class names in UTF-8, one per line'):
        lines = read_text(path).rstrip('\r\n').split('\n')
    return [line.removesuffix('\r') for line in lines]


def shorten_names(names: Sequence[str]) -> list[str]:
    """Shortens names such as `tabby, tabby cat` to the first synonym if it is unique."""
    synonyms = [name.partition(', ')[0] for name in names]
    uses = collections.Counter(synonyms)
    return [
        synonym if uses[synonym] == 1 else name
        for synonym, name in zip(synonyms, names, strict=True)
    ]


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('predict', __doc__)
    add = parser.add_argument
    add('checkpoint', metavar='CHECKPOINT', help='file, directory or augreg:NAME')
    add('images', metavar='IMAGE', nargs='+', help='image files, or folders of images')
    add(
        '--top',
        type=app.positive_int,
        metavar='N',
        help='classes per image; default: 5, or all above 50%% after training with a sigmoid loss',
    )
    add('--format', choices=['text', 'csv', 'jsonl'], help='default: ending of --out, or text')
    add('--out', type=app.local_path, metavar='FILE', help='file to write; default: stdout')
    add('--class_names', metavar='FILE', help='class names, one per line; default: in CHECKPOINT')
    add('--features', type=app.local_path, metavar='OUT.npz', help='write features and paths')
    add('--overwrite', action='store_true', help='replace existing files of --out, --features')
    app.add_image_flags(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), only_prints=True)
