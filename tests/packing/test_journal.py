"""What is journaled is there after any kill; what a kill tore is not; what was damaged is said and never used."""

from __future__ import annotations

import errno
import os
import stat
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_making import make_trajectory

from shmstage.errors import BundleError, TrajectoryError
from shmstage.packing.group_record import decode_group, encode_group
from shmstage.packing.journal import FIRST, Journal
from shmstage.packing.journal_segment import HEADER_NBYTES, MAGIC, frame
from shmstage.packing.journal_source import JournaledSource
from shmstage.packing.trajectory import Group, Trajectory

ALL_OPTIONAL = frozenset({"ref_logprobs", "returns", "old_values", "routing"})
FAST = settings(max_examples=60, derandomize=True, database=None, deadline=None)


def make_group(number: int, lengths: tuple[int, ...] = (3, 2)) -> Group:
    members = tuple(
        make_trajectory(length, name=f"t{number}.{i}", seed=number, group_id=f"g{number}", batch_index=number // 2,
                        policy_version=number)
        for i, length in enumerate(lengths)
    )  # fmt: skip
    return Group(f"g{number}", number // 2, members)


def facts(group: Group) -> tuple[object, ...]:
    return (
        group.group_id,
        group.batch_index,
        [
            (t.trajectory_id, t.group_id, t.batch_index, t.policy_version, t.experts, t.optional, t.digest)
            for t in group.trajectories
        ],
    )


def written(directory: Path, count: int, *, segment_nbytes: int = 1 << 20) -> list[Group]:
    groups = [make_group(i) for i in range(count)]
    journal = Journal(directory, segment_nbytes=segment_nbytes)
    assert [journal.append(group) for group in groups] == list(range(count))
    journal.close()
    return groups


def held(directory: Path, cursor: int = 0) -> list[tuple[object, ...]]:
    journal = Journal(directory)
    try:
        return [facts(group) for group in journal.read(cursor)]
    finally:
        journal.close()


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


# --- one group as bytes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@FAST
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([frozenset(), ALL_OPTIONAL, frozenset({"returns"})]),
                       st.sampled_from([8, 16])), max_size=5)
)  # fmt: skip
def test_any_group_comes_back_bit_for_bit(drawn: list[tuple[int, frozenset[str], int]]) -> None:
    members: list[Trajectory] = [
        make_trajectory(length, name=f"t{i}", seed=i, optional=optional, experts=experts, batch_index=3)
        for i, (length, optional, experts) in enumerate(drawn)
    ]
    group = Group("g", 3, tuple(members))
    again = decode_group(b"".join(encode_group(group)), Path("x"))
    assert facts(again) == facts(group)
    for a, b in zip(again.trajectories, members, strict=True):
        for name in ("loss_mask", "advantages", "old_logprobs", *b.optional):
            assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True)


def test_a_group_that_could_not_be_read_back_is_refused_at_once() -> None:
    with pytest.raises(TrajectoryError, match="batch -1"):
        encode_group(Group("g", -1, ()))
    with pytest.raises(TrajectoryError, match="id is 1 to 200"):
        encode_group(Group("", 0, ()))


@pytest.mark.slow
@FAST
@given(st.data())
def test_no_altered_record_is_taken_for_a_group(data: st.DataObject) -> None:
    """The hash of the frame is not looked at here: what gets past it must still be refused in words."""
    good = b"".join(encode_group(make_group(1)))
    kind = data.draw(st.sampled_from(["flip", "cut", "noise", "longer"]))
    if kind == "flip":
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :]
    elif kind == "cut":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    elif kind == "longer":
        bad = good + b"x"
    else:
        bad = data.draw(st.binary(max_size=80))
    try:
        got = decode_group(bad, Path("here"))
    except BundleError as error:
        assert "here" in str(error)
        assert "another --out" in str(error)
    else:
        # ids and numbers are protected by the frame alone; arrays and their digests are not altered in silence
        assert [t.digest for t in got.trajectories] == [t.digest for t in make_group(1).trajectories]


