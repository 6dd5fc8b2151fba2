"""Draws what networks learned: python -m vit_jax.visualize CHECKPOINT... --images=DATA --out=DIR.

CHECKPOINT is of any kind that vit_jax.load reads, ViT, hybrid or ResNet; DATA a folder of photos,
or of any kind that a configuration takes. DIR/index.html has the figures of the ViT paper and of
"Do Vision Transformers See Like Convolutional Neural Networks?" (Raghu et al.), each with what to
look for; beside it are the pictures (.png) and the numbers that they are drawn from (.npz).
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from vit_jax.base import (
    UserError,
    atomic_write,
    counted,
    records,
    require,
    require_writable,
    usable,
)
from vit_jax.checkpoints.formats.array_files import NotFiniteArray, write_npz
from vit_jax.checkpoints.names import as_path, shown
from vit_jax.cli import app, output
from vit_jax.data.reading import reader_for
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.folders import has_images, is_image, unlabelled
from vit_jax.data.sources.opening import make_opener
from vit_jax.distributed.processes import Job
from vit_jax.figures import catalogue, layers, networks
from vit_jax.figures.catalogue import Kind
from vit_jax.figures.networks import LeftOut, Network, Numbers, Study
from vit_jax.pretrained import Loaded, load

PAGE = 'index.html'
_LONGEST = 80  # letters of a network's name


class Section(NamedTuple):
    """One figure on the page: its pictures, and of which networks it was left out and why."""

    pictures: list[Any]  # page.Picture
    left_out: list[str]


def main(arguments: argparse.Namespace, job: Job) -> int:
    """Writes the page; 1 where some images cannot be read, 0 otherwise."""
    if importlib.util.find_spec('matplotlib') is None:
        raise UserError("pictures need matplotlib: pip install 'vit_jax[plots]'")
    kinds, folder = _kinds(arguments.figures), pathlib.Path(arguments.out)
    within = pathlib.Path(arguments.images).absolute() in (
        folder.absolute(),
        *folder.absolute().parents,
    )
    require(not within, f'--out={folder}: is in the folder of images, and would be taken for some')
    if job.index == 0:
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
        require_writable(folder / PAGE)
    shown = sys.stderr.isatty() and job.index == 0
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        study, lines, problems = _study(arguments, bar, job)
        if job.index == 0:
            _remove_former(folder)
        faults = _Faults(study)
        wanted = [(k, n) for k in kinds for n in ([None] if k.of_all else study.networks)]
        task, sections = bar.add_task('', total=len(wanted)), dict[Kind, Section]()
        for kind, network in wanted:
            of = '' if network is None else f', {network.name}'
            bar.update(task, description=f'{kind.title}{of}')
            section = sections.setdefault(kind, Section([], []))
            try:
                numbers = _computed(kind, network, study, faults)
            except LeftOut as why:
                name = '' if network is None else f'{network.name}: '
                section.left_out.append(f'{name}{why}.')
                print(f'{kind.name}: left out: {name}{why}') if job.index == 0 else None
            else:
                if job.index == 0:
                    section.pictures.extend(_drawn(folder, kind, network, numbers))
            bar.advance(task)
    if job.index == 0:
        _write_page(folder / PAGE, [*lines, *faults.found], sections)
    if problems:
        print(f'{counted(len(problems), "image")} cannot be read, left out', file=sys.stderr)
    return 1 if problems else 0


def _remove_former(folder: pathlib.Path) -> None:
    """Removes the parts of a page that is there, which the new one need not have."""
    names = '|'.join(kind.name for kind in catalogue.KINDS)
    with usable(folder):
        for path in folder.iterdir() if (folder / PAGE).exists() else ():
            if re.fullmatch(rf'({names})(-.+)?[.](npz|png)', path.name):
                path.unlink()


def _kinds(names: str | None) -> list[Kind]:
    """The figures of these names, in the order of the page; all where none is named."""
    known = {kind.name: kind for kind in catalogue.KINDS}
    if names is None:
        return [*known.values()]
    asked = [name.strip().lower() for name in names.split(',') if name.strip()]
    require(bool(asked), f'--figures={names}: expected some of {", ".join(known)}')
    for name in asked:
        require(name in known, f'--figures: no figure {name!r}; {records.nearest(name, known)}')
    return [kind for kind in known.values() if kind.name in asked]


def _study(
    arguments: argparse.Namespace, bar: Progress, job: Job
) -> tuple[Study, list[str], list[str]]:
    """The networks on the devices and the images that can be read; what was found of networks and
    images, in sentences; what is wrong with other images."""
    source = _opened(arguments.images, arguments.split)
    loaded, lines = _loaded(arguments)

    def watched(name: str, every: Iterable[Any], total: int) -> Iterator[Any]:
        task = bar.add_task(name, total=total)
        yield from bar.track(every, total=total, task_id=task)
        bar.remove_task(task)

    def beating(batches: Iterable[Any], total: int) -> Iterator[Any]:
        return watched('  batches of images', job.tick_each(batches), total)

    readers = {
        name: reader_for(
            source, one.preprocessing, one.config.image_size, max_pixels=arguments.max_pixels
        )
        for name, one in loaded.items()
    }
    reading, first = functools.partial(watched, 'reading images'), next(iter(readers.values()))
    indices, problems = networks.readable(first, arguments.num_images, reading)
    job.require_same('the images', {'readable': indices.tolist()})
    size, mesh = networks.batch_for(len(indices), arguments.batch_size)
    used = counted(len(indices) // size * size, 'image')
    images = f'{used} of {arguments.images}, {size} at a time'
    images += f'; {len(problems):,} cannot be read' if problems else ''
    lines = [
        f'Made by: vit_jax visualize {shlex.join(map(shown, sys.argv[1:]))}',
        f'Images: {images}.',
        *lines,
    ]
    for text in problems if job.index == 0 else ():
        print(f'unreadable, left out: {output.printable(text)}', file=sys.stderr)
    placed = tuple(networks.on_devices(n, one, readers[n], mesh) for n, one in loaded.items())
    return Study(placed, indices, size, arguments.probe_l2, beating), lines, problems


def _loaded(arguments: argparse.Namespace) -> tuple[dict[str, Loaded], list[str]]:
    """The networks by name, and what was found in each file, also where it holds NaN."""
    loaded, lines = dict[str, Loaded](), list[str]()
    for name, path in zip(_names(arguments.checkpoints), arguments.checkpoints, strict=True):
        try:
            loaded[name] = one = load(path, **app.overrides(arguments))
        except NotFiniteArray as error:
            if len(arguments.checkpoints) - len(lines) == 1 and not loaded:
                raise
            lines.append(f'{name} is left out: {error}.')
            continue
        height, width = one.config.image_size
        removed = getattr(one.config, 'blocks_without_skips', ())
        without = f'; blocks without skip connections: {removed}' if removed else ''
        found = '; '.join(one.report[1 : len(one.origin) + 2])  # where from, and what it is
        lines.append(f'{name}: {found}; images of {height}x{width}{without}.')
    print('\n'.join(lines), file=sys.stderr)
    return loaded, lines


def _opened(data: str, split: str | None) -> Source:
    """A photo or a folder of photos, without labels, or the split of any other data.

    Where none is asked for it is `test`, or all images where the data have no splits.
    """
    place = pathlib.Path(data)
    if place.is_file() and is_image(data):
        return unlabelled([data])
    if place.is_dir() and has_images(place) and not any(map(has_images, place.glob('*/'))):
        return unlabelled([data])
    opened = make_opener()
    if split is None:
        with contextlib.suppress(UserError):  # which `test` says better
            return opened(data, 'all')
    return opened(data, split or 'test')


def _names(paths: Sequence[str]) -> list[str]:
    """As few last parts of each path as tell it from the others; characters of file names."""
    whole = [pathlib.Path(os.path.abspath(as_path(path))) for path in paths]
    parts = [(*path.parts[:-1], _without_ending(path.name)) for path in whole]
    for length in range(1, max(map(len, parts)) + 1):
        names = ['-'.join(each[-length:]).strip('/') for each in parts]
        if len({*names}) == len(names):
            break
    else:
        raise UserError(f'the same checkpoint is given twice: {", ".join(paths)}')
    kept = dict[str, None]()
    for name in names:
        plain = re.sub(r'[^\w.+-]', '_', name)[-_LONGEST:]
        others = (f'{plain}-{number}' for number in itertools.count(2))
        kept[plain if plain not in kept else next(o for o in others if o not in kept)] = None
    return [*kept]


def _without_ending(name: str) -> str:
    return re.sub(r'[.](npz|safetensors|bin|pth?)(?=:|$)', '', name)


class _Faults:
    """Why figures of networks are left out; whether one computes NaN is looked for once."""

    def __init__(self, study: Study):
        self._study = study
        self._nan: dict[str, str | None] = {}

    @property
    def found(self) -> list[str]:
        """All that was found so far, in sentences."""
        of_images = (self.of(network) for network in self._study.networks)
        return [text for text in (*of_images, *self._nan.values()) if text is not None]

    def of(self, network: Network, *, look: bool = False) -> str | None:
        """The fault of a network, if it has one; `look`: for NaN too, in all batches."""
        name, channels = network.name, network.loaded.config.channels
        if channels != 3:
            return f'{name} takes images of {counted(channels, "channel")}, these have 3'
        if look and name not in self._nan:
            layer = layers.first_not_finite(self._study, network)
            text = f'{name} computes NaN or infinity: it begins in {layer}'
            self._nan[name] = None if layer is None else text
        return self._nan[name] if look else None


def _computed(kind: Kind, network: Network | None, study: Study, faults: _Faults) -> Numbers:
    """The numbers of a figure of a network, or of the one of all without faults; or LeftOut.

    Whether a network computes NaN is looked for where the numbers have some, or would hide it.
    """
    if not kind.needs_images:
        return kind.compute(study, network)
    networks = study.networks if network is None else (network,)

    def computed(*, look: bool) -> Numbers:
        found = {each: faults.of(each, look=look) for each in networks}
        sound = tuple(each for each, fault in found.items() if fault is None)
        if not sound:
            raise LeftOut('; '.join(filter(None, found.values())))
        if network is not None:
            return kind.compute(study, network)
        return kind.compute(dataclasses.replace(study, networks=sound))

    numbers = computed(look=kind.hides_nan)
    finite = all(np.isfinite(each).all() for each in numbers.values() if each.dtype.kind == 'f')
    if not finite and any([faults.of(each, look=True) for each in networks]):
        return computed(look=True)
    return numbers


def _drawn(
    folder: pathlib.Path, kind: Kind, network: Network | None, numbers: Numbers
) -> list[Any]:
    """Writes numbers and pictures of a figure, and says what is seen in them."""
    from vit_jax.figures import drawing, page, style  # here: matplotlib is an extra

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


def _write_page(path: pathlib.Path, lines: Sequence[str], sections: Mapping[Kind, Section]) -> None:
    from vit_jax.figures import page

    parts = [
        page.Section(
            kind.title,
            f'{kind.text} ({kind.source}.)',
            section.pictures,
            ' '.join(section.left_out) or None,
        )
        for kind, section in sections.items()
    ]
    with usable(path), atomic_write(path) as partial:
        partial.write_text(page.page('What the networks have learned', lines, parts))
    print(f'\nwritten: {path}')


def _parser() -> argparse.ArgumentParser:
    parser = app.new_parser('visualize', __doc__)
    parser.add_argument('checkpoints', metavar='CHECKPOINT', nargs='+')
    text = 'a folder of photos; or a folder of classes, FILE.csv, FILE.npz, tfds:NAME, digits'
    parser.add_argument('--images', required=True, metavar='DATA', help=text)
    text = 'of data that has some, perhaps a slice: train[90%%:] (test)'
    parser.add_argument('--split', metavar='NAME', help=text)
    text = 'for the page and its parts'
    parser.add_argument('--out', required=True, type=app.local_path, metavar='DIR', help=text)
    names = ', '.join(kind.name for kind in catalogue.KINDS)
    parser.add_argument('--figures', metavar='NAME,...', help=f'(all) of {names}')
    text = 'images at most, evenly spread over all (256)'
    parser.add_argument('--num_images', type=app.positive, default=256, metavar='N', help=text)
    text = 'strength of the ridge regressions of probes (1024)'
    parser.add_argument('--probe_l2', type=float, default=1024.0, metavar='L2', help=text)
    app.add_reading(parser)
    app.add_overrides(parser)
    app.add_launch(parser)
    return parser


if __name__ == '__main__':
    app.run_together(main, _parser())
