"""The evaluator, which measures metrics of whole data sets, and outputs of each image.

Training, `evaluate` and `fewshot` use it. An evaluator applies a function of (params, batch),
jitted for the mesh, to all images in order. Evaluations with the same step and batch shapes share a
compiled program. `Selection` finds the best evaluation of a training run.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.base import Array, Batch, Bool, Int, Num, Params, UserError, require
from vit_jax.data import loading
from vit_jax.data.loading import BatchSource, ImageReader, LoaderConfig
from vit_jax.distributed import meshes
from vit_jax.training.duration import Interval, TrainLength
from vit_jax.training.losses import BatchSums
from vit_jax.training.metrics import SET_METRICS, Metric, random_outputs

# Wraps an iterator of batches, for example to show progress.
WrapBatches = Callable[[Iterable[Batch]], Iterable[Batch]]


class StepResult(NamedTuple):
    """Results of one batch."""

    sums: dict[str, Array]  # sums of loss and metrics over the examples, by name
    mask: Array  # False for padding and for unreadable images
    outputs: dict[str, Array]  # outputs of each example by name


EvalStep = Callable[..., StepResult]  # maps (params, batch, *arguments) to results
_FEW = 32  # lower bound of batch sizes, so that small data sets share compiled programs
# By default, each evaluation runs 10 times. If it would evaluate more than a fifth as many images
# as training uses, it runs fewer times, but at least once. Training on an image takes three times
# as long as evaluating it.
_EVALUATIONS = 10
_EVALUATED_SHARE = 0.2
_MOST_TRIED_CLASSES = 4096


def batches_on_all_devices(reader: ImageReader, batch_size: int) -> BatchSource:
    """Makes batches that are sharded over all devices.

    Args:
      reader: Images.
      batch_size: Images per batch. It is reduced for small data sets, and rounded up to a multiple
        of the number of devices.

    Raises:
      UserError: If a batch exceeds the memory.
    """
    mesh = meshes.make_mesh(meshes.MeshConfig())
    batch_size = min(batch_size, max(_FEW, len(reader.source)))
    loading.check_memory(batch_size, reader.size, '--batch_size')
    batch_size = -(-batch_size // mesh.size) * mesh.size
    sharding = meshes.batch_sharding(mesh)
    loader_of = loading.make_loaders(LoaderConfig(placement='host'), sharding)
    return BatchSource(mesh=mesh, make_loader=loader_of, batch_size=batch_size)


class Evaluation(NamedTuple):
    """Results over the images that could be read."""

    metrics: dict[str, float]  # means over images, and metrics of the whole set, by name
    outputs: dict[str, Num[np.ndarray, 'r ...']]  # outputs of each readable image in order, by name
    readable: Bool[np.ndarray, 'n']  # whether each image could be read

    @property
    def num_images(self) -> int:
        """Number of images that could be read."""
        return int(self.readable.sum())


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Applies a function of (params, batch) to whole data sets (see `make_evaluator`)."""

    step: Any  # an `EvalStep`, jitted or compiled
    batches: BatchSource
    arguments: tuple[Any, ...] = ()  # further arguments of `step`, on the devices or abstract
    metrics: Sequence[Metric] = ()  # metrics of whole data sets, besides the means of `step`

    def compile(self, params: Params, reader: ImageReader) -> 'Evaluator':
        """Returns the evaluator compiled for abstract parameters and the batches of a reader."""
        batch = self.batches.abstract(reader)
        step = self.step.lower(params, batch, *self.arguments).compile()
        return dataclasses.replace(self, step=step)

    def try_metrics(self, params: Params, reader: ImageReader) -> None:
        """Calls the user's metric functions with random outputs, so that they fail before training.

        With very many classes, the outputs would need much memory, and are not tried.
        """
        own = [metric for metric in self.metrics if metric.name not in SET_METRICS]
        if own and len(reader.source.class_names) <= _MOST_TRIED_CLASSES:
            batch = self.batches.abstract(reader)
            shapes = jax.eval_shape(self.step, params, batch, *self.arguments).outputs
            outputs = random_outputs(shapes)
            for metric in own:
                metric.measure(outputs)

    def list_metrics(self, params: Params, reader: ImageReader) -> list[str]:
        """Lists the names of `Evaluation.metrics`, for abstract parameters."""
        batch = self.batches.abstract(reader)
        result = jax.eval_shape(self.step, params, batch, *self.arguments)
        return [*result.sums, *(metric.name for metric in self.metrics)]

    def evaluate(
        self,
        params: Params,
        reader: ImageReader,
        indices: Int[np.ndarray, 'n'] | None = None,
        *,
        wrap: WrapBatches = iter,
    ) -> Evaluation:
        """Evaluates images, counting each exactly once.

        Args:
          params: Parameters on the devices of the mesh.
          reader: Images. Unreadable images that it skips are left out.
          indices: Indices of images in the source; None: all.
          wrap: Wraps the iterator of batches, for example to show progress.

        Raises:
          UserError: If no image can be read.
          AssertionError: If an image was lost or counted twice.
        """
        count = len(reader.source if indices is None else indices)
        totals: dict[str, float] = collections.defaultdict(float)
        outputs_by_batch: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        masks = []

        def add(on_devices: StepResult) -> None:
            result = jax.device_get(on_devices)
            masks.append(result.mask)
            for name, value in result.sums.items():
                totals[name] += float(value)
            for name, values in result.outputs.items():
                outputs_by_batch[name].append(values[result.mask])

        # The devices compute a batch while the outputs of the previous one are read.
        previous = None
        for batch in wrap(self.batches.read(reader, indices)):
            current = self.step(params, batch, *self.arguments)
            if previous is not None:
                add(previous)
            previous = current
        if previous is not None:
            add(previous)
        mask = np.concatenate(masks)
        readable = mask[:count]
        num_examples = int(mask.sum())
        may_skip = reader.on_unreadable == 'skip'
        require(num_examples > 0 or not may_skip, f'none of {count:,} images can be read')
        counts_padding = num_examples != readable.sum()
        if counts_padding or (num_examples < count and not may_skip):
            raise AssertionError(f'evaluated {num_examples} of {count} images')
        metrics = {name: total / num_examples for name, total in totals.items()}
        outputs = {name: np.concatenate(arrays) for name, arrays in outputs_by_batch.items()}
        for array in outputs.values():
            array.setflags(write=False)  # metrics share them
        try:
            metrics |= {metric.name: metric.measure(outputs) for metric in self.metrics}
        except UserError as error:
            source = reader.source
            raise UserError(f'{source.data} {source.split}: {error}') from error
        return Evaluation(metrics=metrics, outputs=outputs, readable=readable)


