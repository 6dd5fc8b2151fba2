"""The card of a checkpoint: what belongs to its parameters, kept as JSON beside them."""

import dataclasses
from typing import Any

from vit_jax.base import records
from vit_jax.base.records import Record
from vit_jax.data.image_preprocessing import Preprocessing
from vit_jax.models import ResNetConfig, ViTConfig


@dataclasses.dataclass(kw_only=True)
class Card(Record):
    """What belongs to parameters: enough to use them without the experiment that made them."""

    step: int
    model: ViTConfig | ResNetConfig
    grid: tuple[int, int]  # (height, width) in patches, or of a ResNet's last feature map
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    software: dict[str, str] = dataclasses.field(default_factory=dict)

    @staticmethod
    def read(values: dict[str, Any], *, where: str) -> 'Card':
        """The card of JSON values. Raises UserError that names what is wrong in it."""
        return records.from_dict(Card, values, where=where)
