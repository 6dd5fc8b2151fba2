"""Where the time of an experiment went, over all its starts: WORKDIR/ledger.jsonl.

Each line is an event of one start of the run: when that start began, what happens now, at which
step, and the seconds spent since, by name:

    {"began": 1760.1, "event": "saving", "step": 300, "seconds": {"start": 3.1, "step": 50.2}}

What was done after the checkpoint from which the next start resumed, and the time between the two
starts, is lost by the restart. The ratio of the rest to the wall time is the goodput.

`began` is by the clock of the host. If the clocks of hosts differ, the time between two starts on
the same host is right.
"""

import json
import logging
import time
from typing import Any

from vit_jax.base import Path, appending, read_json_lines, require_kept, usable
from vit_jax.training.loop import Clock

LOST = 'lost by restart'


class Lines:
    """Appends JSON values to a file of a run, one a line; without a path it does nothing."""

    def __init__(self, path: Path | None):
        self._path = path
        if path is not None:
            with usable(path):
                is_cut = path.exists() and path.read_bytes()[-1:] not in (b'', b'\n')
                self._file = appending(path)
                if is_cut:  # by a kill, in the middle of a line
                    self._file.write('\n')

    def write(self, values: dict[str, Any]) -> None:
        """Adds a line. Raises UserError if the file cannot be written, or was removed."""
        if self._path is not None:
            require_kept(self._path)
            with usable(self._path):
                self._file.write(json.dumps(values) + '\n')

    def flush(self) -> None:
        """Returns when all lines are where they are kept, on a bucket too."""
        if self._path is not None:
            with usable(self._path):
                self._file.flush()

    def close(self) -> None:
        """Closes the file; on a bucket it warns of lines that cannot be written by now."""
        if self._path is not None:
            with usable(self._path):
                self._file.close()


class Ledger(Lines):
    """Writes the ledger of one start, number `run` of its directory; none if `path` is None."""

    def __init__(self, path: Path | None, clock: Clock):
        clock.settle()
        self.clock = clock
        self._began = round(time.time() - sum(clock.seconds.values()), 4)
        self.run = 1 + len({line['began'] for line in read(path)})
        super().__init__(path)

    def record(self, event: str, step: int | None = None) -> None:
        """Writes a line, while the state is that of `step`; None: there is no state yet."""
        self.clock.settle()
        seconds = {name: round(s, 4) for name, s in self.clock.seconds.items()}
        self.write({'began': self._began, 'event': event, 'step': step, 'seconds': seconds})

    def totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns seconds by name of this start, and of all before it with what they lost.

        Omits starts that ended before they had a state, for example with a rejected configuration.
        """
        own, lines = dict(self.clock.seconds), read(self._path)
        if all(line['step'] is None or line['began'] == self._began for line in lines):
            return own, {}
        earlier = {name: s - own.get(name, 0.0) for name, s in totals(lines).items()}
        return own, {name: s for name, s in earlier.items() if s > 1e-3}


def seconds_since_start() -> float:
    """Returns the seconds since Python started: since `logging` was imported, before all else."""
    return logging.makeLogRecord({}).relativeCreated / 1000


def read(path: Path | None) -> list[dict[str, Any]]:
    """Returns the lines of a ledger, those of one start after those of the start before."""
    if path is None:
        return []
    lines = read_json_lines(path, began=float, step=int | None, seconds=dict)
    return [x for x in lines if all(isinstance(s, int | float) for s in x['seconds'].values())]


def totals(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Returns seconds by name, from the first start to the last line."""
    starts: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        starts.setdefault(line['began'], []).append(line)
    result: dict[str, float] = {}
    redone = waited = 0.0  # `waited` by the clocks of the hosts, whose differences cancel out
    resumed, next_began = float('inf'), None
    for began, own in reversed(starts.items()):
        spent = kept = own[-1]['seconds']
        steps = [line['step'] for line in own if line['step'] is not None]
        if next_began is not None:
            before = [x for x in own if x['step'] is not None and x['step'] <= resumed]
            kept = before[-1]['seconds'] if before else {}
            redone += sum(spent.values()) - sum(kept.values())
            if own[-1].get('event') != 'complete':  # else it was started again at leisure
                waited += next_began - began - sum(spent.values())
        for name, seconds in kept.items():
            result[name] = result.get(name, 0.0) + seconds
        if steps:  # a later start may have resumed earlier: its newest checkpoint was damaged
            resumed = min(resumed, steps[0])
        next_began = began
    return result if len(starts) < 2 else result | {LOST: redone + max(0.0, waited)}
