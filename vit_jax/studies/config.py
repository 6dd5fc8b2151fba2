"""The typed configuration of a study: experiments that differ in some values."""

import dataclasses
import re
from typing import Any

from vit_jax.base import Record, require, require_between
from vit_jax.config import TrainConfig

COMPUTE = 'compute'  # the measure: floating-point operations of the training that all began with


@dataclasses.dataclass(kw_only=True)
class Grid(Record):
    """Experiments that differ in the values of some axes: every combination, with every seed.

    `axes` name, for each value of an axis, the fields that it changes and their new values, as
    {'depth': {'6': {'model.depth': 6}, '12': {'model.depth': 12}}}. Where `start_from` names an
    earlier grid, each of its runs is gone on from, with its own values and seed: the network is
    that of its checkpoint, at the step where `best` says that it was best.
    """

    changes: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of the study's base, for all of them
    axes: dict[str, dict[str, dict[str, Any]]] = dataclasses.field(
        default_factory=dict
    )  # AXIS: VALUE: FIELD: new value
    start_from: str | None = None  # an earlier grid; None: what `base` says
    best: str | None = None  # NAME/NUMBER: numbers are of the step where it is highest; None: last
    measures: tuple[str, ...] = ('test/accuracy',)  # NAME/NUMBER as in metrics.jsonl, or `compute`
    published: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # by VALUE-VALUE, of the first measure
    means: dict[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )  # over some values of the last axis

    def check(self) -> None:
        before: dict[str, set[str]] = {}  # what each of the axes before changes
        for axis, values in self.axes.items():
            for name in (axis, *values):
                fits = re.fullmatch(r'[\w.+%@=-]{1,64}', name) is not None
                wanted = 'expected 1 to 64 letters, digits and any of .+%@=-'
                require(fits, f'axes: {name!r}: {wanted}')
            require(bool(values), f'axes: {axis!r} has no values')
            always = set.intersection(*(set(changes) for changes in values.values()))
            gone = [name for name, fields in before.items() if fields and fields <= always]
            require(not gone, f'axes: {axis!r} overwrites all that {gone[:1]} changes')
            before[axis] = set().union(*values.values())
        last = [*self.axes.values()][-1:]
        for name, of in self.means.items():
            unknown = [value for value in of if not last or value not in last[0]]
            require(not unknown, f'means: {name}: {unknown[:1]} is no value of the last axis')


@dataclasses.dataclass(kw_only=True)
class Drawing(Record):
    """The picture of a study: a measure over the values of an axis, a line for each of the others.

    Over `compute`, floating-point operations counted from the multiply-adds of networks, a line is
    a grid, or, of the only one, a value of its first axis.
    """

    x: str  # an axis, or `compute`
    y: str = 'test/accuracy'  # one of the measures
    mean: str | None = None  # one of the grids' means, in place of the values of the last axis
    logarithmic: bool = False  # the axis x


@dataclasses.dataclass(kw_only=True)
class Study(Record):
    """Experiments beside each other, and what is drawn of them (python -m vit_jax.study)."""

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
        earlier: list[str] = []
        for name, grid in self.grids.items():
            fits = re.fullmatch(r'[\w+-]{1,64}', name) is not None  # no dot: results.md lies beside
            require(fits, f'grids: {name!r}: expected 1 to 64 letters, digits and any of +-')
            known = grid.start_from is None or grid.start_from in earlier
            wanted = ', '.join(earlier) or 'none'
            require(
                known,
                f'grids.{name}.start_from={grid.start_from!r}: expected an earlier one: {wanted}',
            )
            earlier.append(name)
        seed = self.base.seed
        require(seed == TrainConfig.seed, f'base.seed={seed}: the seeds of all runs are `seeds`')
        if self.draw is not None:
            self._check_drawing(self.draw)

    def _check_drawing(self, draw: Drawing) -> None:
        grids = self.grids.values()
        measures = {measure for grid in grids for measure in grid.measures}
        xs = {axis for grid in grids for axis in grid.axes} | ({COMPUTE} & measures)
        means = {name for grid in grids for name in grid.means}
        for name, value, known in ('x', draw.x, xs), ('y', draw.y, measures):
            there = ', '.join(sorted(known)) or 'none'
            require(value in known, f'draw.{name}={value!r}: the grids have {there}')
        require(draw.mean is None or draw.mean in means, f'draw.mean={draw.mean!r}: no grid has it')
