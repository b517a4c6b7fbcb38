"""How a child of the launcher is told its settings, and how it says why it ended."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmstage.child import Lifeline, run_child
from shmstage.errors import PeerLostError
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
    seen: list[tuple[Settings, int]] = []

    def serve(given: Settings, lifeline: Lifeline, epoch: int) -> None:
        seen.append((given, epoch))

    assert run(monkeypatch, serve, "--settings-file", str(tmp_path / "run.json"), "--epoch", "3") == 0
    assert run(monkeypatch, serve, "--settings", settings.model_dump_json()) == 0
    assert seen == [(settings, 3), (settings, 1)]
    with pytest.raises(SystemExit):
        run(monkeypatch, serve)


def test_the_reason_of_an_end_is_left_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(settings: Settings, lifeline: Lifeline, epoch: int) -> None:
        raise PeerLostError("the orchestrator is dead")

    assert run(monkeypatch, serve, "--settings", Settings(run="r", out=tmp_path).model_dump_json()) == 6
    assert isinstance(read_failure(tmp_path, "trainer"), PeerLostError)
