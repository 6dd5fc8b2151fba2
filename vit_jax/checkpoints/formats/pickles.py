"""Bounds for the pickles of PyTorch files, which torch itself unpickles, tensors alone."""

import contextlib
import pickletools
import re
from collections.abc import Iterator
from typing import Any

from vit_jax.base import UserError

_MOST_OPCODES = 500_000  # some seconds; 1,000 arrays with an optimizer's have 150,000
_WORK = 100  # values held, for each of them


def check_pickle(pickle: Any) -> None:
    """Raises UserError for a pickle that takes longer to read than one of a network.

    Its stack is followed, to know how much each value holds: a short pickle can say a tuple of
    2^100 parts, each holding the one before twice, which as a key would be hashed for ever.
    """
    mark = pickletools.markobject
    stack: list[list[int]] = []  # [how much a value holds], one list wherever the value is
    marks: list[int] = []  # their places in the stack
    memo: dict[object, list[int]] = {}
    work = 0
    with plain_tensors():
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle), 1):
            name, size = opcode.name, len(opcode.stack_before)
            if mark in opcode.stack_before:  # all above the newest mark, it, and what is below
                size = len(stack) - marks.pop() + opcode.stack_before.index(mark)
            elif name == 'MARK':
                marks.append(len(stack))
            taken = stack[len(stack) - size :]
            del stack[len(stack) - size :]
            held = sum(value[0] for value in taken)
            if 'PUT' in name:
                memo[argument] = stack[-1]
            elif name.startswith(('APPEND', 'SETITEM')):  # to the first, which stays
                taken[0][0] = held
                stack.append(taken[0])
            else:
                pushed = [memo[argument] if 'GET' in name else [1 + held]]
                stack += pushed * len(opcode.stack_after)
                work += pushed[0][0]
            if max(count, work // _WORK) > _MOST_OPCODES:
                raise UserError(f'holds a pickle of more than {_MOST_OPCODES:,} operations')


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Makes of every error within a UserError: the file is none of plain tensors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many kinds
        other = re.search(r'GLOBAL ([\w.]+)', str(error))
        held = f'it holds {other[1]}' if other else type(error).__name__
        saved = "torch.save(torch.load('FILE', weights_only=False)['state_dict'], 'weights.pth')"
        way = f'if you trust it: python -c "import torch; {saved}"'
        raise UserError(
            f'not a PyTorch file of plain tensors ({held}), and nothing else is unpickled; {way}'
        ) from error
