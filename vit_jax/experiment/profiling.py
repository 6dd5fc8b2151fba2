"""A profile of some training steps: what ran when on the devices and the host, as pictures."""

import contextlib
import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import jax
from rich.console import Console

from vit_jax.base import Batch, Path, UserError
from vit_jax.training.metrics import StepMetrics
from vit_jax.training.update import TrainState

FOLDER = 'profile'
Update = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


def require_within(steps: range | None, end: int) -> None:
    """Raises UserError where a run of `end` steps has not all of these."""
    if steps is not None and steps.stop > end:
        asked = f'--profile_steps={steps.start}:{steps.stop}'
        raise UserError(f'{asked}: this run ends with step {end:,}')


@contextlib.contextmanager
def profiled(
    update: Update, steps: range | None, *, first: int, folder: Path, console: Console
) -> Iterator[Update]:
    """The same update, watched in some steps; its first call takes the state after step `first`.

    `steps` 3, 4 and 5 are those from the state after step 3 to that after step 6, as which reports
    count them: 4, 5 and 6.
    The profile is written to `folder`/profile, for TensorBoard (with its plugin `xprof`) and, as
    perfetto_trace.json.gz, for ui.perfetto.dev. What fails is a warning: the run is worth more.
    """
    if steps is None or first >= steps.stop:
        if steps is not None:
            asked = f'steps {steps.start} to {steps.stop} are done, this is step {first}'
            console.print(f'nothing is profiled: {asked}')
        yield update
        return
    step = first
    with contextlib.ExitStack() as watching:

        def one(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
            nonlocal step
            if step == max(steps.start, first):
                jax.block_until_ready(state)  # what came before is not in the picture
                watching.enter_context(_watched(folder / FOLDER, console))
            step += 1
            with jax.profiler.StepTraceAnnotation('train', step_num=step):
                state, metrics = update(state, batch)
            if step == steps.stop:
                jax.block_until_ready(metrics)
                watching.close()
            return state, metrics

        yield one


@contextlib.contextmanager
def _watched(folder: Path, console: Console) -> Iterator[None]:
    """Profiles what is within; the files are copied, as the profiler knows no store of objects."""
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
            except Exception as error:  # whatever a disk or a store raises
                logging.warning('no profile in %s: %s', folder, error)
