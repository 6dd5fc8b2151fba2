"""What a network costs, without computing it: parameters and multiply-adds."""

import math

import jax

from vit_jax.models.vit import ViTConfig, build


def parameter_count(config: ViTConfig) -> int:
    """The number of parameters (table 1)."""
    params = jax.eval_shape(build(config).init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def multiply_adds(config: ViTConfig) -> int:
    """Multiply-adds of one image's forward pass, in matrix products only.

    With epochs * images * 3 * 2 * multiply_adds as floating-point operations, the compute of
    table 6 comes out: the backward pass costs two forward ones, a multiply-add two operations.
    """
    tokens, width, mlp_dim = config.num_tokens, config.width, config.mlp_dim
    patches = math.prod(config.grid)
    embedding = patches * math.prod(config.patch_size) * config.channels * width
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * mlp_dim
    pool = 0
    if config.pool == 'map':  # one query; keys and values of every token
        pool = 2 * width**2 + 2 * tokens * width**2 + 2 * tokens * width + 2 * width * mlp_dim
    outputs = tokens if config.pool == 'none' else 1
    features = config.representation_size or width
    pre_logits = width * features if config.representation_size else 0
    head = features * (config.num_classes or 0)
    return embedding + config.depth * block + pool + outputs * (pre_logits + head)
