"""Progress bars on stderr, shown only in a terminal."""

import sys
from typing import Any


def progress_bar(**options: Any) -> Any:
    """Returns a rich.progress.Progress; options are passed to it."""
    from rich.console import Console  # 0.1 s, which most programs do not need
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return Progress(console=console, disable=not sys.stderr.isatty(), **options)
