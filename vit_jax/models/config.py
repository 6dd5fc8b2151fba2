"""Configurations of the architectures: Vision Transformer, hybrid, and ResNet."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from vit_jax.base import Record, UserError, require, require_between
from vit_jax.models.positions import ROTARY, WIDTH_MULTIPLES, PositionKind

GROUPS = 32  # groups of each GroupNorm in the ResNet
MAX_SIZE = 1_000_000  # upper bound of all sizes, which catches typos

Gelu = Literal['tanh', 'exact', 'quick']
# The name of a head (`make_head` in heads.py), or a function f(num_classes) that returns an unnamed
# Flax module from features to logits. All its parameters are below `head/`.
Head = str | Callable[..., Any]
# Input of the head: the class token (cls), the mean of the patch tokens (gap), attention pooling
# (map), all tokens (none), the class token and the mean, concatenated (cls_gap, DINOv2), or the
# class token and the distillation token (cls_dist, DeiT).
Pool = Literal['cls', 'gap', 'map', 'none', 'cls_gap', 'cls_dist']
# Number of class tokens that a pool reads.
_CLASS_TOKENS: dict[Pool, int] = {'cls': 1, 'cls_gap': 1, 'cls_dist': 2}
# Where positions are added: once, before the blocks (stem), or at the start of each block, with a
# table for each block (every_layer) or one table for all (every_layer_shared).
PositionsAt = Literal['stem', 'every_layer', 'every_layer_shared']
# How learned positions are resized to another grid. `bilinear` aligns corners, as in the paper's
# code. The others align image edges, as in these libraries:
# - bicubic: transformers
# - bicubic_offset: Meta's DINO and DINOv2
# - bicubic_antialias: timm, OpenCLIP, and DINOv2 with registers
# - bilinear_edges: timm's FlexiViT
PositionResize = Literal[
    'bilinear', 'bicubic', 'bicubic_offset', 'bicubic_antialias', 'bilinear_edges'
]


@dataclasses.dataclass(kw_only=True)
class Backbone(Record):
    """The convolutions of a ResNet: a root that downsamples by 4, then stages of bottleneck units.

    Each stage doubles the channels of the previous one. All stages except the first halve height
    and width. The output of a stage has 4 times as many channels as its 3x3 convolutions.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # number of units in each stage; (): the root only
    width: int = 64  # channels of the root and of the 3x3 convolutions in the first stage

    def check(self) -> None:
        require_between(self, 'width', 'blocks', low=1, high=MAX_SIZE)
        require(len(self.blocks) <= 8, f'blocks={self.blocks}: expected at most 8 stages')
        require(self.width % GROUPS == 0, f'width={self.width}: expected a multiple of {GROUPS}')

    @property
    def stride(self) -> int:
        """Downsampling factor from the image to the feature map."""
        return 2 ** (2 + max(0, len(self.blocks) - 1))

    def feature_map_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Returns (height, width) of the feature map. Each halving rounds up (SAME padding)."""
        return -(-image_size[0] // self.stride), -(-image_size[1] // self.stride)


@dataclasses.dataclass(kw_only=True)
class ArchitectureConfig(Record):
    """Fields of all architectures: input images and head. Sizes are (height, width)."""

    image_size: tuple[int, int] = (224, 224)  # image (height, width) in pixels
    channels: int = 3  # number of image channels
    num_classes: int | None = None  # number of classes; None: no head, the model returns features
    head: Head = (
        'linear'  # cosine: scaled cosine similarities to class vectors, cosine:WIDTH: after a
        # projection to this width (CLIP); or your own function f(num_classes) -> flax module
    )
    head_bias: float = 0.0  # initial value of the linear head's bias

    def check(self) -> None:
        require_between(self, 'image_size', 'channels', 'num_classes', low=1, high=MAX_SIZE)
        if not math.isfinite(self.head_bias):
            raise UserError(f'head_bias={self.head_bias}: expected a finite number')
        if self.head != 'linear' and self.head_bias != 0:
            raise UserError(
                f'head_bias={self.head_bias}: expected 0, as only head=linear supports it'
            )


@dataclasses.dataclass(kw_only=True)
class ResNetConfig(ArchitectureConfig):
    """The architecture of a ResNet classifier."""

    backbone: Backbone = dataclasses.field(default_factory=Backbone)  # all layers except the head

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the last feature map."""
        return self.backbone.feature_map_size(self.image_size)


