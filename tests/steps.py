"""Steps of several processes that sum over all devices: python -m tests.steps FAULT[,FAULT...].

A fault is NAME:NUMBER or NAME:NUMBER:PROCESS. It happens at step NUMBER, on PROCESS or on all;
-1 is before the processes compare facts.
"""

import ctypes
import os
import signal
import socket
import threading
import time

import jax
import jax.numpy as jnp
from jaxlib import _jax

from vit_jax.cli import app
from vit_jax.distributed import meshes, processes
from vit_jax.distributed.processes import Interrupted, Job

NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS of Linux
STEPS = 400  # of a program without the option `steps`; tests stop it long before
LONG_SECONDS = 3.0  # of the step `long`; tests set a watchdog of half of them


def hang():
    """Prints `hanging`, and never returns."""
    print('hanging', flush=True)
    while True:
        time.sleep(1)


def interrupt_and_hang():
    """Hangs after a Ctrl-C that asks for a stop after this step, which never ends."""
    os.kill(os.getpid(), signal.SIGINT)
    hang()


def hold_lock():
    """Keeps the interpreter's lock, so that no other Python thread runs."""
    ctypes.PyDLL(None).sleep(1000)


def raise_error():
    raise RuntimeError('the disk is on fire')


def send_signal_of_its_own():
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)


FAULTS = {
    'usr1': send_signal_of_its_own,
    'hang': hang,
    'interrupt': interrupt_and_hang,
    'lock': hold_lock,
    'fail': raise_error,
    'die': lambda: os.kill(os.getpid(), signal.SIGKILL),
    'long': lambda: time.sleep(LONG_SECONDS),
}


def main(arguments, job: Job) -> int:
    faults = [(*fault.split(':'), None)[:3] for fault in arguments.faults.split(',')]
    due = {
        int(number): FAULTS[name]
        for name, number, index in faults
        if name in FAULTS and index in (None, str(job.index))
    }
    options = {name: float(number) for name, number, _ in faults}
    due.get(-1, lambda: None)()
    job.require_equal('the facts', {'seed': arguments.seed})
    mesh = meshes.make_mesh(meshes.MeshConfig())
    step, ones = 0, meshes.put(jnp.ones(mesh.size), meshes.batch_sharding(mesh))
    total = jax.jit(jnp.sum, out_shardings=meshes.replicated(mesh))
    job.save_on_signals()
    try:
        for step in job.tick_each(range(int(options.get('steps', STEPS)))):
            due.get(step, lambda: None)()
            assert 'alone' in options or float(total(ones)) == mesh.size
            print(f'step {step}', flush=True)
            time.sleep(options.get('ms', 50) / 1000)
    except Interrupted:
        job.barrier('saved')
        print(f'saved after step {step}', flush=True)
        raise Interrupted(f'stopped after step {step}') from None
    return 0


def connect_after_sigterm(*arguments):
    """Connects when the first SIGTERM has arrived."""
    arrived = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: arrived.set())
    print('not connecting', flush=True)
    while not arrived.wait(0.1):  # short waits, between which Python handles signals
        pass
    connect(*arguments)


def raise_unavailable(*_, **__):
    raise jax.errors.JaxRuntimeError('UNAVAILABLE: failed to connect to all addresses')


if __name__ == '__main__':
    # As root on Linux: a host whose name has no address.
    if os.sys.platform == 'linux' and ctypes.CDLL(None).unshare(NEW_HOST_NAME) == 0:
        socket.sethostname('no-such-host.invalid')
    connect = processes.connect
    parser = app.new_parser('steps', __doc__)
    parser.add_argument('faults')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--late', action='store_true')
    parser.add_argument('--unreachable', action='store_true')
    app.add_launch_flags(parser)
    if '--late' in os.sys.argv:
        processes.connect = connect_after_sigterm
    if '--unreachable' in os.sys.argv:
        _jax.get_distributed_runtime_client = raise_unavailable
    app.run_job(main, parser)
