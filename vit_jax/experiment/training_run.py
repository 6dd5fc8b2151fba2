"""A run that trains to the end of a configuration: compiled, running, evaluated, saved."""

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from vit_jax.base import Path, UserError, counted, write_json
from vit_jax.checkpoints.store import Checkpoints, quarantine_damaged
from vit_jax.config import TrainConfig, write_config
from vit_jax.data import loading
from vit_jax.distributed import meshes
from vit_jax.distributed.processes import Interrupted, Job
from vit_jax.evaluation import probing
from vit_jax.evaluation.evaluator import Evaluator
from vit_jax.evaluation.features import features_by
from vit_jax.evaluation.probing import Probes
from vit_jax.experiment import compilation, data_record, fingerprint, goodput, profiling, workdirs
from vit_jax.experiment.build import Experiment, build_experiment, eval_loaders
from vit_jax.experiment.compilation import Programs
from vit_jax.experiment.goodput import Ledger
from vit_jax.experiment.reporter import Reporter, console_of, eval_summary, images_at_peak, outline
from vit_jax.experiment.source_run import trained_before
from vit_jax.experiment.workdirs import Workdir
from vit_jax.training.loop import Clock, Every, NotFinite, Stopped, fit
from vit_jax.training.losses import StepMetrics
from vit_jax.training.update import TrainState

_COMPLETE = (
    ', the last step: there is nothing left to train; another --workdir begins anew, a longer '
    '--config.total with --accept_config_changes goes on'
)


class Result(NamedTuple):
    """What a run reached, and where it is kept."""

    experiment: Experiment
    state: TrainState
    evals: dict[str, dict[str, float]]  # the newest numbers of each evaluation, by name
    fewshot: dict[str, Any] | None
    checkpoint: Path
    folder: Path
    skipped: int  # uses of unreadable training images, over all starts of this run
    seconds: dict[str, float]  # of the wall time of this start, by name
    earlier: dict[str, float]  # likewise of the starts before, with what was lost by them


def train(
    config: TrainConfig,
    path: str,
    *,
    accept_changes: bool = False,
    accept_data: bool = False,
    job: Job | None = None,
    profile: range | None = None,
) -> Result:
    """Trains to the end of the configuration, from the newest checkpoint if there is one.

    Args:
      config: The experiment.
      path: The work directory.
      accept_changes: Whether to resume a run of another configuration.
      accept_data: Whether to resume a run on other data.
      job: This process among those of its job; None: one process alone.
      profile: Steps that a profiler records, on process 0.

    Raises:
      UserError: For input that does not fit, before anything is compiled if that is possible.
      NotFinite: With the last good checkpoint, when the training breaks down.
      Interrupted: After saving, if the job was asked to stop.
    """
    clock = Clock(0.0 if job is None else goodput.seconds_since_start())
    job = job or Job()
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(
            open_run(config, path, job, accept_changes=accept_changes, accept_data=accept_data)
        )
        end = opened.experiment.length.total_steps
        if profile is not None:
            profiling.require_within(profile, end)
        kept = opened.workdir.folder / workdirs.LEDGER if job.index == 0 else None
        ledger = stack.enter_context(contextlib.closing(Ledger(kept, clock)))
        run, state = _prepare(opened, job, ledger, stack)
        state = run.train(state, profile)
    seconds, earlier = ledger.totals()
    return Result(
        experiment=opened.experiment,
        state=state,
        evals=run.evals,
        fewshot=run.fewshot,
        checkpoint=run.checkpoints.path(end),
        folder=opened.workdir.folder,
        skipped=run.reporter.skipped,
        seconds=seconds,
        earlier=earlier,
    )


class OpenedRun(NamedTuple):
    """What all processes of a job have agreed to train, in a work directory that they hold."""

    experiment: Experiment
    workdir: Workdir
    check_data: Callable[[float], None]  # raises changes of the data found in the background


@contextlib.contextmanager
def open_run(
    config: TrainConfig,
    path: str,
    job: Job,
    *,
    accept_changes: bool = False,
    accept_data: bool = False,
) -> Iterator[OpenedRun]:
    """Builds the experiment, opens its work directory, and compares both with the other processes.

    Raises UserError as `train` does before it compiles.
    """
    if job.count > 1:
        job.require_same('this run', fingerprint.of_run(config, path))
    dtype = job.from_process_0('dtype', lambda: workdirs.recorded_dtype(path))
    experiment = build_experiment(config, dtype=dtype)
    job.require_same('what is decided', experiment.decisions)
    values, readers = experiment.recorded_config(), experiment.readers
    sources = data_record.find_sources(experiment.config, readers, experiment.probes)
    with workdirs.opened(path, values, job, accept_changes=accept_changes) as workdir:
        compared = data_record.compare_data(workdir, sources, job, accept=accept_data)
        with compared as check_data:
            yield OpenedRun(experiment, workdir, check_data)


