"""Classification of images that may have several classes."""

import dataclasses

from vit_jax.base import records
from vit_jax.config import TrainConfig
from vit_jax.data.sources.base import Source
from vit_jax.models import Model
from vit_jax.tasks.base import LossSums, Normalize
from vit_jax.tasks.single_label import SingleLabel
from vit_jax.training import losses
from vit_jax.training.metrics import OF_SEVERAL_CLASSES
from vit_jax.training.update import make_loss_sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralLabels(SingleLabel):
    """Classification of images that may have several classes."""

    @property
    def measured(self) -> tuple[str, ...]:
        return OF_SEVERAL_CLASSES

    @property
    def shown(self) -> tuple[str, ...]:
        return 'accuracy', 'mean_average_precision'

    def check_classes(self, config: TrainConfig, train: Source) -> list[str]:
        assert isinstance(config.loss, losses.LossConfig)
        if config.loss.kind != 'softmax':
            return []
        return [
            f'{records.text_of(config.data)}: images may have several classes, which the softmax '
            'loss does not support; pass --config.loss.kind=sigmoid'
        ]

    def eval_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        loss = losses.make_loss(config.loss)
        return make_loss_sums(model.apply, loss, normalize, outputs=self.outputs)
