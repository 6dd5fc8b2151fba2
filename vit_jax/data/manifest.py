"""Manifests list the splits of a data set: class names, image names, labels and sizes, in order.

Two manifests show which images of a data set were added, removed or replaced. A file has a
`SplitManifest` for each split.
"""

import gzip
import json
from collections import Counter
from typing import NamedTuple

from vit_jax.base import Path, plural, usable, write_bytes
from vit_jax.base.files import Limit, read_file
from vit_jax.data.sources.base import Source, make_names_relative


class SplitManifest(NamedTuple):
    """The images of a split in order, as JSON values.

    A label is a class name, or comma-separated class names. A size is the size of the image's file,
    or another number that changes with the image (see `Source.size_of`). If labels are not in
    memory, each label is a question mark, and the size also changes with the label. The sizes of
    the last images may be missing.
    """

    class_names: list[str]
    names: list[str]
    labels: list[str]
    sizes: list[int]


Manifest = dict[str, SplitManifest]  # by the name of the split


def make_split_manifest(source: Source, *, max_sizes: int) -> SplitManifest:
    """Lists the images of a split. If file sizes are not in memory, reads at most `max_sizes`."""
    indices, classes = range(len(source)), source.class_names
    eager = indices if source.sizes_in_memory else indices[:max_sizes]
    labels = ['?'] * len(source)
    if source.labels_in_memory and source.multi_label:
        labels = [', '.join(classes[i] for i in row.nonzero()[0]) for row in source.labels]
    elif source.labels_in_memory:
        labels = [classes[label] for label in source.labels.tolist()]
    names = make_names_relative(source.read_names(indices), source.data)
    return SplitManifest([*classes], names, labels, sizes=source.read_sizes(eager).tolist())


def keeps_class_numbers(old: SplitManifest, new: SplitManifest) -> bool:
    """Returns whether each class has the same index as before. Names may have changed."""
    same_count = len(old.class_names) == len(new.class_names)
    return same_count and not _renumbered(old.class_names, new.class_names)


def _renumbered(old: list[str], new: list[str]) -> list[str]:
    """Describes the classes whose index changed."""
    numbers = {name: number for number, name in enumerate(old)}
    moved = [(i, x) for i, x in enumerate(new) if x in numbers and old[i : i + 1] != [x]]
    return [f'{name!r} from {numbers[name]} to {number}' for number, name in moved]


def describe_differences(old: SplitManifest, new: SplitManifest) -> list[str]:
    """Describes the differences by kind, each with a count and up to three examples.

    An image whose label changed counts as removed and added.
    """
    size_of = dict(zip(old.names, old.sizes, strict=False))
    sizes = zip(new.names, new.sizes, strict=False)
    examples = {'replaced image': [repr(x) for x, size in sizes if size_of.get(x, size) != size]}
    if old[:3] != new[:3]:
        before, after = (Counter(map('{!r} ({})'.format, x.names, x.labels)) for x in (old, new))
        classes = Counter(old.class_names), Counter(new.class_names)
        examples['removed class'] = [*map(repr, (classes[0] - classes[1]).elements())]
        examples['added class'] = [*map(repr, (classes[1] - classes[0]).elements())]
        examples['renumbered class'] = _renumbered(old.class_names, new.class_names)
        examples['removed image'] = [*(before - after).elements()]
        examples['added image'] = [*(after - before).elements()]
        if not any(examples.values()):
            return ['the order of the images changed']
    shown = {kind: ', '.join(names[:3]) for kind, names in examples.items() if names}
    return [f'{plural(len(examples[kind]), kind)}: {text}' for kind, text in shown.items()]


def describe_changes(old: Manifest, new: Manifest) -> dict[str, str]:
    """Describes the splits that are in both manifests and differ, by name."""
    lines = {x: describe_differences(old[x], new[x]) for x in new if x in old}
    return {name: f'{name}: {"; ".join(changes)}' for name, changes in lines.items() if changes}


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest; returns an empty one if it is missing or damaged."""
    with usable(path):
        data = read_file(path, Limit.TABLE_BYTES) if path.exists() else b''
    try:
        splits = json.loads(gzip.decompress(data))
        return {name: SplitManifest(**split) for name, split in splits.items()}
    except Exception:  # gzip, zlib and json raise many types for damaged files
        return {}


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest."""
    text = json.dumps({name: split._asdict() for name, split in manifest.items()})
    write_bytes(path, gzip.compress(text.encode(), compresslevel=1, mtime=0))
