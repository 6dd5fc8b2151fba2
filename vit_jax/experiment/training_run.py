"""One start of a run: open, compile, restore or initialize, train, evaluate, save.

`train` calls the functions below it, in their order; `Run` is the training.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil
from rich.console import Console

from vit_jax.base import Batch, Params, Path, counted, errors, require, storage, write_json
from vit_jax.checkpoints.store import Checkpoints, quarantine_damaged
from vit_jax.config import TrainConfig, write_config
from vit_jax.data import loading
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.distributed.processes import Interrupted, Job
from vit_jax.evaluation import probing
from vit_jax.evaluation.evaluator import Evaluator
from vit_jax.evaluation.features import features_by, make_feature_evaluator
from vit_jax.experiment import data_record, workdirs
from vit_jax.experiment.build import Experiment, Update, build_experiment
from vit_jax.experiment.reporter import Reporter, console_of, eval_summary, outline
from vit_jax.experiment.workdirs import Workdir
from vit_jax.training.loop import Clock, Every, NotFinite, Stopped, fit
from vit_jax.training.losses import StepMetrics
from vit_jax.training.update import TrainState


class Result(NamedTuple):
    """What a run has reached, and where it is kept."""

    experiment: Experiment
    state: TrainState
    evals: dict[str, dict[str, float]]  # the newest numbers of each evaluation, by name
    fewshot: dict[str, Any] | None
    checkpoint: Path
    folder: Path
    reporter: Reporter  # with the wall time of this start, and of earlier starts


def train(
    config: TrainConfig,
    path: str,
    *,
    accept_changes: bool = False,
    accept_data: bool = False,
    job: Job | None = None,
    profile: range = range(0),
) -> Result:
    """Trains to the end of the configuration, from the newest checkpoint if there is one.

    Args:
      config: The experiment.
      path: The work directory.
      accept_changes: Whether to resume a run of another configuration.
      accept_data: Whether to resume a run on other data.
      job: This process among those of its job; None: one process alone.
      profile: Steps to profile, on process 0: 3, 4, 5 lead from state 3 to state 6.

    Raises:
      UserError: For input that does not fit, before anything is compiled if that is possible.
      NotFinite: With the last good checkpoint, when the training breaks down.
      Interrupted: After saving, if the job was asked to stop.
    """
    # The program has imported its libraries since its process began.
    clock = Clock(0.0 if job is None else time.time() - psutil.Process().create_time())
    job = job or Job()
    console = console_of(job)
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(
            open_run(config, path, job, accept_changes=accept_changes, accept_data=accept_data)
        )
        experiment, workdir, _ = opened
        console.print(outline(experiment))
        loader_of = experiment.evaluator.batches.loader_of
        for reader in (experiment.train, *experiment.evals.values()):
            loader_of(reader)  # reads the images that are kept on the devices
        with clock('compile'):
            programs = compile_programs(experiment, console)
        console.print(f'compiled in {clock.seconds["compile"]:.1f} s')
        checkpoints = open_checkpoints(experiment, workdir, job)
        stack.enter_context(contextlib.closing(checkpoints))
        state, progress = restore_or_init(experiment, programs.state, checkpoints, console)
        steps = range(int(state.step), experiment.length.total_steps)
        reporter = Reporter(
            experiment, workdir.folder, steps=steps, progress=progress, clock=clock, console=console
        )
        stack.enter_context(contextlib.closing(reporter))
        run = Run(opened, job=job, programs=programs, checkpoints=checkpoints, reporter=reporter)
        return run.train(state, steps, profile if job.index == 0 else range(0))


class OpenedRun(NamedTuple):
    """What all processes of a job have agreed to train, in a work directory that they hold."""

    experiment: Experiment
    workdir: Workdir
    check_data: Callable[[float], None]  # raises changes of the data found in the background


@contextlib.contextmanager
def open_run(
    config: TrainConfig, path: str, job: Job, *, accept_changes: bool, accept_data: bool
) -> Iterator[OpenedRun]:
    """Builds the experiment, opens its work directory, and compares both with the other processes.

    Raises UserError as `train` does before it compiles.
    """
    if job.count > 1:
        job.require_same('this run', workdirs.run_settings(config, path))
    dtype = job.from_process_0('dtype', lambda: workdirs.recorded_dtype(path))
    experiment = build_experiment(config, dtype=dtype)
    job.require_same('what is decided', experiment.decisions)
    train, evals, values = experiment.train, experiment.evals, experiment.recorded_config()
    sources = data_record.find_sources(train, evals.values(), experiment.probes)
    with workdirs.opened(path, values, job, accept_changes=accept_changes) as workdir:
        compared = data_record.compare_data(workdir, sources, job, accept=accept_data)
        with compared as check_data:
            yield OpenedRun(experiment, workdir, check_data)


class Programs(NamedTuple):
    """The compiled programs of a run, and the abstract state that they are compiled for."""

    state: TrainState  # shape, type and sharding of each array
    update: Update
    evaluators: dict[str, Evaluator]  # by name; `fewshot` computes features


def compile_programs(experiment: Experiment, console: Console) -> Programs:
    """Compiles the update and the evaluators; prints a line about each array that is split."""
    state, mesh = abstract_state(experiment), experiment.mesh
    for line in sharding_rules.sharding_report(state, shardings_of(state), mesh):
        console.print(line)
    console.print(f'compile for {mesh.size} x {mesh.devices.flat[0].device_kind}')
    update = lower_update(experiment, state).compile()
    return Programs(state, update, compile_evaluators(experiment, state.eval_params))


def abstract_state(experiment: Experiment) -> TrainState:
    """Returns shape, type and sharding of each array of the state.

    Raises UserError if less of it can be split than the configuration demands.
    """
    state, config = jax.eval_shape(experiment.init), experiment.config.mesh
    shardings = sharding_rules.shardings_for(state, experiment.mesh, config)
    sharding_rules.check_split(state, shardings, experiment.mesh, config)
    return sharding_rules.abstract(state, shardings)


def shardings_of(abstract: Any) -> Any:
    """Returns the shardings of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def lower_update(experiment: Experiment, state: TrainState) -> Any:
    """Traces the update step, which donates its state; compiles nothing yet."""
    size, reader = experiment.config.batch_size, experiment.train
    batch = loading.abstract_batch(experiment.mesh, size, reader.size, reader.source.label_shape)
    out_shardings = shardings_of(state), meshes.replicated(experiment.mesh)
    options = {'donate_argnums': 0, 'out_shardings': out_shardings}
    return meshes.jit_on(experiment.update, experiment.mesh, **options).lower(state, batch)


