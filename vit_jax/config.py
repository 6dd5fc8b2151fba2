"""The configuration of an experiment, composed of the configurations of its parts."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from vit_jax.base import Path, Record, UserError, records, require, require_between, write_json
from vit_jax.base.files import read_json
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
from vit_jax.training.duration import Duration, Interval, TrainLength
from vit_jax.training.losses import Loss, LossConfig
from vit_jax.training.metrics import Metric, MetricFunction, resolve_metrics
from vit_jax.training.objectives import Distillation, MaskedAutoencoder, MaskedPatches
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig
from vit_jax.training.update import draw_patch_size

FORMAT = 5  # format number of work directories; increases when a run cannot be resumed
READABLE_FORMATS = 4, FORMAT  # runs of 4 are not resumed: their order of images was another
# Kinds of lines in metrics.jsonl that are not names of evaluations.
_RESERVED_KINDS = 'train', 'fewshot', 'skipped'
Writer = Callable[[dict[str, Any]], None]  # gets each line of metrics.jsonl


class StepVariant(NamedTuple):
    """What can differ between the training steps of a run. Each variant has its own program."""

    patch_size: int | None  # None: the model's
    patch_dropout: float

    def regularize(self, config: Regularization) -> Regularization:
        """Returns the regularization in steps of this variant."""
        return records.replaced(config, {'patch_dropout': self.patch_dropout})

    def __str__(self) -> str:
        return ', '.join(f'{name}={value}' for name, value in self._asdict().items() if value)


def default(kind: type) -> Any:
    """Makes a field of a record with `kind` as default factory."""
    return dataclasses.field(default_factory=kind)


@dataclasses.dataclass(kw_only=True)
class EvalConfig(Record):
    """An evaluation on all images of a split.

    `labels` names other labels than the data set's: a JSON file with a list of class numbers per
    image, such as ReaL's real.json ("Are we done with ImageNet?"), or a column of a TFDS data set.
    Images without labels are left out.
    """

    data: str | DataFunction | None = None  # data set; None: the data of the experiment
    split: str = 'test'  # split to evaluate on, in the format of train_split
    labels: str | None = None  # other labels: a JSON file or TFDS column; None: the data set's
    every_steps: Interval | None = None  # interval in steps, or epoch; None: eval_every_steps
    patch_size: int | None = None  # pixels per side of a patch (FlexiViT); None: the model's

    def check(self) -> None:
        require_between(self, 'every_steps', 'patch_size', low=1)


@dataclasses.dataclass(kw_only=True)
class TrainConfig(Record):
    """An experiment: pre-training, fine-tuning, or few-shot evaluation.

    `data`, `augmentation`, `loss`, `head`, `optimizer.kind` and `writers` can be your own
    functions. config.json records their names only.
    """

    # Data and model.
    data: str | DataFunction  # folder, file or name of a data set (docs/data.md), or f(split)
    train_split: str = 'train'  # training split, such as train, train[:98%], train+validation
    eval_split: str = 'test'  # split of the evaluation `test`; only if `evals` is empty
    held_out: HeldOut = default(HeldOut)  # test images of a data set without splits
    classes: tuple[str, ...] = ()  # names of the classes to train and evaluate on; empty: all
    model: ViTConfig | ResNetConfig | None = None  # architecture; None: the model of start_from
    image_size: tuple[int, int] | None = None  # (height, width) in pixels; None: the model's
    head: Head | None = None  # as model.head; None: the model's head
    start_from: str | None = None  # checkpoint, in any format, to initialize parameters from
    reuse_head: bool = False  # keep the head of start_from for its classes; false: a new head
    init_head: Literal['logistic'] | None = None  # LP-FT: fit a head first; needs reuse_head=false
    hints: Hints = default(Hints)  # facts about start_from that its files do not contain
    preprocessing: Preprocessing | None = None  # None: preprocessing of start_from, or default
    augmentation: Augmentation | AugmentFunction = default(Augmentation)  # random changes to images

    # Training.
    total: Duration | None = None  # length of training; None: only few-shot evaluation
    batch_size: int = 256  # images per step, on all devices together
    accumulation_steps: int = 1  # number of parts of a batch for gradient accumulation
    patch_sizes: tuple[int, ...] = ()  # sizes drawn per step (FlexiViT); empty: the model's
    objective: MaskedPatches | MaskedAutoencoder | None = None  # None: classification
    loss: LossConfig | Loss = default(LossConfig)  # classification loss, or f(logits, targets)
    distillation: Distillation = default(Distillation)  # a teacher to learn from
    optimizer: OptimizerConfig = default(OptimizerConfig)  # optimizer and param groups
    schedule: ScheduleConfig = default(ScheduleConfig)  # learning rate schedule
    regularization: Regularization = default(Regularization)  # dropout, stochastic depth, ...
    patch_dropout_until: Duration | None = None  # PatchDropout ends here; None: at the end
    ema_decay: float | None = None  # decay of the moving average of parameters; None: no average
    spike_deviations: float | None = None  # skip losses above mean + this * standard deviation
    max_skipped_steps: int = 10  # skipped steps in a row before the training stops
    seed: int = 0  # seed of all random numbers

    # Logs, evaluations and checkpoints. An interval is a number of steps, or epoch.
    log_every_steps: Interval | None = None  # logging interval; None: 50 steps, or about 20 lines
    evals: dict[str, EvalConfig] = default(dict)  # evaluations by name; empty: test on eval_split
    metrics: tuple[str | Metric | MetricFunction, ...] = ()  # further metrics of evaluations
    eval_every_steps: Interval | None = None  # interval of evaluations; None: about 10 evaluations
    eval_batch_size: int | None = None  # images per batch in evaluations; None: batch_size
    checkpoint_every_steps: Interval | None = None  # interval of checkpoints; None: only at the end
    keep_checkpoints: int = 2  # number of newest checkpoints to keep
    keep_best: str | None = None  # EVALUATION/METRIC: also keep the checkpoint with its best value
    patience: int | None = None  # stop after this many evaluations without a new best; None: never
    fewshot: FewshotConfig | None = None  # few-shot and other probes of features; None: no probes
    tensorboard: bool = False  # also write metrics as TensorBoard event files
    writers: tuple[Writer, ...] = ()  # functions that also get each line of metrics.jsonl, as dict

    # Computation. These fields affect only speed, memory and rounding, except for compute.dtype
    # and the fields on_unreadable, max_pixels, repeats and balance of loader.
    compute: Compute = default(Compute)  # precision, memory and kernels
    mesh: MeshConfig = default(MeshConfig)  # sharding of batch and parameters over devices
    loader: LoaderConfig = default(LoaderConfig)  # reading of images

    def check(self) -> None:
        names = 'batch_size', 'accumulation_steps', 'max_skipped_steps', 'keep_checkpoints'
        every = 'log_every_steps', 'eval_every_steps', 'checkpoint_every_steps'
        optional = 'eval_batch_size', 'image_size', 'patience', 'patch_sizes'
        require_between(self, *names, *every, *optional, low=1)
        require_between(self, 'ema_decay', low=0, below=1)
        require_between(self, 'spike_deviations', low=5)
        mixes = isinstance(self.augmentation, Augmentation) and self.augmentation.mixes
        self.loader.check_batch_size(self.batch_size, mixes=mixes)
        require_between(self, 'seed', low=0, below=2**32)
        for name in 'classes', 'patch_sizes':
            values = getattr(self, name)
            require(len({*values}) == len(values), f'{name}={values}: expected distinct values')
        for name in self.evals:
            require(
                re.fullmatch(r'[\w-]+', name) is not None and name not in _RESERVED_KINDS,
                f'evals: {name!r} is not a valid name; expected letters, digits, _ and -, but not '
                f'{" or ".join(_RESERVED_KINDS)}',
            )
        if self.patience is not None and self.keep_best is None:
            raise UserError(
                f'patience={self.patience}: needs keep_best, such as keep_best=test/accuracy'
            )
        if self.evals and self.eval_split != 'test':
            raise UserError(
                f'eval_split={self.eval_split!r}: not used with evals; set evals.*.split'
            )
        if self.objective is not None:
            self._check_unused(self.objective.unused)
        resolve_metrics(self.metrics)
        if self.patch_dropout_until is not None and self.regularization.patch_dropout == 0:
            raise UserError(
                'patch_dropout_until: not used with regularization.patch_dropout=0; leave it out'
            )
        if self.optimizer.trained_blocks == 0 and self.distillation.kind == 'features':
            raise UserError(
                'distillation.kind=features: has no effect if only the head is trained; set '
                'optimizer.trained_blocks=1'
            )
        if self.init_head is not None:
            self._check_init_head()
        if self.head and self.model is not None and self.model.head != 'linear':
            raise UserError('head: model.head is also set; leave one out')

    def _check_init_head(self) -> None:
        if self.reuse_head:
            raise UserError(
                f'init_head={self.init_head}: replaces the head that reuse_head=true keeps; add '
                '--config.reuse_head=false'
            )
        if isinstance(self.loss, LossConfig) and self.loss.kind == 'sigmoid':
            raise UserError(
                f'init_head={self.init_head}: fits the softmax loss; expected loss.kind=softmax'
            )

    def _check_unused(self, paths: Sequence[str]) -> None:
        """Raises UserError if a field is set that `objective` does not use."""
        for path in paths:
            for place, record, name in records.find_fields(self, path):
                default = records.default_of(type(record), name)
                is_default = getattr(record, name) == default
                reset = ''
                if isinstance(default, Record):  # the file of the configuration may set it
                    reset = f', or add --config.{place}={type(default).__name__}'
                require(is_default, f'{place}: not supported with objective; leave it out{reset}')

    @property
    def evaluations(self) -> dict[str, EvalConfig]:
        """Evaluations by name, from `evals`, or `test` on `eval_split`."""
        return self.evals or {'test': EvalConfig(split=self.eval_split)}

    @property
    def step_variants(self) -> list[StepVariant]:
        """Variants of training steps. The first one has the longest sequence."""
        sizes: list[int | None] = [*sorted(self.patch_sizes)] or [None]
        rate = self.regularization.patch_dropout
        rates = [0.0, rate] if self.patch_dropout_until else [rate]
        return [StepVariant(size, rate) for size in sizes for rate in rates]

    def step_variant(self, step: int, length: TrainLength) -> StepVariant:
        """Returns the variant of a step, which does not depend on earlier steps."""
        until = self.patch_dropout_until
        is_late = until is not None and step >= length.to_steps(until)
        return StepVariant(
            patch_size=draw_patch_size(self.patch_sizes, self.seed, step),
            patch_dropout=0.0 if is_late else self.regularization.patch_dropout,
        )


# Fields that may change when a run resumes. They affect speed, memory, rounding, measurements,
# files and early stopping, but no update.
MAY_CHANGE_ON_RESUME = (
    'checkpoint_every_steps',
    'compute.attention',
    'compute.last_block',
    'compute.layout',
    'compute.remat',
    'compute.unroll',
    'eval_batch_size',
    'eval_every_steps',
    'eval_split',
    'evals',
    'fewshot',
    'keep_best',
    'keep_checkpoints',
    'loader.device_mb',
    'loader.placement',
    'loader.threads',
    'log_every_steps',
    'mesh',
    'metrics',
    'patience',
    'tensorboard',
    'writers',
)


def config_differences(
    old: dict[str, Any], new: dict[str, Any], *, ignored: Sequence[str] = MAY_CHANGE_ON_RESUME
) -> list[str]:
    """Returns a line for each field that differs between two JSON configs, without ignored ones."""
    prefixes = tuple(f'{name}.' for name in ignored)
    lines = records.differences(old, new)
    return [line for line in lines if not f'{line.partition(":")[0]}.'.startswith(prefixes)]


def write_config(path: Path, values: dict[str, Any]) -> None:
    """Writes the JSON values of a configuration with the format number of work directories."""
    write_json(path, {'format': FORMAT} | values)


def read_config(
    path: Path, *, formats: Sequence[int] = READABLE_FORMATS, **options: Any
) -> dict[str, Any]:
    """Reads a file of `write_config`; `options` are passed to `json.loads`.

    Raises:
      UserError: If the file has another format number than `formats`.
      OSError, ValueError: If the file cannot be read.
    """
    values = read_json(path, **options)
    if not isinstance(values, dict):
        raise ValueError(f'{path}: not a JSON object')
    number = values.pop('format', None)
    expected = ' or '.join(map(str, formats))
    require(
        number in formats,
        f'{path}: format is {number}; expected {expected}; use the version of vit_jax that wrote '
        'it, or another --workdir',
    )
    return values
