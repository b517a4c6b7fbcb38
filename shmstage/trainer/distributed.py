"""Several hosts, one computation: joining ``jax.distributed``, and arrays over the devices of all its processes.

Nothing here waits for a device: what hosts have to agree on goes through the key-value store of the coordinator.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import sys
import threading
from typing import Any

import jax
import numpy as np

from shmstage.errors import EngineError, PeerLostError, SettingsError, WaitTimeoutError
from shmstage.trainer.host_copy import is_whole_here
from shmstage.trainer.jax_seam import coordinator_store, leave_signals_alone, run_copy

log = logging.getLogger(__name__)

#: how long a process may be silent before JAX ends the others (SIGABRT): they would sit in a collective for ever
HEARTBEAT_S = 30
#: how long those that are done wait for the others to be
GOOD_BYE_S = 10
#: how much longer JAX itself would wait: past its deadline it kills the process without a word to the launcher
_MARGIN_S = 60
_ASK_S = 60.0

_asked = itertools.count()
_tried: list[str] = []


def join(coordinator: str, *, rank: int, hosts: int, bind: str, timeout_s: float) -> None:
    """Become process ``rank`` of ``hosts``; to be called before anything else of JAX. Returns when all have.

    ``coordinator`` is ``address:port`` of rank 0, which listens at ``bind:port``. Raises ``SettingsError`` if it cannot
    listen there, ``WaitTimeoutError`` if the others have not come, ``PeerLostError`` if rank 0 cannot be reached.
    """
    who = f"rank {rank} of {hosts} joining at {coordinator}"
    port = _port_of(coordinator)
    if rank == 0:
        _check_free(bind, port, who)
    leave_signals_alone()
    _tried.append(who)
    raised: list[BaseException] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                hosts,
                rank,
                cluster_detection_method="deactivate",
                initialization_timeout=int(timeout_s) + _MARGIN_S,
                heartbeat_timeout_seconds=HEARTBEAT_S,
                shutdown_timeout_seconds=GOOD_BYE_S,
                coordinator_bind_address=f"{_bracketed(bind)}:{port}",
            )
        except BaseException as error:
            raised.append(error)

    # in a thread: past a deadline of its own JAX does not raise, it aborts the process
    joining = threading.Thread(target=initialize, name="shmstage-join", daemon=True)
    joining.start()
    joining.join(timeout_s)
    if joining.is_alive():
        raise _not_joined(coordinator, rank, hosts, who, timeout_s)
    if raised:
        error = raised[0]
        text = (str(error).strip().splitlines() or ["no text"])[0]
        raise PeerLostError(f"{who} failed: {type(error).__name__}: {text}") from error
    log.info("%s: joined, %d devices of %d", who, jax.local_device_count(), jax.device_count())


def leave(code: int) -> None:
    """End a process that failed after ``join`` was called, without the good-bye that waits for all the others."""
    if code and _tried:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def spans_processes(mesh: jax.sharding.Mesh) -> bool:
    """Whether some of its devices are another process's."""
    here = jax.process_index()
    return any(device.process_index != here for device in mesh.devices.flat)


def copied_over_hosts(leaf: Any, target: jax.sharding.Sharding) -> jax.Array:
    """A copy of ``leaf``, which every process has or which lies on ``target``'s devices, lying as ``target`` says."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return run_copy(leaf, target)
    values = np.array(leaf)  # a copy, which the arrays may alias
    return jax.make_array_from_callback(values.shape, target, lambda index: values[index])


def check_replicated(state: Any) -> None:
    """Raise ``EngineError`` for state that lies on the devices of several hosts, a part on each.

    What is written, digested and published is whole, and no host has it.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not is_whole_here(leaf):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise EngineError(
                f"parameter or optimizer state {name} {list(leaf.shape)} lies as {leaf.sharding}: no host has all of "
                "it; replicate it over the hosts and shard it over the devices within each, if at all"
            )


def said_by_first(what: str, mine: int | None, *, timeout_s: float = _ASK_S) -> int | None:
    """What process 0 passes as ``mine``; every process asks, the same number of times.

    Raises ``WaitTimeoutError`` if process 0 did not say in time.
    """
    key = f"shmstage/{what}/{next(_asked)}"
    store = coordinator_store()
    if jax.process_index() == 0:
        store.key_value_set(key, json.dumps(mine))
        return mine
    try:
        said = json.loads(store.blocking_key_value_get(key, int(timeout_s * 1000)))
    except Exception as error:  # XLA's own, whose kinds differ between versions
        raise WaitTimeoutError(f"process 0 did not say within {timeout_s:g} s what to {what}: {error}") from error
    return None if said is None else int(said)


def _not_joined(coordinator: str, rank: int, hosts: int, who: str, timeout_s: float) -> Exception:
    if rank == 0:
        return WaitTimeoutError(
            f"{who}: of ranks 1 to {hosts - 1} some have not come within {timeout_s:g} s; see their logs, and whether "
            "they reach this address, or raise start_timeout_s"
        )
    try:
        with socket.create_connection((_host_of(coordinator), _port_of(coordinator)), timeout=2.0):
            pass
    except OSError as error:
        return PeerLostError(f"{who}: rank 0 cannot be reached there after {timeout_s:g} s: {error}")
    return WaitTimeoutError(
        f"{who}: rank 0 is there, but not all of ranks 1 to {hosts - 1} have come within {timeout_s:g} s; see their "
        "logs, or raise start_timeout_s"
    )


def _check_free(bind: str, port: int, who: str) -> None:
    """JAX does not survive an address it cannot listen at."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            raise SettingsError(
                f"{who}: cannot listen at {bind}:{port}: {error.strerror}; choose another port"
            ) from None


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _port_of(address: str) -> int:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"coordinator = {address!r}: want address:port, the port between 1 and 65535")
    return int(port)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