def _prepare(
    opened: OpenedRun, job: Job, ledger: Ledger, stack: contextlib.ExitStack
) -> tuple['Run', TrainState]:
    """Compiles the programs, restores or initializes the state, and opens files on the stack."""
    experiment, workdir, check_data = opened
    clock, console = ledger.clock, console_of(job)
    ledger.record('starting')  # a start that ends before its first step took time too
    console.print(outline(experiment))
    unread = eval_loaders(experiment)  # reads what is kept on the devices
    with loading.read_beside(unread, index=job.index, count=job.count) as wait_until_read:
        with clock('compile'):
            ledger.record('compiling')
            programs = compilation.compile_programs(experiment, console.print)
        console.print(f'compiled in {clock.seconds["compile"]:.1f} s')
        checkpoints = open_checkpoints(experiment, workdir, job)
        stack.enter_context(contextlib.closing(checkpoints))
        state, progress = restore_or_init(experiment, programs.state, checkpoints, console)
        if not int(state.step):
            wait_until_read()
    reporter = Reporter(
        experiment,
        workdir.folder,
        steps=range(int(state.step), experiment.length.total_steps),
        progress=progress,
        ledger=ledger,
        console=console,
        images_at_peak=images_at_peak(experiment),
    )
    run = Run(
        experiment=experiment,
        workdir=workdir,
        check_data=check_data,
        programs=programs,
        checkpoints=checkpoints,
        reporter=stack.enter_context(reporter),
        ledger=ledger,
        job=job,
    )
    return run, state


def open_checkpoints(experiment: Experiment, workdir: Workdir, job: Job) -> Checkpoints:
    """Opens the checkpoints of a run; damaged ones are moved aside, with a warning."""
    job.barrier('compiled')  # devices meet in what follows, and gloo would wait for 30 s only
    job.reset_watchdog()
    folder, check = workdir
    check()  # before anything is moved or removed
    damaged = job.from_process_0('damaged', lambda: json.dumps(quarantine_damaged(folder)))
    for line in json.loads(damaged):
        logging.warning('%s', line)
    keep, along = experiment.config.keep_checkpoints, [folder / workdirs.METRICS]
    checkpoints = Checkpoints(folder, keep=keep, along=along, held=check)
    job.require_same('the step to go on from', {'step': checkpoints.latest_step})
    return checkpoints


