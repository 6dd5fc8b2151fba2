"""The interface of a task: what a run learns, and how this is measured."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from vit_jax.base import Array, Float, Key, Params, require
from vit_jax.checkpoints import transfer
from vit_jax.config import TrainConfig
from vit_jax.data.sources.base import Source
from vit_jax.models import Model, ModelConfig, Regularization, ViTConfig, count_multiply_adds
from vit_jax.pretrained import LoadedModel
from vit_jax.training.losses import BatchSums
from vit_jax.training.metrics import Metric, OutputName, combine_metrics

# Maps (params, batch, key=None) to sums over the examples. A key enables dropout. If the task has
# frozen parameters, the function also gets them, as `frozen`.
LossSums = Callable[..., BatchSums]
Normalize = Callable[[Array], Float[Array, 'b h w c']]  # from pixels (0 to 255) to a model's input


class LoadedTask(NamedTuple):
    """A task whose other model is loaded."""

    task: 'Task'
    config: TrainConfig  # with the digest of the loaded model
    frozen_model: LoadedModel | None  # None: the task needs no other model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a run learns, and how this is measured.

    Compiled programs depend on the fields of a task. `train_sums` and `eval_sums` get the values of
    the configuration, such as label smoothing, as numbers that jax may trace.
    """

    num_classes: int  # number of classes of the training images
    multi_label: bool = False  # whether training images may have several classes
    outputs: tuple[OutputName, ...] = ()  # outputs of evaluations that metrics need

    needs_classes: ClassVar[bool] = True  # whether the data must have classes

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the metrics of whole data sets that each evaluation measures.

        They are in `METRICS`.
        """
        return ()

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of the metrics that are printed during training, in addition to the user's."""
        raise NotImplementedError

    def metrics(self, config: TrainConfig) -> list[Metric]:
        """Returns the metrics of whole data sets that evaluations measure."""
        return combine_metrics(self.measured, config.metrics, multi_label=self.multi_label)

    def metrics_of(self, config: TrainConfig, evaluated: Source) -> list[Metric]:
        """Returns the metrics of whole data sets that an evaluation measures.

        Returns none if training images have one class and evaluated images may have several (ReaL),
        because predicting any of those classes counts as right.
        """
        if evaluated.multi_label and not self.multi_label:
            return []
        return [metric for metric in self.metrics(config) if metric.supports(evaluated.multi_label)]

    def shown_metrics(self, config: TrainConfig) -> list[Metric]:
        """Returns the metrics that are printed during training."""
        return combine_metrics(self.shown, config.metrics, multi_label=self.multi_label)

    def check_data(
        self, config: TrainConfig, train: Source, evaluated: Mapping[str, Source]
    ) -> list[str]:
        """Lists problems of the labels of training and evaluated images, with remedies."""
        return []

    def adapt_stored_model(self, model: ModelConfig) -> ModelConfig:
        """Returns the architecture of a checkpoint with the outputs that the task trains.

        By default, the head is removed.
        """
        return transfer.replace_head(model, None)

    def configure_model(self, config: TrainConfig, model: ModelConfig) -> ModelConfig:
        """Returns the architecture to train. Raises UserError if it does not fit the task."""
        raise NotImplementedError

    def load(self, config: TrainConfig, class_names: Sequence[str]) -> LoadedTask:
        """Loads the model that the task needs besides the trained one, if any."""
        return LoadedTask(self, config, None)

    def init_params(self, config: TrainConfig, model: ModelConfig, key: Key[Array, '']) -> Params:
        """Initializes the task's own parameters, such as a decoder, which are trained too.

        The functions of the task get them as `params[TASK_PARAMS]`.
        """
        return {}

    def count_multiply_adds(
        self, config: TrainConfig, model: ModelConfig, regularization: Regularization | None = None
    ) -> int:
        """Counts the multiply-adds of a forward pass of one image. A frozen model is not counted.

        With `regularization`, the training pass is counted.
        """
        return count_multiply_adds(model, regularization=regularization)

    def train_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        """Makes the function that sums loss and metrics over a batch in training.

        Raises UserError if the model does not fit the task.
        """
        raise NotImplementedError

    def eval_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        """Makes the function that sums loss and metrics over a batch in evaluations."""
        raise NotImplementedError

    def card_fields(self, config: TrainConfig, class_names: Sequence[str]) -> dict[str, Any]:
        """Returns the fields of a checkpoint's card that depend on the task."""
        return {}

    def describe(self, config: TrainConfig) -> list[str]:
        """Returns lines for the start of a run."""
        return []


def require_no_head(model: ViTConfig) -> None:
    """Raises UserError if the model has a head, which a task without labels does not train."""
    default = ViTConfig()
    for name in 'num_classes', 'representation_size', 'head', 'head_bias':
        value = getattr(model, name)
        require(
            value == getattr(default, name),
            f'config.model.{name}={value}: not used by config.objective; leave it out',
        )
    require(
        model.pool != 'map',
        'config.model.pool=map: config.objective does not train its attention; '
        'set pool to cls or gap',
    )
