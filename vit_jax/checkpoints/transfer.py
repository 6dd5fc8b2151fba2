"""A network that begins with another one's parameters: fine-tuning."""

import math
from typing import NamedTuple

import numpy as np

from vit_jax import tree
from vit_jax.models import ViTConfig
from vit_jax.models.positions import resize
from vit_jax.typing import Params


class Transferred(NamedTuple):
    """Parameters of the new network, and one line for each thing that happened to them."""

    params: Params
    report: list[str]


def transfer(params: Params, *, old: ViTConfig, new: ViTConfig, fresh: Params) -> Transferred:
    """The parameters of `old` in the network `new`, whose own initial ones are `fresh`.

    The head is always the new network's, and a tanh layer before it that the new one does not
    have is dropped (section 3.2). Position embeddings are resized to the new grid. Everything
    else is kept as it is; raises ValueError with the names where it does not fit.
    """
    found, expected = tree.named_leaves(params), tree.named_leaves(fresh)
    head = [name for name in expected if name.startswith('head/')]
    dropped = [name for name in found if name.startswith('head/')]
    if new.representation_size is None:
        dropped += [name for name in found if name.startswith('pre_logits/')]
    body = {name: leaf for name, leaf in found.items() if name not in dropped}
    report = []
    if 'pos_embedding' in body and old.grid != new.grid:
        body['pos_embedding'] = resize(np.asarray(body['pos_embedding']), old.grid, new.grid)
        report.append(f'pos_embedding: resized from {_by(old.grid)} to {_by(new.grid)} patches')
    wanted = {name: leaf for name, leaf in expected.items() if name not in head}
    tree.compare_names(body, wanted, where='start_from')
    numbers = sum(math.prod(leaf.shape) for leaf in body.values())
    report.insert(0, f'{len(body)} of {len(wanted)} parameter arrays loaded, {numbers:,} numbers')
    if head:
        report.append(f'head: reset to zero, for {new.num_classes} classes')
    if any(name.startswith('pre_logits/') for name in dropped):
        report.append('pre_logits: dropped with the pre-trained head')
    return Transferred(tree.map_named(lambda name, leaf: body.get(name, leaf), fresh), report)


def _by(grid: tuple[int, int]) -> str:
    return f'{grid[0]}x{grid[1]}'
