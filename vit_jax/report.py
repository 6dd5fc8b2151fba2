"""What runs have done, on one page: python -m vit_jax.report WORKDIR... --out=FILE.html.

The page has loss, accuracy, learning rate, gradient norm, speed and few-shot accuracies of all runs
in one picture each, skipped steps, what was reached, where the time went, and in which values of
their configurations they differ. It is one file, needs no network and no script, and can
be made while the runs go on.
"""

import argparse
import importlib.util
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax.base import (
    UserError,
    atomic_write,
    counted,
    require,
    require_writable,
    usable,
)
from vit_jax.cli import app
from vit_jax.experiment import reporter
from vit_jax.studies import history
from vit_jax.studies.history import History, Line

OVER = {'steps': 'step', 'time': 'hours of running'}
# How kinds of lines are told apart, which have the colour of their run: dashes, fill of markers.
_TRAINING = (':', 'none')
_DASHES = '-', '--', '-.', (0, (6, 1.5, 1, 1.5, 1, 1.5))
_FILLS = 'full', 'left', 'top', 'right', 'bottom'
_OF_EPISODES = re.compile(r'(^|/)\d+_way_\d+_shot_accuracy$')


def main(arguments: argparse.Namespace) -> int:
    """Writes the page."""
    if importlib.util.find_spec('matplotlib') is None:
        raise UserError("pictures need matplotlib: pip install 'vit_jax[plots]'")
    path = pathlib.Path(arguments.out)
    require(path.suffix == '.html', f'--out={path}: expected the name of a file, FILE.html')
    runs = history.read_all(arguments.workdirs)
    require_writable(path)
    from vit_jax.figures import page  # here: matplotlib is an extra

    sections = [_reached(runs), *_numbers(runs, arguments.over), _events(runs), _time(runs)]
    if len(runs) > 1:
        sections.append(_differences(runs))
    lines = [f'{run.name}: {run.folder}, {_state(run)}' for run in runs]
    with usable(path), atomic_write(path) as partial:
        partial.write_text(page.page('What the runs have done', lines, sections))
    print(f'written: {path}')
    return 0


def _state(run: History) -> str:
    """How far a run is, in words."""
    steps = max((line['step'] for line in run.lines), default=0)
    ended = run.event if run.event in ('complete', 'stopped', 'diverged') else ''
    if not run.lines:
        return f'{ended} before there were numbers' if ended else 'no numbers yet'
    ended = ended or ('not complete' if run.event else '')  # without a ledger it is not known
    return f'{ended} at step {steps:,}'.strip()


def _reached(runs: Sequence[History]) -> Any:
    from vit_jax.figures.page import Section, Table

    kinds = dict.fromkeys(kind for run in runs for kind in run.evaluations)
    shots = dict.fromkeys(
        name for run in runs for line in run.of_kind('fewshot') for name in _shots(line)
    )
    columns = ['run', 'state', 'training loss', *(f'{kind} accuracy' for kind in kinds)]
    columns += [*map(_in_words, shots), 'images/s', 'wall time']
    rows = []
    for run in runs:
        trained = run.of_kind('train')
        few = run.of_kind('fewshot')
        speed = history.values(trained, 'images_per_second')
        row = [run.name, _state(run), _last(trained, 'loss', '{:.4f}')]
        row += [_last(run.of_kind(kind), 'accuracy', '{:.2%}') for kind in kinds]
        row += [_last(few, name, '{:.2%}') for name in shots]
        row.append(f'{np.nanmedian(speed):,.0f}' if np.isfinite(speed).any() else '')
        rows.append([*row, reporter.duration(sum(run.seconds.values())) if run.seconds else ''])
    text = (
        'The last number of each kind; images a second are the median over the reports. The wall '
        'time is that of all starts.'
    )
    return Section('What was reached', text, table=Table(columns, rows))


def _last(lines: Sequence[dict[str, Any]], name: str, form: str) -> str:
    numbers = history.values(lines, name)
    return form.format(numbers[-1]) if len(numbers) and np.isfinite(numbers[-1]) else ''


def _shots(line: dict[str, Any]) -> list[str]:
    return [name for name in line if name.endswith('_shot_accuracy')]


def _in_words(name: str) -> str:
    return name.removesuffix('_accuracy').replace('_', '-')


