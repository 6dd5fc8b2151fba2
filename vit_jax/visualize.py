"""Draws what networks learned: python -m vit_jax.visualize CHECKPOINT... --images=DATA --out=DIR.

CHECKPOINT is of any kind that vit_jax.load reads, ViT, hybrid or ResNet; DATA a folder of photos,
or of any kind that a configuration takes. DIR/index.html has the figures of the ViT paper and of
"Do Vision Transformers See Like Convolutional Neural Networks?" (Raghu et al.), each with what to
look for; beside it are the pictures (.png) and the numbers that they are drawn from (.npz).
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from vit_jax.base import UserError, atomic_write, counted, records, require, usable
from vit_jax.checkpoints.formats.array_files import write_npz
from vit_jax.command_line import app, output
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.folders import has_images, unlabelled
from vit_jax.data.sources.opening import make_opener
from vit_jax.figures import catalogue, layers, networks
from vit_jax.figures.catalogue import Kind
from vit_jax.figures.networks import LeftOut, Network, Numbers, Study
from vit_jax.parallel.processes import Job
from vit_jax.pretrained import load

PAGE = 'index.html'
_FROM_PARAMETERS = 'filters', 'positions'  # figures for which no image is shown to a network


class Made(NamedTuple):
    """A figure of one network or of all: its numbers, or why it was left out."""

    kind: Kind
    network: Network | None  # None: of all
    numbers: Numbers
    left_out: str | None = None

    @property
    def stem(self) -> str:
        """The name of its files, without the ending."""
        return self.kind.name + ('' if self.network is None else f'-{self.network.name}')


def main(arguments: argparse.Namespace, job: Job) -> int:
    """Writes the page; 1 where some images cannot be read, 0 otherwise."""
    if importlib.util.find_spec('matplotlib') is None:
        raise UserError("pictures need matplotlib: pip install 'vit_jax[plots]'")
    kinds = _kinds(arguments.figures)
    folder = pathlib.Path(arguments.out)
    with usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    shown = sys.stderr.isatty() and job.index == 0
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        study, problems = _study(arguments, bar, job)
        for text in problems:
            print(f'unreadable, left out: {output.printable(text)}', file=sys.stderr)
        faults = _faults(study) if any(k.name not in _FROM_PARAMETERS for k in kinds) else {}
        wanted = [(k, n) for k in kinds for n in ([None] if k.of_all else study.networks)]
        task, made = bar.add_task('', total=len(wanted)), list[Made]()
        for kind, network in wanted:
            of = '' if network is None else f', {network.name}'
            bar.update(task, description=f'{kind.title}{of}')
            made.append(_made(kind, network, study, faults))
            bar.advance(task)
    if job.index == 0:
        _write(folder, made, study, arguments, faults)
    return 1 if problems else 0


def _kinds(names: str | None) -> list[Kind]:
    """The figures of these names, in the order of the page; all where none is named."""
    known = {kind.name: kind for kind in catalogue.KINDS}
    if names is None:
        return [*known.values()]
    asked = names.split(',')
    for name in asked:
        require(name in known, f'--figures: no figure {name!r}; {records.nearest(name, known)}')
    return [kind for kind in known.values() if kind.name in asked]


def _study(arguments: argparse.Namespace, bar: Progress, job: Job) -> tuple[Study, list[str]]:
    """The networks on the devices and the images that can be read; what is wrong with others."""
    source = _opened(arguments.images, arguments.split)
    loaded = []
    for path in arguments.checkpoints:
        one = load(path, **app.overrides(arguments))
        if job.index == 0:
            print('\n'.join(one.report), file=sys.stderr)
        loaded.append(one)

    def watched(name: str, every: Iterable[Any], total: int) -> Iterator[Any]:
        task = bar.add_task(name, total=total)
        yield from bar.track(every, total=total, task_id=task)
        bar.remove_task(task)

    readers = [networks.reader_for(one, source, arguments.max_pixels) for one in loaded]
    reading = functools.partial(watched, 'reading images')
    indices, problems = networks.readable(readers[0], arguments.num_images, reading)
    size, mesh = networks.batch_for(len(indices), arguments.batch_size)
    names = _names(arguments.checkpoints)
    placed = tuple(
        networks.on_devices(name, one, reader, mesh)
        for name, one, reader in zip(names, loaded, readers, strict=True)
    )

    def beating(batches: Iterable[Any], total: int) -> Iterator[Any]:
        return watched('  batches of images', job.with_heartbeat(batches), total)

    return Study(placed, indices, size, beating), problems


def _opened(data: str, split: str) -> Source:
    """A file or folder of photos, without labels, or the split of any other data."""
    if data != 'digits' and (os.path.isdir(data) and has_images(pathlib.Path(data))):
        return unlabelled([data])
    return make_opener()(data, split)


def _names(paths: Sequence[str]) -> list[str]:
    """As few last parts of each path as tell it from the others; characters of file names."""
    whole = [pathlib.Path(os.path.abspath(path)) for path in paths]
    parts = [(*path.parts[:-1], _without_ending(path.name)) for path in whole]
    for length in range(1, max(map(len, parts)) + 1):
        names = ['-'.join(each[-length:]).strip('/') for each in parts]
        if len({*names}) == len(names):
            break
    else:
        raise UserError(f'the same checkpoint is given twice: {", ".join(paths)}')
    kept = [''.join(c if c.isalnum() or c in '-_.+' else '_' for c in name) for name in names]
    return [name if kept.count(name) == 1 else f'{name}-{i}' for i, name in enumerate(kept)]


def _without_ending(name: str) -> str:
    return re.sub(r'[.](npz|safetensors|bin|pth?)(?=:|$)', '', name)


def _faults(study: Study) -> dict[str, str]:
    """Of each network that computes numbers that are none: where they begin."""
    begins = {n.name: layers.first_not_finite(study, n) for n in study.networks}
    return {
        name: f'{name} computes NaN or infinity: it begins in {layer}'
        for name, layer in begins.items()
        if layer is not None
    }


def _made(kind: Kind, network: Network | None, study: Study, faults: dict[str, str]) -> Made:
    """The figure of a network, or the one of all that compute numbers."""
    try:
        if network is None:
            sound = tuple(n for n in study.networks if n.name not in faults)
            if not sound:
                raise LeftOut('; '.join(faults.values()))
            return Made(kind, None, kind.compute(dataclasses.replace(study, networks=sound)))
        if network.name in faults and kind.name not in _FROM_PARAMETERS:
            raise LeftOut(faults[network.name])
        return Made(kind, network, kind.compute(study, network))
    except LeftOut as why:
        return Made(kind, network, {}, str(why))


def _write(
    folder: pathlib.Path,
    made: Sequence[Made],
    study: Study,
    arguments: argparse.Namespace,
    faults: dict[str, str],
) -> None:
    """Draws all figures, and writes pictures, numbers and the page."""
    from vit_jax.figures import drawing, page, style  # here: matplotlib is an extra

    sections = []
    for kind, parts in itertools.groupby(made, key=lambda one: one.kind):
        pictures: list[page.Picture] = []
        left_out: list[str] = []
        for one in parts:
            of = '' if one.network is None else f'{one.network.name}: '
            if one.left_out is not None:
                left_out.append(f'{of}{one.left_out}.')
                continue
            finding = f'{of}{kind.finding(one.numbers, one.network)}'
            print(f'{one.stem}: {finding}')
            pngs = [style.png(drawn) for drawn in kind.draw(drawing, one.numbers)]
            _keep(folder, one, pngs)
            captions = [''] * (len(pngs) - 1) + [finding]  # below the last
            alt = f'{of}{kind.title}'
            pictures += [
                page.Picture(png, alt, text) for png, text in zip(pngs, captions, strict=True)
            ]
        words = f'{kind.text} ({kind.source}.)'
        sections.append(page.Section(kind.title, words, pictures, ' '.join(left_out) or None))
    text = page.page('What the networks have learned', _lines(study, arguments, faults), sections)
    with usable(folder), atomic_write(folder / PAGE) as partial:
        partial.write_text(text)
    print(f'\nwritten: {folder / PAGE}')


def _keep(folder: pathlib.Path, one: Made, pngs: Sequence[bytes]) -> None:
    """Writes a figure's numbers and pictures."""
    with usable(folder):
        write_npz(folder / f'{one.stem}.npz', one.numbers)
    for index, png in enumerate(pngs, start=1):
        stem = one.stem if len(pngs) == 1 else f'{one.stem}-{index}'
        with usable(folder), atomic_write(folder / f'{stem}.png') as partial:
            partial.write_bytes(png)


