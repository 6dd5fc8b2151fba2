"""ImageNet's 1,000 classes (ILSVRC 2012) as networks number them: their WordNet ids and names.

imagenet_classes.txt has a line for each, in the order of the ids: `n01440764 tench, Tinca tinca`.
The names are the words of WordNet 3.0 (Princeton University), as transformers' networks have them.
"""

import functools
import pathlib
import re
from collections.abc import Sequence

_FILE = pathlib.Path(__file__).with_suffix('.txt')
# In the name of a file of a network that was trained or fine-tuned on it.
_SAID = re.compile(r'imagenet[-_]?(2012|1k)(?!\d)|ilsvrc[-_]?2012|[._-]in1k', re.IGNORECASE)


@functools.cache
def _names_by_id() -> dict[str, str]:
    lines = _FILE.read_text(encoding='utf-8').splitlines()
    return dict(line.split(' ', 1) for line in lines)


def ids() -> tuple[str, ...]:
    """The WordNet ids: `n01440764` is of class 0."""
    return tuple(_names_by_id())


def names() -> tuple[str, ...]:
    """The names: `tench, Tinca tinca` is that of class 0. `crane` is there twice."""
    return tuple(_names_by_id().values())


def is_said_by(name: str) -> bool:
    """Does the name of a file say that its network has these classes?"""
    return _SAID.search(name) is not None


def are(class_names: Sequence[str]) -> bool:
    """Are a network's classes these, in this order? Lists differ in a few words, not in most."""
    if len(class_names) != len(names()):
        return False
    same = sum(
        one.casefold() in other.casefold().split(', ')
        for one, other in zip((name.split(', ')[0] for name in class_names), names(), strict=True)
    )
    return same > len(names()) // 2
