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
import numpy as np
from rich.console import Console

from vit_jax.base import Path, UserError, counted, records, write_json
from vit_jax.checkpoints.store import Checkpoints, quarantine_damaged
from vit_jax.config import TrainConfig, write_config
from vit_jax.data import loading, reading
from vit_jax.data.loading import Loader
from vit_jax.distributed import meshes
from vit_jax.distributed.processes import Interrupted, Job
from vit_jax.distributed.sharding_rules import sharding_report
from vit_jax.evaluation import classification, probing
from vit_jax.evaluation.probing import Probes
from vit_jax.experiment import compilation, data_record, fingerprint, goodput, profiling, workdirs
from vit_jax.experiment.build import Experiment, build_experiment, images_at_peak, loaders
from vit_jax.experiment.compilation import Features, shardings_of
from vit_jax.experiment.goodput import Ledger
from vit_jax.experiment.reporter import Reporter, console_of, eval_summary, outline
from vit_jax.experiment.source_run import trained_before
from vit_jax.experiment.workdirs import Workdir
from vit_jax.training.loop import Clock, Every, NotFinite, Stopped, fit
from vit_jax.training.metrics import StepMetrics
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
    """Trains to the end of the configuration, from where the work directory `path` stands.

    The steps in `profile` are watched by a profiler, on the first process.

    Raises UserError, before anything is compiled where that is possible, for input that does not
    fit, NotFinite, with the last good checkpoint, when the training breaks down, and Interrupted,
    when all is saved, where the job was asked to stop.
    """
    clock = Clock(0.0 if job is None else goodput.seconds_since_start())
    job = job or Job()
    console = console_of(job)
    with contextlib.ExitStack() as stack:
        with clock('start'):
            opened = agreed(
                config, path, job, accept_changes=accept_changes, accept_data=accept_data
            )
            experiment, workdir, check_data = stack.enter_context(opened)
            config, folder = experiment.config, workdir.folder
            profiling.require_within(profile, experiment.length.total_steps)
        kept = folder / workdirs.LEDGER if job.index == 0 else None
        ledger = Ledger(kept, clock)
        stack.enter_context(contextlib.closing(ledger))
        ledger.record('starting', None)  # a start that ends before its first step took time too
        console.print(outline(experiment))
        with clock('start'):  # what is kept on the devices is read here
            loader_of, unread = loaders(experiment)
        with loading.read_beside(unread, index=job.index, count=job.count) as wait:
            with clock('compile'):
                ledger.record('compiling', None)
                abstract, update, eval_steps, features = _compiled(experiment, console)
            console.print(f'compiled in {clock.seconds["compile"]:.1f} s')
            with clock('start'):
                restored = _first_state(experiment, abstract, workdir, job, console)
                checkpoints, state, progress = restored
                stack.enter_context(contextlib.closing(checkpoints))
                compilation.give_back_memory()
                if not int(state.step):
                    wait()
        steps = range(int(state.step), experiment.length.total_steps)
        reporter = _reporter(experiment, steps, progress, workdir, ledger, console)
        stack.enter_context(reporter)
        parts = experiment, update, eval_steps, features, loader_of, checkpoints, reporter
        run = Run(*parts, ledger, check_data, workdir, job, profile)
        state = run.to_the_end(state)
    reached = state, run.evals, run.fewshot, checkpoints.path(int(state.step)), folder
    return Result(experiment, *reached, reporter.skipped, *ledger.totals())


def _reporter(
    experiment: Experiment,
    steps: range,
    progress: dict[str, Any],
    workdir: Workdir,
    ledger: Ledger,
    console: Console,
) -> Reporter:
    config = experiment.config
    return Reporter(
        workdir.folder,
        steps=steps,
        log_every_steps=experiment.length.log_interval(config.log_every_steps),
        batch_size=config.batch_size,
        clock=ledger.clock,
        tensorboard=config.tensorboard,
        console=console,
        progress=progress,
        evaluations=[*experiment.evals, 'fewshot'],
        run=ledger.run,
        images_at_peak=images_at_peak(experiment),
    )


@contextlib.contextmanager
def agreed(
    config: TrainConfig,
    path: str,
    job: Job,
    *,
    accept_changes: bool = False,
    accept_data: bool = False,
) -> Iterator[tuple[Experiment, Workdir, Callable[[float], None]]]:
    """What all processes are about to train, the work directory, which is held, and `check_data`.

    Raises UserError as `train` does before it compiles.
    """
    job.require_same('this run', fingerprint.of_run(config, path))
    config = records.checked(config, where='config')
    config = workdirs.with_kept_dtype(config, path, job)
    experiment = build_experiment(config)
    job.require_same('what is decided', fingerprint.of_decisions(experiment))
    config, readers = experiment.config, experiment.readers
    sources = data_record.find_sources(config, readers, experiment.probes)
    values = records.to_dict(config)
    with workdirs.opened(path, values, job, accept_changes=accept_changes) as workdir:
        compared = data_record.compare_data(workdir, sources, job, accept=accept_data)
        with compared as check_data:
            yield experiment, workdir, check_data


