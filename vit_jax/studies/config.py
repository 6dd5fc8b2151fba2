"""The typed configuration of a study: experiments that differ in some values."""

import dataclasses
import re
from typing import Any

from vit_jax.base import Record, require, require_between
from vit_jax.config import TrainConfig, default

COMPUTE = 'compute'  # the measure: floating-point operations of the first training


@dataclasses.dataclass(kw_only=True)
class Grid(Record):
    """Experiments that differ in the values of some axes: every combination, with every seed.

    `axes` name, for each value of an axis, the fields that it changes and their new values, such as
    {'depth': {'6': {'model.depth': 6}, '12': {'model.depth': 12}}}. If `start_from` names an
    earlier grid, each run of that grid continues here, with its own values and seed: the model is
    the one of its checkpoint, at the step that `best` selects.
    """

    changes: dict[str, Any] = default(dict)  # of the study's base, for all experiments
    axes: dict[str, dict[str, dict[str, Any]]] = default(dict)  # AXIS: VALUE: FIELD: new value
    start_from: str | None = None  # an earlier grid; None: what `base` says
    best: str | None = None  # KIND/NAME: use the step where this number is highest; None: the last
    measures: tuple[str, ...] = ('test/accuracy',)  # KIND/NAME as in metrics.jsonl, or `compute`
    published: dict[str, float] = default(dict)  # by VALUE-VALUE, of the first measure
    means: dict[str, tuple[str, ...]] = default(dict)  # over some values of the last axis

    def check(self) -> None:
        for axis, values in self.axes.items():
            require(bool(values), f'axes.{axis}: expected at least one value')
            for name in (axis, *values):
                _require_name(f'axes.{axis}', name)
        last = [*self.axes.values()][-1] if self.axes else {}
        for name, averaged in self.means.items():
            unknown = {*averaged} - {*last}
            require(not unknown, f'means.{name}: {unknown}: expected values of the last axis')


@dataclasses.dataclass(kw_only=True)
class Drawing(Record):
    """The picture of a study: a measure over the values of an axis, a line for each of the others.

    Over `compute`, floating-point operations counted from the multiply-adds of the model, there is
    a line for each grid, or for each value of the first axis if there is one grid.
    """

    x: str  # an axis, or `compute`
    y: str = 'test/accuracy'  # one of the measures
    mean: str | None = None  # one of the grids' means, in place of the values of the last axis
    logarithmic: bool = False  # the x axis


@dataclasses.dataclass(kw_only=True)
class Study(Record):
    """Experiments that are compared, and their picture (python -m vit_jax.study)."""

    title: str  # of the table and the picture
    base: TrainConfig  # the experiment that all others change
    grids: dict[str, Grid]  # by name, in the order in which they run
    seeds: tuple[int, ...] = (0,)  # of each experiment
    draw: Drawing | None = None  # None: no picture

    def check(self) -> None:
        require(bool(self.grids), 'grids: expected at least one')
        require_between(self, 'seeds', low=0, below=2**32)
        distinct = len({*self.seeds}) == len(self.seeds) > 0
        require(distinct, f'seeds={self.seeds}: expected at least one, each once')
        seed = self.base.seed
        require(seed == TrainConfig.seed, f'base.seed={seed}: expected `seeds` of the study')
        earlier: list[str | None] = [None]
        for name, grid in self.grids.items():
            _require_name('grids', name)
            where = f'grids.{name}.start_from={grid.start_from!r}'
            require(grid.start_from in earlier, f'{where}: expected one of {earlier}')
            earlier.append(name)
        if self.draw is not None:
            grids = self.grids.values()
            measures = {measure for grid in grids for measure in grid.measures}
            axes = {axis for grid in grids for axis in grid.axes}
            means = {None, *(name for grid in grids for name in grid.means)}
            checks: dict[str, set[Any]] = {'x': axes | {COMPUTE}, 'y': measures, 'mean': means}
            for name, known in checks.items():
                value = getattr(self.draw, name)
                require(value in known, f'draw.{name}={value!r}: expected one of {known}')


def _require_name(where: str, name: str) -> None:
    """Raises UserError unless the name can be a folder, or a part of its name."""
    fits = re.fullmatch(r'[\w+%@=-][\w.+%@=-]{0,63}', name) is not None
    require(fits, f'{where}: {name!r}: expected 1 to 64 letters, digits and any of .+%@=-')
