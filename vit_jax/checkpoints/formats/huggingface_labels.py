"""What transformers' config.json says of classes: names, and what the head was trained for."""

from typing import Any

from vit_jax.base import require
from vit_jax.checkpoints.card import Card
from vit_jax.models import ViTConfig

# By the loss of the training.
PROBLEM_TYPES = {'softmax': 'single_label_classification'}
PROBLEM_TYPES |= {'sigmoid': 'multi_label_classification', 'regression': 'regression'}


def class_names(declared: dict[str, Any], count: int | None) -> tuple[str, ...]:
    """The names in `id2label`, unless they are the placeholders that stand for none.

    Raises UserError for those of another number of classes than the head has.
    """
    labels = declared.get('id2label')
    if labels is None or count is None:
        return ()
    fits = isinstance(labels, dict) and {*labels} == {str(i) for i in range(count)}
    fits = fits and all(isinstance(name, str) for name in labels.values())
    wrong = 'config.json.id2label: expected a name for each number from "0" to'
    require(fits, f'{wrong} "{count - 1}", the last of the classes of the arrays')
    names = tuple(labels[str(i)] for i in range(count))
    return () if all(name == f'LABEL_{i}' for i, name in enumerate(names)) else names


def of_head(config: ViTConfig, card: Card) -> dict[str, Any]:
    """What a config.json says of the head."""
    if card.projects:
        return {}
    labels = card.class_names or tuple(f'LABEL_{i}' for i in range(config.num_classes or 0))
    names = {
        'id2label': {str(i): name for i, name in enumerate(labels)},
        'label2id': {name: i for i, name in enumerate(labels)},
    }
    problem = PROBLEM_TYPES.get(card.loss or '') if config.num_classes is not None else None
    return names | ({'problem_type': problem} if problem else {})