# --- the file ---------------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_from_any_cursor_in_any_process(tmp_path: Path) -> None:
    groups = written(tmp_path / "j", 7, segment_nbytes=1500)
    assert len(segments(tmp_path / "j")) > 2
    for cursor in range(8):
        assert held(tmp_path / "j", cursor) == [facts(group) for group in groups[cursor:]]
    journal = Journal(tmp_path / "j")
    assert (journal.count, journal.begin) == (7, 0)
    assert journal.append(make_group(7)) == 7
    journal.close()
    assert len(held(tmp_path / "j")) == 8


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    written(tmp_path / "j", 3, segment_nbytes=1)
    Journal(tmp_path / "j").keep_first(make_group(0))
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "j").iterdir()} == {0o600}


@pytest.mark.slow
def test_a_kill_at_any_byte_of_the_last_record_loses_that_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = written(tmp_path / "j", 3)
    for sync in ("fsync", "fdatasync"):  # thousands of them, and no power is cut here
        monkeypatch.setattr(os, sync, lambda descriptor: None)
    (file,) = segments(tmp_path / "j")
    whole = file.read_bytes()
    two = len(whole) - len(b"".join([frame(2, encode_group(groups[2])), *encode_group(groups[2])]))
    for end in range(two, len(whole)):
        file.write_bytes(whole[:end])
        journal = Journal(tmp_path / "j")
        assert journal.count == 2, end
        # what comes next overwrites the torn tail: nothing of it may shine through
        assert journal.append(make_group(9, (1,))) == 2
        assert [facts(group) for group in journal.read(0)] == [facts(g) for g in (*groups[:2], make_group(9, (1,)))]
        journal.close()
        assert len(held(tmp_path / "j")) == 3


@pytest.mark.parametrize("tail", [b"\0" * 3000, b"\0", os.urandom(500), b"shmjrn1\n" * 40])
def test_a_tail_of_anything_but_whole_records_is_dropped(tmp_path: Path, tail: bytes) -> None:
    """A power cut can leave the length but not the content."""
    groups = written(tmp_path / "j", 2)
    (file,) = segments(tmp_path / "j")
    length = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(tail)
    assert held(tmp_path / "j") == [facts(group) for group in groups]
    assert file.stat().st_size == length


def test_a_last_record_of_right_length_and_wrong_content_is_dropped(tmp_path: Path) -> None:
    groups = written(tmp_path / "j", 2)
    (file,) = segments(tmp_path / "j")
    data = bytearray(file.read_bytes())
    data[-400:] = bytes(400)
    file.write_bytes(data)
    assert held(tmp_path / "j") == [facts(groups[0])]


@pytest.mark.parametrize("where", ["magic", "number", "length", "check", "body"])
@pytest.mark.parametrize("record", [0, 1])
def test_damage_before_the_last_record_is_an_error_and_nothing_is_dropped(
    tmp_path: Path, where: str, record: int
) -> None:
    groups = written(tmp_path / "j", 3)
    (file,) = segments(tmp_path / "j")
    size = len(b"".join([frame(0, encode_group(groups[0])), *encode_group(groups[0])]))
    begin = {"magic": 0, "number": 8, "length": 20, "check": 44, "body": 100}[where] + record * size
    data = bytearray(file.read_bytes())
    data[begin] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"damaged.*another --out"):
        held(tmp_path / "j")
    assert file.read_bytes() == data


