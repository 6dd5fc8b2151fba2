"""Distillation: the model learns from the outputs of a frozen teacher and from the labels.

With `task_weight=0`, it does not learn from the labels. Teacher and model get the same augmented
images ("Knowledge distillation: A good teacher is patient and consistent", Beyer et al. 2022).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import Array, Batch, Float, Key, Num, Params, records
from vit_jax.models import Model, ModelConfig, apply_heads
from vit_jax.models.model import feature_width
from vit_jax.training.losses import BatchSums, Loss, example_metrics, make_targets, sum_examples

PROJECTION = 'teacher_projection'  # name of the linear map of features in the parameters
Normalize = Callable[[Array], Float[Array, 'b h w c']]


@dataclasses.dataclass(kw_only=True)
class Distillation(records.Record):
    """A teacher, and how the model learns from it.

    The loss is `task_weight` times the loss for the labels (`config.loss`), plus 1 - `task_weight`
    times the distillation loss. With logits z and temperature t, `kl` is
    t^2 KL(softmax(z_teacher / t) || softmax(z / t)) (Hinton et al. 2015), and `hard` is the
    cross-entropy with the class that the teacher predicts. `token` is `hard` and `token_kl` is `kl`
    for the head of the distillation token; the other head learns the labels (DeiT, section 4).
    `features` is the mean squared difference between the inputs of the teacher's head and a trained
    linear map of the inputs of the model's head.
    """

    teacher: str | None = None  # checkpoint of the teacher, in any format; None: no teacher
    digest: str | None = None  # SHA-256 of the teacher, recorded by a run; None: not compared
    kind: Literal['kl', 'hard', 'token', 'token_kl', 'features'] = (
        'kl'  # kl: probabilities; hard: predicted class; token, token_kl: hard and kl for the head
        # of the distillation token (pool=cls_dist); features: inputs of the heads
    )
    task_weight: float = 0.5  # weight of the loss for the labels; 1 - task_weight: distillation
    temperature: float = 1.0  # divides the logits in kl and token_kl

    def check(self) -> None:
        records.require_between(self, 'task_weight', low=0, below=1)
        records.require_between(self, 'temperature', above=0)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wrong = f'{field.name}={value}: not used without a teacher; set teacher=CHECKPOINT'
            records.require(self.teacher is not None or value == field.default, wrong)
        wrong = f'temperature={self.temperature:g}: not used with kind={self.kind}; leave it out'
        records.require(self.temperature == 1 or self.kind in ('kl', 'token_kl'), wrong)
        wrong = f'task_weight=0: expected more than 0 with kind={self.kind}, to train both heads'
        records.require(self.task_weight > 0 or 'token' not in self.kind, wrong)


class Teacher(NamedTuple):
    """A frozen model from whose outputs the student learns."""

    model: Model
    normalize: Normalize  # maps images with pixels from 0 to 255 to the input of the model


def _check_models(config: Distillation, student: ModelConfig, teacher: ModelConfig) -> None:
    """Raises UserError if a model does not fit the kind of distillation."""
    wrong = f'config.distillation.kind={config.kind}: the model has no distillation token'
    fits = 'token' not in config.kind or getattr(student, 'pool', None) == 'cls_dist'
    records.require(fits, f'{wrong}; expected model.pool=cls_dist')
    wrong = 'config.distillation.kind=features: model.pool=none has features per token'
    has_vector = config.kind != 'features' or getattr(student, 'pool', None) != 'none'
    records.require(has_vector, f'{wrong}; expected a pooled model, such as model.pool=gap')
    wrong = 'config.distillation.teacher: a model with pool=none has outputs per token'
    has_vector = getattr(teacher, 'pool', None) != 'none'
    records.require(has_vector, f'{wrong}; use a teacher with another pool')
    wrong = f'config.distillation.teacher: the teacher takes {teacher.channels} channels'
    same = teacher.channels == student.channels
    records.require(same, f'{wrong}; use a teacher with {student.channels}, like the model')


def with_projection(student: Model, teacher: Model) -> Model:
    """Returns the student with the linear map of `kind=features` in its initial parameters.

    The map is trained with the student, but is not part of it: `TrainState.split` stores it
    separately. It is used even if both widths are equal, unlike in timm, because it helps then
    too ("Improved Feature Distillation via Projector Ensemble").
    """
    widths = [feature_width(model.config) for model in (student, teacher)]

    def init(key: Key[Array, '']) -> Params:
        kernel = jax.nn.initializers.lecun_normal()(jax.random.fold_in(key, 0), widths)
        return student.init(key) | {PROJECTION: {'kernel': kernel, 'bias': jnp.zeros(widths[1])}}

    return student._replace(init=init)


def make_distillation_sums(
    config: Distillation, student: Model, teacher: Teacher, loss: Loss, normalize: Normalize
) -> Callable[..., BatchSums]:
    """Makes the function that computes loss and metrics of training with a teacher.

    Args:
      config: The kinds and weights of the losses.
      student: The model to train.
      teacher: The frozen model.
      loss: Maps (logits, targets) to the loss for the labels, one per example.
      normalize: Maps images with pixels from 0 to 255 to the input of the student.

    Returns:
      `loss_sums(params, batch, key=None, *, teacher)`, as `make_loss_sums` returns; `teacher`
      is the teacher's parameters. The metrics contain both losses; accuracy is measured on
      the labels.

    Raises:
      UserError: If a model does not fit the kind of distillation.
    """
    _check_models(config, student.config, teacher.model.config)
    forward = teacher.model.features if config.kind == 'features' else teacher.model.apply
    height, width = teacher.model.config.image_size

    def teacher_outputs(params: Params, images: Num[Array, 'b h w c']) -> Float[Array, 'b k']:
        if images.shape[1:3] != (height, width):
            shape = len(images), height, width, images.shape[3]
            images = jax.image.resize(images.astype(jnp.float32), shape, 'bilinear')
        return forward(params, teacher.normalize(images))

    def loss_sums(
        params: Params, batch: Batch, key: Key[Array, ''] | None = None, *, teacher: Params
    ) -> BatchSums:
        features = student.features(params, normalize(batch['images']), key)
        heads = apply_heads(student.config, params['head'], features)
        logits = jnp.stack(heads).mean(axis=0)
        targets = make_targets(batch['labels'], logits.shape[-1])
        task_logits, outputs = heads if 'token' in config.kind else (logits, logits)
        if config.kind == 'features':
            outputs = features @ params[PROJECTION]['kernel'] + params[PROJECTION]['bias']
        task = loss(task_logits, targets)
        distance = distillation_loss(config, outputs, teacher_outputs(teacher, batch['images']))
        total = config.task_weight * task + (1 - config.task_weight) * distance
        values = {'loss': total, 'task_loss': task, 'distillation_loss': distance}
        return sum_examples(values | example_metrics(logits, targets), batch['mask'])

    return loss_sums


def distillation_loss(
    config: Distillation, outputs: Float[Array, 'b k'], teacher_outputs: Float[Array, 'b k']
) -> Float[Array, 'b']:
    """Computes the distillation loss of each example from logits, or from features."""
    match config.kind:
        case 'kl' | 'token_kl':
            logs = (jax.nn.log_softmax(z / config.temperature) for z in (outputs, teacher_outputs))
            return config.temperature**2 * optax.losses.kl_divergence_with_log_targets(*logs)
        case 'hard' | 'token':
            labels = teacher_outputs.argmax(axis=-1)
            return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        case 'features':
            return jnp.square(outputs - teacher_outputs).mean(axis=-1)
        case other:
            assert_never(other)