def _compiled(
    experiment: Experiment, console: Console
) -> tuple[TrainState, Callable[..., Any], dict[str, Callable[..., Any]], Features | None]:
    """The abstract state, and the programs: update, evaluations, features where they are needed."""
    abstract, mesh = compilation.abstract_state(experiment), experiment.mesh
    for line in sharding_report(abstract, shardings_of(abstract), mesh):
        console.print(line)
    console.print(f'compile for {mesh.size} x {mesh.devices.flat[0].device_kind}')
    update = compilation.lower_update(experiment, abstract).compile()
    eval_steps = compilation.compile_eval_steps(experiment, abstract.eval_params)
    features = None
    if experiment.probes is not None:
        size, params = experiment.eval_batch_size, abstract.eval_params
        features = compilation.compile_features(
            experiment.model, experiment.preprocessing, mesh, size, params
        )
    return abstract, update, eval_steps, features


def _first_state(
    experiment: Experiment, abstract: TrainState, workdir: Workdir, job: Job, console: Console
) -> tuple[Checkpoints, TrainState, dict[str, Any]]:
    """The newest sound state of the work directory, or one that begins, and its reports' progress.

    A damaged checkpoint is moved aside, with a warning, and the one before is taken.
    """
    job.barrier('compiled')  # devices meet in what follows, and gloo would wait for 30 s only
    job.reset_watchdog()
    folder, check = workdir
    check()  # before anything is moved or removed
    damaged = job.from_process_0('damaged', lambda: json.dumps(quarantine_damaged(folder)))
    for line in json.loads(damaged):
        logging.warning('%s', line)
    keep, along = experiment.config.keep_checkpoints, [folder / workdirs.METRICS]
    checkpoints = Checkpoints(folder, keep=keep, along=along, held=check)
    step, end = checkpoints.latest_step, experiment.length.total_steps
    job.require_same('the step to go on from', {'step': step})
    if step is None:
        return checkpoints, _new_state(experiment, abstract, console), {}
    if step > end:
        checkpoints.close()
        raise UserError(f'{folder} is at step {step}, the end, step {end}, is before it')
    *parts, progress = checkpoints.restore(step, abstract.split(), shardings_of(abstract).split())
    complete = '' if step < end else _COMPLETE
    console.print(f'resuming at step {step} from {checkpoints.path(step)}{complete}')
    return checkpoints, TrainState.join(*parts), progress


def _new_state(experiment: Experiment, abstract: TrainState, console: Console) -> TrainState:
    """The state before the first step, with the parameters of `start_from` where there is one."""
    shardings, start = shardings_of(abstract), experiment.start
    init = meshes.jit_on(experiment.init, experiment.mesh, out_shardings=shardings)
    state: TrainState = init()
    if start is None:
        return state
    params, report = experiment.transferred(start, state.params)
    tested = trained_before(experiment.evals, start.path)
    console.print('\n'.join([f'start_from {start.path}', *start.report, *report, *tested]))
    params = meshes.put(params, shardings.params)
    ema_params = None if state.ema_params is None else jax.tree.map(jnp.copy, params)
    return state._replace(params=params, ema_params=ema_params)


