"""The manifest of a split: its class names, image names, labels and sizes, in order.

Two manifests show which images of a data set were added, removed, replaced or relabeled.
"""

import itertools
from collections import Counter
from typing import NamedTuple

from vit_jax.base import plural
from vit_jax.data.sources.base import Source, make_names_relative

MAX_EAGER_SIZES = 16_384  # file sizes that `make_split_manifest` reads; a run reads the rest later


class SplitManifest(NamedTuple):
    """The images of a split in order, as JSON values.

    A label is a class name, or comma-separated class names. A size is a file size, or a number that
    changes with the image (see `Source.size_of`). If labels are not in memory, each label is a
    question mark, and changed labels are detected by the sizes, which depend on image and label.
    The sizes of the last images may be missing.
    """

    class_names: list[str]
    names: list[str]
    labels: list[str]
    sizes: list[int]


def make_split_manifest(source: Source) -> SplitManifest:
    """Lists the images of a split. If file sizes are not in memory, reads the first ones only."""
    indices, classes = range(len(source)), source.class_names
    eager = indices if source.sizes_in_memory else indices[:MAX_EAGER_SIZES]
    labels = ['?'] * len(source)
    if source.labels_in_memory and source.multi_label:
        labels = [', '.join(classes[i] for i in row.nonzero()[0]) for row in source.labels]
    elif source.labels_in_memory:
        labels = [classes[label] for label in source.labels.tolist()]
    names = make_names_relative(source.read_names(indices), source.data)
    return SplitManifest([*classes], names, labels, sizes=source.read_sizes(eager).tolist())


def describe_differences(old: SplitManifest, new: SplitManifest) -> list[str]:
    """Describes the differences by kind, each with a count and up to three examples.

    An image whose label changed counts as removed and added.
    """
    size_of = dict(zip(old.names, old.sizes, strict=False))
    sizes = zip(new.names, new.sizes, strict=False)
    examples = {'replaced image': [repr(x) for x, size in sizes if size_of.get(x, size) != size]}
    if old[:3] != new[:3]:
        before, after = (Counter(map('{!r} ({})'.format, x.names, x.labels)) for x in (old, new))
        classes = itertools.zip_longest(old.class_names, new.class_names)
        examples['changed class'] = [f'{a!r} to {b!r}' for a, b in classes if a != b]
        examples['removed image'] = [*(before - after).elements()]
        examples['added image'] = [*(after - before).elements()]
        if not any(examples.values()):
            return ['the order of the images changed']
    shown = {kind: ', '.join(names[:3]) for kind, names in examples.items() if names}
    return [f'{plural(len(examples[kind]), kind)}: {text}' for kind, text in shown.items()]