def compile_evaluators(experiment: Experiment, params: Params) -> dict[str, Evaluator]:
    """Compiles the evaluators, by name; `fewshot` computes features.

    Evaluations with batches of one shape share a compiled step.
    """
    compile_for = functools.partial(experiment.evaluator.compile, params)
    compiled = {name: compile_for(reader) for name, reader in experiment.evals.items()}
    if experiment.probes is not None:
        model, batches = experiment.model, experiment.evaluator.batches
        features = make_feature_evaluator(model, experiment.preprocessing, batches)
        compiled['fewshot'] = features.compile(params, experiment.probes.example)
    return compiled


def open_checkpoints(experiment: Experiment, workdir: Workdir, job: Job) -> Checkpoints:
    """Opens the checkpoints of a run; damaged ones are moved aside, with a warning."""
    folder, check = workdir
    job.reset_watchdog()
    if job.index == 0:
        check()  # before anything is moved or removed
        for line in quarantine_damaged(folder):
            logging.warning('%s', line)
    job.barrier('compiled')  # devices meet in what follows, and gloo would wait for 30 s only
    job.reset_watchdog()
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
    shardings = shardings_of(abstract)
    step, end = checkpoints.latest_step, experiment.length.total_steps
    if step is not None:
        where = checkpoints.path(step)
        require(step <= end, f'{where}: config.total ends before it, at step {end}')
        params, training, progress = checkpoints.restore(step, abstract.split(), shardings.split())
        console.print(f'resuming at step {step} from {where}')
        if step == end:
            advice = 'a longer --config.total with --accept_config_changes trains on'
            console.print(f'the run is complete; {advice}')
        return TrainState.join(params, training), progress
    init = meshes.jit_on(experiment.init, experiment.mesh, out_shardings=shardings)
    state, start = init(), experiment.start
    if start is not None:
        params, report = experiment.transferred(start, state.params)
        console.print('\n'.join([f'start_from {start.path}', *start.report, *report]))
        params = meshes.put(params, shardings.params)
        average = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
        state = state._replace(params=params, ema_params=average)
    return state, {}