@dataclasses.dataclass
class Run:
    """What runs: compiled programs, open files, and the newest results of evaluations."""

    experiment: Experiment
    update: Callable[..., Any]
    eval_steps: dict[str, Callable[..., Any]]
    features: Features | None  # for the few-shot evaluation
    loader_of: Callable[[reading.ImageReader], Loader]
    checkpoints: Checkpoints
    reporter: Reporter
    ledger: Ledger
    check_data: Callable[[float], None]  # raises changes of the data that were found meanwhile
    workdir: Workdir
    job: Job
    profile: range | None  # steps to watch
    evals: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    fewshot: dict[str, Any] | None = None

    def to_the_end(self, state: TrainState) -> TrainState:
        """Trains, evaluates and saves up to the last step; returns the state after it."""
        steps = range(int(state.step), self.experiment.length.total_steps)
        self.ledger.record('training', steps.start)
        if self.job.index == 0:  # changes that were accepted have proved possible
            self.workdir.check()
            values = records.to_dict(self.experiment.config)
            write_config(self.workdir.folder / workdirs.CONFIG, values)
        self.job.enter('stepping')
        try:
            self._evaluated(state, steps)
            state = self._trained(state, steps) if steps else state
        except NotFinite as error:
            self._wait()
            self.ledger.record('diverged', None)
            self.ledger.flush()
            last = self.checkpoints.latest_step
            good = 'there is none yet' if last is None else self.checkpoints.path(last)
            raise NotFinite(f'{error}; last good checkpoint: {good}') from error
        except (Stopped, Interrupted) as stopped:
            state = stopped.state if isinstance(stopped, Stopped) else state
            step = int(state.step)
            self.save(step, state)
            self._wait()
            self.ledger.record('stopped', step)
            self.ledger.flush()
            where = self.checkpoints.path(step)
            raise Interrupted(f'stopped at step {step}, saved in {where}') from None
        self._wait()
        self.check_data(data_record.PATIENCE)
        self.reporter.flush()
        self.ledger.record('complete', steps.stop)
        self.ledger.flush()
        return state

    def _trained(self, state: TrainState, steps: range) -> TrainState:
        config, reader = self.experiment.config, self.experiment.train
        every = self.experiment.length.interval(config.checkpoint_every_steps)
        loader = self.loader_of(reader)
        batches = loading.training_batches(
            loader, steps=steps, batch_size=config.batch_size, seed=config.seed
        )
        with profiling.profiled(
            self.update,
            self.profile if self.job.index == 0 else None,
            first=steps.start,
            folder=self.reporter.folder,
            console=self.reporter.console,
        ) as update:
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
        """The evaluations, each at its own interval, but those of some names."""
        config, every = self.experiment.config, self.experiment.length.interval
        due: dict[int | None, list[str]] = {}
        for name, one in config.evaluations.items():
            if name not in without:
                due.setdefault(every(one.every_steps or config.eval_every_steps), []).append(name)
        observers = [Every(n, functools.partial(self.evaluate, names)) for n, names in due.items()]
        probes = self.experiment.probes if 'fewshot' not in without else None
        if probes is not None and self.features is not None:
            evaluate = functools.partial(self.probe, probes, self.features)
            observers.append(Every(every(probes.config.every_steps), evaluate))
        return observers

    def _evaluated(self, state: TrainState, steps: range) -> None:
        """Does evaluations that were interrupted where a run goes on, all of a complete one."""
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
            card, progress = self.experiment.card(step), self.reporter.progress
            self.checkpoints.save(step, *state.split(), card, progress)

    def _wait(self) -> None:
        self.job.enter('saving')
        with self.ledger.clock('save stall'):
            self.checkpoints.wait()
        self.job.reset_watchdog()

    def evaluate(self, names: list[str], step: int, state: TrainState) -> None:
        """Loss and metrics over all images of these evaluations."""
        for name in names:
            with self.ledger.clock('evaluation'):
                self.ledger.record(f'evaluating {name}', step)
                reader = self.experiment.evals[name]
                loader = self.loader_of(reader)
                size, count = self.experiment.eval_batch_size, len(loader.source)
                batches = loading.sequential_batches(loader, np.arange(count), batch_size=size)
                watched = self.job.tick_each(batches)
                numbers, read = classification.evaluate(
                    self.eval_steps[name],
                    state.eval_params,
                    watched,
                    count=count,
                    may_lack=self.experiment.evals[name].on_unreadable == 'skip',
                )
            self.evals[name], missing = numbers, {}
            text = f'{eval_summary({name: numbers})} of {counted(read, "image")}'
            if read < count:
                missing = {'unreadable': count - read}
                text += f', {count - read:,} left out, unreadable'
            self.reporter.record(name, step, numbers | {'count': read} | missing, text)

    def probe(self, probes: Probes, features: Features, step: int, state: TrainState) -> None:
        """The few-shot evaluation, written to the work directory."""
        params, size = state.eval_params, self.experiment.eval_batch_size
        folder = self.workdir.folder
        with self.ledger.clock('evaluation'):
            self.ledger.record('evaluating fewshot', step)
            features_of = probing.make_features_of(features, params, self.loader_of, size, self.job)
            self.fewshot = probing.evaluate(features_of, probes, self.experiment.preprocessing)
            self.fewshot |= {'step': step, 'checkpoint': str(folder)}
            if self.job.index == 0:
                self.workdir.check()
                write_json(folder / workdirs.FEWSHOT, self.fewshot)
        text = probing.summary(self.fewshot)
        self.reporter.record('fewshot', step, probing.numbers(self.fewshot), text)
