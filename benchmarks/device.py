"""Measures training on this device in a few minutes, the most valuable part first.

    python -m benchmarks.device [--minutes=6] [--only=PART] [--out=FILE.jsonl]

The parts run in this order:

- compile: a hybrid, a ResNet, and a ViT with each way to compute attention: 20 steps of each
- peers: B/16, L/16, S/16, H/14, next to timm (--timm=PYTHON) and big_vision (--big_vision=FOLDER)
- profile: the 30 slowest kernels of a step of B/16, with bytes and operations if they are known
- files: B/16 from JPEG files (--photos=FOLDER; without it, from generated files)
- cifar10: the ViT and the hybrid of configs/pretrain/cifar10_gpu.py (--cifar10=FOLDER), and the
  accuracies that they reach; complete only with --only=cifar10 --minutes=12
- optimizers: B/16 and L/16 with Muon, next to AdamW
- distillation: S/16 with a teacher B/16, next to S/16 alone and a forward pass of B/16
- options: B/16 with options of XLA and of training (SAM, PatchDropout, 3-Augment), one at a time
- attention: cuDNN in bfloat16 against XLA in float32, forward and backward, at eight lengths

Each part is a process with a time limit, so a part that fails or hangs does not stop the others.
Each line is printed, and appended to --out (benchmarks/results/device.jsonl) when it is measured.
With --only, one part runs and has all the time. On a CPU the models are tiny, which only tests the
program. Nothing else should run on the machine.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from benchmarks.peer_programs import python_path

ROOT = pathlib.Path(__file__).parents[1]
# Time limit of each part in seconds, for a total of 6 minutes. The sum is larger because most parts
# finish early.
LIMITS = {
    'compile': 150,
    'peers': 150,
    'profile': 60,
    'files': 60,
    'cifar10': 100,
    'optimizers': 100,
    'distillation': 60,
    'options': 100,
    'attention': 60,
}
MINUTES = 6.0


class Results:
    """Prints measurements, and appends them to a file."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open('a').close()  # a path that cannot be written fails here

    def add(self, part: str, line: dict[str, Any]) -> None:
        """Prints the text of a line, and appends all of it to the file."""
        print(f'{part:<10}{line.get("text", "")}', flush=True)
        now = datetime.datetime.now().isoformat(' ', 'seconds')
        with self.path.open('a') as file:
            file.write(json.dumps({'part': part, 'date': now} | line) + '\n')


def kill_group(number: int) -> None:
    """Kills the processes of a group, if any are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


def run_part(part: str, options: dict[str, Any], seconds: float, results: Results) -> None:
    """Runs one part in its own process group, and kills the group after its time limit."""
    command = [sys.executable, '-m', 'benchmarks.device_parts', part, json.dumps(options)]
    environment = os.environ | {'PYTHONPATH': python_path(ROOT)}
    began = time.monotonic()
    with tempfile.TemporaryFile('w+') as errors:
        child = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(seconds, kill_group, [child.pid])
        timer.daemon = True
        try:
            timer.start()
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith('{'):
                    results.add(part, json.loads(line))
            code = child.wait()
        finally:  # also if this process is interrupted
            timer.cancel()
            kill_group(child.pid)
        elapsed = time.monotonic() - began
        if code == 0:
            return
        errors.seek(0)
        last = errors.read()[-4000:]
    if code == -signal.SIGKILL and elapsed >= seconds:
        results.add(
            part, {'text': f'stopped at the time limit of {seconds:.0f} s', 'stopped': True}
        )
        return
    lines = last.strip().splitlines() or ['']
    reason = next((line for line in lines if 'Check failed' in line), lines[-1])
    results.add(part, {'text': f'failed with exit code {code}: {reason}', 'error': last})


def minutes(text: str) -> float:
    """Parses a positive number of minutes."""
    if not 0 < float(text) < float('inf'):
        raise argparse.ArgumentTypeError(f'{text}: expected more than 0')
    return float(text)


def main() -> None:
    """Runs the parts for which there is time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--minutes', type=minutes, default=MINUTES)
    parser.add_argument('--only', choices=LIMITS, metavar='PART', help=', '.join(LIMITS))
    parser.add_argument('--out', default=ROOT / 'benchmarks' / 'results' / 'device.jsonl')
    parser.add_argument('--timm', metavar='PYTHON', help='interpreter that has torch and timm')
    parser.add_argument('--big_vision', metavar='FOLDER', help='clone of big_vision')
    parser.add_argument('--photos', metavar='FOLDER', help='folder of JPEG files')
    parser.add_argument('--cifar10', metavar='FOLDER', help='data set, as written by tfds build')
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + 60 * arguments.minutes
    results = Results(pathlib.Path(arguments.out))
    options = {
        name: getattr(arguments, name) for name in ('timm', 'big_vision', 'photos', 'cifar10')
    }
    command = shlex.join(['python', '-m', 'benchmarks.device', *sys.argv[1:]])
    run_part('device', options | {'command': command}, deadline - time.monotonic(), results)
    for part in [arguments.only] if arguments.only else LIMITS:
        left = deadline - time.monotonic()
        limit = left if arguments.only else min(left, LIMITS[part] * arguments.minutes / MINUTES)
        if left < 5:
            results.add(
                part, {'text': 'not measured: the time limit is reached; increase --minutes'}
            )
            continue
        run_part(part, options | {'seconds': limit}, limit, results)


if __name__ == '__main__':
    main()