def restore_or_init(
    experiment: Experiment, abstract: TrainState, checkpoints: Checkpoints, console: Console
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state of the newest checkpoint, or the first one, and the reporter's progress.

    Raises UserError if the newest checkpoint is beyond the last step.
    """
    shardings = compilation.shardings_of(abstract)
    step, end = checkpoints.latest_step, experiment.length.total_steps
    if step is not None:
        where = checkpoints.path(step)
        if step > end:
            folder = where.parent.parent
            raise UserError(f'{folder} is at step {step}, the end, step {end}, is before it')
        params, training, progress = checkpoints.restore(step, abstract.split(), shardings.split())
        console.print(f'resuming at step {step} from {where}{"" if step < end else _COMPLETE}')
        return TrainState.join(params, training), progress
    init = meshes.jit_on(experiment.init, experiment.mesh, out_shardings=shardings)
    state, start = init(), experiment.start
    if start is not None:
        params, report = experiment.transferred(start, state.params)
        warnings = trained_before(experiment.evals, start.path)
        console.print('\n'.join([f'start_from {start.path}', *start.report, *report, *warnings]))
        params = meshes.put(params, shardings.params)
        average = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
        state = state._replace(params=params, ema_params=average)
    return state, {}


@dataclasses.dataclass(kw_only=True)
class Run:
    """A training in progress: compiled programs, open files, newest results of evaluations."""

    experiment: Experiment
    workdir: Workdir
    check_data: Callable[[float], None]
    programs: Programs
    checkpoints: Checkpoints
    reporter: Reporter
    ledger: Ledger
    job: Job
    evals: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    fewshot: dict[str, Any] | None = None

    def train(self, state: TrainState, profile: range | None = None) -> TrainState:
        """Trains, evaluates and saves up to the last step; returns the state after it.

        Process 0 records the steps in `profile` with a profiler.
        """
        steps = range(int(state.step), self.experiment.length.total_steps)
        self.ledger.record('training', steps.start)
        if self.job.index == 0:  # changes that were accepted have proved possible
            self.workdir.check()
            path = self.workdir.folder / workdirs.CONFIG
            write_config(path, self.experiment.recorded_config())
        self.job.save_on_signals()
        try:
            self._resume_evaluations(state, steps)
            state = self._fit(state, steps, profile) if steps else state
        except NotFinite as error:
            self._wait()
            self._record_end('diverged', None)
            last = self.checkpoints.latest_step
            good = 'there is none yet' if last is None else self.checkpoints.path(last)
            raise NotFinite(f'{error}; last good checkpoint: {good}') from error
        except (Stopped, Interrupted) as stopped:
            state = stopped.state if isinstance(stopped, Stopped) else state
            step = int(state.step)
            self.save(step, state)
            self._wait()
            self._record_end('stopped', step)
            where = self.checkpoints.path(step)
            raise Interrupted(f'stopped at step {step}, saved in {where}') from None
        self._wait()
        self.check_data(data_record.PATIENCE)
        self.reporter.flush()
        self._record_end('complete', steps.stop)
        return state

    def _fit(self, state: TrainState, steps: range, profile: range | None) -> TrainState:
        config, update = self.experiment.config, self.programs.update
        every = self.experiment.length.interval(config.checkpoint_every_steps)
        batches = loading.training_batches(
            self.experiment.loader_of(self.experiment.train),
            steps=steps,
            batch_size=config.batch_size,
            seed=config.seed,
        )
        with contextlib.ExitStack() as stack:
            if profile is not None and self.job.index == 0:
                folder, console = self.workdir.folder, self.reporter.console
                profiled = profiling.profiled(
                    update, profile, first=steps.start, folder=folder, console=console
                )
                update = stack.enter_context(profiled)
            return fit(
                update,
                state,
                self.job.tick_each(batches),
                steps=steps,
                on_metrics=self._on_metrics,
                observers=[Every(every, self.save), *self._observers()],
                clock=self.ledger.clock,
                max_skipped_steps=config.max_skipped_steps,
            )

    def _observers(self, without: Collection[str] = ()) -> list[Every]:
        """Returns the observers that evaluate, each at its own interval, without those named."""
        config, every = self.experiment.config, self.experiment.length.interval
        due: dict[int | None, list[str]] = {}
        for name, one in config.evaluations.items():
            if name not in without:
                due.setdefault(every(one.every_steps or config.eval_every_steps), []).append(name)
        observers = [Every(n, functools.partial(self.evaluate, names)) for n, names in due.items()]
        probes = self.experiment.probes if 'fewshot' not in without else None
        features = self.programs.features
        if probes is not None and features is not None:
            evaluate = functools.partial(self.probe, probes, features)
            observers.append(Every(every(probes.config.every_steps), evaluate))
        return observers

    def _resume_evaluations(self, state: TrainState, steps: range) -> None:
        """Runs the evaluations that are due at the first step of a resumed run and missing.

        If the run is already complete, all its evaluations run again.
        """
        if steps.start == 0:
            return
        done = self.job.from_process_0('evaluated', lambda: json.dumps(self.reporter.evaluated))
        for observer in self._observers(without=json.loads(done)):
            if observer.is_due(steps.start, steps.stop):
                observer.run(steps.start, state)

    def _on_metrics(self, step: int, metrics: StepMetrics) -> None:
        if self.reporter.step(step, metrics):
            self.checkpoints.check()
            self.check_data(0)
            self.ledger.record('reported', step)

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save a checkpoint."""
        with self.ledger.clock('save stall'):
            self.job.reset_watchdog()
            self.ledger.record('saving', step)
            self.reporter.flush()
            params, training = state.split()
            card, progress = self.experiment.card(step), self.reporter.progress
            self.checkpoints.save(step, params, training, card, progress)

    def _wait(self) -> None:
        """Waits for the last checkpoint."""
        self.job.reset_watchdog()
        with self.ledger.clock('save stall'):
            self.checkpoints.wait()
        self.job.reset_watchdog()

    def _record_end(self, event: str, step: int | None) -> None:
        self.ledger.record(event, step)
        self.ledger.flush()

    def evaluate(self, names: list[str], step: int, state: TrainState) -> None:
        """Computes loss and metrics over all images of these evaluations."""
        for name in names:
            with self.ledger.clock('evaluation'):
                self.ledger.record(f'evaluating {name}', step)
                evaluator, params = self.programs.evaluators[name], state.eval_params
                reader = self.experiment.evals[name]
                found = evaluator.evaluate(params, reader, watch=self.job.tick_each)
            self.evals[name] = found.means
            numbers = found.means | {'count': found.num_images}
            text = f'{eval_summary({name: found.means})} of {counted(found.num_images, "image")}'
            if unreadable := len(reader.source) - found.num_images:
                numbers['unreadable'] = unreadable
                text += f', {unreadable:,} left out, unreadable'
            self.reporter.record(name, step, numbers, text)

    def probe(self, probes: Probes, features: Evaluator, step: int, state: TrainState) -> None:
        """Runs the few-shot evaluation and writes it to the work directory."""
        folder = self.workdir.folder
        with self.ledger.clock('evaluation'):
            self.ledger.record('evaluating fewshot', step)
            features_of = features_by(features, state.eval_params, watch=self.job.tick_each)
            self.fewshot = probing.evaluate(features_of, probes, self.experiment.preprocessing)
            self.fewshot |= {'step': step, 'checkpoint': str(folder)}
            if self.job.index == 0:
                self.workdir.check()
                write_json(folder / workdirs.FEWSHOT, self.fewshot)
        text = probing.summary(self.fewshot)
        self.reporter.record('fewshot', step, probing.numbers(self.fewshot), text)
