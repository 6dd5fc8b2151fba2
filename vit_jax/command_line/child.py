"""A training that ends with its study: python -m vit_jax.command_line.child PID ARGUMENTS.

It is python -m vit_jax.train ARGUMENTS, and told to stop, by SIGTERM, as soon as process PID, which
started it, is gone: on Linux.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Trains, unless the parent is gone already."""
    parent = int(sys.argv.pop(1))
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
    runpy.run_module('vit_jax.train', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    main()
