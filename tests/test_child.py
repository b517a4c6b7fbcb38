"""How a child of the launcher is told its settings, and how it says why it ended."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmstage.child import Lifeline, run_child
from shmstage.errors import PeerLostError, SettingsError
from shmstage.records import read_failure
from shmstage.settings import Settings


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(monkeypatch: pytest.MonkeyPatch, serve: object, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["child", *arguments])
    return run_child("trainer", serve)  # type: ignore[arg-type]


def test_settings_come_from_a_run_file_or_as_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(run="r", out=tmp_path, rows=7)
    (tmp_path / "run.json").write_text(json.dumps({"pids": {}, "settings": json.loads(settings.model_dump_json())}))
    seen: list[tuple[Settings, int, Path | None]] = []

    def serve(given: Settings, lifeline: Lifeline, epoch: int, peers_file: Path | None) -> None:
        seen.append((given, epoch, peers_file))

    assert run(monkeypatch, serve, "--settings-file", str(tmp_path / "run.json"), "--epoch", "3") == 0
    assert run(monkeypatch, serve, "--settings", settings.model_dump_json(), "--peers-file", "hosts.json") == 0
    assert seen == [(settings, 3, None), (settings, 1, Path("hosts.json"))]
    with pytest.raises(SystemExit):
        run(monkeypatch, serve)


def test_the_reason_of_an_end_is_left_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(settings: Settings, lifeline: Lifeline, epoch: int, peers_file: Path | None) -> None:
        raise PeerLostError("the orchestrator is dead")

    assert run(monkeypatch, serve, "--settings", Settings(run="r", out=tmp_path).model_dump_json()) == 6
    assert isinstance(read_failure(tmp_path, "trainer"), PeerLostError)


def test_a_host_of_several_leaves_the_reason_in_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts" / "1").mkdir(parents=True)

    def serve(settings: Settings, lifeline: Lifeline, epoch: int, peers_file: Path | None) -> None:
        raise PeerLostError("rank 0 is gone")

    def records_in(settings: Settings, peers_file: Path | None) -> Path:
        assert peers_file == Path("host.json")
        return settings.out_dir / "hosts" / "1"

    settings = Settings(run="r", out=tmp_path).model_dump_json()
    monkeypatch.setattr("sys.argv", ["child", "--settings", settings, "--peers-file", "host.json"])
    assert run_child("trainer", serve, records_in) == 6
    assert isinstance(read_failure(tmp_path / "hosts" / "1", "trainer"), PeerLostError)
    assert read_failure(tmp_path, "trainer") is None


def test_where_the_place_of_the_record_cannot_be_read_the_reason_is_left_in_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(settings: Settings, lifeline: Lifeline, epoch: int, peers_file: Path | None) -> None:
        raise SettingsError("host.json is no host file")

    def records_in(settings: Settings, peers_file: Path | None) -> Path:
        raise SettingsError("host.json is no host file")

    monkeypatch.setattr("sys.argv", ["child", "--settings", Settings(run="r", out=tmp_path).model_dump_json()])
    assert run_child("trainer", serve, records_in) == 2
    assert isinstance(read_failure(tmp_path, "trainer"), SettingsError)
