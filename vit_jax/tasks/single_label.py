"""Classification of images that have one class each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.base import UserError, plural, records
from vit_jax.checkpoints import transfer
from vit_jax.config import TrainConfig
from vit_jax.data.sources.base import Source
from vit_jax.models import Model, ModelConfig
from vit_jax.tasks.base import LossSums, Normalize, Task
from vit_jax.training import losses
from vit_jax.training.metrics import OF_ONE_CLASS
from vit_jax.training.update import make_loss_sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleLabel(Task):
    """Classification of images that have one class each."""

    @property
    def measured(self) -> tuple[str, ...]:
        return OF_ONE_CLASS

    @property
    def shown(self) -> tuple[str, ...]:
        return ('accuracy',)

    def check_data(
        self, config: TrainConfig, train: Source, evaluated: Mapping[str, Source]
    ) -> list[str]:
        data = records.text_of(config.data)
        problems = [
            f'{data}: the class names of train and {name} differ '
            f'({len(train.class_names):,} and {len(source.class_names):,} classes)'
            for name, source in evaluated.items()
            if source.class_names != train.class_names
        ]
        if isinstance(config.loss, losses.LossConfig):  # a loss of the user may need one class
            problems += self.check_classes(config, train)
        return problems

    def check_classes(self, config: TrainConfig, train: Source) -> list[str]:
        """Lists problems of the classes for the losses of this project."""
        if len(train.class_names) != 1:
            return []
        data = records.text_of(config.data)
        return [f'{data}: got one class, {train.class_names[0]!r}; expected several']

    def adapt_stored_model(self, model: ModelConfig) -> ModelConfig:
        return transfer.replace_head(model, self.num_classes, keep=['head_bias'])

    def configure_model(self, config: TrainConfig, model: ModelConfig) -> ModelConfig:
        classes = self.num_classes
        if model.num_classes not in (None, classes):
            raise UserError(
                f'config.model.num_classes={model.num_classes}: '
                f'{records.text_of(config.data)} has {plural(classes, "class")}; '
                f'expected none or {classes}'
            )
        return dataclasses.replace(model, num_classes=classes, head=config.head or model.head)

    def train_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        return make_loss_sums(model.apply, losses.make_loss(config.loss), normalize)

    def eval_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        """An evaluated image may have several classes, of which any is right (ReaL)."""
        loss = losses.with_scaled_targets(losses.make_loss(config.loss))
        return make_loss_sums(model.apply, loss, normalize, outputs=self.outputs)

    def card_fields(self, config: TrainConfig, class_names: Sequence[str]) -> dict[str, Any]:
        loss = config.loss
        kind = loss.kind if isinstance(loss, losses.LossConfig) else records.text_of(loss)
        return {'class_names': tuple(class_names), 'loss': kind}
