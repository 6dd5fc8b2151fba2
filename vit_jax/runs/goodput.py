"""Where the time of an experiment went, over all its starts: WORKDIR/ledger.jsonl.

Each line is an event of one start of the run: when that start began, what happens now, at which
step, and the seconds spent since, by name:

    {"began": 1760.1, "event": "saving", "step": 300, "seconds": {"start": 3.1, "step": 50.2}}

What was done after the checkpoint from which the next start went on, and the time between the two
starts, is lost by the restart. The ratio of the rest to the wall time is the goodput.
"""

import json
import logging
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
        if path is not None and path.exists() and not path.read_bytes().endswith(b'\n'):
            with usable(path), path.open('a') as file:
                file.write('\n')  # after the half line of a killed run

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
        lines = read(self._path, began=float, step=int | None, seconds=dict)
        return totals(lines)


def read(path: pathlib.Path, **fields: Any) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects which have these fields, of these types.

    The last line of a killed run may be half a line; any other that is left out is warned of.
    """
    texts = path.read_bytes().splitlines() if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        known = isinstance(line, dict) and fields.keys() <= line.keys()
        if known and all(isinstance(line[name], kind) for name, kind in fields.items()):
            lines.append(line)
        elif number < len(texts):
            logging.warning('%s, line %d: damaged, left out', path, number)
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
            lost = following - began - sum(kept.values())
            kept = {LOST: max(0.0, lost)} | kept  # a clock may have been set back
        for name, seconds in kept.items():
            result[name] = result.get(name, 0.0) + seconds
        if at:  # a later start may have gone on from an earlier step: its newest was damaged
            resumed = at[0]['step'] if resumed is None else min(resumed, at[0]['step'])
        following = began
    return result
