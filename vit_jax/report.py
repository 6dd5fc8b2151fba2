"""Writes an HTML report of training runs: python -m vit_jax.report WORKDIR... --out=FILE.html.

The report compares the runs: final results, curves of loss, accuracy, few-shot accuracy, learning
rate, gradient norm and speed, skipped steps, wall time, and the fields in which the configurations
differ. FILE.html is self-contained, without scripts. Runs can be in progress.
"""

import argparse
import importlib.util
import pathlib
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from vit_jax.base import UserError, records, require, write_text
from vit_jax.base.files import is_special
from vit_jax.cli import app
from vit_jax.experiment import reporter
from vit_jax.figures import curves, page, style
from vit_jax.figures.page import Picture, Section, Table
from vit_jax.studies import history, planned_runs, results
from vit_jax.studies.history import History
from vit_jax.training.metrics import SET_METRICS

_DASHES = '-', '--', '-.', (0, (6, 1.5, 1, 1.5, 1, 1.5))
_CURVES_TEXT = (
    'Dotted: mean over augmented training images since the last report. Other lines: evaluations.'
)
_FEWSHOT = 'Accuracy of probes on frozen features; linear accuracies are means over seeds.'
_NORM = 'Before clipping. A norm that grows over many steps often precedes divergence.'
_SPEED = 'Includes waiting for data; excludes evaluation and saving.'


class _Curves(NamedTuple):
    """A picture of curves."""

    title: str
    pattern: str  # of KIND/NAME as in metrics.jsonl
    scale: Literal['linear', 'magnitudes', 'percent']
    text: str


_MEASURED = (
    _Curves('Loss', r'(?!skipped)[^/]+/loss', 'linear', _CURVES_TEXT),
    _Curves('Accuracy', r'[^/]+/accuracy', 'percent', _CURVES_TEXT),
)
_OTHERS = (
    _Curves('Few-shot accuracy', r'fewshot/.*_accuracy', 'percent', _FEWSHOT),
    _Curves('Learning rate', 'train/learning_rate', 'linear', 'Warm-up, then decay.'),
    _Curves('Gradient norm', 'train/gradient_norm', 'magnitudes', _NORM),
    _Curves('Images per second', 'train/images_per_second', 'linear', _SPEED),
)
_SELECTED = (
    ' The value of the best step is a validation number, because it selected the checkpoint.'
)
_SKIPPED = 'Updates with a loss or gradient that is not finite; metrics.jsonl lists them.'
_TIME = 'Wall time, summed over all starts of a run.'


def main(arguments: argparse.Namespace) -> int:
    """Writes the report."""
    if importlib.util.find_spec('matplotlib') is None:
        raise UserError("pictures need matplotlib: pip install 'vit_jax[plots]'")
    path = pathlib.Path(arguments.out)
    is_page = path.suffix.lower() in ('.html', '.htm') or is_special(path)
    require(is_page, f'--out={path}: expected FILE.html')
    runs = history.read_histories(arguments.workdirs)
    sections = [_results(runs), *_curves(runs), _skipped(runs), _time(runs)]
    if any(run.changes for run in runs):
        sections.append(_changes(runs))
    if len(runs) > 1:
        sections.append(_differences(runs))
    lines = [f'{run.name}: {run.folder}, {_state(run)}' for run in runs]
    write_text(path, page.render_page('Training report', lines, sections))
    print(f'written: {path}')
    return 0


def _state(run: History) -> str:
    """Describes the progress of a run, such as `complete at step 300`."""
    ended = run.event in ('complete', 'stopped', 'diverged')
    state = run.event if ended or not run.event else 'incomplete'  # empty without an event log
    return f'{state} at step {run.step:,}'.strip()


def _results(runs: Sequence[History]) -> Section:
    names = [*dict.fromkeys(name for run in runs for name in _list_results(run))]
    selects = any(run.config.get('keep_best') for run in runs)
    rows = []
    for run in runs:
        cells = [run.name, _state(run)]
        for name in names:
            values = [x for x in run.numbers.get(name, {}).values() if np.isfinite(x)]
            cells.append(results.text_of(name, values[-1], run.own_metrics) if values else '')
        if selects:
            cells.append(_describe_best(run))
        rows.append([*cells, reporter.format_duration(sum(run.seconds.values(), 0.0))])
    text = 'The last finite value of each metric.' + (_SELECTED if selects else '')
    best = ['best step'] if selects else []
    return Section('Results', text, table=Table(['run', 'state', *names, *best, 'wall time'], rows))


