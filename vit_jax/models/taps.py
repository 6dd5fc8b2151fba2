"""What can be seen inside a network: the list of all intermediate arrays, and how they come out."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import DenyList

from vit_jax.base import Array, UserError, records

# All taps by name, in the order in which they are computed. Letters: b images, n tokens, d width,
# k heads, l blocks (the first axis of all that a block has), h w c a feature map; U and S stand for
# a number. Of a ResNet, and of a hybrid's backbone:
RESNET_TAPS = {
    'conv_root': '(b h w c), the first convolution',
    'norm_root': '(b h w c), its norm, after the ReLU',
    'root': '(b h w c), after the pooling: what the first stage is given',
    'stageS/unitU/conv_proj': '(b h w c), the convolution of the shortcut, where it has one',
    'stageS/unitU/norm_proj': '(b h w c), its norm',
    'stageS/unitU/conv1': '(b h w c)',
    'stageS/unitU/norm1': '(b h w c), after the ReLU',
    'stageS/unitU/conv2': '(b h w c)',
    'stageS/unitU/norm2': '(b h w c), after the ReLU',
    'stageS/unitU/conv3': '(b h w c)',
    'stageS/unitU/norm3': '(b h w c), what is added to the shortcut',
    'stageS/unitU/residual': 'two of (b h w c): the shortcut, and what is added to it',
    'stageS/unitU/out': '(b h w c), after the ReLU of their sum',
    'stageS': '(b h w c), the output of a stage, that of its last unit',
}
# Of a Vision Transformer, and of a hybrid behind its backbone:
VIT_TAPS = {
    'embedding': '(b n d), patches, class token and positions at the stem: z_0 of equation 1',
    'norm1': '(l b n d), the LayerNorm before attention: LN(z) of equation 2',
    'attention/weights': '(l b k n n), float32, of each query to all keys; rows sum to one',
    'attention/heads': '(l b n k d/k), what each head gives, before the output projection',
    'attention/out': '(l b n d), what attention adds: MSA(LN(z))',
    'attention/residual': 'two of (l b n d): z (0 without skip connection), and what is added',
    'norm2': "(l b n d), the LayerNorm before the MLP: LN(z') of equation 3; not if parallel",
    'mlp/hidden': '(l b n m), after the GELU, or SwiGLU',
    'mlp/out': "(l b n d), what the MLP adds: MLP(LN(z'))",
    'mlp/residual': "two of (l b n d): z' (likewise), and what the MLP adds to it",
    'tokens': '(l b n d), after each block: z of equation 3',
    'norm': '(b n d), the final LayerNorm of all tokens (with final_norm=before_pool)',
    'pool/attention/weights': '(b k 1 n), float32: those of the attention pooling (pool=map)',
    'pool/attention/heads': '(b 1 k d/k), likewise',
    'pool/mlp/hidden': '(b 1 m), likewise',
}

# What becomes of a tap's value, an array or a pair, where it is computed: any tree of arrays.
Reduction = Callable[[Any], Any]
_reductions: ContextVar[Mapping[str, Reduction]] = ContextVar('_reductions')


def tap(module: nn.Module, name: str, value: Callable[[], Any]) -> None:
    """Offers `value()` to `Model.capture`; computed only if it is asked for by name.

    It is a Flax collection of its own, whose name is the module's place in the tree, without
    `encoder/block` and `backbone`, and `name`: `attention/weights` in every block.
    """
    place = [part for part in module.path if part not in ('encoder', 'block', 'backbone')]
    collection = '/'.join((*place, name))
    if module.is_mutable_collection(collection) and not module.is_initializing():
        kept = _reductions.get({}).get(collection, lambda whole: whole)(value())
        module.sow(collection, 'tapped', kept, reduce_fn=lambda _, latest: latest)


def needs_everything(module: nn.Module) -> bool:
    """Are parameters made, or taps asked for? Then nothing may be left out."""
    return module.is_initializing() or any(map(module.is_mutable_collection, VIT_TAPS))


def seen(module: nn.Module, name: str, x: Array) -> Array:
    """The array itself, offered as a tap."""
    tap(module, name, lambda: x)
    return x


def capture(
    forward: Callable[[Any], Mapping[str, Any]],
    wanted: Iterable[str] | Mapping[str, Reduction],
) -> dict[str, Any]:
    """The taps of these names, from a forward pass that gives the collections it is asked for.

    Of a mapping it is what each function makes of its tap: applied within the blocks, before they
    are stacked, so that the whole arrays of all blocks are never in memory together. Raises
    UserError for a name that there is not.
    """
    reductions = wanted if isinstance(wanted, Mapping) else {}
    names = [*dict.fromkeys(wanted)]

    def kept(collections: Any) -> dict[str, Any]:
        with _reduced(reductions):
            return {name: _tapped(found) for name, found in forward(collections).items()}

    every = jax.eval_shape(lambda: kept(DenyList('params')))
    for name in names:
        if name not in every:
            raise UserError(f'capture: no {name!r} here; {records.nearest(name, every)}')
    # A forward pass of its own, in a branch of which the compiler cannot know that it is always
    # taken. In one pass with the logits it changed their last bits (ResNets; unrolled blocks in
    # bfloat16), as other operations are fused; and XLA drops optimization barriers on CPUs.
    return jax.lax.cond(
        jax.lax.rng_uniform(0.0, 1.0, shape=()) < 2,
        lambda: kept(names),
        lambda: jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), {name: every[name] for name in names}
        ),
    )


def _tapped(collection: Mapping[str, Any]) -> Any:
    """What was kept in a collection, whose only other keys are the way to its module."""
    while 'tapped' not in collection:
        (collection,) = collection.values()
    return collection['tapped']


@contextlib.contextmanager
def _reduced(reductions: Mapping[str, Reduction]) -> Iterator[None]:
    """Within, taps keep what these functions make of them: it is traced, and does not run."""
    token = _reductions.set(reductions)
    try:
        yield
    finally:
        _reductions.reset(token)
