"""A folder in which the commands of the documentation are typed, with small things to work on.

Their names are those of the pages: DATA, PHOTOS, cifar10, CHECKPOINT, B_16.npz, photo.jpg. A shell
finds there a `python`, a `vit_jax` and a `pip` that have this process do what is asked for: it
forks from one that has loaded the libraries (tests/hosts.py), and training ends after two steps.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import shutil
import socketserver
import subprocess
import sys
import threading
import traceback

import cv2
import numpy as np

from tests import hosts
from tests.pages import ROOT
from tests.servers import web
from vit_jax.checkpoints.remote import PUBLISHED

REFERENCE = ROOT / 'tests/reference'

_SHORT = {'total.steps': 2, 'schedule.warmup.steps': 1, 'batch_size': 8, 'eval_batch_size': 8}
_TINY = {'depth': 1, 'width': 16, 'mlp_dim': 16, 'num_heads': 2}
# Flags that make a program's work small; they replace the same flags of a page.
_TRAINING = [f'--config.{name}={value}' for name, value in _SHORT.items()]
_TINY_MODEL = [f'--config.model.{name}={value}' for name, value in _TINY.items()]
SMALL = {
    'train': _TRAINING,
    'finetune': _TRAINING,
    'study': ['--list'],
    'visualize': ['--num_images=8'],
}
# One run of one study; the others would be many, and are listed. tests/test_study.py has more.
ONE_STUDY = (
    'configs/studies/pooling.py',
    [f'--config.base.{name}={value}' for name, value in _SHORT.items()] + ['--only=cls-1e-3-seed0'],
)
# What is not done here, and why.
STUBS = {
    'venv': 'the environment of the tests is there',
    'pip': 'nothing is downloaded; that extras exist is looked up where commands are parsed',
    'pytest': 'this is a test, which would start all tests',
}
# In place of those that a page gives.
SMALLER = {'--profile_steps': '--profile_steps=1:2'}
# Models that are built, not loaded, and are large.
LARGE = 'configs/pretrain/vit.py', 'configs/pretrain/augreg.py', 'configs/pretrain/better_plain'

_ASK = """#!{python} -IS
import json, os, socket, sys
with socket.create_connection(('127.0.0.1', {port})) as connection, connection.makefile('rw') as it:
    it.write(json.dumps([os.getcwd(), {first} + sys.argv[1:]]) + '\\n')
    it.flush()
    code, text = json.loads(it.readline())
sys.stdout.write(text)
sys.exit(code)
"""


def small(program, arguments):
    """The arguments of a program with those that make its work small."""
    added = list(SMALL.get(program, []))
    if program == 'study' and any(ONE_STUDY[0] in argument for argument in arguments):
        added = list(ONE_STUDY[1])
    if program == 'visualize' and not any(a.startswith('--figures') for a in arguments):
        added.append('--figures=filters,positions')  # others compile programs
    added += [flag for name, flag in SMALLER.items() if any(a.startswith(name) for a in arguments)]
    if any('configs/studies/visualize.py' in argument for argument in arguments):
        added.append('--config.fewshot=none')
    if any('visualize.py:resnet' in argument for argument in arguments):
        added.append('--config.model.backbone.blocks=(1,1)')
    if program in ('train', 'finetune') and any(name in a for a in arguments for name in LARGE):
        added += _TINY_MODEL
    units = '.steps', '.epochs', '.examples', '.fraction'
    replaced = tuple(flag.partition('=')[0].removesuffix('.steps') for flag in added)
    kept = []
    for argument in arguments:
        flag = argument.partition('=')[0]
        flag = next((flag.removesuffix(unit) for unit in units if flag.endswith(unit)), flag)
        if flag not in replaced:
            kept.append(argument)
    return kept + added


class Workplace:
    """The folder, and what is typed in it."""

    def __init__(self, folder, port, environment):
        self.folder = folder
        self._port, self._environment = port, environment
        self._numbers = itertools.count()
        self._python = None
        self._done = set()  # commands of the pages before this one
        self._new = set()
        _fill(folder)
        programs = folder / '.venv/bin'
        programs.mkdir(parents=True)
        (programs / 'activate').touch()
        first = {'python': [], 'python3': [], 'vit_jax': ['-m', 'vit_jax'], 'pip': ['-m', 'pip']}
        for name, words in first.items():
            text = _ASK.format(python=sys.executable, port=port, first=words)
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    def shell(self, text):
        """Runs the lines of a shell block; what went wrong, or None.

        Flags alone are not run.
        """
        if text.startswith('--config.'):
            return None
        place = f'{self.folder}/.venv/bin:{os.environ["PATH"]}'
        done = subprocess.run(
            ['bash', '-euo', 'pipefail', '-c', self._own(text)],
            cwd=self.folder,
            env=self._environment | {'PATH': place},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=850,  # tests/conftest.py ends a test after 900
        )
        return done.stdout if done.returncode != 0 else None

    def python(self, text, where):
        """Runs a Python block after those before; what went wrong, or None."""
        if self._python is None:
            self._python, theirs = hosts.context.Pipe()
            arguments = theirs, str(self.folder), self._environment
            hosts.context.Process(target=_interpret, args=arguments, daemon=True).start()
        self._python.send((self._own(text), where))
        return self._python.recv()

    def turn_page(self):
        """From here on, commands that succeeded until now are not run again."""
        self._done |= self._new

    def run(self, cwd, words):
        """The exit code of `python WORDS`, and what it says."""
        if tuple(words) in self._done:
            return 0, ''
        self._new.add(tuple(words))
        module, *arguments = words[1:] if words[:1] == ['-m'] else ['', *words]
        if module in STUBS:
            return 0, ''
        if module == 'vit_jax':
            module = f'vit_jax.{arguments.pop(0)}'
        path = self.folder / f'output-{next(self._numbers)}.txt'
        if not module:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=cwd, env=self._environment, capture_output=True
            )
            return done.returncode, (done.stdout + done.stderr).decode()
        arguments = small(module.removeprefix('vit_jax.'), arguments)
        host = hosts.Host(module, arguments, path, self._environment, cwd)
        try:
            code = host.wait()
        except AssertionError as error:  # it does not end
            return 1, str(error)
        return code, f'$ python -m {module} {" ".join(arguments)}\n{host.text}'

    def _own(self, text):
        return text.replace('/tmp/vit', str(self.folder / 'vit'))


def _interpret(connection, folder, environment):
    """Executes what comes, in one namespace; answers with the error's traceback, or None."""
    os.chdir(folder)
    os.environ.update(environment)
    names = {'__name__': '__main__'}
    with contextlib.suppress(EOFError):  # when the page has ended
        while True:
            text, where = connection.recv()
            try:
                exec(compile(text, where, 'exec'), names)
                connection.send(None)
            except Exception:
                connection.send(traceback.format_exc())