@dataclasses.dataclass(kw_only=True)
class ViTConfig(ArchitectureConfig):
    """The architecture of a Vision Transformer: its layers, their sizes, and their options.

    The defaults are B/16 of the ViT paper. With a backbone, the model is the hybrid of section 3.1,
    which cuts patches from the feature map.
    """

    patch_size: tuple[int, int] = (16, 16)  # in pixels of the image, or a hybrid's feature map
    backbone: Backbone | None = None  # convolutions of a hybrid; None: patches are cut from images
    width: int = 768  # embedding dimension of the tokens
    depth: int = 12  # number of blocks
    mlp_dim: int = 3072  # hidden dimension of the MLPs
    num_heads: int = 12  # number of attention heads
    patch_outputs: int | None = None  # outputs per patch in masked patch prediction; None: no head
    class_tokens: int | None = None  # number of class tokens; None: as many as the pool reads
    registers: int = 0  # number of register tokens ("Vision Transformers Need Registers")
    positions: PositionKind = (
        'learned'  # one vector per position; learned2d: one per row and one per column; sincos2d:
        # fixed sines and cosines; relative: one vector per offset, in attention; rope: queries and
        # keys are rotated; learned_rope: learned and rope (ViT-5); none: no positions
    )
    positions_at: PositionsAt = 'stem'  # stem: before blocks; others: in each block (appendix D.4)
    position_resize: PositionResize = 'bilinear'  # interpolation of learned positions
    pre_norm: bool = False  # LayerNorm before the blocks, patch embedding without bias (CLIP)
    gelu: Gelu | None = 'tanh'  # exact, tanh or quick; None: SwiGLU
    layer_scale: float | None = None  # initial LayerScale (CaiT, equation 4); None: no LayerScale
    norm: Literal['layer', 'rms'] = 'layer'  # LayerNorm; rms: RMSNorm, not centered, no bias
    layer_norm_epsilon: float = 1e-6  # epsilon of all norms, added to the variance
    qkv_bias: bool = True  # whether query, key and value projections have a bias
    qk_norm: bool = False  # whether blocks normalize the queries and keys of each head (ViT-22B)
    parallel: bool = False  # whether attention and MLP of a block run in parallel (ViT-22B)
    pool: Pool = (
        'cls'  # class token; gap: mean of the patches; map: attention pooling; none: all tokens;
        # cls_gap: class token and mean (DINOv2); cls_dist: class and distillation token (DeiT)
    )
    final_norm: Literal['before_pool', 'after_pool'] = 'before_pool'  # place of the final norm
    representation_size: int | None = None  # width of a tanh layer before the head; None: no layer
    blocks_without_skips: tuple[int, ...] = ()  # block indices from 0 (Raghu et al. 2021, figure 8)

    def check(self) -> None:
        """Checks all fields, but not whether a patch fits: `image_size` may still change."""
        super().check()
        sizes = 'patch_size', 'width', 'depth', 'mlp_dim', 'num_heads'
        require_between(self, *sizes, 'patch_outputs', 'representation_size', low=1, high=MAX_SIZE)
        require_between(self, 'registers', low=0, high=MAX_SIZE)
        require_between(self, 'layer_norm_epsilon', above=0, below=1)
        require_between(self, 'layer_scale', low=-1, high=1)
        highest = 2 if self.pool == 'cls_dist' else MAX_SIZE
        require_between(self, 'class_tokens', low=_CLASS_TOKENS.get(self.pool, 0), high=highest)
        require_between(self, 'blocks_without_skips', low=0, below=self.depth)
        if self.pool == 'cls_dist' and self.representation_size is not None:
            raise UserError('representation_size: not supported with pool=cls_dist; leave it out')
        if self.parallel and self.blocks_without_skips:
            raise UserError('blocks_without_skips: not supported with parallel=true; leave it out')
        if self.width % self.num_heads:
            raise UserError(
                f'width={self.width}: expected a multiple of num_heads={self.num_heads}'
            )
        self._check_positions()

    def _check_positions(self) -> None:
        # In RoPE, 4 features of a head share each frequency (see `positions.rotate`).
        rotary = dict.fromkeys(ROTARY, 4 * self.num_heads)
        factor = (WIDTH_MULTIPLES | rotary).get(self.positions, 1)
        if self.width % factor:
            raise UserError(
                f'width={self.width}: expected a multiple of {factor} for '
                f'positions={self.positions}'
            )
        is_square = math.isqrt(self.registers) ** 2 == self.registers
        if self.positions == 'learned_rope' and not is_square:
            raise UserError(
                f'registers={self.registers}: expected a square number for positions=learned_rope'
            )
        if self.positions_at != 'stem' and self.positions not in WIDTH_MULTIPLES:
            raise UserError(
                f'positions_at={self.positions_at}: not supported with '
                f'positions={self.positions}; leave positions_at out'
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches along (height, width).

        Pixels at the bottom and the right that do not fill a patch are ignored.

        Raises:
          UserError: If no patch fits into the image.
        """
        height, width = self._patched_size
        p, q = self.patch_size
        if height < p or width < q:
            array = 'feature map' if self.backbone is not None else 'image'
            raise UserError(
                f'patch_size={self.patch_size}: expected at most {height}x{width}, the size of '
                f'the {array}'
            )
        return height // p, width // q

    @property
    def patch_size_in_pixels(self) -> tuple[int, int]:
        """(height, width) of a patch in pixels of the image.

        In a hybrid, a patch on the feature map corresponds to `stride` times as many pixels per
        side. Its receptive field is larger.
        """
        stride = self.backbone.stride if self.backbone else 1
        return stride * self.patch_size[0], stride * self.patch_size[1]

    @property
    def _patched_size(self) -> tuple[int, int]:
        """(height, width) of the array from which patches are cut."""
        return self.backbone.feature_map_size(self.image_size) if self.backbone else self.image_size

    @property
    def unused_pixels(self) -> str:
        """Message about pixels that fill no patch; empty if the patches cover the image."""
        height, width = self._patched_size
        rows = height % self.patch_size[0]
        columns = width % self.patch_size[1]
        if rows == 0 and columns == 0:
            return ''
        array = 'feature map' if self.backbone else 'image'
        return f'the last {rows} rows and {columns} columns of the {array} are ignored'

    @property
    def num_class_tokens(self) -> int:
        """Number of class tokens; DeiT's distillation token counts as the second one.

        They precede the patches. Unlike registers, they have entries in the position table.
        """
        return _CLASS_TOKENS.get(self.pool, 0) if self.class_tokens is None else self.class_tokens

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches (class tokens, then registers)."""
        return self.num_class_tokens + self.registers

    @property
    def num_tokens_read(self) -> int | None:
        """Number of leading tokens that the heads read, or None if a head reads patches."""
        if self.pool not in ('cls', 'cls_dist') or self.patch_outputs is not None:
            return None
        return _CLASS_TOKENS[self.pool]

    @property
    def num_tokens(self) -> int:
        """Sequence length, including the tokens before the patches."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def sequence_summary(self) -> str:
        """Sequence length as text, with a note about pixels that fill no patch."""
        note = f' ({self.unused_pixels})' if self.unused_pixels else ''
        return f'{self.num_tokens} tokens{note}'


ModelConfig = ViTConfig | ResNetConfig
