"""Architectures as typed values: the Vision Transformer, its hybrid, and the ResNet."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from vit_jax.base import Record, require, require_between
from vit_jax.models.positions import MULTIPLES, PositionKind

GROUPS = 32  # of GroupNorm in the ResNet
LARGEST = 1_000_000  # upper bound of every size: a larger one is a typing error

Gelu = Literal['tanh', 'exact', 'quick']
# The name of a head in `make_head` (vit.py), or a function from the number of classes to an unnamed
# Flax module from features to logits. All its parameters are below `head/`.
Head = str | Callable[..., Any]
# What the head is given: the class token, the mean of the patches, attention pooling, every token;
# the class token beside the mean (DINOv2), or beside the distillation token (DeiT).
Pool = Literal['cls', 'gap', 'map', 'none', 'cls_gap', 'cls_dist']
_READS: dict[Pool, int] = {'cls': 1, 'cls_gap': 1, 'cls_dist': 2}  # class tokens
# Where positions are added: once, before the blocks; or at the beginning of each block, with
# parameters of its own or the same for all.
PositionsAt = Literal['stem', 'every_layer', 'every_layer_shared']
# How learned positions are resized to another grid. `bilinear` aligns corners, as the paper's code.
# The others align the edges of images, each as a library does: `bicubic` as transformers,
# `bicubic_offset` as DINO and DINOv2 of Meta, `bicubic_antialias` as timm, OpenCLIP, and DINOv2
# with registers, `bilinear_edges` as timm's FlexiViT.
PositionResize = Literal[
    'bilinear', 'bicubic', 'bicubic_offset', 'bicubic_antialias', 'bilinear_edges'
]


@dataclasses.dataclass(kw_only=True)
class Backbone(Record):
    """The convolutions: a root that shrinks the image by 4, then stages of bottleneck units.

    Each stage has twice the channels of the one before and, but for the first, half its height
    and width. Its output has 4 times the channels of its 3x3 convolutions.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # units of each stage; () is the root alone
    width: int = 64  # channels of the root and of the first stage's 3x3 convolutions

    def check(self) -> None:
        require_between(self, 'width', 'blocks', low=1, high=LARGEST)
        require(len(self.blocks) <= 8, f'blocks={self.blocks}: expected at most 8 stages')
        require(self.width % GROUPS == 0, f'width={self.width}: expected a multiple of {GROUPS}')

    @property
    def stride(self) -> int:
        """Pixels of the image, along a side, for one of the feature map."""
        return 2 ** (2 + max(0, len(self.blocks) - 1))

    def map_size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) of the feature map: every halving rounds up, as SAME padding does."""
        return -(-image_size[0] // self.stride), -(-image_size[1] // self.stride)


@dataclasses.dataclass(kw_only=True)
class ImagesAndHead(Record):
    """The images and the head of an architecture. Lengths are (height, width)."""

    image_size: tuple[int, int] = (224, 224)  # in pixels
    channels: int = 3  # of an image
    num_classes: int | None = None  # None: no head, the outputs are the features
    head: Head = 'linear'  # or a function of your own, f(num_classes) -> flax module
    head_bias: float = 0.0  # the linear head's bias at initialization

    def check(self) -> None:
        require_between(self, 'image_size', 'channels', 'num_classes', low=1, high=LARGEST)
        wrong = f'head_bias={self.head_bias}'
        require(math.isfinite(self.head_bias), f'{wrong}: expected a finite number')
        has_bias = self.head == 'linear' or self.head_bias == 0
        require(has_bias, f'{wrong}: only the linear head has one')


@dataclasses.dataclass(kw_only=True)
class ResNetConfig(ImagesAndHead):
    """A ResNet as a classifier: the architecture, and nothing else."""

    backbone: Backbone = dataclasses.field(default_factory=Backbone)  # all but the head

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the last feature map."""
        return self.backbone.map_size(self.image_size)


