"""Draws what models learned: python -m vit_jax.visualize CHECKPOINT... --images=DATA --out=DIR.

CHECKPOINT is a ViT, hybrid or ResNet in any format that vit_jax.load reads, or a name such as
augreg:B/16 (docs/checkpoint_names.md). DATA is a folder of photos, or any value of --config.data.
DIR/index.html has figures of the ViT paper and of "Do Vision Transformers See Like Convolutional
Neural Networks?" (Raghu et al.), with explanations. DIR also receives each picture (.png) and its
numbers (.npz).
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.progress import Progress

from vit_jax.base import (
    UserError,
    make_folder,
    plural,
    records,
    require,
    write_bytes,
    write_text,
)
from vit_jax.base.progress import progress_bar
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.checkpoints.remote import redact, to_path
from vit_jax.cli import app, output
from vit_jax.data.loading import make_reader
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.folders import is_image, loose_images, unlabeled_source
from vit_jax.data.sources.opening import EXPECTED, make_opener, require_outside
from vit_jax.figures import style
from vit_jax.figures.figure import (
    NAMES,
    Figure,
    Images,
    PlacedModel,
    choose_batch,
    find_figure,
    find_readable,
    put_on_devices,
    require_finite,
)
from vit_jax.figures.page import Picture, Section, render_page
from vit_jax.pretrained import LoadedModel, load

PAGE = 'index.html'
_LONGEST = 80  # characters of the name of a model


class _Inputs(NamedTuple):
    """The models and images of a page."""

    models: list[PlacedModel]
    images: Images
    description: list[str]  # lines about the models and images, for the page
    unreadable: list[str]  # a message per unreadable image


def main(arguments: argparse.Namespace) -> int:
    """Writes the page. Returns 1 if some images are unreadable, else 0."""
    if importlib.util.find_spec('matplotlib') is None:
        raise UserError("pictures need matplotlib: pip install 'vit_jax[plots]'")
    chosen = select_figures(arguments.figures)
    folder = pathlib.Path(arguments.out)
    require_outside(arguments.out, arguments.images)
    make_folder(folder)
    with progress_bar() as bar:
        inputs = _open_inputs(arguments, bar)
        if any(figure.needs_images for figure in chosen.values()):
            for model in inputs.models:
                require_finite(inputs.images, model)
        sections = [
            _make_section(folder, name, figure, inputs)
            for name, figure in bar.track(chosen.items(), description='figures')
        ]
    write_text(folder / PAGE, render_page('What the models learned', inputs.description, sections))
    print(f'\nwritten: {folder / PAGE}')
    num_images = len(inputs.images.indices) + len(inputs.unreadable)
    return output.report_unreadable(inputs.unreadable, num_images)


def select_figures(names: str | None) -> dict[str, Figure]:
    """Returns the figures in a comma-separated list, or all, in the order of the page."""
    chosen = NAMES if names is None else [name.strip() for name in names.split(',')]
    for name in chosen:
        require(name in NAMES, f'--figures: no figure {name!r}; {records.closest(name, NAMES)}')
    return {name: find_figure(name) for name in NAMES if name in chosen}


def _open_inputs(arguments: argparse.Namespace, bar: Progress) -> _Inputs:
    """Puts the models on the devices and finds the readable images."""
    source = _open_images(arguments.images, arguments.split)
    loaded_models = _load_models(arguments)
    reports = [f'{name}: {"; ".join(loaded.report[1:])}' for name, loaded in loaded_models.items()]
    print('\n'.join(reports), file=sys.stderr)

    def progress(items: Iterable[Any], total: int) -> Iterator[Any]:
        task = bar.add_task('  images', total=total)
        yield from bar.track(items, task_id=task)
        bar.remove_task(task)

    readers = [
        make_reader(
            source,
            loaded.preprocessing,
            loaded.config.image_size,
            max_pixels=arguments.max_pixels,
        )
        for loaded in loaded_models.values()
    ]
    indices, unreadable = find_readable(readers[0], arguments.num_images, progress)
    batch_size, mesh = choose_batch(len(indices), arguments.batch_size)
    models = [
        put_on_devices(name, loaded, reader, mesh)
        for (name, loaded), reader in zip(loaded_models.items(), readers, strict=True)
    ]
    images = Images(indices, batch_size, progress, arguments.patch)
    used = plural(len(images.used_indices()), 'image')
    skipped = f'; {len(unreadable):,} unreadable' if unreadable else ''
    description = [
        f'Command: vit_jax visualize {shlex.join(map(redact, sys.argv[1:]))}',
        f'Images: {used} of {arguments.images} in batches of {batch_size}{skipped}.',
        *reports,
    ]
    return _Inputs(models, images, description, unreadable)


def _load_models(arguments: argparse.Namespace) -> dict[str, LoadedModel]:
    """Loads the models by name. Raises UserError for a model that does not take 3 channels."""
    loaded = dict[str, LoadedModel]()
    for name, path in zip(name_models(arguments.checkpoints), arguments.checkpoints, strict=True):
        loaded[name] = load(path, **app.checkpoint_options(arguments))
        channels = loaded[name].config.channels
        require(channels == 3, f'{redact(path)}: got a model for {channels} channels; expected 3')
    return loaded


def _open_images(data: str, split: str | None) -> Source:
    """Opens a photo or a folder of photos, without labels, or a split of other data.

    The default is all images if the data have no splits, else `test`.
    """
    path = pathlib.Path(data)
    if is_image(data) or (path.is_dir() and loose_images(path)):
        return unlabeled_source([data])
    open_split = make_opener(needs_classes=False)
    if split is None:
        with contextlib.suppress(UserError):  # opening `test` gives a better message
            return open_split(data, 'all')
    return open_split(data, split or 'test')


def name_models(paths: Sequence[str]) -> list[str]:
    """Names models by the fewest last parts of their paths that make the names unique."""
    endings = re.compile(r'[.](npz|safetensors|bin|pth?)(?=:|$)')
    stems = [endings.sub('', os.path.abspath(to_path(path))) for path in paths]
    parts_of_paths = [pathlib.Path(stem).parts[1:] for stem in stems]
    for length in range(1, max(map(len, parts_of_paths)) + 1):
        joined = ['-'.join(parts[-length:]) for parts in parts_of_paths]
        names = [re.sub(r'[^\w.+-]', '_', name)[-_LONGEST:] for name in joined]
        if len({*names}) == len(names):
            return names
    raise UserError(f'{", ".join(paths)}: expected distinct checkpoints')


def _make_section(folder: pathlib.Path, name: str, figure: Figure, inputs: _Inputs) -> Section:
    """Computes and draws a figure, of each model or of all together, or says why it cannot."""
    if figure.compares_models:
        groups = [(name, '', inputs.models)]
    else:
        groups = [(f'{name}-{model.name}', f'{model.name}: ', [model]) for model in inputs.models]
    pictures: list[Picture] = []
    left_out: list[str] = []
    for stem, prefix, models in groups:
        try:
            numbers = figure.compute(inputs.images, *models)
        except UserError as reason:
            left_out.append(f'{prefix}{reason}.')
            print(f'{name}: skipped: {left_out[-1]}')
            continue
        finding = figure.finding(numbers)
        print(f'{stem}: {finding}'.removesuffix(': '))
        png = style.png(figure.draw, numbers)
        caption = f'{prefix}{finding}'.removesuffix(': ')
        pictures.append(Picture(png, f'{prefix}{figure.title}', caption))
        write_npz(folder / f'{stem}.npz', numbers)
        write_bytes(folder / f'{stem}.png', png)
    return Section(figure.title, figure.caption, pictures, ' '.join(left_out) or None)


def _parse_point(text: str) -> tuple[float, float]:
    """Parses `0.5,0.25`: a place in an image, in fractions of its width and height."""
    with contextlib.suppress(ValueError):
        x, y = app.numbers(text)
        if 0 <= x <= 1 and 0 <= y <= 1:
            return x, y
    raise argparse.ArgumentTypeError(f'{text!r}: expected X,Y from 0 to 1, such as 0.5,0.25')


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('visualize', __doc__)
    add = parser.add_argument
    add('checkpoints', metavar='CHECKPOINT', nargs='+', help='file, directory or augreg:NAME')
    add(
        '--images',
        required=True,
        metavar='DATA',
        help=f'a folder of photos, {EXPECTED}',
    )
    add(
        '--split',
        metavar='NAME',
        help='split or slice, such as train[90%%:]; default: test, or all without splits',
    )
    add(
        '--out',
        required=True,
        type=app.local_path,
        metavar='DIR',
        help='directory for the page, its pictures and their numbers',
    )
    add('--figures', metavar='NAME,...', help=f'figures to draw; default: all ({", ".join(NAMES)})')
    add(
        '--num_images',
        type=app.positive_int,
        default=256,
        metavar='N',
        help='maximum number of images, evenly spread over the data; default: 256',
    )
    add(
        '--patch',
        type=_parse_point,
        default=(0.5, 0.5),
        metavar='X,Y',
        help='place of the patch for `features`, in fractions of the image; '
        'default: 0.5,0.5 (center)',
    )
    app.add_image_flags(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser())
