"""Distillation: the model learns from the outputs of a frozen teacher and from the labels.

With `task_weight=0`, it does not learn from the labels. Teacher and model get the same augmented
images ("Knowledge distillation: A good teacher is patient and consistent", Beyer et al. 2022).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import Array, Batch, Float, Key, Num, Params, UserError, records
from vit_jax.checkpoints import remote
from vit_jax.checkpoints.digests import digest_model
from vit_jax.checkpoints.formats.inference import NeedsHint
from vit_jax.config import TrainConfig
from vit_jax.data.image_preprocessing import Preprocessing, normalize
from vit_jax.data.sources.base import Source
from vit_jax.models import Compute, Model, ModelConfig, apply_heads, build
from vit_jax.models.model import feature_width
from vit_jax.pretrained import LoadedModel, load
from vit_jax.tasks.base import LoadedTask, LossSums, Normalize, Task
from vit_jax.tasks.single_label import SingleLabel
from vit_jax.training.losses import BatchSums, Loss, make_loss, make_targets, sum_examples
from vit_jax.training.metrics import example_metrics
from vit_jax.training.objectives import TASK_PARAMS, Distillation

PROJECTION = 'teacher_projection'  # name of the linear map of features in the task's parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilledClassification(Task):
    """Classification that is learned from labels and a teacher, and measured on labels."""

    labels: SingleLabel
    teacher: tuple[ModelConfig, Preprocessing] | None = None  # None: not loaded yet

    @property
    def measured(self) -> tuple[str, ...]:
        return self.labels.measured

    @property
    def shown(self) -> tuple[str, ...]:
        return self.labels.shown

    def check_data(
        self, config: TrainConfig, train: Source, evaluated: Mapping[str, Source]
    ) -> list[str]:
        problems = self.labels.check_data(config, train, evaluated)
        kind = config.distillation.kind
        if train.multi_label and kind != 'features':
            problems.append(
                f'{records.text_of(config.data)}: images may have several classes, which '
                f'kind={kind} does not support; pass --config.distillation.kind=features'
            )
        return problems

    def adapt_stored_model(self, model: ModelConfig) -> ModelConfig:
        return self.labels.adapt_stored_model(model)

    def configure_model(self, config: TrainConfig, model: ModelConfig) -> ModelConfig:
        return self.labels.configure_model(config, model)

    def load(self, config: TrainConfig, class_names: Sequence[str]) -> LoadedTask:
        distillation, teacher = load_teacher(config.distillation, class_names)
        return LoadedTask(
            task=dataclasses.replace(self, teacher=(teacher.config, teacher.preprocessing)),
            config=dataclasses.replace(config, distillation=distillation),
            frozen_model=teacher,
        )

    def init_params(self, config: TrainConfig, model: ModelConfig, key: Key[Array, '']) -> Params:
        """Initializes the linear map of `kind=features`.

        It is used even if both widths are equal, unlike in timm, because it helps then too
        ("Improved Feature Distillation via Projector Ensemble").
        """
        if config.distillation.kind != 'features':
            return {}
        assert self.teacher is not None
        size = feature_width(model), feature_width(self.teacher[0])
        kernel = jax.nn.initializers.lecun_normal()(key, size)
        return {PROJECTION: {'kernel': kernel, 'bias': jnp.zeros(size[1])}}

    def train_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        assert self.teacher is not None
        teacher = build_teacher(*self.teacher, student=model)
        loss = make_loss(config.loss)
        return make_distillation_sums(config.distillation, model, teacher, loss, normalize)

    def eval_sums(self, config: TrainConfig, model: Model, normalize: Normalize) -> LossSums:
        labels = dataclasses.replace(self.labels, outputs=self.outputs)
        return labels.eval_sums(config, model, normalize)

    def card_fields(self, config: TrainConfig, class_names: Sequence[str]) -> dict[str, Any]:
        return self.labels.card_fields(config, class_names)

    def describe(self, config: TrainConfig) -> list[str]:
        return [f'teacher {config.distillation.teacher}, {config.distillation.kind}']


def load_teacher(
    config: Distillation, class_names: Sequence[str]
) -> tuple[Distillation, LoadedModel]:
    """Loads the teacher, without a head for `kind=features`.

    Args:
      config: The teacher.
      class_names: The classes of the data. The teacher must have the same, if its head is used.

    Returns:
      `config` with the digest of the teacher and without secrets in its path, and the teacher.

    Raises:
      UserError: If the teacher cannot be loaded, or has other classes or another digest.
    """
    assert config.teacher is not None
    has_head = config.kind != 'features'
    try:
        teacher = load(config.teacher, num_classes='keep' if has_head else None)
        if has_head:
            teacher.require_classes(class_names)
    except NeedsHint as error:
        raise UserError(
            f'config.distillation.teacher: {error} '
            '(write another file with vit_jax.convert, and use it as the teacher)'
        ) from error
    except UserError as error:
        path = remote.redact(config.teacher)
        raise UserError(f'config.distillation.teacher={path}: {error}') from error
    digest = digest_model(teacher.config, teacher.params, teacher.preprocessing)
    if config.digest not in (None, digest):
        raise UserError(
            f'config.distillation.digest: the teacher has {digest}; expected {config.digest}; '
            'use the same teacher, or set digest=none'
        )
    path = remote.redact(config.teacher)
    return dataclasses.replace(config, teacher=path, digest=digest), teacher


class Teacher(NamedTuple):
    """A frozen model from whose outputs the student learns."""

    model: Model
    normalize: Normalize  # maps images with pixels from 0 to 255 to the input of the model


def build_teacher(config: ModelConfig, preprocessing: Preprocessing, *, student: Model) -> Teacher:
    """Builds the teacher for the devices and the type of the student."""
    compute = Compute(dtype=student.compute.dtype)
    model = build(config, compute=compute, platform=student.platform)
    return Teacher(model, functools.partial(normalize, preprocessing=preprocessing))


def _check_models(config: Distillation, student: ModelConfig, teacher: ModelConfig) -> None:
    """Raises UserError if a model does not fit the kind of distillation."""
    pool = getattr(student, 'pool', None)
    if 'token' in config.kind and pool != 'cls_dist':
        raise UserError(
            f'config.distillation.kind={config.kind}: the model has no distillation token; '
            'expected model.pool=cls_dist'
        )
    if config.kind == 'features' and pool == 'none':
        raise UserError(
            'config.distillation.kind=features: model.pool=none has features per token; '
            'expected a pooled model, such as model.pool=gap'
        )
    if getattr(teacher, 'pool', None) == 'none':
        raise UserError(
            'config.distillation.teacher: a model with pool=none has outputs per token; '
            'use a teacher with another pool'
        )
    if teacher.channels != student.channels:
        raise UserError(
            f'config.distillation.teacher: the teacher takes {teacher.channels} channels; '
            f'use a teacher with {student.channels}, like the model'
        )


def make_distillation_sums(
    config: Distillation, student: Model, teacher: Teacher, loss: Loss, normalize: Normalize
) -> LossSums:
    """Makes the function that computes loss and metrics of training with a teacher.

    Args:
      config: The kinds and weights of the losses.
      student: The model to train.
      teacher: The frozen model.
      loss: Maps (logits, targets) to the loss for the labels, one per example.
      normalize: Maps images with pixels from 0 to 255 to the input of the student.

    Returns:
      `loss_sums(params, batch, key=None, *, frozen)`, as `make_loss_sums` returns; `frozen`
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
        params: Params, batch: Batch, key: Key[Array, ''] | None = None, *, frozen: Params
    ) -> BatchSums:
        features = student.features(params, normalize(batch['images']), key)
        heads = apply_heads(student.config, params['head'], features)
        logits = jnp.stack(heads).mean(axis=0)
        targets = make_targets(batch['labels'], logits.shape[-1])
        task_logits = logits
        outputs = logits
        if 'token' in config.kind:
            task_logits, outputs = heads
        elif config.kind == 'features':
            projection = params[TASK_PARAMS][PROJECTION]
            outputs = features @ projection['kernel'] + projection['bias']
        task_loss = loss(task_logits, targets)
        distance = distillation_loss(config, outputs, teacher_outputs(frozen, batch['images']))
        total = config.task_weight * task_loss + (1 - config.task_weight) * distance
        losses = {'loss': total, 'task_loss': task_loss, 'distillation_loss': distance}
        return sum_examples(losses | example_metrics(logits, targets), batch['mask'])

    return loss_sums


def distillation_loss(
    config: Distillation, outputs: Float[Array, 'b k'], teacher_outputs: Float[Array, 'b k']
) -> Float[Array, 'b']:
    """Computes the distillation loss of each example from logits, or from features."""
    match config.kind:
        case 'kl' | 'token_kl':
            predicted = jax.nn.log_softmax(outputs / config.temperature)
            expected = jax.nn.log_softmax(teacher_outputs / config.temperature)
            divergence = optax.losses.kl_divergence_with_log_targets(predicted, expected)
            return config.temperature**2 * divergence
        case 'hard' | 'token':
            labels = teacher_outputs.argmax(axis=-1)
            return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        case 'features':
            return jnp.square(outputs - teacher_outputs).mean(axis=-1)
        case other:
            assert_never(other)
