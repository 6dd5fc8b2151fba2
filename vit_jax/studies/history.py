"""Reads what runs have written into their work directories, while they run or afterwards."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vit_jax.base import Path, UserError, require, storage, usable
from vit_jax.config import read_config
from vit_jax.experiment import reporter, workdirs

Numbers = dict[str, dict[int, float]]  # by KIND/NAME, such as test/accuracy, and step


class History(NamedTuple):
    """A run: its configuration, its numbers, and where its time went."""

    name: str
    folder: Path
    config: dict[str, Any]  # of JSON values; {} without a file
    lines: list[dict[str, Any]]  # of metrics.jsonl
    numbers: Numbers  # of these lines
    seconds: dict[str, float]  # of wall time by name, over all starts
    event: str  # the last one in the ledger, such as `saving` or `complete`


def read_all(paths: Sequence[str]) -> list[History]:
    """Returns the histories of work directories, each with its own name.

    Raises UserError if one is not a work directory, or if two are the same.
    """
    folders = [storage.folder(path) for path in paths]
    require(len({*folders}) == len(folders), f'{", ".join(paths)}: expected each directory once')
    for count in itertools.count(1):  # as few of the last parts of each path as tell them apart
        names = ['/'.join(folder.parts[-count:]) for folder in folders]
        if len({*names}) == len(names):
            return [read(folder, name) for folder, name in zip(folders, names, strict=True)]
    raise AssertionError


def read(folder: Path, name: str) -> History:
    """Returns the history of one work directory. Raises UserError if a run has not begun there."""
    metrics, config = folder / workdirs.METRICS, folder / workdirs.CONFIG
    if not metrics.exists() and not config.exists():
        raise UserError(f'{folder}: no {metrics.name}; expected the work directory of a training')
    lines = storage.read_json_lines(metrics, kind=str, step=int)
    values: dict[str, Any] = {}
    if config.exists():
        with usable(config, 'the configuration of a run'):
            values = read_config(config)
    ledger = reporter.read_ledger(folder / workdirs.LEDGER)
    seconds, event = reporter.total_seconds(ledger), ledger[-1]['event'] if ledger else ''
    return History(name, folder, values, lines, _numbers(lines), seconds, event)


def _numbers(lines: Sequence[dict[str, Any]]) -> Numbers:
    numbers: Numbers = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float | None):  # None: not finite
                by_step = numbers.setdefault(f'{line["kind"]}/{name}', {})
                by_step[line['step']] = math.nan if value is None else float(value)
    return numbers
