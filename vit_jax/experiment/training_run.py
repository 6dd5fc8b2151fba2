"""Trains: opens the run, compiles, restores or initializes, trains, evaluates and saves.

`train` calls the functions below it in their order. `TrainingRun` is the training run in progress.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from rich.console import Console

from vit_jax.base import Batch, Params, Path, UserError, plural, require, tree_names, write_json
from vit_jax.base.files import read_json
from vit_jax.checkpoints.store import Checkpoints, quarantine_damaged
from vit_jax.config import StepVariant, TrainConfig, write_config
from vit_jax.data import loading
from vit_jax.data.sources import opening
from vit_jax.distributed import meshes, sharding_rules
from vit_jax.distributed.processes import Interrupted, Job
from vit_jax.evaluation import probing
from vit_jax.evaluation.evaluator import (
    Evaluator,
    Selection,
    find_eval_interval,
    make_step_evaluator,
    summarize_evals,
)
from vit_jax.evaluation.features import make_feature_function
from vit_jax.experiment import data_manifest, workdirs
from vit_jax.experiment.build import Experiment, build_experiment, make_batch_source
from vit_jax.experiment.functions import Update
from vit_jax.experiment.reporter import Reporter, describe_run, make_console
from vit_jax.experiment.workdirs import Workdir
from vit_jax.training import loop
from vit_jax.training.loop import Clock, NotFiniteError, PeriodicAction, TrainingStopped
from vit_jax.training.losses import StepMetrics
from vit_jax.training.metrics import find_metric, resolve_metrics
from vit_jax.training.update import TrainState

_MAX_INITIAL_SHARE = 0.05  # of the initial parameters in the average; a larger one is reported
# Fields of the configuration on which the arrays of a checkpoint depend.
_FIELDS_OF_ARRAYS = (
    'model',
    'optimizer',
    'ema_decay',
    'accumulation_steps',
    'objective',
    'distillation',
    'classes',
    'image_size',
)


class Result(NamedTuple):
    """The final state and metrics of a run, and the paths of its files."""

    experiment: Experiment
    state: TrainState
    evals: dict[str, dict[str, float]]  # newest metrics of each evaluation, by name
    fewshot: dict[str, Any] | None  # newest few-shot result, as in fewshot.json
    checkpoint: Path
    selection: Selection | None  # the best evaluation, if `config.keep_best` is set
    folder: Path  # the work directory
    reporter: Reporter  # has the wall time of this start and of earlier starts


def train(
    config: TrainConfig,
    path: str,
    *,
    accept_changes: bool = False,
    accept_data: bool = False,
    job: Job | None = None,
    profile: range = range(0),
) -> Result:
    """Trains until `config.total`, from the newest checkpoint in the work directory if any.

    With `config.patience` the training may end earlier.

    Args:
      config: The experiment.
      path: The work directory, a local path or gs://BUCKET/FOLDER.
      accept_changes: Whether to resume a run that has another configuration.
      accept_data: Whether to resume a run although its data changed.
      job: This process of a multi-process job; None: a single process.
      profile: Steps to profile on process 0. range(3, 6) profiles the three steps after step 3.

    Returns:
      The final state, the newest metrics and the path of the last checkpoint.

    Raises:
      UserError: For invalid input, before compilation where possible.
      NotFiniteError: If training diverges. The message has the path of the last good
        checkpoint.
      Interrupted: If the process was told to stop (SIGTERM, SIGHUP, Ctrl-C), after saving.
    """
    # Command-line programs pass a job. Their clock starts with the process, to include imports.
    clock = Clock(0.0 if job is None else time.time() - job.started)
    job = job or Job()
    console = make_console(job)
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(
            open_run(config, path, job, accept_changes=accept_changes, accept_data=accept_data)
        )
        experiment = opened.experiment
        workdir = opened.workdir
        console.print(describe_run(experiment))
        if job.index == 0:
            warn_of_short_average(experiment.config.ema_decay, experiment.length.total_steps)
        # This caches the images on the devices if they fit.
        for reader in (experiment.train_reader, *experiment.eval_readers.values()):
            experiment.batches.make_loader(reader)
        with clock('compile'):
            programs = compile_programs(experiment, console)
        console.print(f'compiled in {clock.seconds["compile"]:.1f} s')
        checkpoints = open_checkpoint_store(experiment, workdir, job)

        def close_checkpoints(error_type: type[BaseException] | None, *_: Any) -> None:
            # If another process has died, a save never finishes.
            is_broken = error_type is not None and job.count > 1
            checkpoints.close(2 if is_broken else None)

        stack.push(close_checkpoints)
        state, progress = restore_or_init(
            experiment, programs.state, checkpoints, job, console, workdir.changes
        )
        steps = range(int(state.step), experiment.length.total_steps)
        selects_anew = opened.selection is not None and not opened.selection.resume(
            progress.get('selection', {})
        )
        reporter = Reporter(
            experiment, workdir.folder, steps=steps, progress=progress, clock=clock, job=job
        )
        stack.enter_context(contextlib.closing(reporter))
        run = TrainingRun(opened, job, programs, checkpoints, reporter, selects_anew=selects_anew)
        return run.train(state, steps, profile if job.index == 0 else range(0))


def warn_of_short_average(ema_decay: float | None, total_steps: int) -> None:
    """Logs a warning if the average of parameters still contains much of the initial ones."""
    if ema_decay is None:
        return
    share = ema_decay**total_steps  # of the initial parameters in the average
    if share < _MAX_INITIAL_SHARE:
        return
    enough = _MAX_INITIAL_SHARE ** (1 / total_steps) * (1 - 1e-9)
    digits = 1 + math.ceil(-math.log10(1 - enough))
    logging.warning(
        'config.ema_decay=%s is too high for %s: the average that is evaluated and saved would '
        'consist of %.1f%% initial parameters; set --config.ema_decay=%g or none',
        ema_decay,
        plural(total_steps, 'step'),
        100 * share,
        math.floor(enough * 10**digits) / 10**digits,
    )


class OpenedRun(NamedTuple):
    """An experiment that is equal in all processes of a job, and its locked work directory."""

    experiment: Experiment
    workdir: Workdir
    check_data: Callable[[float], None]  # waits up to this many seconds; raises if the data changed
    selection: Selection | None  # the best evaluation; None: `config.keep_best` is not set


@contextlib.contextmanager
def open_run(
    config: TrainConfig, path: str, job: Job, *, accept_changes: bool, accept_data: bool
) -> Iterator[OpenedRun]:
    """Builds the experiment, opens its work directory, and compares both between processes.

    Raises:
      UserError: For invalid input. `train` raises it before compilation.
    """
    opening.require_outside(path, config.data, *(each.data for each in config.evals.values()))
    if job.count > 1:
        job.require_equal('this run', workdirs.collect_settings(config, path))
    dtype = job.broadcast_text('dtype', lambda: workdirs.read_dtype(path))
    experiment = build_experiment(config, dtype=dtype)
    selection = make_selection(experiment)
    if experiment.config.metrics:
        state = jax.eval_shape(experiment.functions.init, experiment.values)
        for name, evaluator in experiment.evaluators.items():
            evaluator.try_metrics(state.eval_params, experiment.eval_readers[name])
    job.require_equal('the resolved experiment', experiment.resolved_choices)
    values = experiment.export_config()
    sources = data_manifest.name_sources(
        experiment.train_reader, experiment.eval_readers.values(), experiment.probes
    )
    with workdirs.open_workdir(path, values, job, accept_changes=accept_changes) as workdir:
        compared = data_manifest.compare_data(workdir, sources, job, accept=accept_data)
        with compared as check_data:
            yield OpenedRun(experiment, workdir, check_data, selection)


def find_eval_intervals(experiment: Experiment) -> dict[str, int]:
    """Returns the interval of each evaluation in steps, by name."""
    config = experiment.config
    intervals = dict[str, int]()
    for name, reader in experiment.eval_readers.items():
        every = config.evaluations[name].every_steps or config.eval_every_steps
        intervals[name] = find_eval_interval(experiment.length, every, len(reader.source))
    return intervals


def make_selection(experiment: Experiment) -> Selection | None:
    """Makes the selection of the best checkpoint by `config.keep_best`; None if it is not set.

    Raises UserError for an unknown metric, or for `config.patience` without an evaluation before
    the end.
    """
    config = experiment.config
    if config.keep_best is None:
        return None
    readers = experiment.eval_readers
    state = jax.eval_shape(experiment.functions.init, experiment.values)
    known = [
        f'{name}/{each}'
        for name, evaluator in experiment.evaluators.items()
        for each in evaluator.list_metrics(state.eval_params, readers[name])
    ]
    if config.keep_best not in known:
        raise UserError(
            f'config.keep_best={config.keep_best!r}: expected one of {", ".join(known)}'
        )
    name, _, metric = config.keep_best.partition('/')
    end = experiment.length.total_steps
    if config.patience is not None and find_eval_intervals(experiment)[name] >= end:
        field = f'evals.{name}.every_steps' if config.evals else 'eval_every_steps'
        raise UserError(
            f'config.patience={config.patience}: {name} is evaluated only at the end, step {end}; '
            f'set --config.{field}={max(1, end // 10)} or a longer --config.total'
        )
    return Selection(
        evaluation=name,
        metric=find_metric(metric, resolve_metrics(config.metrics)),
        data=readers[name].source.data,
        split=readers[name].source.split,
        patience=config.patience,
    )


class Programs(NamedTuple):
    """The compiled programs of a run, and the abstract train state."""

    state: TrainState  # shape, type and sharding of each array
    update: dict[StepVariant, Update]
    evaluators: dict[str, Evaluator]  # by name; `fewshot` computes features


def compile_programs(experiment: Experiment, console: Console) -> Programs:
    """Compiles the updates and the evaluators. Prints a line per sharded array.

    Evaluations with equal batch shapes and patch sizes share a compiled step.
    """
    state = abstract_state(experiment)
    mesh = experiment.mesh
    shardings = sharding_rules.get_shardings(state)
    for line in sharding_rules.sharding_report(state, shardings, mesh):
        console.print(line)
    console.print(f'compile for {mesh.size} x {mesh.devices.flat[0].device_kind}')
    variants = experiment.config.step_variants
    return Programs(
        state=state,
        update={each: lower_update(experiment, state, each).compile() for each in variants},
        evaluators=_compile_evaluators(experiment, state),
    )


def _compile_evaluators(experiment: Experiment, state: TrainState) -> dict[str, Evaluator]:
    """Compiles an evaluator for each evaluation, and for the few-shot evaluation."""
    params = state.eval_params
    evaluators = {
        name: evaluator.compile(params, experiment.eval_readers[name])
        for name, evaluator in experiment.evaluators.items()
    }
    if experiment.probes is not None:
        features = make_step_evaluator(experiment.functions.features(), experiment.batches)
        evaluators['fewshot'] = features.compile(params, experiment.probes.example)
    return evaluators


def abstract_state(experiment: Experiment) -> TrainState:
    """Returns the train state with shape, dtype and sharding of each array.

    Raises UserError if less of the state can be sharded than `config.mesh` demands.
    """
    state = jax.eval_shape(experiment.functions.init, experiment.values)
    config = experiment.config.mesh
    shardings = sharding_rules.shardings_for(state, experiment.mesh, config)
    sharding_rules.require_sharded(state, shardings, experiment.mesh, config)
    return sharding_rules.abstract_arrays(state, shardings)


def lower_update(
    experiment: Experiment, state: TrainState, variant: StepVariant | None = None
) -> Any:
    """Traces and lowers the update step, which donates its state, but not frozen parameters.

    By default, it is the update with the longest sequence, which needs the most memory.
    """
    batches = experiment.batches._replace(batch_size=experiment.config.batch_size)
    out_shardings = sharding_rules.get_shardings(state), meshes.replicated(experiment.mesh)
    update = experiment.functions.update(variant or experiment.config.step_variants[0])
    step = meshes.jit(update, experiment.mesh, donate_argnums=0, out_shardings=out_shardings)
    batch = batches.abstract(experiment.train_reader)
    return step.lower(state, batch, experiment.values, experiment.frozen, 0.0)


def open_checkpoint_store(experiment: Experiment, workdir: Workdir, job: Job) -> Checkpoints:
    """Opens the checkpoints of a run. Moves damaged ones aside, with a warning."""
    folder = workdir.folder
    job.reset_watchdog()
    if job.index == 0:
        workdir.check_held()  # before the folder is changed
        for line in quarantine_damaged(folder):
            logging.warning('%s', line)
    job.barrier('compiled')  # collectives follow, for which gloo waits only 30 s
    job.reset_watchdog()
    checkpoints = Checkpoints(
        folder,
        keep=experiment.config.keep_checkpoints,
        sync_first=[folder / workdirs.METRICS],
        check_lease=workdir.check_held,
    )
    job.require_equal('the step to resume from', {'step': checkpoints.latest_step})
    return checkpoints


@contextlib.contextmanager
def list_changes_of_arrays(changes: Sequence[str]) -> Iterator[None]:
    """Adds to a WrongLeaves error the configuration changes that may have caused it."""
    try:
        yield
    except tree_names.WrongLeaves as error:
        lines = [f'config.{line}' for line in changes if line.startswith(_FIELDS_OF_ARRAYS)]
        if not lines:
            raise
        changed = '\n  '.join(['the checkpoint does not fit these changes:', *lines])
        advice = (
            'undo these changes, or start a new run from this checkpoint with --config.start_from'
        )
        raise UserError(f'{error}\n{changed}\n{advice}') from error


def restore_or_init(
    experiment: Experiment,
    abstract: TrainState,
    checkpoints: Checkpoints,
    job: Job,
    console: Console,
    changes: Sequence[str] = (),
) -> tuple[TrainState, dict[str, Any]]:
    """Restores the newest checkpoint or initializes the state.

    Initial parameters come from `config.start_from` if it is set, and the head from `init_head`.

    Args:
      experiment: The experiment.
      abstract: Shape, dtype and sharding of each array of the state.
      checkpoints: The checkpoints of the run.
      job: This process.
      console: Receives a line about the source of the state.
      changes: The accepted changes of the configuration, for messages.

    Returns:
      The state, and the progress of the reporter ({} for a new run).

    Raises:
      UserError: If the newest checkpoint is beyond the last step.
    """
    shardings = sharding_rules.get_shardings(abstract)
    step = checkpoints.latest_step
    end = experiment.length.total_steps
    if step is not None:
        where = checkpoints.path(step)
        require(step <= end, f'{where}: expected at most step {end}; set a longer --config.total')
        with list_changes_of_arrays(changes):
            params, training, progress = checkpoints.restore(
                step, abstract.split(), shardings.split()
            )
        console.print(f'resuming at step {step} from {where}')
        if step == end:
            advice = 'to continue it, pass a longer --config.total and --accept_config_changes'
            console.print(f'the run is complete; {advice}')
        return TrainState.join(params, training), progress
    functions = experiment.functions
    start = experiment.start_from
    init = meshes.jit(functions.init, experiment.mesh, out_shardings=shardings)
    if start is None:
        return init(experiment.values), {}
    init_params = meshes.jit(functions.init_params, experiment.mesh, out_shardings=shardings.params)
    params = init_params(experiment.values)
    params, report = experiment.transfer_params(start, params)
    console.print('\n'.join([f'start_from {start.path}', *start.report, *report]))
    params = meshes.put(params, shardings.params)
    if experiment.config.init_head is not None:
        params['head'] = make_linear_probe_head(experiment, params, job, console)
    return init(experiment.values, params), {}


def make_linear_probe_head(
    experiment: Experiment, params: Params, job: Job, console: Console
) -> Params:
    """Fits a linear head to the features of all training images, without augmentation.

    All processes get it from process 0.
    """
    batches = make_batch_source(experiment.config, experiment.mesh)  # with its own cache of images
    features = make_step_evaluator(experiment.functions.features(), batches)
    reader = dataclasses.replace(experiment.train_reader, crop=experiment.preprocessing.crop)
    features_of = make_feature_function(features, params, job.tick_each)
    head, line = probing.fit_head(features_of, reader)
    console.print(line)
    job.barrier('head')  # a collective follows, for which gloo waits only 30 s
    return meshes.put(meshes.broadcast(head), sharding_rules.get_shardings(params['head']))


@dataclasses.dataclass
class TrainingRun:
    """A training run in progress: programs, checkpoints, reporter, and the newest metrics."""

    opened: OpenedRun
    job: Job
    programs: Programs
    checkpoints: Checkpoints
    reporter: Reporter
    selects_anew: bool  # whether evaluations of earlier starts are not compared with later ones
    evals: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    fewshot: dict[str, Any] | None = None
    # The metrics of evaluations that an earlier start completed at the first step, by name.
    recorded: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def train(self, state: TrainState, steps: range, profile: range) -> Result:
        """Trains, evaluates and saves in `steps`; profiles the steps in `profile`."""
        experiment = self.opened.experiment
        workdir = self.opened.workdir
        more: dict[str, Any] = {'changes': workdir.changes} if workdir.changes else {}
        for change in workdir.changes:
            self.reporter.console.print(f'changed from step {steps.start}: config.{change}')
        if self.selects_anew:
            more['selects_anew'] = True
        if self.selects_anew and steps.start > 0:
            self.reporter.console.print(f'keep_best starts anew at step {steps.start}')
        self.reporter.record_event('training', steps.start, **more)
        if self.job.index == 0:  # accepted changes of the configuration are now known to work
            workdir.check_held()
            write_config(workdir.folder / workdirs.CONFIG, experiment.export_config())
        self.job.save_on_signals()
        try:
            with self.job.saving_on_interrupt():
                if self._resume_evaluations(state, steps) > steps.start:
                    state = self._fit(state, steps, profile)
        except NotFiniteError as error:
            self._finish('diverged', None)
            last = self.checkpoints.latest_step
            good = 'none' if last is None else self.checkpoints.path(last)
            raise NotFiniteError(f'{error}; last good checkpoint: {good}') from error
        except (TrainingStopped, Interrupted) as stopped:
            state = stopped.state if isinstance(stopped, TrainingStopped) else state
            step = int(state.step)
            self.save(step, state)
            self._finish('stopped', step)
            where = self.checkpoints.path(step)
            raise Interrupted(f'stopped at step {step}; saved in {where}') from None
        self.opened.check_data(5.0)  # seconds; the next start compares the rest
        step = int(state.step)
        if step < steps.stop:
            count = plural(experiment.config.patience or 0, 'evaluation')
            self.reporter.console.print(
                f'the run is complete at step {step}: no better {experiment.config.keep_best} in '
                f'{count}; to continue it, pass a larger --config.patience'
            )
        self._finish('complete', step)
        self.reporter.flush()
        return Result(
            experiment=experiment,
            state=state,
            evals=self.evals,
            fewshot=self.fewshot,
            checkpoint=self.checkpoints.path(step),
            selection=self.opened.selection,
            folder=workdir.folder,
            reporter=self.reporter,
        )

    def _fit(self, state: TrainState, steps: range, profile: range) -> TrainState:
        experiment = self.opened.experiment
        config = experiment.config
        loader = experiment.batches.make_loader(experiment.train_reader)
        sampler = loading.training_sampler(
            loader.source, loader.config, batch_size=config.batch_size, seed=config.seed
        )
        batches = loading.host_batches(loader, sampler, steps=steps, batch_size=config.batch_size)

        def update(
            step: int, state: TrainState, local: Batch, loss_limit: float
        ) -> tuple[TrainState, StepMetrics]:
            batch = loading.to_devices(loader, local, config.batch_size)
            compiled = self.programs.update[config.step_variant(step, experiment.length)]
            return compiled(state, batch, experiment.values, experiment.frozen, loss_limit)

        folder = self.opened.workdir.folder / 'profile'
        watched = loop.profile_steps(
            self.job.tick_each(batches), steps, profile, folder, self.reporter.console
        )
        with contextlib.closing(watched):
            return loop.fit(
                update,
                state,
                watched,
                steps=steps,
                on_metrics=self._on_metrics,
                actions=self._actions(),
                clock=self.reporter.clock,
                max_skipped_steps=config.max_skipped_steps,
                spike_deviations=config.spike_deviations,
                losses=self.reporter.losses,
            )

    def _actions(self) -> list[PeriodicAction]:
        """Returns the actions that evaluate and that save checkpoints, with their intervals.

        The evaluation for `keep_best` comes first, so that a checkpoint includes its result.
        """
        experiment = self.opened.experiment
        config = experiment.config
        steps_of = experiment.length.interval_steps
        actions = [PeriodicAction(steps_of(config.checkpoint_every_steps), self.save)]
        for name, interval in find_eval_intervals(experiment).items():
            action = PeriodicAction(interval, functools.partial(self.evaluate, name))
            if self.opened.selection and name == self.opened.selection.evaluation:
                actions.insert(0, action)
            else:
                actions.append(action)
        if config.fewshot is not None:
            evaluate = functools.partial(self.evaluate, 'fewshot')
            actions.append(PeriodicAction(steps_of(config.fewshot.every_steps), evaluate))
        return actions

    def _resume_evaluations(self, state: TrainState, steps: range) -> int:
        """Runs actions that are due at the first step, if the run is resumed or `init_head` is set.

        The previous start may have been killed before them. Evaluations that it completed are not
        repeated. Returns the last step of the training (see `run_actions`).
        """
        if steps.start == 0 and self.opened.experiment.config.init_head is None:
            return steps.stop
        recorded = self.job.broadcast_text('recorded', lambda: json.dumps(self._find_recorded()))
        self.recorded = json.loads(recorded)
        if self.selects_anew and self.opened.selection is not None:
            self.recorded.pop(self.opened.selection.evaluation, None)  # of other images
        end = loop.run_actions(self._actions(), state, steps.start, steps.stop)
        self.recorded = {}
        return end

    def _find_recorded(self) -> dict[str, dict[str, Any]]:
        """Returns the metrics that an earlier start recorded for the first step, by evaluation."""
        recorded = self.reporter.recorded
        fewshot = self._read_few_shot()
        if 'fewshot' in recorded and fewshot.get('step') == self.reporter.first_step:
            self.fewshot = fewshot
        return recorded

    def _read_few_shot(self) -> dict[str, Any]:
        """Reads fewshot.json of an earlier evaluation; returns {} if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(read_json(self.opened.workdir.folder / workdirs.FEWSHOT))
        return {}

    def _on_metrics(self, step: int, metrics: StepMetrics) -> None:
        if self.reporter.record_step(step, metrics):
            self.checkpoints.check()
            self.opened.check_data(0)

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving a checkpoint in the background."""
        with self.reporter.clock('save stall'):
            self.job.reset_watchdog()
            self.reporter.record_event('saving', step)
            self.reporter.flush()
            params, training = state.split()
            card = self.opened.experiment.make_card(step)
            progress = self.reporter.progress
            best = None
            if self.opened.selection:
                progress['selection'] = self.opened.selection.to_dict()
                best = self.opened.selection.step
            self.checkpoints.save(step, params, training, card, progress, best=best)

    def _finish(self, event: str, step: int | None) -> None:
        """Waits until the last checkpoint is written, then records the final event."""
        self.job.reset_watchdog()
        with self.reporter.clock('save stall'):
            self.checkpoints.wait()
        self.job.reset_watchdog()
        self.reporter.record_event(event, step)

    def evaluate(self, name: str, step: int, state: TrainState) -> bool:
        """Runs one evaluation over its whole split and records its metrics.

        Saves a checkpoint at a new best value. Returns whether `config.patience` stops training.
        """
        numbers = self._restore_evaluation(name)
        if numbers is None:
            with self.reporter.clock('evaluation'):
                self.reporter.record_event(f'evaluating {name}', step)
                if name == 'fewshot':
                    numbers, text = self._evaluate_few_shot(step, state)
                else:
                    numbers, text = self._evaluate_split(name, state)
            self.reporter.record_metrics(name, step, numbers, text)
        selection = self.opened.selection
        if selection is None or name != selection.evaluation:
            return False
        if selection.metric.name not in numbers:  # an earlier start recorded other metrics
            return False
        is_best = selection.record(step, numbers[selection.metric.name])
        if is_best or selection.is_exhausted:
            self.save(step, state)
        return selection.is_exhausted

    def _restore_evaluation(self, name: str) -> dict[str, Any] | None:
        """Returns the metrics that an earlier start recorded for this step, if there are any."""
        numbers = self.recorded.get(name)
        if numbers is not None and name != 'fewshot':
            counts = 'count', 'unreadable'
            self.evals[name] = {n: value for n, value in numbers.items() if n not in counts}
        return numbers

    def _evaluate_split(self, name: str, state: TrainState) -> tuple[dict[str, Any], str]:
        """Computes loss and metrics of a split. Returns them, and a summary."""
        reader = self.opened.experiment.eval_readers[name]
        evaluate = self.programs.evaluators[name].evaluate
        result = evaluate(state.eval_params, reader, wrap=self.job.tick_each)
        self.evals[name] = result.metrics
        numbers = result.metrics | {'count': result.num_images}
        summary = summarize_evals({name: result.metrics}, self.opened.experiment.shown)
        text = f'{summary} on {plural(result.num_images, "image")}'
        unreadable = len(reader.source) - result.num_images
        if unreadable:
            numbers['unreadable'] = unreadable
            text += f', {unreadable:,} unreadable'
        return numbers, text

    def _evaluate_few_shot(self, step: int, state: TrainState) -> tuple[dict[str, Any], str]:
        """Runs the few-shot evaluation and writes fewshot.json. Returns metrics and a summary."""
        experiment = self.opened.experiment
        workdir = self.opened.workdir
        assert experiment.probes is not None  # `_actions` checks config.fewshot
        features_of = make_feature_function(
            self.programs.evaluators['fewshot'], state.eval_params, wrap=self.job.tick_each
        )
        result = probing.evaluate(features_of, experiment.probes, experiment.preprocessing)
        self.fewshot = result | {'step': step, 'checkpoint': str(workdir.folder)}
        if self.job.index == 0:
            workdir.check_held()
            earlier = self._read_few_shot()
            end = earlier.get('step')
            if end in self.reporter.ends and end != step:
                write_json(workdir.folder / f'fewshot-{end}.json', earlier)
            write_json(workdir.folder / workdirs.FEWSHOT, self.fewshot)
        return probing.name_accuracies(self.fewshot), probing.summarize(self.fewshot)
