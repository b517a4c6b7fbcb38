"""Whom a process of a run on several hosts talks to, and with which keys: a JSON file from its launcher.

Two kinds. ``HostsFile`` is the orchestrator's: the doors of every host. ``HostFile`` is a trainer's: its place among
the hosts, its keys, and whom to let in. A file holds a secret key: it is mode 0600 and of this user, or refused.
Whoever starts the process writes it and removes it; the process reads it once, at its start.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from shmstage.errors import SettingsError, TransportError, named, shown
from shmstage.records import parse_record, write_json
from shmstage.transport.curve import CurveKeys, are_a_pair, is_key
from shmstage.transport.endpoints import check_tcp_endpoint, tcp_base

LIMIT_NBYTES = 4 << 20
"""Of one file: doors and keys of one host take about 700 bytes, so this is for 6,000 hosts."""

_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252}):([1-9][0-9]{0,4})", re.ASCII)
_NAME_CHARACTERS = 255
_REMEDY = "have the launcher write it anew"


@dataclass(frozen=True)
class Door:
    """Where a server listens, and the public key that it proves."""

    endpoint: str
    key: str


@dataclass(frozen=True)
class HostPeers:
    """The servers of one host: its trainer, its agent's two doors, its store. ``name`` is for errors."""

    rank: int
    name: str
    trainer: Door
    feed: Door
    aux: Door
    store: Door


@dataclass(frozen=True)
class HostsFile:
    """All hosts in the order of their ranks, and the orchestrator's own keys, which every door lets in."""

    hosts: list[HostPeers]
    client: CurveKeys


@dataclass(frozen=True)
class HostFile:
    """A trainer's place: it is ``rank`` of ``hosts``, listens at address ``bind`` and lets ``allowed`` in.

    ``coordinator`` (``host:port``) is where ``jax.distributed`` meets. ``directory`` is the trainer's own below OUT.
    Once it listens it says so in ``endpoint_file``: ``{"endpoint": ..., "pid": ...}``.
    """

    rank: int
    hosts: int
    name: str
    coordinator: str
    bind: str
    keys: CurveKeys
    allowed: list[str]
    directory: str
    endpoint_file: str


Peers = TypeVar("Peers", HostsFile, HostFile)


def read_hosts_file(path: Path) -> HostsFile:
    """The orchestrator's. Raises ``SettingsError`` naming file, field and remedy; no text shows a secret."""
    return _read(path, HostsFile)


def read_host_file(path: Path) -> HostFile:
    """A trainer's. Raises as ``read_hosts_file``."""
    return _read(path, HostFile)


def write_hosts_file(path: Path, peers: HostsFile) -> None:
    """In one piece, mode 0600. Raises ``SettingsError`` for what would not be read."""
    _write(path, peers)


def write_host_file(path: Path, peers: HostFile) -> None:
    """In one piece, mode 0600. Raises ``SettingsError`` for what would not be read."""
    _write(path, peers)


def _write(path: Path, peers: HostsFile | HostFile) -> None:
    value = dataclasses.asdict(peers)
    try:
        _built(type(peers), value, "")
        _check(peers)
        write_json(path, value, mode=0o600)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}; make room or choose another place") from error
    except (ValueError, TransportError) as error:
        raise SettingsError(f"{path} would be refused: {error}") from None


def _read(path: Path, kind: type[Peers]) -> Peers:
    where = named(str(path), 300)
    try:
        peers = _built(kind, parse_record(_private_bytes(path)), "")
        _check(peers)
    except OSError as error:
        raise SettingsError(f"peers file {where} cannot be read: {error.strerror}; {_REMEDY}") from None
    except (ValueError, TransportError) as error:
        raise SettingsError(f"peers file {where} is refused: {error}; {_REMEDY}") from None
    assert isinstance(peers, kind)
    return peers


