"""Reads metrics, configurations and wall time from work directories, also of runs in progress."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vit_jax.base import Path, UserError, files, records, require, storage, usable
from vit_jax.config import TrainConfig, read_config
from vit_jax.experiment import reporter, workdirs
from vit_jax.training.metrics import Metric, resolve_metrics

Numbers = dict[str, dict[int, float]]  # by KIND/NAME, such as test/accuracy, and step


class History(NamedTuple):
    """The configuration, metrics and wall time of a run."""

    name: str
    folder: Path
    config: dict[str, Any]  # config.json; {} without a file
    lines: list[dict[str, Any]]  # the lines of metrics.jsonl
    numbers: Numbers  # the metrics in these lines
    seconds: dict[str, float]  # wall time by activity, over all starts
    step: int  # the later of the last event's step and the last step in metrics.jsonl
    event: str  # last one in events.jsonl, such as `saving` or `complete`; '' without the file
    changes: list[tuple[int, str]]  # accepted changes of the configuration, and their steps
    first_selecting: int  # number of the start from which `keep_best` compares evaluations

    @property
    def own_metrics(self) -> list[Metric]:
        """The metrics that the configuration adds; functions are known by name only."""
        options = records.field_options(TrainConfig)['metrics']
        return resolve_metrics(
            records.parse(options, self.config.get('metrics', ()), 'config.metrics')
        )


def read_histories(paths: Sequence[str]) -> list[History]:
    """Reads the histories of work directories, with distinct names.

    Raises UserError if a path is not a work directory, or is repeated.
    """
    folders = [storage.resolve_folder(path) for path in paths]
    require(len({*folders}) == len(folders), f'{", ".join(paths)}: expected distinct directories')
    for count in itertools.count(1):  # number of last path parts in a name
        names = ['/'.join(folder.parts[-count:]) for folder in folders]
        if len({*names}) == len(names):
            return [read_history(folder, name) for folder, name in zip(folders, names, strict=True)]
    raise AssertionError


def read_history(folder: Path, name: str) -> History:
    """Reads the history of a work directory. Raises UserError if no run was started in it."""
    metrics_file = folder / workdirs.METRICS
    config_file = folder / workdirs.CONFIG
    if not metrics_file.exists() and not config_file.exists():
        raise UserError(f'{folder}: has no {metrics_file.name}; expected a work directory')
    lines = files.read_json_lines(metrics_file, kind=str, step=int)
    config: dict[str, Any] = {}
    if config_file.exists():
        with usable(config_file, 'the configuration of a run'):
            config = read_config(config_file)
    events = reporter.read_events(folder / workdirs.EVENTS)
    changes = [(event['step'], change) for event in events for change in event.get('changes', ())]
    line_steps = [line['step'] for line in lines]
    event_steps = [event['step'] for event in events if event['step'] is not None]
    return History(
        name=name,
        folder=folder,
        config=config,
        lines=lines,
        numbers=_numbers(lines),
        seconds=reporter.sum_seconds(events),
        step=max(line_steps + event_steps[-1:], default=0),
        event=events[-1]['event'] if events else '',
        changes=changes,
        first_selecting=max((e['run'] for e in events if e.get('selects_anew')), default=0),
    )


def _numbers(lines: Sequence[dict[str, Any]]) -> Numbers:
    numbers: Numbers = {}
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float | None):  # None: not finite
                by_step = numbers.setdefault(f'{line["kind"]}/{name}', {})
                by_step[line['step']] = math.nan if value is None else float(value)
    return numbers