def make_evaluator(
    function: Callable[[Params, Batch], BatchSums],
    batches: BatchSource,
    metrics: Sequence[Metric] = (),
) -> Evaluator:
    """Makes an evaluator from a function that sums over the examples of a batch.

    Args:
      function: Maps (params, batch) to `BatchSums`, such as the function that `make_loss_sums`
        returns.
      batches: Makes the batches.
      metrics: Metrics of whole data sets. `function` returns the outputs that they need.
    """
    step = meshes.with_mesh(batches.mesh, as_step(function))
    return make_step_evaluator(step, batches, metrics=metrics)


def make_step_evaluator(
    step: EvalStep, batches: BatchSource, *arguments: Any, metrics: Sequence[Metric] = ()
) -> Evaluator:
    """Makes an evaluator from a step, which is traced with the mesh (see `with_mesh`).

    Args:
      step: Its results are replicated on all devices.
      batches: Makes the batches.
      *arguments: Further arguments of `step`, trees of arrays on the devices.
      metrics: Metrics of whole data sets. `step` returns the outputs that they need.
    """
    everywhere = meshes.replicated(batches.mesh)
    jitted = meshes.jit(step, batches.mesh, out_shardings=everywhere)
    return Evaluator(step=jitted, batches=batches, arguments=arguments, metrics=metrics)


