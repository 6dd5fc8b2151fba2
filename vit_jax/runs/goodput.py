"""Where the time of an experiment went, over all its starts: WORKDIR/ledger.jsonl.

Each line is an event of one start of the run: when that start began, what happens now, at which
step, and the seconds spent since, by name:

    {"began": 1760.1, "event": "saving", "step": 300, "seconds": {"start": 3.1, "step": 50.2}}

What was done after the checkpoint from which the next start went on, and the time between the two
starts, is lost by the restart. The ratio of the rest to the wall time is the goodput.
"""

import contextlib
import json
import pathlib
import time
from typing import Any

from vit_jax.base.errors import usable
from vit_jax.training.loop import Clock

LOST = 'lost by restart'


class Ledger:
    """Writes the ledger of one start; nothing where `path` is None."""

    def __init__(self, path: pathlib.Path | None, clock: Clock):
        self._path, self.clock = path, clock
        clock.settle()
        self._began = time.time() - sum(clock.seconds.values())

    def record(self, event: str, step: int | None) -> None:
        """Writes a line, while the state is that of `step`; None: there is none yet."""
        if self._path is None:
            return
        self.clock.settle()
        seconds = {name: round(s, 4) for name, s in self.clock.seconds.items()}
        began = round(self._began, 4)
        line = {'began': began, 'event': event, 'step': step, 'seconds': seconds}
        with usable(self._path), self._path.open('a') as file:
            file.write(json.dumps(line) + '\n')

    def totals(self) -> dict[str, float]:
        """Seconds by name over all starts; they sum up to the wall time."""
        if self._path is None:
            return dict(self.clock.seconds)
        return totals(read(self._path))


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects; half a line, the last of a killed run, is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def totals(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by name, from the first start to the last line."""
    starts: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        starts.setdefault(line['began'], []).append(line)
    result: dict[str, float] = {}
    resumed: int | None = None  # the step from which the next start went on, where it came so far
    following: float | None = None
    for began in sorted(starts, reverse=True):
        at = [line for line in starts[began] if line['step'] is not None]
        kept = starts[began][-1]['seconds']
        if following is not None:
            before = [line for line in at if resumed is None or line['step'] <= resumed]
            kept = before[-1]['seconds'] if before else {}
            kept = {LOST: following - began - sum(kept.values())} | kept
        for name, seconds in kept.items():
            result[name] = result.get(name, 0.0) + seconds
        resumed, following = (at[0]['step'] if at else resumed), began
    return result
