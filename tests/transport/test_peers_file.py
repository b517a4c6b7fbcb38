"""Peers files: read as they were written, by their owner alone, and strictly; no error shows a secret."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shmstage.errors import SettingsError
from shmstage.transport.curve import CurveKeys, new_keys
from shmstage.transport.peers_file import (
    LIMIT_NBYTES,
    Door,
    HostFile,
    HostPeers,
    HostsFile,
    read_host_file,
    read_hosts_file,
    write_host_file,
    write_hosts_file,
)

KEYS, OTHER = new_keys(), new_keys()
HOSTS = HostsFile(
    [
        HostPeers(
            rank, f"host{rank}", *(Door(f"tcp://10.0.0.{rank + 1}:{port}", OTHER.public) for port in range(4001, 4005))
        )
        for rank in range(3)
    ],
    KEYS,
)
HOST = HostFile(
    rank=1, hosts=3, name="host1", coordinator="host0:4000", bind="10.0.0.2", keys=KEYS, allowed=[OTHER.public],
    directory="/out/hosts/1", endpoint_file="/out/hosts/1/trainer.endpoint.json",
)  # fmt: skip


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_hosts_file(tmp_path / "hosts", HOSTS)
    write_host_file(tmp_path / "host", HOST)
    assert read_hosts_file(tmp_path / "hosts") == HOSTS
    assert read_host_file(tmp_path / "host") == HOST


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "host"
    before = os.umask(0)
    try:
        write_host_file(path, HOST)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="mode 0640.*is to be 0600"):
        read_host_file(path)


def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_host_file(tmp_path / "host", HOST)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(SettingsError, match="of user 12345"):
        read_host_file(tmp_path / "host")


def test_what_is_no_file_of_a_sane_length_is_refused(tmp_path: Path) -> None:
    write_host_file(tmp_path / "host", HOST)
    (tmp_path / "link").symlink_to(tmp_path / "host")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with open(os.open(tmp_path / "long", os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        file.truncate(LIMIT_NBYTES + 1)
    for name, why in [("gone", "No such file"), ("link", "cannot be read"), ("pipe", "no regular"), ("long", "longer")]:
        with pytest.raises(SettingsError, match=f"{name}.*{why}"):
            read_host_file(tmp_path / name)


def edited(value: Any, *path: str | int, to: object) -> Any:
    """A copy of the JSON value with one place changed; ``KeyError`` removes it."""
    copy = json.loads(json.dumps(value))
    place = copy
    for step in path[:-1]:
        place = place[step]
    if to is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return copy


@pytest.mark.parametrize(
    ("path", "to", "why"),
    [
        (("hosts",), [], "hosts is empty"),
        (("hosts",), {}, "hosts is to be a list, not dict"),
        (("hosts", 1), [], r"hosts\[1\] is to be an object"),
        (("hosts", 1, "rank"), 2, r"hosts\[1\].rank is 2"),
        (("hosts", 1, "rank"), True, "is to be int, not bool"),
        (("hosts", 1, "rank"), 1.0, "is to be int, not float"),
        (("hosts", 1, "name"), "host0", r"also that of hosts\[0\]"),
        (("hosts", 1, "name"), "", "is no name"),
        (("hosts", 1, "name"), "a\x1b[2J", "is no name"),
        (("hosts", 1, "store"), KeyError, r"hosts\[1\].store is missing"),
        (("hosts", 1, "extra"), 1, r"hosts\[1\].extra is unknown"),
        (("hosts", 2, "feed", "endpoint"), "tcp://10.0.0.1:4001", r"is also that of hosts\[0\].trainer"),
        (("hosts", 2, "feed", "endpoint"), "ipc:///tmp/x", r"hosts\[2\].feed.endpoint: .* is refused"),
        (("hosts", 2, "feed", "endpoint"), "tcp://0.0.0.0:4001", "no address of one host"),
        (("hosts", 2, "feed", "endpoint"), "tcp://10.0.0.3:65536", "is refused"),
        (("hosts", 2, "feed", "endpoint"), "tcp://10.0.0.3:0", "is refused"),
        (("hosts", 2, "aux", "key"), "short", r"hosts\[2\].aux.key 'short' is no public key"),
        pytest.param(
            ("client", "secret"), OTHER.secret, "client.public and client.secret are no pair", id="no pair"),
        (("client", "secret"), 5, "client.secret is to be str"),
    ],
)
def test_hosts_file_that_is_wrong_somewhere_is_refused_there(
    tmp_path: Path, path: tuple[str | int, ...], to: object, why: str
) -> None:
    write_hosts_file(tmp_path / "hosts", HOSTS)
    good = json.loads((tmp_path / "hosts").read_text())
    (tmp_path / "hosts").write_text(json.dumps(edited(good, *path, to=to)))
    with pytest.raises(SettingsError, match=why) as raised:
        read_hosts_file(tmp_path / "hosts")
    assert KEYS.secret not in str(raised.value) and OTHER.secret not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda h: replace(h, rank=3), "rank is 3 of 3 hosts"),
        (lambda h: replace(h, rank=-1), "rank is -1"),
        (lambda h: replace(h, coordinator="host0"), "no HOST:PORT"),
        (lambda h: replace(h, coordinator="host0:70000"), "no HOST:PORT"),
        (lambda h: replace(h, bind="host1"), "bind: .* is no address"),
        (lambda h: replace(h, bind="::"), "bind: .* is no address"),
        (lambda h: replace(h, allowed=[]), "nobody could command"),
        (lambda h: replace(h, allowed=["x"]), r"allowed\[0\]"),
        (lambda h: replace(h, keys=CurveKeys(OTHER.public, KEYS.secret)), "no pair of keys"),
        (lambda h: replace(h, directory="hosts/1"), "no absolute path"),
        (lambda h: replace(h, endpoint_file="/a\0b"), "no absolute path"),
        (lambda h: replace(h, allowed=OTHER.public), "allowed is to be a list"),
    ],
)
def test_host_file_that_would_be_refused_is_not_written(
    tmp_path: Path, change: Callable[[HostFile], HostFile], why: str
) -> None:
    with pytest.raises(SettingsError, match=why) as raised:
        write_host_file(tmp_path / "host", change(HOST))
    assert KEYS.secret not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
