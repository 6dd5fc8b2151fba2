"""Names of the leaves of a tree, `encoder/block/mlp/dense1/kernel`, and rules over them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from vit_jax.base.errors import UserError, refuse


def name_of(path: tuple[Any, ...]) -> str:
    """The `/`-joined name of a leaf, from the path that jax gives."""
    return jax.tree_util.keystr(path, simple=True, separator='/')


def named_leaves(tree: Any) -> dict[str, Any]:
    """Every leaf by its name, in the order of the tree."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_named(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` whose function is also given the leaf's name first."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(name_of(path), *leaves), tree, *rest
    )


def mask_of(tree: Any, pattern: str) -> Any:
    """A tree of booleans: does the whole name of the leaf match the regular expression?

    Raises UserError when no leaf does: a rule that matches nothing is a typing error.
    """
    result = map_named(lambda name, _: re.fullmatch(pattern, name) is not None, tree)
    if not any(jax.tree.leaves(result)):
        there = ', '.join(named_leaves(tree))
        raise UserError(f'the pattern {pattern!r} matches no parameter; there are {there}')
    return result


def compare_names(found: Mapping[str, Any], expected: Mapping[str, Any], *, where: str) -> None:
    """Raises UserError that lists missing, extra and mis-shaped leaves of `found`, if any."""
    have = {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in found.items()}
    want = {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in expected.items()}
    lines = [f'missing {name} {want[name]}' for name in want if name not in have]
    lines += [f'extra {name} {have[name]}' for name in have if name not in want]
    both = [name for name in have if name in want]
    lines += [f'{n} is {have[n]}, expected {want[n]}' for n in both if have[n] != want[n]]
    if lines:
        refuse([f'{where}: the arrays do not fit:', *lines], shown=21)
