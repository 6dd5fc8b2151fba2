"""The typed configuration of an experiment, composed of what the parts own."""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.base import Path, Record, records, require, require_between, write_json
from vit_jax.checkpoints.card import Hints
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

FORMAT = 3  # of work directories; raised when the fields or the meaning of their files change
# Kinds of lines in metrics.jsonl that are no evaluations by name.
_RESERVED = 'train', 'fewshot', 'skipped'


def default(kind: type) -> Any:
    """A field of a record whose default is made anew for each record."""
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
    data: str | DataFunction  # a folder, a file or a name, see docs/data.md; or f(split)
    train_split: str = 'train'  # a part of it, or several: train[:98%], train+validation
    eval_split: str = 'test'  # of the evaluation `test`, where `evals` names no others
    held_out: HeldOut = default(HeldOut)  # for testing, of data without splits
    classes: tuple[str, ...] = ()  # names of those to train and evaluate on alone; none: all
    model: ViTConfig | ResNetConfig | None = None  # None: the model of start_from
    image_size: tuple[int, int] | None = None  # (height, width); None: the model's own
    head: Head | None = None  # linear, or f(num_classes) -> flax module; None: the head of `model`
    start_from: str | None = None  # a checkpoint, of any format, with the first parameters
    reuse_head: bool = False  # for classes that start_from knows by name; false: a new head
    hints: Hints = default(Hints)  # what the checkpoint's file does not say of itself
    preprocessing: Preprocessing | None = None  # None: that of start_from, or the usual one
    augmentation: Augmentation | AugmentFunction = default(Augmentation)  # of training images

    # How.
    total: Duration | None = None  # None: nothing is trained, few-shot evaluation alone
    batch_size: int = 256  # images of a step, on all devices together
    accumulation_steps: int = 1  # parts of a batch, one after the other, to need less memory
    objective: MaskedPatches | None = None  # None: classification, with `loss`
    loss: LossConfig | Loss = default(LossConfig)  # of logits and classes
    optimizer: OptimizerConfig = default(OptimizerConfig)  # which, and for which parameters
    schedule: ScheduleConfig = default(ScheduleConfig)  # the learning rate over the steps
    regularization: Regularization = default(Regularization)  # what is dropped at random
    polyak_decay: float | None = None  # of the average of parameters; None: no average
    max_skipped_steps: int = 10  # in a row, whose gradient was not finite; then training stops
    seed: int = 0  # of all that is random

    # What is measured and kept on the way.
    log_every_steps: Interval | None = None  # lines of numbers; None: 50, or fewer if it is short
    evals: dict[str, EvalConfig] = default(dict)  # by name; none: `test`, on eval_split
    eval_every_steps: Interval | None = None  # None: at the end only
    eval_batch_size: int | None = None  # None: batch_size
    checkpoint_every_steps: Interval | None = None  # None: at the end only
    keep_checkpoints: int = 2  # the newest
    fewshot: FewshotConfig | None = None  # evaluation with few labels; None: none
    tensorboard: bool = False  # the numbers as its event files too

    # On what. All but compute.dtype, loader.on_unreadable and loader.max_pixels change speed
    # and memory alone.
    compute: Compute = default(Compute)  # precision, memory, kernels
    mesh: MeshConfig = default(MeshConfig)  # how devices share batch and parameters
    loader: LoaderConfig = default(LoaderConfig)  # how images are read

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


# What a run may go on with other values of: it changes speed, memory, rounding, or what is
# observed, and not what is learned.
_COMPUTE = 'remat', 'unroll', 'attention', 'layout', 'last_block'
_SPEED = 'mesh', *(f'compute.{name}' for name in _COMPUTE)
_LOADING = 'loader.placement', 'loader.device_mb', 'loader.threads'
_OBSERVED = 'evals', 'eval_split', 'eval_every_steps', 'eval_batch_size', 'fewshot', 'tensorboard'
_WRITTEN = 'log_every_steps', 'checkpoint_every_steps', 'keep_checkpoints'
FREE = *_SPEED, *_LOADING, *_OBSERVED, *_WRITTEN


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
    values = json.loads(path.read_bytes(), **options)
    if not isinstance(values, dict):
        raise ValueError(f'{path}: no JSON object')
    number = values.pop('format', None)
    advice = 'continue with the version of vit_jax that wrote it, or choose another --workdir'
    require(number == FORMAT, f'{path}: format is {number}, expected {FORMAT}: {advice}')
    return values