def _lines(study: Study, arguments: argparse.Namespace, faults: dict[str, str]) -> list[str]:
    """What was looked at, for the head of the page."""
    used = len(study.indices) // study.batch_size * study.batch_size
    images = f'{counted(used, "image")} of {arguments.images}, {study.batch_size} at a time'
    lines = [f'Images: {images}.']
    for network in study.networks:
        config = network.loaded.config
        height, width = config.image_size
        lines.append(f'{network.name}: {network.loaded.report[1]}; images of {height}x{width}.')
    return [*lines, *faults.values()]


def _parser() -> argparse.ArgumentParser:
    parser = app.new_parser('visualize', __doc__)
    parser.add_argument('checkpoints', metavar='CHECKPOINT', nargs='+')
    text = 'a folder of photos; or a folder of classes, FILE.csv, FILE.npz, tfds:NAME, digits'
    parser.add_argument('--images', required=True, metavar='DATA', help=text)
    text = 'of data that has some, perhaps a slice: train[90%%:] (test)'
    parser.add_argument('--split', default='test', metavar='NAME', help=text)
    parser.add_argument('--out', required=True, metavar='DIR', help='for the page and its parts')
    names = ', '.join(kind.name for kind in catalogue.KINDS)
    parser.add_argument('--figures', metavar='NAME,...', help=f'(all) of {names}')
    text = 'images at most, evenly spread over all (256)'
    parser.add_argument('--num_images', type=app.positive, default=256, metavar='N', help=text)
    app.add_reading(parser)
    app.add_overrides(parser)
    return parser


if __name__ == '__main__':
    app.run_together(main, _parser())
