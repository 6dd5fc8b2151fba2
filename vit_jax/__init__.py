"""Vision Transformers in JAX: pre-train, fine-tune, probe with few labels, and look inside."""

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

STARTED = time.time()  # in seconds since 1970; the first seconds of a program are its imports
__version__ = '0.1.0'
__all__ = ['load', 'save']

if TYPE_CHECKING:
    from vit_jax.pretrained import load, save


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """Imports `load` and `save` on first use, so that models need only jax and flax."""
    if name in __all__:
        from vit_jax import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def exit_on_interrupt(*_: Any) -> None:
    """Handles Ctrl-C while a program imports libraries, which may ignore a KeyboardInterrupt."""
    print('error: interrupted', file=sys.stderr, flush=True)
    os._exit(130)


def _is_program() -> bool:
    """Returns whether this process was started as `python -m vit_jax.PROGRAM` or as `vit_jax`."""
    if sys.argv[:1] != ['-m']:  # Python's placeholder while it looks for the module
        return os.path.basename((sys.argv or [''])[0]) == 'vit_jax'
    return any(re.fullmatch(r'(-\w*m)?vit_jax(\.\w+)?', word) for word in sys.orig_argv)


# `cli.app.run` and `Job` install other handlers. In the background, a shell ignores the signal.
if _is_program():
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_interrupt)
