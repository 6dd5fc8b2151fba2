"""The typed experiment: what a file in configs/ returns, and what a checkpoint says of itself."""

import dataclasses
from typing import Any

from vit_jax.base import records
from vit_jax.base.errors import UserError
from vit_jax.base.records import Record
from vit_jax.checkpoints.formats.inference import Hints
from vit_jax.data.augmentation import Augmentation
from vit_jax.data.image_preprocessing import Crop, Preprocessing
from vit_jax.data.loading import LoaderConfig
from vit_jax.data.sources.opening import HeldOut
from vit_jax.evaluation.ridge import FewshotConfig
from vit_jax.models import Compute, Regularization, ResNetConfig, ViTConfig
from vit_jax.parallel.meshes import MeshConfig
from vit_jax.training.duration import Duration
from vit_jax.training.losses import LossConfig
from vit_jax.training.optimizer import OptimizerConfig, ScheduleConfig

RENAMED: dict[str, str] = {}  # fields by their old dotted names


def _default(kind: type) -> Any:
    return dataclasses.field(default_factory=kind)


@dataclasses.dataclass(kw_only=True)
class TrainConfig(Record):
    """One experiment: pre-training, fine-tuning and few-shot evaluation are values of this."""

    # What is learned from, and by what.
    data: str  # 'digits', tfds:NAME, FILE.npz, FILE.csv, FILE.jsonl, or a folder (data/sources.py)
    train_split: str = 'train'
    test_split: str = 'test'
    held_out: HeldOut = _default(HeldOut)  # for testing, of data without splits
    model: ViTConfig | ResNetConfig | None = None  # None: the model of start_from
    image_size: tuple[int, int] | None = None  # (height, width); None: the model's own
    start_from: str | None = None  # a checkpoint, of any format, with the first parameters
    hints: Hints = _default(Hints)  # what its file does not say of itself
    preprocessing: Preprocessing | None = None  # None: that of start_from, or the usual one
    augmentation: Augmentation = _default(Augmentation)

    # How.
    total: Duration | None = None  # None: nothing is trained, few-shot evaluation alone
    batch_size: int = 256
    accumulation_steps: int = 1
    loss: LossConfig = _default(LossConfig)
    optimizer: OptimizerConfig = _default(OptimizerConfig)
    schedule: ScheduleConfig = _default(ScheduleConfig)
    regularization: Regularization = _default(Regularization)
    polyak_decay: float | None = None  # of the average of parameters; None: no average
    max_skipped_steps: int = 10  # in a row, whose gradient was not finite; then training stops
    seed: int = 0

    # What is measured and kept on the way.
    log_every_steps: int = 50
    eval_every_steps: int | None = None  # None: at the end only
    eval_batch_size: int | None = None  # None: batch_size
    checkpoint_every_steps: int | None = None  # None: at the end only
    keep_checkpoints: int = 2
    fewshot: FewshotConfig | None = None
    fewshot_crop: Crop | None = None  # None: the preprocessing's
    tensorboard: bool = False

    # On what. These change speed and memory, not the result.
    compute: Compute = _default(Compute)
    mesh: MeshConfig = _default(MeshConfig)
    loader: LoaderConfig = _default(LoaderConfig)


def checked(config: TrainConfig) -> TrainConfig:
    """The configuration with every value checked. Raises UserError that names a wrong one."""
    config = records.checked(config, where='config')
    for name, value in records.to_dict(config).items():
        counts = name.endswith(('_steps', '_size')) and isinstance(value, int)
        _require(not counts or value >= 1, f'{name}={value}: expected 1 or more')
    fractions = {
        'regularization.dropout': config.regularization.dropout,
        'regularization.stochastic_depth': config.regularization.stochastic_depth,
        'loss.label_smoothing': config.loss.label_smoothing,
        'polyak_decay': config.polyak_decay or 0.0,
    }
    for name, fraction in fractions.items():
        _require(0 <= fraction < 1, f'{name}={fraction}: expected at least 0 and less than 1')
    augmentation = config.augmentation
    _require(
        0 <= augmentation.erasing <= 1,
        f'augmentation.erasing={augmentation.erasing}: expected a share, 0 to 1',
    )
    not_negative = {
        'augmentation.mixup': augmentation.mixup,
        'augmentation.cutmix': augmentation.cutmix,
        'augmentation.randaugment.layers': augmentation.randaugment.layers,
        'augmentation.randaugment.magnitude': augmentation.randaugment.magnitude,
        'optimizer.trained_blocks': config.optimizer.trained_blocks or 0,
    }
    for name, number in not_negative.items():
        _require(number >= 0, f'{name}={number}: expected 0 or more')
    _require(
        config.model is not None or config.start_from is not None,
        'model is none: give a model, or start_from=CHECKPOINT to take that one',
    )
    return config


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(f'config.{message}')
