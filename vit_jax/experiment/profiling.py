"""A profile of some training steps: what ran when on the devices and the host, as pictures."""

import contextlib
import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import jax
from rich.console import Console

from vit_jax.base import Batch, Path, UserError
from vit_jax.training.losses import StepMetrics
from vit_jax.training.update import TrainState

FOLDER = 'profile'
Update = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


def require_within(steps: range, end: int) -> None:
    """Raises UserError if a run of `end` steps does not have all of these."""
    if steps.stop > end:
        flag = f'--profile_steps={steps.start}:{steps.stop}'
        raise UserError(f'{flag}: this run ends with step {end:,}')


@contextlib.contextmanager
def profiled(
    update: Update, steps: range, *, first: int, folder: Path, console: Console
) -> Iterator[Update]:
    """Yields the update, profiled in some steps; its first call takes the state of step `first`.

    `steps` 3, 4 and 5 lead from the state of step 3 to that of step 6; reports call them 4, 5, 6.
    The profile is written to `folder`/profile, for TensorBoard (with its plugin `xprof`) and, as
    perfetto_trace.json.gz, for ui.perfetto.dev. A profile that fails is a warning.
    """
    if first >= steps.stop:
        done = f'steps {steps.start} to {steps.stop} are done, this is step {first}'
        console.print(f'nothing is profiled: {done}')
        yield update
        return
    step = first
    with contextlib.ExitStack() as trace:

        def profiled_update(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
            nonlocal step
            if step == max(steps.start, first):
                jax.block_until_ready(state)  # what came before is not in the picture
                trace.enter_context(_trace(folder / FOLDER, console))
            step += 1
            with jax.profiler.StepTraceAnnotation('train', step_num=step):
                state, metrics = update(state, batch)
            if step == steps.stop:
                jax.block_until_ready(metrics)
                trace.close()
            return state, metrics

        yield profiled_update


@contextlib.contextmanager
def _trace(folder: Path, console: Console) -> Iterator[None]:
    """Profiles what runs within; the files are copied, as the profiler knows no buckets."""
    with tempfile.TemporaryDirectory() as local:
        try:
            jax.profiler.start_trace(local, create_perfetto_trace=True)
        except (RuntimeError, ValueError, OSError) as error:
            logging.warning('no profile: %s', error)
            yield
            return
        try:
            yield
        finally:
            try:
                jax.profiler.stop_trace()
                for file in pathlib.Path(local).rglob('*'):
                    if file.is_file():
                        target = folder / file.relative_to(local).as_posix()
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(file.read_bytes())
                console.print(f'profile in {folder}: tensorboard --logdir={folder}, or Perfetto')
            except Exception as error:  # whatever a disk or a bucket raises
                logging.warning('no profile in %s: %s', folder, error)
