"""WordNet ids and names of ImageNet's 1,000 classes (ILSVRC 2012), in the order of class numbers.

imagenet_classes.txt has a line for each class, sorted by id: `n01440764 tench, Tinca tinca`. The
names are the words of WordNet 3.0 (Princeton University), as in transformers' models.
"""

import functools
import pathlib
import re
from collections.abc import Sequence

_FILE = pathlib.Path(__file__).with_suffix('.txt')
# Matches file names of models that were trained or fine-tuned on ImageNet-1k.
_NAME_PATTERN = re.compile(r'imagenet[-_]?(2012|1k)(?!\d)|ilsvrc[-_]?2012|[._-]in1k', re.IGNORECASE)


@functools.cache
def _names_by_id() -> dict[str, str]:
    lines = _FILE.read_text(encoding='utf-8').splitlines()
    return dict(line.split(' ', 1) for line in lines)


def ids() -> tuple[str, ...]:
    """Returns the WordNet ids: class 0 is `n01440764`."""
    return tuple(_names_by_id())


def names() -> tuple[str, ...]:
    """Returns the names: class 0 is `tench, Tinca tinca`. Two classes have the name `crane`."""
    return tuple(_names_by_id().values())


def is_in_name(name: str) -> bool:
    """Returns whether a file name says that the model has ImageNet's classes."""
    return _NAME_PATTERN.search(name) is not None


def match(class_names: Sequence[str]) -> bool:
    """Returns whether class names are ImageNet's, in this order.

    More than half of the names must match, because published lists differ in a few words.
    """
    if len(class_names) != len(names()):
        return False
    same = sum(
        one.casefold() in other.casefold().split(', ')
        for one, other in zip((name.split(', ')[0] for name in class_names), names(), strict=True)
    )
    return same > len(names()) // 2