@contextlib.contextmanager
def workplace(folder):
    """A place to type in; the hub and the buckets of published checkpoints are on this machine."""

    class Asked(socketserver.StreamRequestHandler):
        def handle(self):
            answer = place.run(*json.loads(self.rfile.readline()))
            self.wfile.write(json.dumps(answer).encode() + b'\n')

    with web.serving(_published()) as server:
        environment = hosts.environment() | {
            'STORAGE_EMULATOR_HOST': server.url,
            'HF_ENDPOINT': server.url,
            'HF_HOME': str(folder / 'hub'),
            'VIT_JAX_CACHE': str(folder / 'cache'),
            'PYTHONPATH': f'{folder}:{ROOT}',
        }
        with socketserver.ThreadingTCPServer(('127.0.0.1', 0), Asked) as asked:
            asked.daemon_threads = True
            place = Workplace(folder, asked.server_address[1], environment)
            threading.Thread(target=asked.serve_forever, args=[0.01], daemon=True).start()
            yield place
            asked.shutdown()


@functools.cache
def _published():
    """What the hub and the buckets answer: small networks under the published names."""
    files = {path.name: path.read_bytes() for path in (REFERENCE / 'hf_vit').iterdir()}
    answers = web.repository('google/vit-base-patch16-224', {'main': files})
    network = web.Answer((REFERENCE / 'google_vit_token_prelogits.npz').read_bytes())
    for one in PUBLISHED.values():
        answers['/' + one.address.removeprefix('gs://')] = network
    return answers


def _fill(folder):
    """Images and checkpoints under the names of the pages."""
    rng = np.random.default_rng(0)

    def draw(path, side=40):
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), rng.integers(0, 255, (side, side, 3), np.uint8))

    for split, count in {'train': 6, 'test': 2}.items():
        for name, number in itertools.product(('daisy', 'rose', 'tulip'), range(count)):
            draw(folder / f'DATA/{split}/{name}/{number}.jpg')
        for name, number in itertools.product(range(10), range(count)):
            draw(folder / f'cifar10/{split}/class{name}/{number}.png', 32)
    for number in range(3):
        draw(folder / f'PHOTOS/{number}.jpg')
    draw(folder / 'photo.jpg')
    shutil.copytree(REFERENCE / 'hf_vit', folder / 'CHECKPOINT')
    shutil.copy(REFERENCE / 'google_vit_token_prelogits.npz', folder / 'B_16.npz')
    (folder / 'vit').mkdir()
    for name in 'tests', 'configs', 'benchmarks', 'docs', 'constraints.txt':
        pathlib.Path(folder / name).symlink_to(ROOT / name)
