"""Who reads what, in words; the dead are not among them."""

from __future__ import annotations

import os

import pytest

from shmstage import _native
from shmstage.errors import EndpointBusyError
from shmstage.memory.cells import Cell, Cells
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, lock_path_of, lock_word, new_name

RUN = f"cells-test-{os.getpid()}"


def test_a_lock_and_its_word_name_each_other() -> None:
    for _ in range(200):
        path = os.path.join(SHM_DIR, new_name(RUN) + LOCK_SUFFIX)
        word = lock_word(path)
        assert 0 < word < 1 << 32
        assert lock_path_of(RUN, word) == path
    first = os.path.join(SHM_DIR, new_name(RUN)[:-5] + "00000" + LOCK_SUFFIX)
    assert (lock_word(first), lock_path_of(RUN, 1)) == (1, first)


@pytest.fixture
def headers() -> _native.Headers:
    return _native.Headers(bytearray(_native.POOL_HEADER_NBYTES + 3 * _native.SLOT_HEADER_NBYTES), 3, 1, 1)


def test_readers_are_told_by_the_slot_they_read(headers: _native.Headers) -> None:
    cells, me = Cells(headers, RUN), ProcessIdentity.create(RUN, "weights reader")
    first, second = Cell(headers, me, "p"), Cell(headers, me, "p")
    assert (first.take(), cells.newest_slot(), cells.readers()) == (None, None, {})
    cells.announce(2)
    assert (first.take(), second.take(), cells.newest_slot()) == (2, 2, 2)
    cells.announce(0)
    assert second.take() == 0
    told = cells.readers()
    assert sorted(told) == [0, 2]
    assert told[2] == [f"weights reader {os.getpid()} (lock {os.path.basename(me.lock_path)})"]
    first.put_back()
    assert sorted(cells.readers()) == [0]
    cells.announce_nothing()
    assert (first.take(), cells.newest_slot()) == (None, None)
    second.release()
    second.release()
    assert cells.readers() == {}
    me.close()


def test_the_same_slot_announced_again_is_another_publication(headers: _native.Headers) -> None:
    """Else a reader that looks again could take new content for what it took."""
    cells = Cells(headers, RUN)
    words = set()
    for _ in range(3):
        cells.announce(1)
        words.add(headers.latest())
    assert len(words) == 3


def test_the_cell_of_a_reader_that_is_dead_is_cleared(headers: _native.Headers) -> None:
    """S12"""
    cells, living = Cells(headers, RUN), ProcessIdentity.create(RUN, "weights reader")
    dead = ProcessIdentity.create(RUN, "weights reader")
    cells.announce(1)
    for identity in (living, dead):
        Cell(headers, identity, "p").take()
    dead.close()  # to everybody else a closed identity is a dead process
    assert len(cells.readers()[1]) == 1
    assert [headers.cell(index)[0] != 0 for index in range(3)] == [True, False, False]
    living.close()
    assert cells.readers() == {}


def test_a_pool_that_has_all_its_readers_says_so(headers: _native.Headers) -> None:
    me = ProcessIdentity.create(RUN, "weights reader")
    for _ in range(_native.MAX_CONSUMERS):
        Cell(headers, me, "p")
    with pytest.raises(EndpointBusyError, match="all 24 readers' cells of pool p are taken"):
        Cell(headers, me, "p")
    me.close()


def test_giving_a_place_up_twice_leaves_the_next_reader_of_the_same_process_alone(headers: _native.Headers) -> None:
    """S12: the place given up is another reader's, under the same identity, when it is given up again."""
    cells, me = Cells(headers, RUN), ProcessIdentity.create(RUN, "weights reader")
    first = Cell(headers, me, "p")
    first.release()
    second = Cell(headers, me, "p")
    cells.announce(1)
    assert second.take() == 1
    first.release()
    assert list(cells.readers()) == [1]
    second.release()
    assert cells.readers() == {}
    me.close()


def test_a_reader_whose_lock_lost_its_name_still_reads(headers: _native.Headers) -> None:
    """S43: somebody tidied /dev/shm up; nothing is written under it, and its death is noticed all the same."""
    cells, reader = Cells(headers, RUN), ProcessIdentity.create(RUN, "weights reader")
    cells.announce(1)
    Cell(headers, reader, "p").take()
    assert sorted(cells.readers()) == [1]
    os.unlink(reader.lock_path)
    assert sorted(cells.readers()) == [1]
    reader.close()
    assert cells.readers() == {}
    descriptors = len(os.listdir("/proc/self/fd"))
    cells.readers()
    cells.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
