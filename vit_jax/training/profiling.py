"""Profiles steps of the training loop with jax's profiler."""

import contextlib
import itertools
import logging
import tempfile
from collections.abc import Generator, Iterator

import jax
from rich.console import Console

from vit_jax.base import Batch, Path, errors, storage


def profile_steps(
    batches: Iterator[Batch], steps: range, profile: range, folder: Path, console: Console
) -> Generator[Batch, None, None]:
    """Yields the batches of `steps`, and profiles the steps in `profile`."""
    first = max(profile.start, steps.start)
    yield from itertools.islice(batches, first - steps.start)
    if first in profile:
        with contextlib.ExitStack() as stack:
            with _warn_of_errors(folder):
                local = stack.enter_context(tempfile.TemporaryDirectory())
                jax.profiler.start_trace(local, create_perfetto_trace=True)
                stack.callback(_write_profile, local, folder, console)  # also if the run fails
            yield from itertools.islice(batches, profile.stop - first)
            jax.block_until_ready(jax.live_arrays())
    yield from batches


def _write_profile(local: str, folder: Path, console: Console) -> None:
    """Stops the profiler and copies its files from a local folder; it cannot write to buckets.

    The `xprof` plugin of TensorBoard shows them; ui.perfetto.dev shows perfetto_trace.json.gz.
    """
    with _warn_of_errors(folder):
        jax.profiler.stop_trace()
        for file in storage.resolve_folder(local).rglob('*.*'):  # folder names have no dots
            path = folder / file.relative_to(local)
            storage.make_folder(path.parent)
            path.write_bytes(file.read_bytes())
        console.print(f'profile in {folder}: view with tensorboard --logdir={folder} or Perfetto')


@contextlib.contextmanager
def _warn_of_errors(folder: Path) -> Iterator[None]:
    """Turns errors of the profiler into warnings, so that they do not stop the training."""
    try:
        yield
    except Exception as error:
        logging.warning('%s: cannot write the profile: %s', folder, errors.format_error(error))