@pytest.mark.parametrize("length", [2, 2**31, 2**32 + 1, 2**63, 2**64 - 48, 2**64 - 1])
def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path, length: int) -> None:
    """S75, S88: its own hash fits, so the size of the file alone can tell."""
    (tmp_path / "j").mkdir()
    file = tmp_path / "j" / "segment-000000000000.journal"
    front = struct.pack("<8sQQ16s", MAGIC, 0, length, xxhash.xxh3_128_digest(b"x"))
    file.write_bytes(front + struct.pack("<Q", xxhash.xxh3_64_intdigest(front)) + b"x")
    tracemalloc.start()
    try:
        assert held(tmp_path / "j") == []
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_damaged_length_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    file = tmp_path / "j" / "segment-000000000000.journal"
    huge = frame(0, [b"x"]).replace((1).to_bytes(8, "little"), (2**63).to_bytes(8, "little"), 1)
    file.write_bytes(huge + b"x")
    assert held(tmp_path / "j") == []


def test_a_segment_that_is_gone_is_missed(tmp_path: Path) -> None:
    written(tmp_path / "j", 6, segment_nbytes=1500)
    segments(tmp_path / "j")[1].unlink()
    with pytest.raises(BundleError, match="ends before group"):
        held(tmp_path / "j")


def test_release_removes_whole_segments_and_the_count_survives(tmp_path: Path) -> None:
    groups = written(tmp_path / "j", 6, segment_nbytes=1)
    journal = Journal(tmp_path / "j", segment_nbytes=1)
    journal.release(4)
    assert (journal.begin, len(segments(tmp_path / "j"))) == (4, 2)
    with pytest.raises(BundleError, match="group 3 was released, the first one held is 4"):
        list(journal.read(3))
    assert [facts(group) for group in journal.read(4)] == [facts(group) for group in groups[4:]]
    journal.release(6)
    assert sum(file.stat().st_size for file in segments(tmp_path / "j")) == 0
    journal.close()
    again = Journal(tmp_path / "j")
    assert (again.count, again.begin) == (6, 6)
    assert again.append(make_group(6)) == 6
    again.release(2)  # older than what is released already
    assert again.begin == 6
    again.close()


def test_a_segment_is_kept_while_one_of_its_groups_is_needed(tmp_path: Path) -> None:
    groups = written(tmp_path / "j", 6, segment_nbytes=1500)
    journal = Journal(tmp_path / "j")
    second = int(segments(tmp_path / "j")[1].name[8:20])
    journal.release(second - 1)
    assert journal.begin == 0
    journal.release(second)
    assert journal.begin == second > 1
    assert [facts(group) for group in journal.read(second)] == [facts(group) for group in groups[second:]]
    journal.close()


