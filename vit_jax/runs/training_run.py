"""A run: training to the end of a configuration, with everything that is due on the way."""

import contextlib
import dataclasses
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import records
from vit_jax.base.atomic_files import write_json
from vit_jax.base.errors import UserError
from vit_jax.checkpoints.digests import Damaged, quarantine
from vit_jax.checkpoints.store import Checkpoints, quarantine_damaged
from vit_jax.config import TrainConfig, checked
from vit_jax.data import loading
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.opening import make_opener
from vit_jax.evaluation import classification
from vit_jax.models import ViTConfig, multiply_adds, parameter_count
from vit_jax.parallel.processes import Interrupted, Job
from vit_jax.runs import fingerprint, probing, setups, workdirs
from vit_jax.runs.goodput import Ledger
from vit_jax.runs.reporting import Reporter
from vit_jax.training.duration import make_train_length
from vit_jax.training.loop import Clock, Every, NotFinite, Stopped, fit
from vit_jax.training.update import TrainState


class Result(NamedTuple):
    """What a run reached, and where it lies."""

    state: TrainState
    test: dict[str, float]
    fewshot: dict[str, Any] | None
    checkpoint: pathlib.Path
    folder: pathlib.Path
    skipped: int  # training images that could not be read, counted at each use
    seconds: dict[str, float]  # of the wall time, by name, over all starts of this run


class Plan(NamedTuple):
    """A run that is decided: nothing is compiled yet, nothing is written."""

    setup: setups.Setup
    feeds: setups.Feeds
    train: loading.Loader
    test: loading.Loader
    sets: probing.OpenSets | None
    class_names: tuple[str, ...]


def train(
    config: TrainConfig, path: str, *, accept_changes: bool = False, job: Job | None = None
) -> Result:
    """Trains to the end of the configuration, from where the work directory `path` stands.

    Raises UserError or MissingFile, before anything is compiled where that is possible,
    for input that does not fit, NotFinite, with the last good checkpoint, when the training
    breaks down, and Interrupted, when all is saved, where the job was asked to stop.
    """
    job = job or Job()
    clock = Clock(job.age)
    with contextlib.ExitStack() as stack:
        with clock('start'):
            config = checked(config)
            job.require_same('this run', fingerprint.of_run(config, path))
            plan = _planned(config)
            job.require_same('the data', _described(plan))
            values = records.to_dict(config)
            opened = workdirs.opened(path, values, job, accept_changes=accept_changes)
            folder = stack.enter_context(opened)
        main = jax.process_index() == 0
        ledger = Ledger(folder / workdirs.LEDGER if main else None, clock)
        ledger.record(None)  # a start that ends before its first step took time too
        if main:
            print(_outline(plan), flush=True)
        with clock('compile'):
            programs = setups.compile_training(plan.setup)
            features = _compiled_features(plan.setup, programs) if plan.sets else None
        with clock('start'):
            checkpoints, state, said = _first_state(plan.setup, programs, folder, job)
            stack.enter_context(contextlib.closing(checkpoints))
        reporter = stack.enter_context(_reporter(plan.setup, folder, int(state.step), clock))
        for line in (*programs.report, *said):
            reporter.console.print(line)
        run = _Run(plan, programs, features, checkpoints, reporter, clock, ledger, folder, job)
        state = run.to_the_end(state)
    last = checkpoints.path(int(state.step))
    return Result(state, run.test, run.fewshot, last, folder, reporter.skipped, ledger.totals())


def _planned(config: TrainConfig) -> Plan:
    if config.total is None:
        raise UserError('config.total is none: expected how long to train')
    opened = make_opener(config.held_out)
    class_names = _class_names(config, opened)
    origin = setups.read_origin(config)
    model = setups.trained_model(config, origin, class_names)
    images = opened(config.data, config.train_split)
    length = make_train_length(config.total, batch_size=config.batch_size, images=len(images))
    setup = setups.prepare(config, origin, model, length=length, label_shape=images.label_shape)
    feeds = setups.Feeds(setup, opened)
    train, test = feeds.training(), feeds.evaluation(config.data, config.test_split)
    # What is wrong with few-shot's data is said now, not after hours.
    sets = probing.open_sets(setup, feeds) if config.fewshot else None
    return Plan(setup, feeds, train, test, sets, class_names)