def as_step(function: Callable[..., BatchSums]) -> EvalStep:
    """Converts a function that sums over the examples of a batch to the step of an evaluator."""

    def step(params: Params, batch: Batch, *arguments: Any) -> StepResult:
        batch_sums = function(params, batch, *arguments)
        return StepResult(batch_sums.sums, batch['mask'], batch_sums.outputs)

    return step


def summarize_evals(evals: Mapping[str, Mapping[str, float]], shown: Sequence[Metric]) -> str:
    """Formats the metrics of evaluations that are shown, in one line."""
    summaries = []
    for name, numbers in evals.items():
        formatted = [
            metric.describe(numbers[metric.name]) for metric in shown if metric.name in numbers
        ]
        summaries.append(f'{name} {", ".join(formatted)}')
    return '; '.join(summaries)


def find_eval_interval(length: TrainLength, every: Interval | None, num_images: int) -> int:
    """Returns the number of training steps between two evaluations of `num_images` images.

    By default (`every=None`), it depends on the training length and on `num_images`.
    """
    affordable = _EVALUATED_SHARE * length.total_steps * length.batch_size / num_images
    count = max(1, min(_EVALUATIONS, int(affordable)))
    return length.interval_steps(every) or -(-length.total_steps // count)


@dataclasses.dataclass
class Selection:
    """The best evaluation so far by one metric, and the later evaluations.

    A run that resumes at the step of an evaluation evaluates again, so recording a step twice has
    no effect.
    """

    evaluation: str  # name of the evaluation
    metric: Metric  # the metric, such as accuracy
    data: str  # the evaluated data
    split: str  # the evaluated split, such as train[90%:], with other labels if there are any
    patience: int | None = None  # stop after this many evaluations without improvement
    step: int | None = None  # step of the best evaluation; None: no finite value yet
    value: float = 0.0  # the best value
    later_steps: list[int] = dataclasses.field(default_factory=list)  # steps of later evaluations

    def record(self, step: int, value: float) -> bool:
        """Records the value at a step. Returns whether it is the best; NaN and infinity never are.

        The first of equal values is the best.
        """
        is_better = self.step is None or self.metric.is_better(value, self.value)
        if not math.isfinite(value):
            logging.warning('step %d: %s is %s; it cannot be selected', step, self.name, value)
        if math.isfinite(value) and is_better:
            self.step = step
            self.value = value
            self.later_steps = []
        elif step not in (self.step, *self.later_steps):
            self.later_steps.append(step)
        return step == self.step

    @property
    def name(self) -> str:
        """The name of the value, EVALUATION/METRIC."""
        return f'{self.evaluation}/{self.metric.name}'

    @property
    def is_exhausted(self) -> bool:
        """Whether `patience` evaluations in a row did not improve on the best one."""
        return self.patience is not None and len(self.later_steps) >= self.patience

    def to_dict(self) -> dict[str, Any]:
        """Returns the selection as JSON values for a checkpoint."""
        return {
            'evaluation': self.evaluation,
            'metric': self.metric.name,
            'lower_is_better': self.metric.lower_is_better,
            'data': self.data,
            'split': self.split,
            'step': self.step,
            'value': self.value,
            'later_steps': self.later_steps,
        }

    def resume(self, saved: dict[str, Any]) -> bool:
        """Continues a selection of `to_dict`, unless it is by another metric or on other data.

        Returns whether it is continued.
        """
        own = self.to_dict()
        results = 'step', 'value', 'later_steps'
        is_same = all(saved.get(name, own[name]) == own[name] for name in own.keys() - results)
        if not saved or not is_same:
            return False
        self.step = saved['step']
        self.value = saved['value']
        self.later_steps = saved['later_steps']
        return True

    def __str__(self) -> str:
        best = self.metric.describe(self.value)
        return f'{self.evaluation} {best} (validation, on {self.split})'