@dataclasses.dataclass(kw_only=True)
class ViTConfig(ImagesAndHead):
    """The architecture: all that decides which parameters there are and what they compute.

    The defaults describe the paper's B/16. With a backbone it is the hybrid of section 3.1: patches
    are cut from the feature map.
    """

    patch_size: tuple[int, int] = (16, 16)  # in pixels of the image, or of the feature map
    backbone: Backbone | None = None  # of a hybrid; None: patches are cut from the image
    width: int = 768  # of a token
    depth: int = 12  # blocks
    mlp_dim: int = 3072  # width of a block's hidden layer
    num_heads: int = 12  # of attention
    patch_outputs: int | None = None  # of a head of each patch (masked_patches.py); None: no such
    # Before the patches: the class token and, where there are 2, DeiT's distillation token.
    class_tokens: int | None = None  # None: as many as the pool reads
    registers: int = 0  # register tokens ("Vision Transformers Need Registers")
    positions: PositionKind = (
        'learned'  # one vector a place; learned2d: of row and of column; sincos2d: fixed ones;
        # relative: of offsets, in attention; rope: queries and keys are turned; none
    )
    positions_at: PositionsAt = 'stem'  # where they are added (appendix D.4)
    position_resize: PositionResize = 'bilinear'  # of learned ones, for images of another size
    pre_norm: bool = False  # a LayerNorm before the blocks; patches then have no bias (CLIP)
    gelu: Gelu | None = 'tanh'  # None: SwiGLU in its place
    layer_scale: float | None = None  # LayerScale's initial value (CaiT, equation 4); None: none
    norm: Literal['layer', 'rms'] = 'layer'  # LayerNorm; rms: RMSNorm, not centered, no bias
    layer_norm_epsilon: float = 1e-6  # added to the variance
    qkv_bias: bool = True  # of queries, keys and values
    qk_norm: bool = False  # norms of queries and keys of each head, in blocks (ViT-22B)
    parallel: bool = False  # attention and MLP of the same tokens, side by side (ViT-22B)
    pool: Pool = (
        'cls'  # the class token; gap: the mean of patches; map: attention pooling; none: every
        # token; cls_gap: class token and mean (DINOv2); cls_dist: and distillation token (DeiT)
    )
    final_norm: Literal['before_pool', 'after_pool'] = 'before_pool'  # where the last norm is
    representation_size: int | None = None  # width of the tanh layer before the head
    blocks_without_skips: tuple[int, ...] = ()  # from 0 (Raghu et al., figure 8)

    def check(self) -> None:
        """Sizes alone; whether a patch fits into the image is for `build`, as images may change."""
        super().check()
        sizes = 'patch_size', 'width', 'depth', 'mlp_dim', 'num_heads'
        require_between(self, *sizes, 'patch_outputs', 'representation_size', low=1, high=LARGEST)
        require_between(self, 'registers', low=0, high=LARGEST)
        require_between(self, 'layer_norm_epsilon', above=0, below=1)
        require_between(self, 'layer_scale', low=-1, high=1)
        require_between(self, 'class_tokens', low=_READS.get(self.pool, 0), high=2)
        require_between(self, 'blocks_without_skips', low=0, below=self.depth)
        wrong = 'pool=cls_dist: each of its two heads reads one token, without a tanh layer before'
        require(self.pool != 'cls_dist' or self.representation_size is None, wrong)
        wrong = 'blocks_without_skips: in a parallel block attention and MLP have one connection'
        require(not (self.parallel and self.blocks_without_skips), wrong)
        wrong = f'width={self.width} is not a multiple of'
        require(self.width % self.num_heads == 0, f'{wrong} num_heads={self.num_heads}')
        parts = (MULTIPLES | {'rope': 4 * self.num_heads}).get(self.positions, 1)
        require(self.width % parts == 0, f'{wrong} {parts}, as positions={self.positions} needs')
        is_added = self.positions in MULTIPLES
        wrong = f'positions_at={self.positions_at}: {self.positions} positions are not added'
        require(is_added or self.positions_at == 'stem', f'{wrong}; leave positions_at out')

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in (height, width): what fills no patch, below and at the right, is not read.

        Raises UserError where no patch fits into the image.
        """
        (height, width), (p, q) = self._map_size, self.patch_size
        what = 'feature map' if self.backbone is not None else 'image'
        wrong = f'patch_size={self.patch_size}: larger than the {what}, {height}x{width} pixels'
        require(height >= p and width >= q, wrong)
        return height // p, width // q

    @property
    def _map_size(self) -> tuple[int, int]:
        """(height, width) of the array from which patches are cut."""
        return self.backbone.map_size(self.image_size) if self.backbone else self.image_size

    @property
    def unread(self) -> str:
        """Describes the pixels that fill no patch; '' if the patches fill the image."""
        sides = zip(self._map_size, self.patch_size, strict=True)
        rows, columns = (side % size for side, size in sides)
        edge = 'edge of the feature map' if self.backbone else 'edge'
        return f'{rows}x{columns} pixels at the {edge} fill no patch' if rows + columns else ''

    @property
    def positioned_prefix(self) -> int:
        """Tokens before the patches that have positions: of the class, of the distillation."""
        return _READS.get(self.pool, 0) if self.class_tokens is None else self.class_tokens

    @property
    def prefix(self) -> int:
        """All tokens before the patches: of the class, of the distillation, then registers."""
        return self.positioned_prefix + self.registers

    @property
    def num_tokens_read(self) -> int | None:
        """How many tokens, the first ones, heads read; None: they read patches too."""
        if self.pool not in ('cls', 'cls_dist') or self.patch_outputs is not None:
            return None
        return _READS[self.pool]

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: the tokens before the patches, and the patches."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def sequence(self) -> str:
        """Its length in words, and what of the image is not in it."""
        return f'{self.num_tokens} tokens' + (f' ({self.unread})' if self.unread else '')


ModelConfig = ViTConfig | ResNetConfig