def _described(plan: Plan) -> dict[str, Any]:
    """What tells whether two hosts see the same data: counts, classes, some names."""
    return {
        name: {
            'images': len(source),
            'classes': list(source.class_names),
            'some': [source.name_of(i) for i in range(0, len(source), len(source) // 20 + 1)],
        }
        for name, source in (('train', plan.train.source), ('test', plan.test.source))
    }


def _reporter(setup: setups.Setup, folder: pathlib.Path, first: int, clock: Clock) -> Reporter:
    config = setup.config
    assert setup.length is not None
    return Reporter(
        folder,
        steps=range(first, setup.length.total_steps),
        log_every_steps=config.log_every_steps,
        batch_size=config.batch_size,
        clock=clock,
        tensorboard=config.tensorboard,
        is_main_process=jax.process_index() == 0,
    )


def _class_names(config: TrainConfig, opened: Callable[[str, str], Source]) -> tuple[str, ...]:
    """The classes of the training and the test images, which must be the same."""
    train, test = (opened(config.data, s) for s in (config.train_split, config.test_split))
    if train.class_names != test.class_names:
        raise UserError(f'{config.data}: the classes of train and test differ')
    return train.class_names


def _compiled_features(setup: setups.Setup, programs: setups.Programs) -> probing.Features:
    """The features of the parameters that are kept, for few-shot."""
    like, shardings = programs.like.eval_params, programs.shardings.eval_params
    return setups.compile_features(setup, like, shardings)


def _outline(plan: Plan) -> str:
    """What is about to be done, in three lines."""
    setup, train_count, test_count = plan.setup, len(plan.train.source), len(plan.test.source)
    config, model = setup.config, setup.model.config
    tokens = f'{model.num_tokens} tokens, ' if isinstance(model, ViTConfig) else ''
    device, length = jax.devices()[0], setup.length
    assert length is not None
    return (
        f'data    {config.data}: {train_count:,} training and {test_count:,} test images, '
        f'{model.num_classes} classes\n'
        f'length  {length.total_steps:,} steps of {length.batch_size:,} images, '
        f'{length.epochs:,.1f} epochs; warm-up {length.steps(config.schedule.warmup):,} steps\n'
        f'model   {parameter_count(model):,} parameters, {tokens}'
        f'{multiply_adds(model) / 1e6:,.1f} M multiply-adds an image; '
        f'compiling for {setup.mesh.size} x {device.device_kind}'
    )


def _first_state(
    setup: setups.Setup, programs: setups.Programs, folder: pathlib.Path, job: Job
) -> tuple[Checkpoints, TrainState, list[str]]:
    """The newest sound state of the work directory, or one that begins; and how it came about.

    A damaged checkpoint is moved aside, with a warning, and the one before is taken.
    """
    said = job.from_process_0('damaged checkpoints', lambda: json.dumps(quarantine_damaged(folder)))
    for line in json.loads(said):
        logging.warning('%s', line)
    assert setup.length is not None
    checkpoints = Checkpoints(folder, keep=setup.config.keep_checkpoints)
    step = checkpoints.latest_step
    job.require_same('the step to go on from', {'step': step})
    if step is None:
        return checkpoints, *setups.start_state(setup, programs)
    if step > (end := setup.length.total_steps):
        checkpoints.close()
        raise UserError(f'{folder} is at step {step}, the end, step {end}, is before it')
    like, shardings = programs.like.split(), programs.shardings.split()
    try:
        state = TrainState.join(*checkpoints.restore(step, like, shardings))
    except Damaged as error:
        checkpoints.close()
        where = job.from_process_0(
            f'checkpoint {step} is set aside', lambda: str(quarantine(checkpoints.path(step)))
        )
        logging.warning('%s; moved to %s', error, where)
        return _first_state(setup, programs, folder, job)
    return checkpoints, state, [f'resuming at step {step} from {checkpoints.path(step)}']


@dataclasses.dataclass
class _Run:
    """The parts of one training run, and the newest results of its evaluations."""

    plan: Plan
    programs: setups.Programs
    features: probing.Features | None
    checkpoints: Checkpoints
    reporter: Reporter
    clock: Clock
    ledger: Ledger
    folder: pathlib.Path
    job: Job
    test: dict[str, float] = dataclasses.field(default_factory=dict)
    fewshot: dict[str, Any] | None = None

    @property
    def setup(self) -> setups.Setup:
        """What was decided before anything was compiled."""
        return self.plan.setup

    def to_the_end(self, state: TrainState) -> TrainState:
        """The state after the last step; everything that is due on the way is done."""
        assert self.setup.length is not None
        steps = range(int(state.step), self.setup.length.total_steps)
        self.ledger.record(steps.start)
        self.job.stop_gracefully_from_here()
        try:
            state = self._trained(state, steps) if steps else self._observed(state, steps.stop)
        except NotFinite as error:
            self._wait()
            last = self.checkpoints.latest_step
            good = 'there is none yet' if last is None else self.checkpoints.path(last)
            raise NotFinite(f'{error}; last good checkpoint: {good}') from error
        except Stopped as stopped:
            step = int(stopped.state.step)
            self.save(step, stopped.state)
            self._wait()
            self.ledger.record(step)
            where = self.checkpoints.path(step)
            raise Interrupted(f'stopped at step {step}, saved in {where}') from None
        self._wait()
        self.ledger.record(steps.stop)
        return state

    def _trained(self, state: TrainState, steps: range) -> TrainState:
        config = self.setup.config
        batches = loading.training_batches(
            self.plan.train, steps=steps, batch_size=config.batch_size, seed=config.seed
        )
        return fit(
            self.programs.update,
            state,
            batches,
            steps=steps,
            on_metrics=self._on_metrics,
            observers=[Every(config.checkpoint_every_steps, self.save), *self._evaluations()],
            clock=self.clock,
            tick=self.job.heartbeat,
            max_skipped_steps=config.max_skipped_steps,
        )

    def _evaluations(self) -> list[Every]:
        config = self.setup.config
        observers = [Every(config.eval_every_steps, self.run_test)]
        if config.fewshot:
            observers.append(Every(config.fewshot.every_steps, self.run_fewshot))
        return observers

    def _observed(self, state: TrainState, step: int) -> TrainState:
        """A run that was complete before is evaluated again."""
        try:
            for observer in self._evaluations():
                observer.run(step, state)
        except Interrupted:
            raise Stopped(state) from None
        return state

    def _on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if self.reporter.step(step, metrics):
            self.checkpoints.check()
            self.ledger.record(step)

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save a checkpoint."""
        with self.clock('save stall'):
            self.job.reset_watchdog()
            params, rest = state.split()
            card = setups.card(self.setup, step, self.plan.class_names)
            self.checkpoints.save(step, params, rest, card)
        self.ledger.record(step)

    def _wait(self) -> None:
        with self.clock('save stall'):
            self.job.reset_watchdog()
            self.checkpoints.wait()

    def run_test(self, step: int, state: TrainState) -> None:
        """Loss and accuracy on the test images."""
        with self.clock('evaluation'):
            count = len(self.plan.test.source)
            batches = loading.sequential_batches(
                self.plan.test, np.arange(count), batch_size=self.setup.eval_batch_size
            )
            self.test = classification.evaluate(
                self.programs.scores,
                state.eval_params,
                self.job.with_heartbeat(batches),
                count=count,
            )
        text = f'{reached(self.test)} of {count:,} images'
        self.reporter.record('test', step, self.test | {'count': count}, text)

    def run_fewshot(self, step: int, state: TrainState) -> None:
        """The few-shot evaluation, written to the work directory."""
        assert self.features is not None and self.plan.sets is not None
        with self.clock('evaluation'):
            rows = probing.rows_of(self.setup, self.features, state.eval_params, self.job)
            self.fewshot = probing.evaluate(self.setup, rows, self.plan.sets)
            self.fewshot |= {'step': step, 'checkpoint': str(self.folder)}
            if jax.process_index() == 0:
                write_json(self.folder / workdirs.FEWSHOT, self.fewshot)
        text = probing.summary(self.fewshot)
        self.reporter.record('fewshot', step, probing.numbers(self.fewshot), text)


def reached(test: dict[str, float]) -> str:
    """The result of the test images in one line."""
    precision = test.get('mean_average_precision')
    more = '' if precision is None else f', mean average precision {precision:.2%}'
    return f'test accuracy {test["accuracy"]:.2%}{more}'