class _Curves(NamedTuple):
    """Makes the curves of one run, which is in such a place of all, over steps or time."""

    run: History
    place: int
    over: str

    def x(self, lines: Sequence[Line]) -> Any:
        if self.over == 'time':
            return history.seconds_since(lines, self.run) / 3600
        return np.array([line['step'] for line in lines], float)

    def curve(self, kind: str, name: str, label: str) -> Any:
        from vit_jax.figures.curves import Curve

        lines = self.run.of_kind(kind)
        numbers = history.values(lines, name)
        return Curve(label, self.place, self.x(lines), numbers)

    def classified(self, name: str) -> list[Any]:
        """Of training images, and of each evaluation of the classifier."""
        dashes, fill = _TRAINING
        training = self.curve('train', name, 'training')._replace(style=dashes, fill=fill)
        return [training, *(self.curve(kind, name, kind) for kind in self.run.evaluations)]

    def loss(self) -> list[Any]:
        """With a mark on the training loss at each step that was skipped."""
        from vit_jax.figures.curves import Curve

        training, *evaluated = self.classified('loss')
        marked = [training, *evaluated]
        if (lines := self.run.of_kind('skipped')) and len(training.x):
            x = self.x(lines)
            y = np.interp(x, training.x, training.y)
            marked.append(Curve('skipped', self.place, x, y, '', marker='x'))
        return marked

    def fewshot(self, *, episodes: bool) -> list[Any]:
        """Of the linear evaluation, or of episodes."""
        names = dict.fromkeys(n for line in self.run.of_kind('fewshot') for n in _shots(line))
        chosen = [name for name in names if bool(_OF_EPISODES.search(name)) == episodes]
        return [self.curve('fewshot', name, _in_words(name)) for name in chosen]

    def trained(self, name: str) -> list[Any]:
        return [self.curve('train', name, '')]


def _numbers(runs: Sequence[History], over: str) -> list[Any]:
    """A section for each number that any run has."""
    from vit_jax.figures import curves, style
    from vit_jax.figures.page import Picture, Section

    makers = [_Curves(run, place, over) for place, run in enumerate(runs)]
    sections = []
    for title, text, drawn, scale in _PICTURES:
        found = [curve for maker in makers for curve in drawn(maker)]
        found = [curve for curve in found if np.isfinite(curve.x + curve.y).any()]
        if found:
            x = OVER[over]
            found = _named(_told_apart(found), [run.name for run in runs])
            drawing = curves.curves(title, found, x=x, y=title[0].lower() + title[1:], scale=scale)
            picture = Picture(style.png(drawing), f'{title} over {x}', '')
            sections.append(Section(title, text, [picture]))
    return sections


def _told_apart(drawn: Sequence[Any]) -> list[Any]:
    """The same curves: those that have no look of their own, one for each kind, in all runs."""
    names = dict.fromkeys(curve.name for curve in drawn if curve.style == '-')
    looks = {
        name: (_DASHES[place % len(_DASHES)], _FILLS[place % len(_FILLS)])
        for place, name in enumerate(names)
    }
    plain = [(curve, looks.get(curve.name, (curve.style, curve.fill))) for curve in drawn]
    return [curve._replace(style=dashes, fill=fill) for curve, (dashes, fill) in plain]


def _named(drawn: Sequence[Any], runs: Sequence[str]) -> list[Any]:
    """Each run named once in its colour, and where there are several kinds, each once in grey."""
    kinds = {curve.name: curve for curve in drawn}
    if len(runs) == 1:
        return [curve._replace(name=curve.name or runs[0]) for curve in drawn]
    first = {curve.place: index for index, curve in reversed([*enumerate(drawn)])}
    named = [
        curve._replace(name=runs[curve.place] if first[curve.place] == index else '')
        for index, curve in enumerate(drawn)
    ]
    gone = np.array([np.nan])
    keys = [curve._replace(place=None, x=gone, y=gone) for curve in kinds.values()]
    return [*named, *(keys if len(kinds) > 1 else [])]


def _events(runs: Sequence[History]) -> Any:
    from vit_jax.figures.page import Section, Table

    rows = []
    for run in runs:
        for line in run.lines:
            if line['kind'] == 'skipped':
                told = f'loss {line.get("loss")}, gradient norm {line.get("gradient_norm")}'
                rows.append([run.name, f'{line["step"]:,}', f'update skipped: {told}'])
    shown = rows[:_MOST_EVENTS]
    more = f' The first {_MOST_EVENTS} of {len(rows):,}.' if len(rows) > _MOST_EVENTS else ''
    table = Table(['run', 'step', 'what happened'], shown) if rows else None
    text = _EVENTS + more if rows else f'{_EVENTS} There were none.'
    return Section('Skipped steps', text, table=table)


