"""Reads what runs have written into their work directories, while they run or afterwards."""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.base import Float, Path, UserError, read_json_lines, require, storage, usable
from vit_jax.config import read_config
from vit_jax.experiment import reporter, workdirs

Line = dict[str, Any]


class History(NamedTuple):
    """A run: its configuration, the lines of its numbers, and where its time went."""

    name: str
    folder: Path
    config: dict[str, Any]  # of JSON values; {} where it cannot be read
    lines: list[Line]  # of metrics.jsonl
    seconds: dict[str, float]  # of wall time by name, over all starts
    event: str  # the last one in the ledger, such as `saving` or `complete`

    def of_kind(self, kind: str) -> list[Line]:
        """The lines of a kind: `train`, `fewshot`, `skipped`, or an evaluation's name."""
        return [line for line in self.lines if line['kind'] == kind]

    @property
    def evaluations(self) -> list[str]:
        """The kinds of lines that are evaluations of what is learned, in order of appearance."""
        kinds = dict.fromkeys(line['kind'] for line in self.lines if 'loss' in line)
        return [kind for kind in kinds if kind not in ('train', 'skipped')]


def read_all(paths: Sequence[str]) -> list[History]:
    """The histories of work directories, each with a name of its own.

    Raises UserError for one that is none, that is named twice, and where no run has begun.
    """
    folders = [storage.folder(path) for path in paths]
    real = [os.path.realpath(folder) for folder in folders]
    for number, folder in enumerate(real):
        if folder in real[:number]:
            raise UserError(f'{paths[number]}: is given twice')
    found = [read(f, name) for f, name in zip(folders, _names(folders), strict=True)]
    if not any((run.folder / workdirs.METRICS).exists() for run in found):
        raise UserError(f'{folders[0]}: no {workdirs.METRICS}: the run has not begun')
    return found


def read(folder: Path, name: str) -> History:
    """The history of one work directory, empty before it begins. Raises UserError for another."""
    with usable(folder):
        metrics = folder / workdirs.METRICS
        if not metrics.exists() and not (folder / workdirs.CONFIG).exists():
            absent = f'{folder}: no {workdirs.METRICS}'
            require(folder.exists(), f'{absent}: there is no such folder')
            raise UserError(f'{absent}: expected the work directory of a training')
        lines = read_json_lines(metrics, kind=str, step=int, run=int) if metrics.exists() else []
        try:
            config = read_config(folder / workdirs.CONFIG)
        except UserError:
            raise
        except Exception:  # there is none yet, or damaged text, which may be anything
            config = {}
        ledger = reporter.read_ledger(folder / workdirs.LEDGER)
    seconds, event = reporter.total_seconds(ledger), ledger[-1]['event'] if ledger else ''
    return History(name, folder, config, lines, seconds, event)


def _names(folders: Sequence[Path]) -> list[str]:
    """As few of the last parts of each path as tell them apart."""
    for count in range(1, 1 + max(len(folder.parts) for folder in folders)):
        names = ['/'.join(folder.parts[-count:]) for folder in folders]
        if len({*names}) == len(names):
            return names
    return [str(folder) for folder in folders]


def seconds_since(lines: Sequence[Line], history: History) -> Float[np.ndarray, 'n']:
    """When each line was written: seconds of running, the starts of the run one after the other."""
    starts, seconds = values(history.lines, 'run'), values(history.lines, 'seconds')
    longest = {start: np.nan_to_num(seconds[starts == start]).max() for start in np.unique(starts)}
    before = {start: sum(s for r, s in longest.items() if r < start) for start in longest}
    return np.array([before[start] for start in values(lines, 'run')]) + values(lines, 'seconds')


def values(lines: Sequence[Line], name: str) -> Float[np.ndarray, 'n']:
    """The numbers of this name; NaN where a line has none."""
    found = (line.get(name) for line in lines)
    return np.array([x if isinstance(x, int | float) else np.nan for x in found], float)


def differences(histories: Sequence[History]) -> list[tuple[str, list[str]]]:
    """The fields of the configurations that are not the same in all runs, and the values of each.

    A field that a run does not have, as where a record was left out, is an empty text.
    """
    leaves = [dict(_leaves(history.config)) for history in histories]
    rows = []
    for name in dict.fromkeys(name for each in leaves for name in each):
        texts = [each.get(name, '') for each in leaves]
        if len({*texts}) > 1:
            rows.append((name, texts))
    return rows


def _leaves(config: Any, where: str = '') -> list[tuple[str, str]]:
    if not isinstance(config, dict) or not config:
        return [(where, config if isinstance(config, str) else json.dumps(config))]
    inside = (_leaves(x, f'{where}.{name}' if where else name) for name, x in config.items())
    return [leaf for leaves in inside for leaf in leaves]
