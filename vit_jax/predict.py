"""Names what is in images: python -m vit_jax.predict CHECKPOINT IMAGE...

CHECKPOINT is of any kind that vit_jax.load reads, an IMAGE is a file or a folder. Every image gets
a line with its most probable classes; --features=OUT.npz keeps what the head is given, with the
paths of the images that could be read.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from vit_jax.base import Bool, Int, UserError, usable
from vit_jax.command_line import app
from vit_jax.data import loading
from vit_jax.data.image_preprocessing import MAX_PIXELS, normalize
from vit_jax.data.sources.folders import unlabelled
from vit_jax.parallel import meshes
from vit_jax.pretrained import Loaded, OutputName, load


def main(arguments: argparse.Namespace) -> int:
    """Prints a line for each image; 1 where some cannot be read, 0 otherwise."""
    output = pathlib.Path(arguments.features or 'unused.npz')
    if output.suffix != '.npz' or not output.parent.is_dir():
        raise UserError(f'--features={output}: expected NAME.npz in a directory that exists')
    source = unlabelled(arguments.images)
    loaded = load(arguments.checkpoint, **app.overrides(arguments))
    print('\n'.join(loaded.report), file=sys.stderr)
    if getattr(loaded.config, 'pool', None) == 'none':
        raise UserError('pool=none: the network has outputs for every token, not for the image')
    names = _class_names(loaded, arguments.class_names)
    if not arguments.features:
        loaded.require_head()
    how, size = loaded.preprocessing, loaded.config.image_size
    reader = loading.ImageReader(
        source,
        how.crop,
        size,
        how.exif_rotation,
        on_unreadable='skip',
        max_pixels=arguments.max_pixels,
    )
    paths: list[str] = []
    rows, unreadable = [], 0
    # Lines go to the screen through the bar, and past it where they are piped elsewhere.
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    shown, redirected = sys.stderr.isatty(), sys.stdout.isatty()
    with Progress(console=console, disable=not shown, redirect_stdout=redirected) as bar:
        task = bar.add_task('images', total=len(source))
        wanted: list[OutputName] = ['probabilities'] if loaded.predicts else []
        wanted += ['features'] if arguments.features else []
        for indices, mask, outputs in _outputs(loaded, reader, wanted, arguments.batch_size):
            for position, index in enumerate(map(int, indices)):
                if not mask[position]:
                    unreadable += 1
                    print(f'unreadable: {_problem(reader, index)}', file=sys.stderr)
                elif loaded.predicts:
                    shares = outputs['probabilities'][position]
                    best = np.argsort(-shares)[: arguments.top]
                    said = ', '.join(f'{names[i]} {shares[i]:.1%}' for i in best)
                    print(f'{source.name_of(index)}  {said}')
            if arguments.features:
                rows.append(outputs['features'][mask])
                paths += map(source.name_of, indices[mask].tolist())
            bar.update(task, advance=len(indices))
    if arguments.features:
        with usable(arguments.features):
            np.savez(arguments.features, paths=np.array(paths, str), features=np.concatenate(rows))
        print(f'features of {len(paths):,} images: {arguments.features}', file=sys.stderr)
    if unreadable:
        print(f'{unreadable:,} of {len(source):,} images cannot be read', file=sys.stderr)
    return 1 if unreadable else 0


def _outputs(
    loaded: Loaded, reader: loading.ImageReader, wanted: Sequence[OutputName], batch_size: int
) -> Iterator[tuple[Int[np.ndarray, 'b'], Bool[np.ndarray, 'b'], dict[OutputName, np.ndarray]]]:
    """Batch by batch: which images, which of them could be read, and the outputs by name."""
    mesh = meshes.make_mesh(meshes.MeshConfig())
    batch_size = -(-batch_size // mesh.size) * mesh.size
    params = jax.device_put(loaded.params, meshes.replicated(mesh))
    on_devices = dataclasses.replace(loaded, params=params)
    config = loading.LoaderConfig(placement='host')
    feed = loading.make_loader(reader, config, meshes.batch_sharding(mesh))
    indices = np.arange(len(reader.source))
    for batch in loading.sequential_batches(feed, indices, batch_size=batch_size):
        part, indices = indices[:batch_size], indices[batch_size:]
        images = normalize(batch['images'], loaded.preprocessing)
        outputs = on_devices.outputs(images, *wanted)
        named = {n: rows[: len(part)] for n, rows in zip(wanted, outputs, strict=True)}
        yield part, np.asarray(batch['mask'])[: len(part)], named


def _problem(reader: loading.ImageReader, index: int) -> str:
    try:
        reader.example(loading.ExampleRef(index))
    except ValueError as error:
        return str(error)
    return f'{reader.source.name_of(index)}: readable now'


def _class_names(loaded: Loaded, path: str | None) -> list[str]:
    """The names from a file of one a line, or those of the checkpoint, or numbers."""
    count = loaded.config.num_classes or 0
    if path is None:
        return list(loaded.class_names) or [f'class {i}' for i in range(count)]
    with usable(path):
        names = pathlib.Path(path).read_text().splitlines()
    if len(names) != count:
        raise UserError(f'--class_names={path}: {len(names)} lines for {count} classes')
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='python -m vit_jax.predict', description=__doc__)
    parser.add_argument('checkpoint', metavar='CHECKPOINT')
    parser.add_argument('images', metavar='IMAGE', nargs='+', help='files or folders')
    parser.add_argument('--top', type=app.positive, default=5, metavar='N', help='classes (5)')
    parser.add_argument('--class_names', metavar='FILE', help="a name a line; the checkpoint's")
    parser.add_argument('--features', metavar='OUT.npz', help='keep paths and features')
    parser.add_argument('--batch_size', type=app.positive, default=32, metavar='N', help='(32)')
    larger = f'pixels of an image at most ({MAX_PIXELS:,})'
    parser.add_argument(
        '--max_pixels', type=app.positive, default=MAX_PIXELS, metavar='N', help=larger
    )
    app.add_overrides(parser)
    return parser


if __name__ == '__main__':
    app.run(main, _parser())
