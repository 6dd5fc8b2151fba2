"""Names of the leaves of a tree, such as `encoder/block/mlp/dense1/kernel`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from vit_jax.base.errors import UserError, raise_all


def leaf_name(path: tuple[Any, ...]) -> str:
    """Converts jax's path of a leaf to its name, joined by `/`."""
    return jax.tree_util.keystr(path, simple=True, separator='/')


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns all leaves by name, such as `encoder/norm/scale`, in the order of the tree."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_named(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Works like `jax.tree.map`, but passes the leaf's name as the first argument."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(leaf_name(path), *leaves), tree, *rest
    )


def match_mask(tree: Any, pattern: str) -> Any:
    """Returns a tree of booleans: True if the regular expression matches the leaf's whole name.

    Raises:
      UserError: If it matches no leaf, because then it is a typo.
    """
    result = map_named(lambda name, _: re.fullmatch(pattern, name) is not None, tree)
    if not any(jax.tree.leaves(result)):
        names = ', '.join(named_leaves(tree))
        raise UserError(f'pattern {pattern!r} matches no parameter; parameters: {names}')
    return result


class WrongLeaves(UserError):
    """Leaves are missing, unexpected, or of another shape or type."""


def compare_leaves(actual: Mapping[str, Any], expected: Mapping[str, Any], *, where: str) -> None:
    """Raises WrongLeaves with the missing, extra and wrong (dtype or shape) leaves of `actual`."""
    have = {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in actual.items()}
    want = {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in expected.items()}
    lines = [f'missing {name} {want[name]}' for name in want if name not in have]
    lines += [f'extra {name} {have[name]}' for name in have if name not in want]
    both = [name for name in have if name in want]
    lines += [f'{n} is {have[n]}, expected {want[n]}' for n in both if have[n] != want[n]]
    if lines:
        raise_all([f'{where}: wrong arrays:', *lines], shown=21, kind=WrongLeaves)
