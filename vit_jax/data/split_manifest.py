"""The manifest of a split: its class names, image names, labels and sizes, in order.

Two manifests show which images of a data set were added, removed or replaced.
"""

from collections import Counter
from typing import NamedTuple

from vit_jax.base import plural
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


def make_split_manifest(source: Source, *, max_sizes: int) -> SplitManifest:
    """Lists the images of a split. If sizes are not in memory, reads at most `max_sizes`."""
    indices, classes = range(len(source)), source.class_names
    eager = indices if source.sizes_in_memory else indices[:max_sizes]
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
        examples['removed class'] = [repr(x) for x in old.class_names if x not in new.class_names]
        examples['added class'] = [repr(x) for x in new.class_names if x not in old.class_names]
        if not (examples['removed class'] or examples['added class']):
            classes = zip(old.class_names, new.class_names, strict=True)
            examples['changed class'] = [f'{a!r} to {b!r}' for a, b in classes if a != b]
        examples['removed image'] = [*(before - after).elements()]
        examples['added image'] = [*(after - before).elements()]
        if not any(examples.values()):
            return ['the order of the images changed']
    shown = {kind: ', '.join(names[:3]) for kind, names in examples.items() if names}
    return [f'{plural(len(examples[kind]), kind)}: {text}' for kind, text in shown.items()]