def test_a_reader_goes_on_over_appends_and_releases(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", segment_nbytes=1500)
    for i in range(5):
        journal.append(make_group(i))
    reading = journal.read(0)
    seen = [facts(next(reading))]
    for i in range(5, 9):
        journal.append(make_group(i))
    journal.release(1)
    seen += [facts(group) for group in reading]
    assert seen == [facts(make_group(i)) for i in range(9)]
    journal.close()


def test_a_full_disk_is_an_error_with_a_remedy_and_leaves_no_torn_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = written(tmp_path / "j", 1)
    journal = Journal(tmp_path / "j")
    real, calls = os.pwrite, []

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            return real(descriptor, bytes(data)[:7], offset)  # a short write is gone on with
        if len(calls) < 4:
            return real(descriptor, data, offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(BundleError, match=r"No space left.*free space, or set checkpoint_every"):
        journal.append(make_group(1))
    monkeypatch.undo()
    assert journal.append(make_group(2)) == 1
    journal.close()
    assert held(tmp_path / "j") == [facts(groups[0]), facts(make_group(2))]


def test_a_group_is_synced_before_it_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    counts: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: counts.append(journal.count))
    journal.append(make_group(0))
    journal.append(make_group(1))
    assert counts == [0, 1]
    journal.close()


def test_a_link_in_place_of_a_segment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "j" / "segment-000000000000.journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="cannot be opened"):
        Journal(tmp_path / "j")


# --- a live source -----------------------------------------------------------------------------------------------


class Live:
    """Gives each group once; notes the cursors it was asked for."""

    replayable = False

    def __init__(self, groups: list[Group], fail_after: int | None = None) -> None:
        self.left = list(groups)
        self.cursors: list[int] = []
        self.fail_after = fail_after

    def groups(self, cursor: int) -> Iterator[Group]:
        self.cursors.append(cursor)
        while self.left:
            if self.fail_after is not None and self.fail_after == 0:
                raise RuntimeError("the rollout engine is gone")
            if self.fail_after is not None:
                self.fail_after -= 1
            yield self.left.pop(0)


def test_a_live_source_is_journaled_before_it_is_seen_and_replayed_from_any_cursor(tmp_path: Path) -> None:
    groups = [make_group(i) for i in range(6)]
    live = Live(groups)
    journal = Journal(tmp_path / "j")
    source = JournaledSource(live, journal)
    reading = source.groups(0)
    for number in range(3):
        assert facts(next(reading)) == facts(groups[number])
        assert journal.count == number + 1
    # another begins while the first has not ended, as after a trainer died
    assert [facts(group) for group in source.groups(1)] == [facts(group) for group in groups[1:]]
    assert [facts(group) for group in reading] == [facts(group) for group in groups[3:]]
    assert live.cursors == [0]
    journal.close()


def test_a_new_process_asks_the_live_source_for_what_is_not_journaled(tmp_path: Path) -> None:
    groups = [make_group(i) for i in range(6)]
    journal = Journal(tmp_path / "j")
    reading = JournaledSource(Live(groups), journal).groups(0)
    seen = [facts(next(reading)) for _ in range(4)]
    journal.release(2)
    journal.close()
    live = Live(groups[4:])
    journal = Journal(tmp_path / "j")
    assert seen[3:] + [facts(g) for g in groups[4:]] == [facts(g) for g in JournaledSource(live, journal).groups(3)]
    assert live.cursors == [4]
    journal.close()


def test_a_journal_that_ends_before_the_place_to_go_on_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "j", 2)
    journal = Journal(tmp_path / "j")
    source = JournaledSource(Live([make_group(2)]), journal)
    with pytest.raises(BundleError, match=r"up to number 1, and number 3 is to be read next.*another --out"):
        next(source.groups(3))
    assert len(list(source.groups(2))) == 1
    journal.close()


def test_the_first_trajectory_is_known_when_its_group_is_released(tmp_path: Path) -> None:
    groups = [Group("none", 0, ()), make_group(1), make_group(2)]
    journal = Journal(tmp_path / "j", segment_nbytes=1)
    source = JournaledSource(Live(groups), journal)
    assert len(list(source.groups(0))) == 3
    journal.release(3)
    journal.close()
    (tmp_path / "j" / f".{FIRST}.1").write_bytes(b"half")
    again = Journal(tmp_path / "j")
    first = JournaledSource(Live([]), again).first()
    assert first is not None
    assert facts(first) == facts(groups[1])
    assert not list((tmp_path / "j").glob(".*"))
    again.close()


def test_looking_for_the_first_trajectory_loses_nothing(tmp_path: Path) -> None:
    groups = [Group("none", 0, ()), make_group(1), make_group(2)]
    journal = Journal(tmp_path / "j")
    source = JournaledSource(Live(groups), journal)
    first = source.first()
    assert first is not None
    assert facts(first) == facts(groups[1])
    assert [facts(group) for group in source.groups(0)] == [facts(group) for group in groups]
    journal.close()


def test_the_error_of_a_live_source_comes_again_and_does_not_look_like_its_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    source = JournaledSource(Live([make_group(0), make_group(1)], fail_after=1), journal)
    for _ in range(2):
        reading = source.groups(0)
        assert facts(next(reading)) == facts(make_group(0))
        with pytest.raises(RuntimeError, match="rollout engine"):
            next(reading)
    journal.close()


def test_a_header_has_the_size_the_table_says() -> None:
    assert HEADER_NBYTES == 48 == len(frame(0, []))
