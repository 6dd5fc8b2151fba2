"""Connects this process to the others of its job, or ends it with a reason."""

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

# Not public: jax makes its CPU devices itself, and they would listen at the address of the host's
# name, on whatever network that is.
from jax._src import config, xla_bridge
from jax._src.distributed import global_state
from jaxlib import _jax

from vit_jax.base import UserError
from vit_jax.parallel.clusters import Cluster, Launch, address_here, wait_for_coordinator

_SAY_AFTER = 10.0  # seconds


def connect(cluster: Cluster, launch: Launch) -> None:
    """Connects to the other processes. Ends this one, with a reason, where they do not come."""
    bind = wait_for_coordinator(cluster, launch.start_seconds)
    index, count, address = cluster.process_id, cluster.num_processes, cluster.coordinator_address

    def give_up() -> None:
        text = f'error: process {index}: of {count} processes not all came to {address} within'
        text += f' {launch.start_seconds:.0f} s; which were started, and with which process_id?'
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    waits = f'process {index} of {count} waits at {address} for the others'
    say = functools.partial(print, waits, file=sys.stderr, flush=True)
    timers = threading.Timer(_SAY_AFTER, say), threading.Timer(launch.start_seconds, give_up)
    for timer in timers:
        timer.daemon = True
        timer.start()
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM
    logging.getLogger('jax._src.distributed').setLevel(logging.ERROR)
    jax.distributed.initialize(
        address,
        count,
        index,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method='deactivate',
        initialization_timeout=int(launch.start_seconds) + 30,
        heartbeat_timeout_seconds=int(launch.heartbeat_seconds),
        shutdown_timeout_seconds=int(launch.heartbeat_seconds),
        coordinator_bind_address=bind,
    )
    for timer in timers:
        timer.cancel()
    if config.cpu_collectives_implementation.value == 'gloo':
        xla_bridge.register_backend_factory('cpu', functools.partial(_cpu, address_here(cluster)))


def _cpu(address: str) -> Any:
    """jax's CPU devices, which listen for those of other processes at this address alone."""
    client = global_state.client
    gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address)
    return xla_bridge.make_cpu_client(gloo)


@contextlib.contextmanager
def awaiting(name: str) -> Iterator[None]:
    """UserError where the others do not come to the place of this name, which says who."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'not every process came to {name!r}: {reason}') from error
