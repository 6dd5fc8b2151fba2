"""Where the time of an experiment went, over all its starts: WORKDIR/ledger.jsonl.

Each line is an event of one start of the run: when that start began, what happens now, at which
step, and the seconds spent since, by name:

    {"began": 1760.1, "event": "saving", "step": 300, "seconds": {"start": 3.1, "step": 50.2}}

What was done after the checkpoint from which the next start went on, and the time between the two
starts, is lost by the restart. The ratio of the rest to the wall time is the goodput.

`began` is by the clock of the host. Where hosts' clocks differ, the time between two starts on the
same one is right, and what the lines themselves say is lost is the least.
"""

import json
import logging
import time
from typing import Any

from vit_jax.base import Path, appending, read_json_lines, require_kept, usable
from vit_jax.base.storage import reaching
from vit_jax.training.loop import Clock

LOST = 'lost by restart'


class Ledger:
    """Writes the ledger of one start, number `run` of its directory; none where `path` is None."""

    def __init__(self, path: Path | None, clock: Clock):
        self._path, self.clock = path, clock
        clock.settle()
        self._began = round(time.time() - sum(clock.seconds.values()), 4)
        self.run = 1 + (len({line['began'] for line in read(path)}) if path else 0)
        if path is not None:
            with usable(path), reaching(path):
                half = path.exists() and path.read_bytes()[-1:] not in (b'', b'\n')
                self._file = appending(path)
                if half:  # of a killed run
                    self._file.write('\n')

    def record(self, event: str, step: int | None) -> None:
        """Writes a line, while the state is that of `step`; None: there is none yet."""
        if self._path is None:
            return
        self.clock.settle()
        seconds = {name: round(s, 4) for name, s in self.clock.seconds.items()}
        line = {'began': self._began, 'event': event, 'step': step, 'seconds': seconds}
        require_kept(self._path)
        with usable(self._path):
            self._file.write(json.dumps(line) + '\n')

    def flush(self) -> None:
        """Returns when all lines are where they are kept, on a store too."""
        if self._path is not None:
            with usable(self._path):
                self._file.flush()

    def close(self) -> None:
        """Ends the file: on a store, lines that cannot be written by now are warned of."""
        if self._path is not None:
            with usable(self._path):
                self._file.close()

    def totals(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by name of this start, and of all before it with what was lost by them.

        Omits runs that ended before they had a state, for example with a rejected configuration.
        """
        if self._path is None:
            return dict(self.clock.seconds), {}
        lines = read(self._path)
        own = totals([line for line in lines if line['began'] == self._began])
        if all(line['step'] is None or line['began'] == self._began for line in lines):
            return own, {}
        before = {name: s - own.get(name, 0.0) for name, s in totals(lines).items()}
        return own, {name: s for name, s in before.items() if s > 1e-3}


def seconds_since_start() -> float:
    """Returns the seconds since Python started: since `logging` was imported, before all else."""
    return logging.makeLogRecord({}).relativeCreated / 1000


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger, those of one start after those of the start before."""
    lines = read_json_lines(path, began=float, step=int | None, seconds=dict)
    return [x for x in lines if all(isinstance(s, int | float) for s in x['seconds'].values())]


def totals(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by name, from the first start to the last line."""
    starts: dict[float, list[dict[str, Any]]] = {}
    for line in lines:
        starts.setdefault(line['began'], []).append(line)
    result: dict[str, float] = {}
    resumed: int | None = None  # the step from which the next start went on, where it came so far
    following: float | None = None
    lost = told = 0.0  # by the clocks of the hosts, and by the lines
    for began, own in reversed(starts.items()):
        at = [line for line in own if line['step'] is not None]
        kept = own[-1]['seconds']
        if following is not None:
            before = [line for line in at if resumed is None or line['step'] <= resumed]
            kept = before[-1]['seconds'] if before else {}
            gone = sum(own[-1]['seconds'].values()) - sum(kept.values())
            told += gone
            complete = own[-1].get('event') == 'complete'  # it was started again at leisure
            lost += gone if complete else following - began - sum(kept.values())
        for name, seconds in kept.items():
            result[name] = result.get(name, 0.0) + seconds
        if at:  # a later start may have gone on from an earlier step: its newest was damaged
            resumed = at[0]['step'] if resumed is None else min(resumed, at[0]['step'])
        following = began
    return result if len(starts) < 2 else result | {LOST: max(lost, told)}