def _private_bytes(path: Path) -> bytes:
    """Raises ``OSError``, or ``ValueError`` where somebody else may have read or written the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(
                f"it belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}, but holds a secret "
                f"key of user {os.getuid()}; the mode is to be 0600"
            )
        content = file.read(min(found.st_size, LIMIT_NBYTES) + 1)  # a buffer of what is asked for is made
    if len(content) > LIMIT_NBYTES:
        raise ValueError(f"it is longer than {LIMIT_NBYTES} bytes")
    return content


def _built(kind: Any, value: object, where: str) -> Any:
    """``value`` as a ``kind``: exactly its fields, exactly their types. Raises ``ValueError`` without the value."""
    if get_origin(kind) is list:
        if type(value) is not list:
            raise ValueError(f"{where} is to be a list, not {type(value).__name__}")
        return [_built(get_args(kind)[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if kind in (int, str):
        if type(value) is not kind:
            raise ValueError(f"{where} is to be {kind.__name__}, not {type(value).__name__}")
        return value
    if type(value) is not dict:
        raise ValueError(f"{where} is to be an object, not {type(value).__name__}")
    hints = get_type_hints(kind)
    dotted = f"{where}." if where else ""
    for name in hints.keys() - value.keys():
        raise ValueError(f"{dotted}{name} is missing")
    for name in value.keys() - hints.keys():
        raise ValueError(f"{dotted}{named(name, 40)} is unknown")
    return kind(**{name: _built(hint, value[name], f"{dotted}{name}") for name, hint in hints.items()})


def _check(peers: HostsFile | HostFile) -> None:
    """Raises ``ValueError`` or ``TransportError`` for the first thing that is wrong."""
    for fault in _faults_of_hosts(peers) if isinstance(peers, HostsFile) else _faults_of_host(peers):
        raise ValueError(fault)


def _faults_of_hosts(peers: HostsFile) -> Iterator[str]:
    if not peers.hosts:
        yield "hosts is empty"
    if not are_a_pair(peers.client):
        yield "client.public and client.secret are no pair of keys"
    doors: dict[str, str] = {}
    names: dict[str, int] = {}
    for place, host in enumerate(peers.hosts):
        if host.rank != place:
            yield f"hosts[{place}].rank is {shown(host.rank)}; hosts stand in the order of their ranks, from 0"
        yield from _faults_of_name(host.name, f"hosts[{place}].name")
        if (other := names.setdefault(host.name, place)) != place:
            yield f"hosts[{place}].name {shown(host.name)} is also that of hosts[{other}]"
        for role, door in (("trainer", host.trainer), ("feed", host.feed), ("aux", host.aux), ("store", host.store)):
            where = f"hosts[{place}].{role}"
            yield from _faults_of_door(door, where)
            if (known := doors.setdefault(door.endpoint, where)) != where:
                yield f"{where}.endpoint {door.endpoint} is also that of {known}"


def _faults_of_door(door: Door, where: str) -> Iterator[str]:
    try:
        check_tcp_endpoint(door.endpoint)
    except TransportError as error:
        yield f"{where}.endpoint: {error}"
    if not is_key(door.key):
        yield f"{where}.key {shown(door.key)} is no public key"


def _faults_of_host(peers: HostFile) -> Iterator[str]:
    if not 0 <= peers.rank < peers.hosts:
        yield f"rank is {shown(peers.rank)} of {shown(peers.hosts)} hosts; ranks are 0 to hosts - 1"
    yield from _faults_of_name(peers.name, "name")
    found = _HOST_AND_PORT.fullmatch(peers.coordinator)
    if found is None or int(found[1]) > 65535:
        yield f"coordinator {shown(peers.coordinator)} is no HOST:PORT"
    try:
        tcp_base(peers.bind)
    except TransportError as error:
        yield f"bind: {error}"
    if not are_a_pair(peers.keys):
        yield "keys.public and keys.secret are no pair of keys"
    if not peers.allowed:
        yield "allowed is empty: nobody could command this trainer"
    for place, public in enumerate(peers.allowed):
        if not is_key(public):
            yield f"allowed[{place}] {shown(public)} is no public key"
    for name, path in (("directory", peers.directory), ("endpoint_file", peers.endpoint_file)):
        if not path.startswith("/") or "\0" in path:
            yield f"{name} {shown(path)} is no absolute path"


def _faults_of_name(name: str, where: str) -> Iterator[str]:
    if not 0 < len(name) <= _NAME_CHARACTERS or not name.isprintable():
        yield f"{where} {shown(name)} is no name: 1 to {_NAME_CHARACTERS} characters that can be printed"
