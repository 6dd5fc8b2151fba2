"""A run: training to the end of a configuration, with everything that is due on the way."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import config as configs
from vit_jax import probing, records, workdir
from vit_jax import setup as setups
from vit_jax.checkpoints.state import Checkpoints
from vit_jax.config import TrainConfig
from vit_jax.data import pipeline
from vit_jax.data.source import Source
from vit_jax.data.sources import opener
from vit_jax.evaluation import classification
from vit_jax.models import ViTConfig, multiply_adds, parameter_count
from vit_jax.reporting import Reporter
from vit_jax.training.duration import make_length
from vit_jax.training.loop import Clock, Every, NotFinite, fit
from vit_jax.training.update import TrainState
from vit_jax.writing import write_json


class Result(NamedTuple):
    """What a run reached, and where it lies."""

    state: TrainState
    test: dict[str, float]
    fewshot: dict[str, Any] | None
    checkpoint: pathlib.Path
    folder: pathlib.Path
    skipped: int  # training images that could not be read, counted at each use
    clock: Clock


def train(config: TrainConfig, path: str, *, accept_changes: bool = False) -> Result:
    """Trains to the end of the configuration, from where the work directory `path` stands.

    Raises ValueError or FileNotFoundError, before anything is compiled where that is possible,
    for input that does not fit, and NotFinite, with the last good checkpoint, when the training
    breaks down.
    """
    clock = Clock()
    with clock('start'):
        config = configs.checked(config)
        if config.total is None:
            raise ValueError('config.total is none: expected how long to train')
        opened = opener(config.held_out)
        class_names = _class_names(config, opened)
        origin = setups.read_origin(config)
        model = setups.trained_model(config, origin, class_names)
        images = opened(config.data, config.train_split)
        length = make_length(config.total, batch_size=config.batch_size, images=len(images))
        setup = setups.prepare(config, origin, model, length=length, label_shape=images.label_shape)
        folder = workdir.open_workdir(path, records.to_dict(config), accept_changes=accept_changes)
        feeds = setups.Feeds(setup, opened)
        feed = feeds.training()
        test_feed = feeds.evaluation(config.data, config.test_split)
        # What is wrong with few-shot's data is said now, not after hours.
        sets = probing.open_sets(setup, feeds) if config.fewshot else None
    if jax.process_index() == 0:
        print(_outline(setup, len(feed.source), len(test_feed.source)), flush=True)
    with clock('compile'):
        programs = setups.compile_training(setup)
        probe = (_compiled_features(setup, programs), sets) if sets else None
    with clock('start'):
        checkpoints = Checkpoints(folder, keep=config.keep_checkpoints)
        state, said = _first_state(setup, programs, checkpoints)
    steps = range(int(state.step), length.total_steps)
    if steps.start > steps.stop:
        raise ValueError(
            f'{folder} is at step {steps.start}, the end, step {steps.stop}, is before it'
        )
    reporter = Reporter(
        folder,
        steps=steps,
        log_every_steps=config.log_every_steps,
        batch_size=config.batch_size,
        clock=clock,
        tensorboard=config.tensorboard,
        is_main_process=jax.process_index() == 0,
    )
    run = _Run(setup, programs, probe, feeds, class_names, checkpoints, reporter, clock, folder)
    with contextlib.closing(checkpoints), reporter:
        for line in (*programs.report, *said):
            reporter.console.print(line)
        state = run.to_the_end(state, feed, steps)
        with clock('checkpoint'):
            checkpoints.wait()
    checkpoint = checkpoints.path(length.total_steps)
    return Result(state, run.test, run.fewshot, checkpoint, folder, reporter.skipped, clock)


def _class_names(config: TrainConfig, opened: Callable[[str, str], Source]) -> tuple[str, ...]:
    """The classes of the training and the test images, which must be the same."""
    train, test = (opened(config.data, s) for s in (config.train_split, config.test_split))
    if train.class_names != test.class_names:
        raise ValueError(f'{config.data}: the classes of train and test differ')
    return train.class_names


def _compiled_features(setup: setups.Setup, programs: setups.Programs) -> probing.Features:
    """The features of the parameters that are kept, for few-shot."""
    like, shardings = programs.like.best_params, programs.shardings.best_params
    return setups.compile_features(setup, like, shardings)


def _outline(setup: setups.Setup, train_count: int, test_count: int) -> str:
    """What is about to be done, in three lines."""
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
    setup: setups.Setup, programs: setups.Programs, checkpoints: Checkpoints
) -> tuple[TrainState, list[str]]:
    """The newest state of the work directory, or one that begins; and how it came about."""
    step = checkpoints.latest_step
    if step is None:
        return setups.start_state(setup, programs)
    like, shardings = programs.like.split(), programs.shardings.split()
    state = TrainState.join(*checkpoints.restore(step, like, shardings))
    return state, [f'resuming at step {step} from {checkpoints.path(step)}']


@dataclasses.dataclass
class _Run:
    """The parts of one training run, and the newest results of its evaluations."""

    setup: setups.Setup
    programs: setups.Programs
    probe: tuple[probing.Features, probing.OpenSets] | None
    feeds: setups.Feeds
    class_names: tuple[str, ...]
    checkpoints: Checkpoints
    reporter: Reporter
    clock: Clock
    folder: pathlib.Path
    test: dict[str, float] = dataclasses.field(default_factory=dict)
    fewshot: dict[str, Any] | None = None

    def to_the_end(self, state: TrainState, feed: pipeline.Feed, steps: range) -> TrainState:
        """The state after the last step; everything that is due on the way is done."""
        config = self.setup.config
        observers = [Every(config.eval_every_steps, self.run_test)]
        if config.fewshot:
            observers.append(Every(config.fewshot.every_steps, self.run_fewshot))
        if not steps:  # the run was complete before
            for observer in observers:
                observer.run(steps.stop, state)
            return state
        batches = pipeline.training_batches(
            feed, steps=steps, batch_size=config.batch_size, seed=config.seed
        )
        try:
            return fit(
                self.programs.update,
                state,
                batches,
                steps=steps,
                on_metrics=self.reporter.step,
                observers=[Every(config.checkpoint_every_steps, self.save), *observers],
                clock=self.clock,
            )
        except NotFinite as error:
            self.checkpoints.wait()
            last = self.checkpoints.latest_step
            good = 'there is none yet' if last is None else self.checkpoints.path(last)
            raise NotFinite(f'{error}; last good checkpoint: {good}') from error

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save a checkpoint."""
        with self.clock('checkpoint'):
            params, rest = state.split()
            card = setups.card(self.setup, step, self.class_names)
            self.checkpoints.save(step, params, rest, card)

    def run_test(self, step: int, state: TrainState) -> None:
        """Loss and accuracy on the test images."""
        config = self.setup.config
        with self.clock('evaluation'):
            feed = self.feeds.evaluation(config.data, config.test_split)
            count = len(feed.source)
            batches = pipeline.listed_batches(
                feed, np.arange(count), batch_size=self.setup.eval_batch_size
            )
            self.test = classification.evaluate(
                self.programs.scores, state.best_params, batches, count=count
            )
        text = f'{reached(self.test)} of {count:,} images'
        self.reporter.record('test', step, self.test | {'count': count}, text)

    def run_fewshot(self, step: int, state: TrainState) -> None:
        """The few-shot evaluation, written to the work directory."""
        assert self.probe is not None
        features, sets = self.probe
        with self.clock('evaluation'):
            rows = probing.rows_of(self.setup, features, state.best_params)
            self.fewshot = probing.evaluate(self.setup, rows, sets)
            self.fewshot |= {'step': step, 'checkpoint': str(self.folder)}
            if jax.process_index() == 0:
                write_json(self.folder / workdir.FEWSHOT, self.fewshot)
        text = probing.summary(self.fewshot)
        self.reporter.record('fewshot', step, probing.numbers(self.fewshot), text)


def reached(test: dict[str, float]) -> str:
    """The result of the test images in one line."""
    precision = test.get('mean_average_precision')
    more = '' if precision is None else f', mean average precision {precision:.2%}'
    return f'test accuracy {test["accuracy"]:.2%}{more}'