@dataclasses.dataclass
class Run:
    """A training in progress: what it runs, saves and reports with, and its newest results."""

    opened: OpenedRun
    job: Job
    programs: Programs
    checkpoints: Checkpoints
    reporter: Reporter
    evals: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    fewshot: dict[str, Any] | None = None

    def train(self, state: TrainState, steps: range, profile: range) -> Result:
        """Trains, evaluates and saves in these steps, and profiles some of them."""
        experiment, workdir, check_data = self.opened
        self.reporter.record_event('training', steps.start)
        if self.job.index == 0:  # changes that were accepted have proved possible
            workdir.check()
            write_config(workdir.folder / workdirs.CONFIG, experiment.recorded_config())
        self.job.save_on_signals()
        try:
            self._resume_evaluations(state, steps)
            state = self._fit(state, steps, profile)
        except NotFinite as error:
            self._finish('diverged', None)
            last = self.checkpoints.latest_step
            good = 'none' if last is None else self.checkpoints.path(last)
            raise NotFinite(f'{error}; last good checkpoint: {good}') from error
        except (Stopped, Interrupted) as stopped:
            state = stopped.state if isinstance(stopped, Stopped) else state
            step = int(state.step)
            self.save(step, state)
            self._finish('stopped', step)
            where = self.checkpoints.path(step)
            raise Interrupted(f'stopped at step {step}, saved in {where}') from None
        check_data(5.0)  # seconds: the rest of the data is compared at the next start
        self._finish('complete', steps.stop)
        self.reporter.flush()
        return Result(
            experiment=experiment,
            state=state,
            evals=self.evals,
            fewshot=self.fewshot,
            checkpoint=self.checkpoints.path(steps.stop),
            folder=workdir.folder,
            reporter=self.reporter,
        )

    def _fit(self, state: TrainState, steps: range, profile: range) -> TrainState:
        experiment, workdir, _ = self.opened
        config = experiment.config
        loader = experiment.evaluator.batches.loader_of(experiment.train)
        batches = loading.training_batches(
            loader, steps=steps, batch_size=config.batch_size, seed=config.seed
        )
        folder, console = workdir.folder / 'profile', self.reporter.console
        watched = profile_steps(self.job.tick_each(batches), steps, profile, folder, console)
        save = Every(experiment.length.interval(config.checkpoint_every_steps), self.save)
        with contextlib.closing(watched):
            return fit(
                self.programs.update,
                state,
                watched,
                steps=steps,
                on_metrics=self._on_metrics,
                observers=[save, *self._evaluations()],
                clock=self.reporter.clock,
                max_skipped_steps=config.max_skipped_steps,
            )

    def _evaluations(self) -> list[Every]:
        """Returns the observers that evaluate, each at its own interval."""
        config, every = self.opened.experiment.config, self.opened.experiment.length.interval
        usual, evaluations = config.eval_every_steps, config.evaluations.items()
        intervals = {name: one.every_steps or usual for name, one in evaluations}
        if config.fewshot is not None:
            intervals['fewshot'] = config.fewshot.every_steps
        return [
            Every(every(interval), functools.partial(self.evaluate, name))
            for name, interval in intervals.items()
        ]

    def _resume_evaluations(self, state: TrainState, steps: range) -> None:
        """Runs the evaluations of a resumed run that are due at its first step.

        They may have been interrupted. The reporter has removed their earlier numbers.
        """
        for observer in self._evaluations():
            if steps.start > 0 and observer.is_due(steps.start, steps.stop):
                observer.run(steps.start, state)

    def _on_metrics(self, step: int, metrics: StepMetrics) -> None:
        if self.reporter.step(step, metrics):
            self.checkpoints.check()
            self.opened.check_data(0)

    def save(self, step: int, state: TrainState) -> None:
        """Starts to save a checkpoint."""
        with self.reporter.clock('save stall'):
            self.job.reset_watchdog()
            self.reporter.record_event('saving', step)
            self.reporter.flush()
            params, training = state.split()
            card, progress = self.opened.experiment.card(step), self.reporter.progress
            self.checkpoints.save(step, params, training, card, progress)

    def _finish(self, event: str, step: int | None) -> None:
        """Waits until the last checkpoint is written, and records how this start ends."""
        self.job.reset_watchdog()
        with self.reporter.clock('save stall'):
            self.checkpoints.wait()
        self.job.reset_watchdog()
        self.reporter.record_event(event, step)

    def evaluate(self, name: str, step: int, state: TrainState) -> None:
        """Runs one evaluation, over all its images, and records its numbers."""
        with self.reporter.clock('evaluation'):
            self.reporter.record_event(f'evaluating {name}', step)
            if name == 'fewshot':
                numbers, text = self._probe(step, state)
            else:
                numbers, text = self._measure(name, state)
        self.reporter.record(name, step, numbers, text)

    def _measure(self, name: str, state: TrainState) -> tuple[dict[str, Any], str]:
        """Computes loss and metrics; returns them, and a summary."""
        reader = self.opened.experiment.evals[name]
        evaluate = self.programs.evaluators[name].evaluate
        found = evaluate(state.eval_params, reader, watch=self.job.tick_each)
        self.evals[name] = found.means
        numbers = found.means | {'count': found.num_images}
        text = f'{eval_summary({name: found.means})} of {counted(found.num_images, "image")}'
        if unreadable := len(reader.source) - found.num_images:
            numbers['unreadable'] = unreadable
            text += f', {unreadable:,} left out, unreadable'
        return numbers, text

    def _probe(self, step: int, state: TrainState) -> tuple[dict[str, Any], str]:
        """Runs the few-shot evaluation and writes its file; returns numbers, and a summary."""
        experiment, workdir, _ = self.opened
        assert experiment.probes is not None  # else there is no such evaluation
        evaluator, params = self.programs.evaluators['fewshot'], state.eval_params
        features_of = features_by(evaluator, params, watch=self.job.tick_each)
        result = probing.evaluate(features_of, experiment.probes, experiment.preprocessing)
        self.fewshot = result | {'step': step, 'checkpoint': str(workdir.folder)}
        if self.job.index == 0:
            workdir.check()
            write_json(workdir.folder / workdirs.FEWSHOT, self.fewshot)
        return probing.numbers(self.fewshot), probing.summary(self.fewshot)


def profile_steps(
    batches: Iterator[Batch], steps: range, profile: range, folder: Path, console: Console
) -> Generator[Batch, None, None]:
    """Yields the batches of `steps` unchanged, and profiles the steps in the range `profile`."""
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
    """Stops the profiler, then copies its files: the profiler can only write to a local folder.

    TensorBoard shows them, with its plugin `xprof`; ui.perfetto.dev shows perfetto_trace.json.gz.
    """
    with _warn_of_errors(folder):
        jax.profiler.stop_trace()
        for file in storage.folder(local).rglob('*.*'):  # its folders' names have no dots
            path = folder / file.relative_to(local)
            storage.make_folder(path.parent)
            path.write_bytes(file.read_bytes())
        console.print(f'profile in {folder}: tensorboard --logdir={folder}, or Perfetto')


@contextlib.contextmanager
def _warn_of_errors(folder: Path) -> Iterator[None]:
    """Turns errors of the profiler into a warning: they do not stop a training."""
    try:
        yield
    except Exception as error:
        logging.warning('%s: the profile is not written: %s', folder, errors.one_line(error))
