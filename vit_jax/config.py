"""The typed experiment, and the study of several: what files in configs/ return.

Both are composed of what the parts own.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.base import (
    Path,
    Record,
    records,
    require,
    require_between,
    require_regular,
    write_json,
)
from vit_jax.checkpoints.formats.inference import Hints
from vit_jax.data.augmentation import Augmentation, AugmentFunction
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.data.loading import LoaderConfig
from vit_jax.data.sources.base import DataFunction
from vit_jax.data.sources.opening import HeldOut
from vit_jax.distributed.meshes import MeshConfig
from vit_jax.evaluation.probing import FewshotConfig
from vit_jax.models import Compute, Regularization, ResNetConfig, ViTConfig
from vit_jax.models.config import Head
from vit_jax.training.duration import Duration, Interval
from vit_jax.training.losses import Loss, LossConfig
from vit_jax.training.masked_patches import MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

FORMAT = 2  # of work directories; raised when the fields or the meaning of their files change
# Kinds of lines in metrics.jsonl that are no evaluations by name.
_RESERVED = 'train', 'fewshot', 'skipped', 'spike'


def _default(kind: type) -> Any:
    return dataclasses.field(default_factory=kind)


@dataclasses.dataclass(kw_only=True)
class EvalConfig(Record):
    """One evaluation of what is learned, on all images of a split.

    `labels` replaces the data's own: a JSON file of lists of class numbers, as ReaL's real.json
    ("Are we done with ImageNet?"), or a column of a TFDS data set. Images without any are left out.
    """

    data: str | DataFunction | None = None  # None: the data of the experiment
    split: str = 'test'  # of these data; a part or several, as train_split
    labels: str | None = None  # a JSON file, or a column of TFDS data; None: the data's own
    every_steps: Interval | None = None  # None: eval_every_steps

    def check(self) -> None:
        require_between(self, 'every_steps', low=1)


@dataclasses.dataclass(kw_only=True)
class TrainConfig(Record):
    """One experiment: pre-training, fine-tuning and few-shot evaluation are values of this.

    `data`, `augmentation`, `loss`, `head` may be one's own functions: config.json names them.
    """

    # What is learned from, and by what.
    data: str | DataFunction  # digits, tfds:NAME, vtab:TASK, FILE.npz|csv|jsonl, a folder, f(split)
    train_split: str = 'train'  # a part of it, or several: train[:98%], train+validation
    eval_split: str = 'test'  # of the evaluation `test`, where `evals` names no others
    held_out: HeldOut = _default(HeldOut)  # for testing, of data without splits
    classes: tuple[str, ...] = ()  # names of those to train and evaluate on alone; none: all
    model: ViTConfig | ResNetConfig | None = None  # None: the model of start_from
    image_size: tuple[int, int] | None = None  # (height, width); None: the model's own
    head: Head | None = None  # f(num_classes) -> flax module; None: model.head, or a linear one
    start_from: str | None = None  # a checkpoint, of any format, with the first parameters
    reuse_head: bool = False  # for classes that start_from knows by name; false: a new head
    hints: Hints = _default(Hints)  # what the checkpoint's file does not say of itself
    preprocessing: Preprocessing | None = None  # None: that of start_from, or the usual one
    augmentation: Augmentation | AugmentFunction = _default(Augmentation)  # of training images

    # How.
    total: Duration | None = None  # None: nothing is trained, few-shot evaluation alone
    batch_size: int = 256  # images of a step, on all devices together
    accumulation_steps: int = 1  # parts of a batch, one after the other, to need less memory
    objective: MaskedPatches | None = None  # None: classification, with `loss`
    loss: LossConfig | Loss = _default(LossConfig)  # of logits and classes
    optimizer: OptimizerConfig = _default(OptimizerConfig)  # which, and for which parameters
    schedule: ScheduleConfig = _default(ScheduleConfig)  # the learning rate over the steps
    regularization: Regularization = _default(Regularization)  # what is dropped at random
    polyak_decay: float | None = None  # of the average of parameters; None: no average
    max_skipped_steps: int = 10  # in a row, whose gradient was not finite; then training stops
    seed: int = 0  # of all that is random

    # What is measured and kept on the way.
    log_every_steps: Interval | None = None  # lines of numbers; None: 50, or fewer if it is short
    evals: dict[str, EvalConfig] = _default(dict)  # by name; none: `test`, on eval_split
    eval_every_steps: Interval | None = None  # None: at the end only
    eval_batch_size: int | None = None  # None: batch_size
    checkpoint_every_steps: Interval | None = None  # None: at the end only
    keep_checkpoints: int = 2  # the newest
    fewshot: FewshotConfig | None = None  # evaluation with few labels; None: none
    tensorboard: bool = False  # the numbers as its event files too

    # On what. All but compute.dtype, loader.on_unreadable and loader.max_pixels change speed
    # and memory alone.
    compute: Compute = _default(Compute)  # precision, memory, kernels
    mesh: MeshConfig = _default(MeshConfig)  # how devices share batch and parameters
    loader: LoaderConfig = _default(LoaderConfig)  # how images are read

    def check(self) -> None:
        names = 'batch_size', 'accumulation_steps', 'max_skipped_steps', 'keep_checkpoints'
        every = 'log_every_steps', 'eval_every_steps', 'checkpoint_every_steps'
        require_between(self, *names, *every, 'eval_batch_size', 'image_size', low=1)
        require_between(self, 'polyak_decay', low=0, below=1)
        require_between(self, 'seed', low=0, below=2**32)
        distinct = len({*self.classes}) == len(self.classes)
        require(distinct, f'classes={self.classes}: expected each once')
        for name in self.evals:
            fits = re.fullmatch(r'[\w-]+', name) is not None and name not in _RESERVED
            require(fits, f'evals: {name!r} is no name for an evaluation')
        both = self.evals and self.eval_split != 'test'
        require(not both, f'eval_split={self.eval_split!r}: evals name their own splits')
        if self.objective is not None:
            require(self.loss == LossConfig(), 'loss: the objective has its own; leave it out')
            labelled = [name for name, one in self.evals.items() if one.labels is not None]
            wrong = f'evals.{"".join(labelled[:1])}.labels: the objective has no use for labels'
            require(not labelled, wrong)
            has_head = self.head is not None or self.reuse_head
            require(
                not has_head, 'head, reuse_head: the objective has its own head; leave them out'
            )
        own = self.model is not None and self.model.head != 'linear'
        require(not (own and self.head), 'head: model.head is set too; leave one out')

    @property
    def evaluations(self) -> dict[str, EvalConfig]:
        """The evaluations while training, by name."""
        return self.evals or {'test': EvalConfig(split=self.eval_split)}


COMPUTE = 'compute'  # the measure: floating-point operations of the training that all began with


@dataclasses.dataclass(kw_only=True)
class Grid(Record):
    """Experiments that differ in the values of some axes: every combination, with every seed.

    `axes` name, for each value of an axis, the fields that it changes and their new values, as
    {'depth': {'6': {'model.depth': 6}, '12': {'model.depth': 12}}}. Where `start_from` names an
    earlier grid, each of its runs is gone on from, with its own values and seed: the network is
    that of its checkpoint, at the step where `best` says that it was best.
    """

    changes: dict[str, Any] = _default(dict)  # of the study's base, for all of them
    axes: dict[str, dict[str, dict[str, Any]]] = _default(dict)  # AXIS: VALUE: FIELD: new value
    start_from: str | None = None  # an earlier grid; None: what `base` says
    best: str | None = None  # NAME/NUMBER: numbers are of the step where it is highest; None: last
    measures: tuple[str, ...] = ('test/accuracy',)  # NAME/NUMBER as in metrics.jsonl, or `compute`
    published: dict[str, float] = _default(dict)  # by VALUE-VALUE, of the first measure
    means: dict[str, tuple[str, ...]] = _default(dict)  # over some values of the last axis

    def check(self) -> None:
        before: dict[str, set[str]] = {}  # what each of the axes before changes
        for axis, values in self.axes.items():
            for name in (axis, *values):
                fits = re.fullmatch(r'[\w.+%@=-]{1,64}', name) is not None
                wanted = 'expected 1 to 64 letters, digits and any of .+%@=-'
                require(fits, f'axes: {name!r}: {wanted}')
            require(bool(values), f'axes: {axis!r} has no values')
            always = set.intersection(*(set(changes) for changes in values.values()))
            gone = [name for name, fields in before.items() if fields and fields <= always]
            require(not gone, f'axes: {axis!r} overwrites all that {gone[:1]} changes')
            before[axis] = set().union(*values.values())
        last = [*self.axes.values()][-1:]
        for name, of in self.means.items():
            unknown = [value for value in of if not last or value not in last[0]]
            require(not unknown, f'means: {name}: {unknown[:1]} is no value of the last axis')


@dataclasses.dataclass(kw_only=True)
class Drawing(Record):
    """The picture of a study: a measure over the values of an axis, a line for each of the others.

    Over `compute`, floating-point operations counted from the multiply-adds of networks, a line is
    a grid, or, of the only one, a value of its first axis.
    """

    x: str  # an axis, or `compute`
    y: str = 'test/accuracy'  # one of the measures
    mean: str | None = None  # one of the grids' means, in place of the values of the last axis
    logarithmic: bool = False  # the axis x


@dataclasses.dataclass(kw_only=True)
class Study(Record):
    """Experiments beside each other, and what is drawn of them (python -m vit_jax.study)."""

    title: str  # of the table and the picture
    base: TrainConfig  # the experiment that all others change
    grids: dict[str, Grid]  # by name, in the order in which they run
    seeds: tuple[int, ...] = (0,)  # of each experiment
    draw: Drawing | None = None  # None: no picture

    def check(self) -> None:
        require(bool(self.grids), 'grids: expected at least one')
        require_between(self, 'seeds', low=0, below=2**32)
        distinct = len({*self.seeds}) == len(self.seeds) > 0
        require(distinct, f'seeds={self.seeds}: expected at least one, each once')
        earlier: list[str] = []
        for name, grid in self.grids.items():
            fits = re.fullmatch(r'[\w+-]{1,64}', name) is not None  # no dot: results.md lies beside
            require(fits, f'grids: {name!r}: expected 1 to 64 letters, digits and any of +-')
            known = grid.start_from is None or grid.start_from in earlier
            wanted = ', '.join(earlier) or 'none'
            require(
                known,
                f'grids.{name}.start_from={grid.start_from!r}: expected an earlier one: {wanted}',
            )
            earlier.append(name)
        seed = self.base.seed
        require(seed == TrainConfig.seed, f'base.seed={seed}: the seeds of all runs are `seeds`')
        if self.draw is not None:
            self._check_drawing(self.draw)

    def _check_drawing(self, draw: Drawing) -> None:
        grids = self.grids.values()
        measures = {measure for grid in grids for measure in grid.measures}
        xs = {axis for grid in grids for axis in grid.axes} | ({COMPUTE} & measures)
        means = {name for grid in grids for name in grid.means}
        for name, value, known in ('x', draw.x, xs), ('y', draw.y, measures):
            there = ', '.join(sorted(known)) or 'none'
            require(value in known, f'draw.{name}={value!r}: the grids have {there}')
        require(draw.mean is None or draw.mean in means, f'draw.mean={draw.mean!r}: no grid has it')


# What a run may go on with other values of: it changes speed, memory, rounding, or what is
# observed, and not what is learned.
_COMPUTE = 'remat', 'unroll', 'attention', 'layout', 'last_block'
_SPEED = 'mesh', *(f'compute.{name}' for name in _COMPUTE)
_LOADING = 'loader.placement', 'loader.device_mb', 'loader.threads'
_OBSERVED = 'evals', 'eval_split', 'eval_every_steps', 'eval_batch_size', 'fewshot', 'tensorboard'
_WRITTEN = 'log_every_steps', 'checkpoint_every_steps', 'keep_checkpoints'
FREE = *_SPEED, *_LOADING, *_OBSERVED, *_WRITTEN
# Less than that: what changes no number that is reported at the end.
UNMEASURED = *_SPEED, *_LOADING, *_WRITTEN, 'eval_every_steps', 'eval_batch_size', 'tensorboard'


def differing(old: dict[str, Any], new: dict[str, Any], *, free: Sequence[str] = FREE) -> list[str]:
    """One line for each value in which two configurations, as JSON, differ, but for `free` ones."""
    within = tuple(f'{name}.' for name in free)  # and all fields within
    lines = records.differences(old, new)
    return [line for line in lines if not f'{line.partition(":")[0]}.'.startswith(within)]


def write_config(path: Path, values: dict[str, Any]) -> None:
    """Writes the JSON values of a configuration, and the format number of work directories."""
    write_json(path, {'format': FORMAT} | values)


def read_config(path: Path, **options: Any) -> dict[str, Any]:
    """Reads what `write_config` wrote; the options are those of `json.loads`.

    Raises:
      UserError: If another version of vit_jax wrote it.
      OSError, ValueError, RecursionError: If it cannot be read.
    """
    require_regular(path)
    values = json.loads(path.read_bytes(), **options)
    if not isinstance(values, dict):
        raise ValueError(f'{path}: no JSON object')
    number = values.pop('format', None)
    advice = 'continue with the version of vit_jax that wrote it, or choose another --workdir'
    require(number == FORMAT, f'{path}: format is {number}, expected {FORMAT}: {advice}')
    return values
