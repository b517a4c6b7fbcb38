"""Events read back: several starts in one file, torn and damaged lines, a rotated beginning."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from shmstage.errors import SettingsError
from shmstage.events import EventWriter
from shmstage.records import open_regular
from shmstage.timeline import reading
from shmstage.timeline.reading import FOLDER, read_events


def written(out: Path, start: int, events: int, *, process: str = "trainer", limit_nbytes: int = 1 << 20) -> None:
    path = out / FOLDER / f"{process}.jsonl"
    writer = EventWriter(path, process=process, run="r", start=start, limit_nbytes=limit_nbytes)
    for number in range(events):
        writer.note("staged", 10 + number, 20 + number, step=1, index=number, request_id=f"1.{number}@0:2", nbytes=64)
    writer.close()


def test_each_start_of_a_process_has_its_own_events_and_clock(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    written(tmp_path, 2, 3)
    written(tmp_path, 1, 1, process="orchestrator")
    orchestrator, first, second = read_events(tmp_path)
    assert [(p.process, p.start, len(p.events)) for p in (orchestrator, first, second)] == [
        ("orchestrator", 1, 1), ("trainer", 1, 2), ("trainer", 2, 3),
    ]  # fmt: skip
    event = second.events[2]
    assert (event.t, event.end, event.event, event.lane, event.step, event.index, event.id, event.figures) == (
        12, 22, "staged", "uploads", 1, 2, "1.2@0:2", {"nbytes": 64},
    )  # fmt: skip
    assert second.wall_offset_ns > 0


def test_a_killed_writer_leaves_all_whole_lines_readable(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    path = tmp_path / FOLDER / "trainer.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    (process,) = read_events(tmp_path)
    assert len(process.events) == 1 and process.unread == 0


@pytest.mark.parametrize(
    "line",
    ["garbage", '{"t": 1.5, "event": "staged", "lane": "uploads"}', '{"event": "staged", "lane": "uploads"}',
     '{"t": 9, "end": 3, "event": "staged", "lane": "uploads"}', '{"t": 9, "event": 3, "lane": "uploads"}', "[]",
     *(f'{{"t": 9, "event": "dropped", "events": {number}}}' for number in ('"x"', "null", "[1]", "1e999", "-1"))],
)  # fmt: skip
def test_a_damaged_line_is_counted_and_the_others_are_read(tmp_path: Path, line: str) -> None:
    written(tmp_path, 1, 1)
    path = tmp_path / FOLDER / "trainer.jsonl"
    whole = path.read_text()
    path.write_text(whole + line + "\n" + whole.splitlines()[1] + "\n")
    (process,) = read_events(tmp_path)
    assert (len(process.events), process.unread) == (2, 1)


def test_events_of_another_schema_are_refused(tmp_path: Path) -> None:
    written(tmp_path, 1, 1)
    path = tmp_path / FOLDER / "trainer.jsonl"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 7'))
    with pytest.raises(SettingsError, match="schema 7"):
        read_events(tmp_path)


def test_a_process_that_began_a_new_file_is_one_start_whose_beginning_may_be_lost(tmp_path: Path) -> None:
    for _ in range(3):
        written(tmp_path, 1, 200, limit_nbytes=20_000)
    (process,) = read_events(tmp_path)
    assert process.beginning_lost and len(process.events) in (200, 400)


def test_without_events_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []


@pytest.mark.parametrize("gap", [False, True])
def test_a_file_that_is_renamed_while_it_is_read_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: bool
) -> None:
    written(tmp_path, 1, 3)
    path, opened = tmp_path / FOLDER / "trainer.jsonl", []

    def open_after_the_writer_went_on(part: Path) -> BinaryIO:
        if not opened:
            path.replace(path.with_suffix(".old.jsonl"))
            if not gap:
                written(tmp_path, 1, 2)
        opened.append(part)
        return open_regular(part)

    monkeypatch.setattr(reading, "open_regular", open_after_the_writer_went_on)
    (process,) = read_events(tmp_path)
    assert len(process.events) == (3 if gap else 5)


def test_an_old_file_without_a_new_one_is_read(tmp_path: Path) -> None:
    written(tmp_path, 1, 3)
    path = tmp_path / FOLDER / "trainer.jsonl"
    path.replace(path.with_suffix(".old.jsonl"))
    (process,) = read_events(tmp_path)
    assert len(process.events) == 3
