"""Names of the leaves of a tree, `encoder/block/mlp/dense1/kernel`, and rules over them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from vit_jax.base.errors import UserError


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
        raise UserError(
            f'the pattern {pattern!r} matches no parameter; there are '
            f'{", ".join(named_leaves(tree))}'
        )
    return result


def compare_names(found: Mapping[str, Any], expected: Mapping[str, Any], *, where: str) -> None:
    """Raises UserError that lists missing, extra and mis-shaped leaves of `found`, if any."""
    lines = [f'missing {name} {_shape(expected[name])}' for name in expected if name not in found]
    lines += [f'extra {name} {_shape(found[name])}' for name in found if name not in expected]
    lines += [
        f'{name} is {_shape(found[name])}, expected {_shape(expected[name])}'
        for name in found
        if name in expected and _shape(found[name]) != _shape(expected[name])
    ]
    if lines:
        shown = lines[:20] + ([f'and {len(lines) - 20} more'] if len(lines) > 20 else [])
        raise UserError(f'{where}: the arrays do not fit:\n  ' + '\n  '.join(shown))


def _shape(leaf: Any) -> str:
    return f'{leaf.dtype}{list(leaf.shape)}'