def _time(runs: Sequence[History]) -> Any:
    from vit_jax.figures import curves, style
    from vit_jax.figures.page import Picture, Section

    spent = {run.name: run.seconds for run in runs if sum(run.seconds.values())}
    if not spent:
        return Section('Where the time went', _TIME, left_out='No run has a ledger yet.')
    caption = '; '.join(f'{name}: {reporter.spent(s)}' for name, s in spent.items())
    png = style.png(curves.where_time_went(spent))
    picture = Picture(png, 'shares of the wall time by what was done', caption)
    return Section('Where the time went', _TIME, [picture])


def _differences(runs: Sequence[History]) -> Any:
    from vit_jax.figures.page import Section, Table

    title, known = 'How the configurations differ', [run for run in runs if run.config]
    unknown = [run.name for run in runs if not run.config]
    without = f' Without config.json: {", ".join(unknown)}.' if unknown else ''
    rows = history.differences(known)
    if not rows:
        same = f'{counted(len(known), "run")} have the same configuration.' if known[1:] else ''
        return Section(title, (same + without).strip())
    columns = ['field', *(run.name for run in known)]
    text = 'Every field of config.json that is not the same in all runs, defaults included.'
    table = Table(columns, [[name, *texts] for name, texts in rows])
    return Section(title, text + without, table=table)


_MOST_EVENTS = 100
_LOSS = (
    'Dotted, hollow markers: the mean over the training images of each report, with augmentation '
    'and dropout; the others: evaluations on whole splits. Where the training loss falls on while '
    'that of the evaluation rises, the network learns its training images by heart. Crosses: '
    'skipped steps.'
)
_ACCURACY = (
    'Dotted, hollow markers: training images as they are trained on; the others: evaluations on '
    'whole splits. With MixUp the accuracy on training images is that on mixed ones, and below the '
    'others.'
)
_FEWSHOT = (
    'The mean over seeds of the linear few-shot evaluation of the frozen features: how much they '
    'are worth with few labels, whatever the head has learned.'
)
_EPISODES = (
    'The mean over episodes on the test images: each draws some of their classes, and of each so '
    'many images (shots) to learn from, and others to test on.'
)
_RATE = 'The learning rate of each report: warm-up, then the schedule of the configuration.'
_GRADIENT = (
    'The norm of the gradient of all parameters before it is clipped. It falls after the first '
    'steps; a climb over many steps comes before a training breaks down.'
)
_SPEED = (
    'Training images a second, waiting for data included, evaluating and saving left out. A dip '
    'is another program on the machine, or a slow disk.'
)
_EVENTS = 'An update whose gradient is not finite is skipped.'
_TIME = (
    'Wall time of all starts: compiling, waiting for data, computing steps, evaluating, waiting '
    'for checkpoints to be saved.'
)


Scale = Literal['linear', 'magnitudes', 'percent']
# Title, text, the curves of a run, the scale of their axis.
_PICTURES: list[tuple[str, str, Callable[[_Curves], list[Any]], Scale]] = [
    ('Loss', _LOSS, _Curves.loss, 'linear'),
    ('Accuracy', _ACCURACY, lambda curves: curves.classified('accuracy'), 'percent'),
    ('Few-shot accuracy', _FEWSHOT, lambda curves: curves.fewshot(episodes=False), 'percent'),
    ('Accuracy of episodes', _EPISODES, lambda curves: curves.fewshot(episodes=True), 'percent'),
    ('Learning rate', _RATE, lambda curves: curves.trained('learning_rate'), 'linear'),
    ('Gradient norm', _GRADIENT, lambda curves: curves.trained('gradient_norm'), 'magnitudes'),
    ('Images per second', _SPEED, lambda curves: curves.trained('images_per_second'), 'linear'),
]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program."""
    parser = app.new_parser('report', __doc__)
    parser.add_argument('workdirs', metavar='WORKDIR', nargs='+')
    add, text = parser.add_argument, 'the page to write'
    add('--out', required=True, type=app.local_path, metavar='FILE.html', help=text)
    add('--over', choices=OVER, default='steps', help='what numbers are drawn over (steps)')
    return parser


if __name__ == '__main__':
    app.run(main, make_parser(), on_devices=False)
