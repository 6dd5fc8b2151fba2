"""Draws what models learned: python -m vit_jax.visualize CHECKPOINT... --images=DATA --out=DIR.

CHECKPOINT is of any kind that vit_jax.load reads, ViT, hybrid or ResNet; DATA a folder of photos,
or of any kind that a configuration takes. DIR/index.html has the figures of the ViT paper and of
"Do Vision Transformers See Like Convolutional Neural Networks?" (Raghu et al.), each with what to
look for; next to it are the pictures (.png) and the numbers that they are drawn from (.npz).
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.progress import Progress

from vit_jax.base import (
    UserError,
    atomic_write,
    counted,
    make_folder,
    records,
    require,
    require_writable,
    usable,
)
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.checkpoints.remote import as_path, shown
from vit_jax.cli import app, output
from vit_jax.data.loading import reader_for
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.folders import has_images, is_image, unlabelled
from vit_jax.data.sources.opening import make_opener
from vit_jax.figures import catalogue, layers, networks, page
from vit_jax.figures.catalogue import Kind
from vit_jax.figures.networks import LeftOut, Network, Numbers, Study
from vit_jax.pretrained import Loaded, load

PAGE = 'index.html'
_LONGEST = 80  # letters of a network's name


def main(arguments: argparse.Namespace) -> int:
    """Writes the page; returns 1 if some images cannot be read, 0 otherwise."""
    if importlib.util.find_spec('matplotlib') is None:
        raise UserError("pictures need matplotlib: pip install 'vit_jax[plots]'")
    kinds, folder = select_figures(arguments.figures), pathlib.Path(arguments.out)
    within = folder.absolute().is_relative_to(pathlib.Path(arguments.images).absolute())
    require(not within, f'--out={folder}: expected a folder outside of the images')
    make_folder(folder)
    require_writable(folder / PAGE)
    with output.progress() as bar:
        study, lines, problems = _open_study(arguments, bar)
        faults = _find_nan(study) if any(kind.needs_images for kind in kinds) else {}
        sections = [
            _make_section(folder, kind, study, faults)
            for kind in bar.track(kinds, description='figures')
        ]
    text = page.page('What the networks have learned', [*lines, *faults.values()], sections)
    with usable(folder), atomic_write(folder / PAGE) as partial:
        partial.write_text(text)
    print(f'\nwritten: {folder / PAGE}')
    return output.report_unreadable(problems, len(study.indices) + len(problems))


def select_figures(names: str | None) -> list[Kind]:
    """Returns the figures of these names, or all, in the order of the page."""
    by_name = {kind.name: kind for kind in catalogue.KINDS}
    chosen = [*by_name] if names is None else [one.strip().lower() for one in names.split(',')]
    for name in chosen:
        require(name in by_name, f'--figures: no figure {name!r}; {records.nearest(name, by_name)}')
    return [kind for kind in catalogue.KINDS if kind.name in chosen]


def _open_study(arguments: argparse.Namespace, bar: Progress) -> tuple[Study, list[str], list[str]]:
    """Returns the networks on the devices with images; sentences about them; unreadable images."""
    source = _open_images(arguments.images, arguments.split)
    loaded = _load_networks(arguments)
    lines = [_describe(name, one) for name, one in loaded.items()]
    print('\n'.join(lines), file=sys.stderr)

    def watched(items: Iterable[Any], total: int) -> Iterator[Any]:
        task = bar.add_task('  images', total=total)
        yield from bar.track(items, task_id=task)
        bar.remove_task(task)

    most = arguments.max_pixels
    readers = {
        name: reader_for(source, one.preprocessing, one.config.image_size, max_pixels=most)
        for name, one in loaded.items()
    }
    first = next(iter(readers.values()))
    indices, problems = networks.readable(first, arguments.num_images, watched)
    size, mesh = networks.batch_for(len(indices), arguments.batch_size)
    placed = tuple(
        networks.on_devices(name, one, readers[name], mesh) for name, one in loaded.items()
    )
    used = counted(len(indices) // size * size, 'image')
    unreadable = f'; {len(problems):,} cannot be read' if problems else ''
    lines = [
        f'Made by: vit_jax visualize {shlex.join(map(shown, sys.argv[1:]))}',
        f'Images: {used} of {arguments.images}, {size} at a time{unreadable}.',
        *lines,
    ]
    return Study(placed, indices, size, arguments.probe_l2, watched), lines, problems


def _load_networks(arguments: argparse.Namespace) -> dict[str, Loaded]:
    """Loads the networks by name. Raises UserError for images of other than 3 channels."""
    loaded = dict[str, Loaded]()
    for name, path in zip(name_networks(arguments.checkpoints), arguments.checkpoints, strict=True):
        loaded[name] = load(path, **app.overrides(arguments))
        channels = loaded[name].config.channels
        require(channels == 3, f'{shown(path)}: takes {channels} channels, these images have 3')
    return loaded


def _describe(name: str, loaded: Loaded) -> str:
    """Returns a sentence about a network: where it is from, and what it is."""
    height, width = loaded.config.image_size
    report = '; '.join(loaded.report[1 : len(loaded.origin) + 2])
    removed = getattr(loaded.config, 'blocks_without_skips', ())
    without = f'; blocks without skip connections: {removed}' if removed else ''
    return f'{name}: {report}; images of {height}x{width}{without}.'


def _open_images(data: str, split: str | None) -> Source:
    """Opens a photo or a folder of photos, without labels, or the split of any other data.

    The default split is `test`, or all images if the data have no splits.
    """
    place = pathlib.Path(data)
    if is_image(data) or (place.is_dir() and has_images(place)):
        return unlabelled([data])
    open_split = make_opener()
    if split is None:
        with contextlib.suppress(UserError):  # opening `test` names the fault better
            return open_split(data, 'all')
    return open_split(data, split or 'test')


def name_networks(paths: Sequence[str]) -> list[str]:
    """Returns as few last parts of each path as tell it from the others, for names of files."""
    endings = re.compile(r'[.](npz|safetensors|bin|pth?)(?=:|$)')
    parts = [
        pathlib.Path(endings.sub('', os.path.abspath(as_path(path)))).parts[1:] for path in paths
    ]
    for length in range(1, max(map(len, parts)) + 1):
        whole = ['-'.join(each[-length:]) for each in parts]
        names = [re.sub(r'[^\w.+-]', '_', name)[-_LONGEST:] for name in whole]
        if len({*names}) == len(names):
            return names
    raise UserError(f'the same checkpoint is given twice: {", ".join(paths)}')


def _find_nan(study: Study) -> dict[str, str]:
    """Returns the networks that compute NaN from these images, with a sentence about each."""
    layer_of = {one.name: layers.first_not_finite(study, one) for one in study.networks}
    text = 'computes NaN or infinity: it begins in'
    return {name: f'{name} {text} {layer}' for name, layer in layer_of.items() if layer}


def _make_section(
    folder: pathlib.Path, kind: Kind, study: Study, faults: dict[str, str]
) -> page.Section:
    """Computes and draws a figure of all networks, or of each; says where it is left out."""
    pictures, left_out = list[page.Picture](), list[str]()
    for network in [None] if kind.of_all else study.networks:
        try:
            numbers = _compute(kind, network, study, faults)
        except LeftOut as why:
            left_out.append(f'{why}.' if network is None else f'{network.name}: {why}.')
            print(f'{kind.name}: left out: {left_out[-1]}')
        else:
            pictures += _draw(folder, kind, network, numbers)
    text = f'{kind.text} ({kind.source}.)'
    return page.Section(kind.title, text, pictures, ' '.join(left_out) or None)


def _compute(kind: Kind, network: Network | None, study: Study, faults: dict[str, str]) -> Numbers:
    """Returns the numbers of a figure of one network, or of all without faults."""
    if not kind.needs_images:
        return kind.compute(study, network)
    shown_images = study.networks if network is None else (network,)
    sound = tuple(one for one in shown_images if one.name not in faults)
    if not sound:
        raise LeftOut('; '.join(faults[one.name] for one in shown_images))
    if network is not None:
        return kind.compute(study, network)
    return kind.compute(dataclasses.replace(study, networks=sound))


def _draw(
    folder: pathlib.Path, kind: Kind, network: Network | None, numbers: Numbers
) -> list[page.Picture]:
    """Writes numbers and pictures of a figure, and prints what they show."""
    from vit_jax.figures import drawing, style  # matplotlib is an extra

    of = '' if network is None else f'{network.name}: '
    stem = kind.name if network is None else f'{kind.name}-{network.name}'
    finding = f'{of}{kind.finding(numbers, network)}'.removesuffix(': ')
    print(f'{kind.name}: {finding}')
    pngs = [style.png(drawn) for drawn in kind.draw(drawing, numbers)]
    names = [stem if len(pngs) == 1 else f'{stem}-{i}' for i in range(1, len(pngs) + 1)]
    with usable(folder):
        write_npz(folder / f'{stem}.npz', numbers)
        for name, png in zip(names, pngs, strict=True):
            with atomic_write(folder / f'{name}.png') as partial:
                partial.write_bytes(png)
    captions = [''] * (len(pngs) - 1) + [finding]  # below the last
    alt = f'{of}{kind.title}'
    return [page.Picture(png, alt, text) for png, text in zip(pngs, captions, strict=True)]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('visualize', __doc__)
    add = parser.add_argument
    add('checkpoints', metavar='CHECKPOINT', nargs='+')
    text = 'a folder of photos; or a folder of classes, FILE.csv, FILE.npz, tfds:NAME, digits'
    add('--images', required=True, metavar='DATA', help=text)
    text = 'or a slice of it, such as train[90%%:] (test)'
    add('--split', metavar='NAME', help=text)
    text = 'directory of the page and its parts'
    add('--out', required=True, type=app.local_path, metavar='DIR', help=text)
    names = ', '.join(kind.name for kind in catalogue.KINDS)
    add('--figures', metavar='NAME,...', help=f'(all) of {names}')
    text = 'the largest number of images, evenly spread over all (256)'
    add('--num_images', type=app.positive, default=256, metavar='N', help=text)
    text = 'l2 of the ridge regressions of probes (1024)'
    add('--probe_l2', type=float, default=1024.0, metavar='L2', help=text)
    app.add_reading(parser)
    return parser


if __name__ == '__main__':
    app.run(main, make_parser())
