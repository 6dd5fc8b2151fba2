"""Configurations of the tasks: masked patches, masked autoencoder, and learning from a teacher."""

import dataclasses
import math
from typing import ClassVar, Literal

from vit_jax.base import records

# Name of the task's own parameters, such as a decoder. Checkpoints store them with the optimizer
# state, because they are not part of the model.
TASK_PARAMS = 'task'
Target = Literal['mean_color', 'colors_4x4', 'pixels']
# Fields of classification; * stands for the name of any evaluation. A field that a task does not
# use, and that is not in its `unused`, would be ignored silently.
_OF_CLASSES = 'loss', 'metrics', 'distillation', 'head', 'reuse_head', 'init_head', 'evals.*.labels'
_OF_PATCHES = 'patch_sizes', 'evals.*.patch_size'


@dataclasses.dataclass(kw_only=True)
class MaskedPatches(records.Record):
    """Masked patch prediction: some patch embeddings are corrupted, and the patches are predicted.

    `mean_color` classifies the mean color of a patch (3 bits per channel, 512 classes), and
    `colors_4x4` the mean color of each of its 4x4 cells. `pixels` predicts the normalized pixels,
    with the mean squared error as loss.
    """

    unused: ClassVar[tuple[str, ...]] = (*_OF_CLASSES, *_OF_PATCHES)

    fraction: float = 0.5  # fraction of the patches of an image that are corrupted
    masked: float = 0.8  # probability that a corrupted patch becomes the mask token
    replaced: float = 0.1  # probability that it becomes another patch; else it is unchanged
    target: Target = 'mean_color'  # mean color; colors_4x4: colors of 4x4 cells; pixels: pixels

    def check(self) -> None:
        records.require_between(self, 'fraction', above=0, high=1)
        records.require_between(self, 'masked', 'replaced', low=0, high=1)
        records.require(
            self.masked + self.replaced <= 1 + 1e-6,
            f'masked={self.masked:g}, replaced={self.replaced:g}: expected a sum of at most 1',
        )

    def num_corrupted(self, patches: int) -> int:
        """Returns the number of corrupted patches in an image with this number of patches."""
        return round(self.fraction * patches)


@dataclasses.dataclass(kw_only=True)
class MaskedAutoencoder(records.Record):
    """A masked autoencoder predicts the pixels of removed patches from the others (He et al. 2021).

    The model encodes only the visible patches. A small decoder, which is not part of the model,
    predicts all pixels. The loss is the mean squared error over the removed patches.
    """

    unused: ClassVar[tuple[str, ...]] = (*_OF_CLASSES, *_OF_PATCHES, 'regularization.patch_dropout')

    fraction: float = 0.75  # fraction of the patches of an image that are removed
    decoder_depth: int = 8  # number of blocks of the decoder
    decoder_width: int = 512  # embedding dimension of the decoder's tokens
    decoder_heads: int = 16  # number of attention heads of the decoder
    normalize_targets: bool = True  # whether the pixels of each patch have mean 0 and deviation 1

    def check(self) -> None:
        records.require_between(self, 'fraction', above=0, below=1)
        records.require_between(self, 'decoder_depth', 'decoder_width', 'decoder_heads', low=1)
        records.require(
            self.decoder_width % math.lcm(4, self.decoder_heads) == 0,
            f'decoder_width={self.decoder_width}: expected a multiple of 4 and of '
            f'decoder_heads={self.decoder_heads}',
        )

    def num_visible(self, patches: int) -> int:
        """Returns the number of visible patches in an image with this number of patches."""
        return int(patches * (1 - self.fraction))  # rounded down, like the authors' code


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
            records.require(
                self.teacher is not None or value == field.default,
                f'{field.name}={value}: not used without a teacher; set teacher=CHECKPOINT',
            )
        records.require(
            self.temperature == 1 or self.kind in ('kl', 'token_kl'),
            f'temperature={self.temperature:g}: not used with kind={self.kind}; leave it out',
        )
        records.require(
            self.task_weight > 0 or 'token' not in self.kind,
            f'task_weight=0: expected more than 0 with kind={self.kind}, to train both heads',
        )
