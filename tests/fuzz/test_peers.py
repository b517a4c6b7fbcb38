"""Peers files from a failing disk or another release, and whatever connects to a port between hosts."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz, survives
from hypothesis import given
from hypothesis import strategies as st
from mutations import Rng, hostile_json, mutated
from transport.forwarder import hear_out

from shmstage.errors import SettingsError, ShmstageError
from shmstage.transport.curve import ClientAuth, ServerAuth, new_keys
from shmstage.transport.peers_file import (
    Door,
    HostFile,
    HostPeers,
    HostsFile,
    read_host_file,
    read_hosts_file,
    write_host_file,
    write_hosts_file,
)
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel

pytestmark = pytest.mark.slow

CAP_NBYTES = 4_000_000
WAIT_S = 20.0
KEYS, CLIENT = new_keys(), new_keys()
DOORS = [Door(f"tcp://10.0.0.{number}:4000", CLIENT.public) for number in range(1, 9)]
HOSTS = HostsFile([HostPeers(0, "host0", *DOORS[:4]), HostPeers(1, "host1", *DOORS[4:])], KEYS)
HOST = HostFile(1, 2, "host1", "host0:4000", "10.0.0.5", KEYS, [CLIENT.public], "/out/hosts/1", "/out/e.json")

#: file → (what is in it, who reads it, who writes it)
FILES: dict[str, tuple[Any, Callable[[Path], Any], Callable[[Path, Any], None]]] = {
    "hosts": (HOSTS, read_hosts_file, write_hosts_file),
    "host": (HOST, read_host_file, write_host_file),
}
rngs = st.integers(0, 1 << 32).map(Rng)


def text_of(value: object, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutated(json.dumps(value, indent=1).encode(), rng)
    return hostile_json(value, rng)


@pytest.mark.parametrize("kind", FILES)
@fuzz
@given(rngs)
def test_a_damaged_peers_file_is_read_or_bad_input(tmp_path_factory: Any, kind: str, rng: random.Random) -> None:
    value, read, write = FILES[kind]
    folder: Path = tmp_path_factory.getbasetemp() / "peers"
    folder.mkdir(exist_ok=True)
    path = folder / kind
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        file.write(text_of(asdict(value), rng))
    outcome = survives(lambda: read(path), SettingsError, cap_nbytes=CAP_NBYTES)
    if isinstance(outcome, ShmstageError):
        assert KEYS.secret not in str(outcome)
    else:  # what was taken can be written, and is read as the same
        write(path, outcome)
        assert read(path) == outcome


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
COMMANDS = b"\4\xc8\5HELLO\1\0" + b"\0" * 72 + b"key!" * 8 + b"nonce!!!" + b"box!" * 20 + b"\4\5\4PING\0\0" + b"\1\3abc"


@fuzz
@given(st.lists(rngs, min_size=8, max_size=8))
def test_whatever_a_stranger_says_the_next_client_is_served(strangers: list[random.Random]) -> None:
    server = ZmqServerChannel.bind_tcp("127.0.0.1", ServerAuth(KEYS, frozenset([CLIENT.public])))
    port = int(server.endpoint.rsplit(":", 1)[1])
    for rng in strangers:
        said = mutated(rng.choice([GREETING + COMMANDS, COMMANDS]), rng)
        hear_out(port, rng.choice([b"", GREETING]) + said)
    channel = ZmqChannel.connect_tcp(server.endpoint, ClientAuth(KEYS.public, CLIENT))
    assert channel.send(b"question")
    received = server.recv(WAIT_S)
    assert received is not None and received[1] == b"question"
    channel.close()
    server.close()