def _list_results(run: History) -> list[str]:
    """Lists the metrics for the table: of an evaluation, all but the loss if there are others."""
    others = 'step|run|seconds|count|unreadable'
    shown = rf'train/(loss|images_per_second)|(?!(train|skipped)/)[^/]+/(?!({others})$).*'
    names = [name for name in run.numbers if re.fullmatch(shown, name)]
    kinds = {name.partition('/')[0] for name in names if not name.endswith('/loss')} - {'train'}
    minor = {f'{kind}/loss' for kind in kinds}
    return [name for name in names if name not in minor]


def _describe_best(run: History) -> str:
    """Describes the evaluation that selected the best checkpoint; empty if there is none."""
    metric = run.config.get('keep_best') or ''
    if (step := planned_runs.find_best_step(run, metric)) is None:
        return ''
    name = metric.partition('/')[0]
    evals = run.config['evals']
    split = evals[name]['split'] if evals else run.config['eval_split']
    value = results.text_of(metric, run.numbers[metric][step], run.own_metrics)
    return f'{step:,}: {metric} {value} on {split}'


def _names(runs: Sequence[History]) -> list[str]:
    """Returns the names of all metrics, in order of appearance."""
    return [*dict.fromkeys(name for run in runs for name in run.numbers)]


def _list_curves(runs: Sequence[History]) -> list[_Curves]:
    """Lists the pictures, with one for each metric of whole data sets that a run has measured."""
    known = SET_METRICS | {metric.name: metric for run in runs for metric in run.own_metrics}
    measured = {name.rpartition('/')[2] for name in _names(runs)}
    added = [
        _Curves(
            title=metric.title[0].upper() + metric.title[1:],
            pattern=rf'[^/]+/{name}',
            scale='percent' if metric.unit == 'percent' else 'linear',
            text='Over all images of each evaluation.',
        )
        for name, metric in known.items()
        if name in measured
    ]
    return [*_MEASURED, *added, *_OTHERS]


def _curves(runs: Sequence[History]) -> list[Section]:
    """Returns a section for each picture for which a run has values."""
    sections = []
    for title, pattern, scale, text in _list_curves(runs):
        names = [name for name in _names(runs) if re.fullmatch(pattern, name)]
        names.sort(key=lambda name: name.startswith('train/'))  # train/ last
        drawn = []
        for place, run in enumerate(runs):
            for kind, name in enumerate(names):
                if by_step := run.numbers.get(name):
                    label = name if len(runs) == 1 else f'{run.name} {name}'
                    trained = name.startswith('train/') and len(names) > 1
                    dashes = ':' if trained else _DASHES[kind % len(_DASHES)]
                    drawn.append(
                        curves.Curve(
                            label,
                            color_index=place,
                            x=np.array([*by_step], float),
                            y=np.array([*by_step.values()], float),
                            style=dashes,
                        )
                    )
        if drawn:
            png = style.png(
                curves.draw_curves, title, drawn, x='step', y=title.lower(), scale=scale
            )
            picture = Picture(png, f'{title} over steps', '')
            sections.append(Section(title, text, [picture]))
    return sections


def _skipped(runs: Sequence[History]) -> Section:
    counts = {run.name: sum(line['kind'] == 'skipped' for line in run.lines) for run in runs}
    text = ', '.join(f'{name}: {count:,}' for name, count in counts.items())
    return Section('Skipped steps', f'{_SKIPPED} {text}.')


def _time(runs: Sequence[History]) -> Section:
    spent = [f'{run.name}: {reporter.format_seconds(run.seconds)}' for run in runs if run.seconds]
    left_out = None if spent else 'No run has written events.jsonl yet.'
    return Section('Wall time', f'{_TIME} {"; ".join(spent)}', left_out=left_out)


def _changes(runs: Sequence[History]) -> Section:
    rows = [[run.name, f'{step:,}', change] for run in runs for step, change in run.changes]
    text = 'Fields that were changed when a run was resumed (--accept_config_changes).'
    return Section('Accepted changes', text, table=Table(['run', 'from step', 'change'], rows))


def _differences(runs: Sequence[History]) -> Section:
    first, *others = runs
    rows = [
        [run.name, line] for run in others for line in records.differences(first.config, run.config)
    ]
    text = 'Fields of config.json that differ from the first run.'
    table = Table(['run', f'{first.name} -> run'], rows) if rows else None
    return Section('Configuration differences', text, table=table)


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the program."""
    parser = app.new_parser('report', __doc__)
    add = parser.add_argument
    add('workdirs', metavar='WORKDIR', nargs='+', help='work directory of a run')
    add(
        '--out',
        required=True,
        type=app.local_path,
        metavar='FILE.html',
        help='HTML file to write or replace',
    )
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
