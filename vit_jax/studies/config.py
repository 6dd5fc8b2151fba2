"""The typed configuration of a study: grids of experiments, and a plot."""

import dataclasses
import re
from typing import Any

from vit_jax.base import Record, require, require_between
from vit_jax.config import TrainConfig, default

COMPUTE = 'compute'  # measure: floating-point operations of the first training of a run


@dataclasses.dataclass(kw_only=True)
class Grid(Record):
    """A grid of experiments: every combination of the values of its axes, with every seed.

    `axes` maps each value of an axis to the fields that it changes, such as
    {'depth': {'6': {'model.depth': 6}, '12': {'model.depth': 12}}}. If `start_from` names an
    earlier grid, every experiment starts from the checkpoint of each run of that grid, with the
    model and seed of the run. `best` of the earlier grid selects the step of the checkpoint.
    """

    changes: dict[str, Any] = default(dict)  # FIELD: new value, for all experiments of the grid
    axes: dict[str, dict[str, dict[str, Any]]] = default(dict)  # {AXIS: {VALUE: {FIELD: value}}}
    start_from: str | None = None  # name of an earlier grid; None: `start_from` of the base
    best: str | None = None  # KIND/NAME: use the step with its best value; None: the last step
    measures: tuple[str, ...] = ('test/accuracy',)  # KIND/NAME as in metrics.jsonl, or `compute`
    published: dict[str, float] = default(dict)  # values joined by -: published first measure
    means: dict[str, tuple[str, ...]] = default(dict)  # NAME: values of the last axis to average

    def check(self) -> None:
        for axis, values in self.axes.items():
            require(bool(values), f'axes.{axis}: expected at least one value')
            for name in (axis, *values):
                _require_name(f'axes.{axis}', name)
        last_axis = [*self.axes.values()][-1] if self.axes else {}
        for name, averaged in self.means.items():
            unknown = {*averaged} - {*last_axis}
            require(not unknown, f'means.{name}: got {unknown}; expected values of the last axis')


@dataclasses.dataclass(kw_only=True)
class PlotConfig(Record):
    """The plot of a study: a measure over an axis, with a line per combination of the other axes.

    If `x` is `compute` (floating-point operations, from the multiply-adds of the model), there is a
    line per grid, or per value of the first axis if there is only one grid.
    """

    x: str  # name of an axis, or `compute`
    y: str = 'test/accuracy'  # one of the measures
    mean: str | None = None  # plot these `means` of the grids, not the values of the last axis
    logarithmic: bool = False  # whether the x axis is logarithmic


@dataclasses.dataclass(kw_only=True)
class Study(Record):
    """Grids of experiments, and a plot of their results (python -m vit_jax.study)."""

    title: str  # title of the tables and the plot
    base: TrainConfig  # the experiment that the grids change
    grids: dict[str, Grid]  # grids by name, in the order in which they run
    seeds: tuple[int, ...] = (0,)  # seeds of each experiment
    draw: PlotConfig | None = None  # the plot; None: no plot

    def check(self) -> None:
        require(bool(self.grids), 'grids: expected at least one grid')
        require_between(self, 'seeds', low=0, below=2**32)
        require(
            bool(self.seeds) and len({*self.seeds}) == len(self.seeds),
            f'seeds={self.seeds}: expected one or more distinct seeds',
        )
        seed = self.base.seed
        require(seed == TrainConfig.seed, f'base.seed={seed}: set `seeds` of the study instead')
        earlier: list[str | None] = [None]
        for name, grid in self.grids.items():
            _require_name('grids', name)
            require(
                grid.start_from in earlier,
                f'grids.{name}.start_from={grid.start_from!r}: expected one of {earlier}',
            )
            earlier.append(name)
        if self.draw is not None:
            grids = self.grids.values()
            measures = {measure for grid in grids for measure in grid.measures}
            axes = {axis for grid in grids for axis in grid.axes}
            means = {None, *(name for grid in grids for name in grid.means)}
            allowed: dict[str, set[Any]] = {'x': axes | {COMPUTE}, 'y': measures, 'mean': means}
            for field, choices in allowed.items():
                value = getattr(self.draw, field)
                require(value in choices, f'draw.{field}={value!r}: expected one of {choices}')


def _require_name(where: str, name: str) -> None:
    """Raises UserError unless the name can be part of a folder name."""
    require(
        re.fullmatch(r'[\w+%@=-][\w.+%@=-]{0,63}', name) is not None,
        f'{where}: {name!r}: expected 1 to 64 letters, digits or any of _.+%@=-',
    )
