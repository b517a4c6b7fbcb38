"""Readers' cells on bare headers: claim, take, put back, release."""

from __future__ import annotations

import threading

import pytest

from shmstage import _native

NBYTES = _native.POOL_HEADER_NBYTES + 3 * _native.SLOT_HEADER_NBYTES


def _headers() -> _native.Headers:
    return _native.Headers(bytearray(NBYTES), 3, 1, 1)


def test_a_cell_names_what_was_newest_when_it_was_taken() -> None:
    headers = _headers()
    cell = headers.claim_cell(77)
    assert (headers.latest(), headers.take_latest(cell)) == (0, 0)
    headers.set_latest(5)
    assert headers.take_latest(cell) == 5
    headers.set_latest(6)
    assert headers.cell(cell) == (77, 5)
    headers.put_back(cell)
    assert headers.cell(cell) == (77, 0)


def test_a_cell_is_released_only_in_the_name_of_its_reader_and_is_empty_then() -> None:
    headers = _headers()
    cell = headers.claim_cell(77)
    headers.set_latest(5)
    headers.take_latest(cell)
    assert not headers.release_cell(cell, 78)
    assert not headers.release_cell(cell, 0)
    assert headers.cell(cell) == (77, 5)
    assert headers.release_cell(cell, 77)
    assert headers.cell(cell) == (0, 0)
    assert not headers.release_cell(cell, 77)


def test_every_cell_has_one_reader_and_a_full_house_says_no() -> None:
    headers = _headers()
    claimed: list[int] = []
    begin = threading.Barrier(4)

    def claim(first: int) -> None:
        begin.wait()
        claimed.extend(headers.claim_cell(first + number) for number in range(6))

    threads = [threading.Thread(target=claim, args=(1 + 100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(_native.MAX_CONSUMERS))
    assert headers.claim_cell(999) == -1


def test_cells_out_of_range_and_nobodys_identity_are_refused() -> None:
    headers = _headers()
    for act in (headers.take_latest, headers.put_back, headers.cell, lambda cell: headers.release_cell(cell, 1)):
        with pytest.raises(IndexError):
            act(_native.MAX_CONSUMERS)
    with pytest.raises(ValueError, match="nobody"):
        headers.claim_cell(0)
