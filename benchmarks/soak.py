"""Kills a run many times and measures how fast it resumes: python -m benchmarks.soak FOLDER.

For each number of processes, one run is killed at random moments by SIGKILL: all of its
processes, or one, and then the others must exit on their own. The same command starts it again,
as a scheduler would, until it has been killed `--kills` times. It then trains to its end, and its
parameters and metrics are compared with a run that was never killed.

You can stop the benchmark at any time; the same command resumes it. The table shows seconds
from a SIGKILL to the next finished step, with imports and with a warm compilation cache. `useful`
is the fraction of wall time in steps that count (goodput), simulated for a kill every 30 minutes.
"""

import argparse
import ctypes
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import numpy as np

from tests.hosts import free_port, result
from vit_jax.base import files
from vit_jax.distributed.processes import REQUEUE
from vit_jax.experiment.reporter import read_events

ROOT = pathlib.Path(__file__).parent.parent
ENVIRONMENT = {
    'JAX_PLATFORMS': 'cpu',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'PYTHONDONTWRITEBYTECODE': '',
    'PYTHONPATH': str(ROOT),
    'XLA_FLAGS': '--xla_force_host_platform_device_count=1',
}
MAX_STEPS = 30  # a run is killed before it has finished this number of steps
CHECKPOINT_STEPS = 10
TIMEOUT_SECONDS = 600  # of a start, and of the exit of processes whose partner was killed
KILL_EVERY_SECONDS = 1800  # in the simulation
CHECKPOINT_SECONDS = 60  # in the simulation


