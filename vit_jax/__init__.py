"""Vision Transformers in JAX: pre-train, fine-tune, probe with few labels, and look inside."""

import itertools
import signal
import sys
from typing import TYPE_CHECKING, Any

__version__ = '0.1.0'
__all__ = ['load', 'save']

if TYPE_CHECKING:
    from vit_jax.pretrained import load, save

# `python -m vit_jax...`, which has yet to find its file: Ctrl-C ends what follows, imports, at once
# and without a word, until a program takes it (command_line/app.py). Never so in other programs.
_words = itertools.pairwise(sys.orig_argv)
if sys.argv[:1] == ['-m'] and any(a == '-m' and b.split('.')[0] == 'vit_jax' for a, b in _words):
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """`load` and `save`, imported when they are asked for: the model needs jax and flax alone."""
    if name in __all__:
        from vit_jax import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
