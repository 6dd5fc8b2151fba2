"""Bounds for the pickles of PyTorch files, which torch itself unpickles, tensors alone."""

import contextlib
import pickletools
from collections.abc import Iterator
from typing import Any

from vit_jax.base import UserError

_MOST_OPCODES = 10**6


def check_pickle(pickle: Any) -> None:
    """Raises UserError for a pickle that takes longer to read than one of a network.

    Its stack is followed, as far as to know what is a tuple: a short pickle can say a tuple of
    2^100 parts, two times the same in each other, which as a key would be hashed for ever.
    """
    mark = pickletools.markobject
    stack: list[object] = []  # what kinds of values
    marks: list[int] = []  # their places in it
    memo: dict[object, object] = {}
    with plain_tensors():
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle), 1):
            size = len(opcode.stack_before)
            if mark in opcode.stack_before:  # all above the newest mark, it, and what is below
                size = len(stack) - marks.pop() + opcode.stack_before.index(mark)
            elif opcode.name == 'MARK':
                marks.append(len(stack))
            popped = [stack.pop() for _ in range(size)]
            stack += opcode.stack_after
            if 'GET' in opcode.name:
                stack[-1] = memo[argument]
            elif 'PUT' in opcode.name:
                memo[argument] = stack[-1]
            if count > _MOST_OPCODES:
                raise UserError(f'holds a pickle of more than {_MOST_OPCODES:,} operations')
            if 'SETITEM' in opcode.name and pickletools.pytuple in popped[1::2]:
                raise UserError('holds a dictionary with tuples as keys')


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Makes of every error within a UserError: the file is none of plain tensors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many kinds
        raise UserError(
            f'not a PyTorch file of plain tensors, and nothing else is unpickled: '
            f'{type(error).__name__}'
        ) from error
