"""The metrics' door: opened before the run or refused, closed with it, and whoever stands in it holds nobody up."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_metrics import labelled, line, samples_of

from shmstage.errors import MissingExtraError, SettingsError
from shmstage.launch import metrics_server
from shmstage.launch.metrics_server import MAX_CONNECTIONS, Metrics, serving
from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.settings import Settings

DEADLINE_S = 20.0


def complete(tmp_path: Path, **settings: Any) -> Settings:
    return completed(Settings(out=tmp_path / "out", **{"run": "metered", "metrics_port": 0, **settings}))


@contextlib.contextmanager
def served(tmp_path: Path, said: list[str] | None = None) -> Iterator[Metrics]:
    (tmp_path / "out").mkdir(exist_ok=True)
    with serving(complete(tmp_path), [].append if said is None else said.append) as metrics:
        yield metrics


def scrape(address: dict[str, Any] | None) -> str:
    assert address is not None
    url = f"http://{address['host']}:{address['port']}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return str(response.read().decode())


def connect(address: dict[str, Any] | None) -> socket.socket:
    assert address is not None
    return socket.create_connection((address["host"], address["port"]), timeout=DEADLINE_S)


def write(out: Path, *steps: int) -> None:
    with (out / "steps.jsonl").open("a") as file:
        file.writelines(json.dumps(line(step)) + "\n" for step in steps)


def test_steps_are_shown_as_they_come_and_those_before_the_start_are_not_counted(tmp_path: Path) -> None:
    with served(tmp_path) as metrics:
        write(tmp_path / "out", 1, 2)
        metrics.begin()
        metrics.poll()
        assert samples_of(scrape(metrics.address))[labelled("steps_total")] == 0
        write(tmp_path / "out", 3)
        metrics.poll()
        metrics.poll()
        found = samples_of(scrape(metrics.address))
        assert (found[labelled("steps_total")], found[labelled("step")]) == (1, 3)


def test_an_odd_step_line_is_said_once_and_those_after_it_are_shown(tmp_path: Path) -> None:
    said: list[str] = []
    with served(tmp_path, said) as metrics:
        for text in ("no json\n", "{}\n"):
            with (tmp_path / "out" / "steps.jsonl").open("a") as file:
                file.write(text)
            metrics.poll()
        write(tmp_path / "out", 1)
        metrics.poll()
        assert samples_of(scrape(metrics.address))[labelled("steps_total")] == 1
    assert [text for text in said if "some steps" in text] == said[1:]
    assert len(said) == 2


def test_without_a_port_nothing_listens(tmp_path: Path) -> None:
    with serving(complete(tmp_path, metrics_port="off"), [].append) as metrics:
        metrics.begin()
        metrics.poll()
        assert metrics.address is None


def test_a_port_in_use_is_refused_before_anything_of_an_earlier_run_is_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name, text in (("run.json", '{"run": "metered", "settings": {}}'), ("trainer.log", "of yesterday")):
        (tmp_path / "out" / name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"metrics_port = {port} is in use on 127.0.0.1; choose another"):
            run(complete(tmp_path, metrics_port=port), Quiet())
    assert (tmp_path / "out" / "trainer.log").read_text() == "of yesterday"


class Quiet:
    def poll(self) -> None:
        return


def test_a_missing_extra_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shmstage\[metrics\]'") as raised:
        run(complete(tmp_path), Quiet())
    assert raised.value.exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "a b", "x" * 300])
def test_an_address_that_is_not_this_machines_is_refused(host: str, tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsError, match="metrics_host = .*give"),
        serving(complete(tmp_path, metrics_host=host), [].append),
    ):
        pass


def test_the_port_is_free_again_afterwards_whoever_still_holds_a_connection(tmp_path: Path) -> None:
    """Its threads are gone too: the fixture of every test looks."""
    with served(tmp_path) as metrics:
        silent = connect(metrics.address)
        half = connect(metrics.address)
        half.sendall(b"GET /metrics HT")
        scrape(metrics.address)
    with silent, half:
        assert silent.recv(1) == b""
    with pytest.raises(OSError):
        connect(metrics.address)
    assert metrics.address is not None
    with serving(complete(tmp_path, metrics_port=metrics.address["port"]), [].append):
        pass


@pytest.mark.parametrize("sent", [b"", b"GET /me", b"GET /metrics HTTP/1.0\r\n\r\n"])
def test_who_goes_away_in_the_middle_is_no_matter_for_the_log(sent: bytes, tmp_path: Path) -> None:
    said: list[str] = []
    with served(tmp_path, said) as metrics:
        client = connect(metrics.address)
        client.sendall(sent)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        client.close()
        assert "shmstage_steps_total" in scrape(metrics.address)
    assert len(said) == 1  # where it listens


@pytest.mark.parametrize(
    "sent", [b"\x00\xff\xfe garbage\r\n\r\n", b"POST /metrics HTTP/1.1\r\n\r\n", b"GET " + b"x" * 70000, b"\r\n"]
)
def test_what_is_no_request_is_answered_or_dropped_and_the_next_one_is_served(sent: bytes, tmp_path: Path) -> None:
    said: list[str] = []
    with served(tmp_path, said) as metrics:
        with connect(metrics.address) as client, contextlib.suppress(ConnectionError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(4096)
            assert answer == b"" or answer.startswith((b"HTTP/1.0 4", b"HTTP/1.0 5", b"<!DOCTYPE"))
        assert "shmstage_steps_total" in scrape(metrics.address)
    assert len(said) == 1  # where it listens


@pytest.mark.slow
def test_one_connection_too_many_is_closed_and_those_that_only_hang_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_S", 10 * DEADLINE_S)
    with served(tmp_path) as metrics, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(metrics.address)) for _ in range(MAX_CONNECTIONS)]
        with connect(metrics.address) as one_more:
            assert one_more.recv(1) == b""
        monkeypatch.setattr(metrics_server, "CONNECTION_S", 0.0)
        for client in silent:
            assert client.recv(1) == b""
        monkeypatch.setattr(metrics_server, "CONNECTION_S", 10 * DEADLINE_S)
        assert "shmstage_steps_total" in scrape(metrics.address)