def _die_with_parent() -> None:
    """Makes Linux kill this process when its parent dies (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start(folder: pathlib.Path, name: str, count: int, kills: int) -> list[subprocess.Popen[bytes]]:
    """Starts the processes of the run in FOLDER/NAME/run."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, '-m', 'vit_jax.train', '--config=tests/tiny_config.py']
    # Kills lose steps, so the run is not complete before the last kill.
    steps = MAX_STEPS // 2 * kills + 60
    command += [f'--workdir={folder}/{name}/run', f'--config.total.steps={steps}']
    command += ['--config.log_every_steps=1', f'--config.checkpoint_every_steps={CHECKPOINT_STEPS}']
    env = {'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled')} | os.environ | ENVIRONMENT
    address = f'127.0.0.1:{free_port()}'
    processes = []
    for index in range(count):
        place = [f'--coordinator_address={address}', f'--num_processes={count}']
        place += [f'--process_id={index}']
        with (folder / name / f'{index}.log').open('ab') as log:
            process = subprocess.Popen(
                [*command, *(place if count > 1 else [])],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        processes.append(process)
    return processes


def reported(folder: pathlib.Path, after: float) -> list[dict[str, Any]]:
    """Returns the events of steps that finished after the given time."""
    events = read_events(folder / 'killed/run/events.jsonl')
    return [one for one in events if one['event'] == 'reported' and one['time'] > after]


def wait_for_step(
    folder: pathlib.Path, processes: list[subprocess.Popen[bytes]], after: float, steps: int
) -> dict[str, Any]:
    """Waits until `steps` steps have finished after a time; returns the first one's event."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(events := reported(folder, after)) < steps:
        alive = all(process.poll() is None for process in processes)
        assert alive and time.monotonic() < deadline, f'no step finished; see {folder}/killed/*.log'
        time.sleep(0.01)
    return events[0]


def soak(folder: pathlib.Path, count: int, kills: int) -> list[dict[str, Any]]:
    """Kills one run until its record has `kills` kills; returns the record."""
    path = folder / 'kills.jsonl'
    record = files.read_json_lines(path, step=int, seconds=float)
    killed: dict[str, Any] | None = None  # the kill whose recovery is being measured
    while len(record) < kills:
        moments = random.Random(f'{count} {len(record)} {killed is None}')
        began = time.time()
        processes = start(folder, 'killed', count, kills)
        try:
            first = wait_for_step(folder, processes, began, 1)
            if killed:
                recovery = round(first['time'] - killed['time'], 2)
                killed |= {'seconds': recovery, 'resumed': first['step']}
                with path.open('a') as file:
                    file.write(json.dumps(killed) + '\n')
                record.append(killed)
                print(f'{count} processes, kill {len(record)} of {kills}: {killed}', flush=True)
            wait_for_step(folder, processes, began, moments.randrange(1, MAX_STEPS))
            time.sleep(moments.uniform(0, 0.05))
            victims = [*range(count)] if moments.random() < 0.5 else [moments.randrange(count)]
            for index in victims:
                processes[index].kill()
            at = time.time()
            codes = [process.wait(TIMEOUT_SECONDS) for process in processes]
            step = reported(folder, 0)[-1]['step']
            killed = {'step': step, 'victims': victims, 'codes': codes, 'time': at}
            killed['exited'] = round(time.time() - at, 2)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return record


def train_to_end(folder: pathlib.Path, name: str, count: int, kills: int) -> None:
    """Trains without kills."""
    codes = [process.wait() for process in start(folder, name, count, kills)]
    assert not any(codes), f'exit codes {codes}; see {folder}/{name}/*.log'


def simulate_useful_time(recoveries: list[float], hours: int = 1000) -> float:
    """Returns the goodput: the fraction of wall time in steps that are not lost.

    Kills come at random, one in 30 minutes on average. Each costs a measured recovery, drawn at
    random, and the steps since the last checkpoint, which is written once a minute.
    """
    moments = random.Random(0)
    wall = useful = 0.0
    while wall < hours * 3600:
        alive = moments.expovariate(1 / KILL_EVERY_SECONDS)
        wall += alive + moments.choice(recoveries)
        useful += alive - min(alive, moments.uniform(0, CHECKPOINT_SECONDS))
    return useful / wall


def summarize(count: int, record: list[dict[str, Any]], difference: str) -> str:
    """Returns a row of the table."""
    seconds = sorted(one['seconds'] for one in record)
    others = [
        code
        for one in record
        for index, code in enumerate(one['codes'])
        if index not in one['victims']
    ]
    restarts = f'{sum(code == REQUEUE for code in others)}/{len(others)}'
    median = statistics.median(seconds)
    high = seconds[int(0.95 * len(seconds))]
    within = f'{sum(one <= 15 for one in seconds)}/{len(seconds)}'
    numbers = f'{seconds[0]:>8.1f}{median:>8.1f}{high:>8.1f}{seconds[-1]:>8.1f}'
    useful = f'{simulate_useful_time(seconds):>9.1%}'
    same = difference or 'same parameters and metrics'
    return f'{count:>9}{len(record):>7}{numbers}{within:>10}{useful}{restarts:>10}  {same}'


def describe_difference(folder: pathlib.Path, whole: pathlib.Path) -> str:
    """Returns how the run in `folder` differs from the run in `whole`; '' if it does not."""
    params, lines = result(folder)
    expected_params, expected_lines = result(whole)
    if any(not np.array_equal(params[name], leaf) for name, leaf in expected_params.items()):
        return 'parameters differ'
    return '' if lines == expected_lines else 'metrics.jsonl differs'


def measure(folder: pathlib.Path, count: int, kills: int) -> tuple[list[dict[str, Any]], str]:
    """Trains twice, without and with kills; returns the record, and the difference or ''."""
    train_to_end(folder, 'whole', count, kills)
    record = soak(folder, count, kills)
    train_to_end(folder, 'killed', count, kills)
    return record, describe_difference(folder / 'killed', folder / 'whole')


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument('--kills', type=int, default=100, metavar='N', help='for each number')
    parser.add_argument(
        '--processes', type=lambda text: [*map(int, text.split(','))], default=[1, 2, 4]
    )
    arguments = parser.parse_args()
    versions = ', '.join(f'{n} {metadata.version(n)}' for n in ('jax', 'orbax-checkpoint'))
    rows = []
    for count in arguments.processes:
        record = measure(arguments.folder / str(count), count, arguments.kills)
        rows.append(summarize(count, *record))
    print(f'\n{os.cpu_count()} CPU cores, {versions}, loopback, {time.strftime("%Y-%m-%d")}')
    print('seconds from SIGKILL to the next finished step; exit 75: processes that were not killed')
    columns = f'{"min":>8}{"median":>8}{"95 %":>8}{"max":>8}{"<= 15 s":>10}{"useful":>9}'
    print(f'{"processes":>9}{"kills":>7}{columns}{"exit 75":>10}  result')
    print('\n'.join(rows))


if __name__ == '__main__':
    main()
