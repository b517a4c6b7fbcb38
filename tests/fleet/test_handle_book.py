from __future__ import annotations

from dataclasses import replace

import pytest

from shmstage.errors import ProtocolError
from shmstage.memory.handle import Handle
from shmstage.orchestrator.handle_book import SHARED, HandleBook


def handles(step: int = 1, index: int = 0, hosts: int = 2, generation: int = 2) -> tuple[Handle, list[Handle]]:
    whole = Handle(0, generation, 7, b"d" * 16, 4, step, index, True, 33, 5)
    return whole, [replace(whole, slot=host + 1, generation=4 + host, layout_id=host) for host in range(hosts)]


def test_a_whole_has_its_parts_and_each_part_its_whole() -> None:
    book = HandleBook(2)
    whole, parts = handles()
    book.put(whole, parts)
    assert book.parts(whole.request_id) == tuple(parts)
    assert [book.whole_of(host, parts[host].request_id) for host in (0, 1)] == [whole.request_id] * 2


def test_the_same_name_on_another_host_is_another_part() -> None:
    book = HandleBook(2)
    whole, parts = handles()
    book.put(whole, parts)
    assert book.whole_of(1, parts[0].request_id) == parts[0].request_id
    assert book.whole_of(0, "update.1") == "update.1"


@pytest.mark.parametrize("name", SHARED)
def test_a_part_of_another_microbatch_is_refused(name: str) -> None:
    whole, parts = handles()
    other = {"digest": b"e" * 16, "is_final": False}.get(name, 99)
    with pytest.raises(ProtocolError, match=f"part 1 of micro-batch 1.0@0:2 .*: {name} is "):
        HandleBook(2).put(whole, [parts[0], replace(parts[1], **{name: other})])


def test_a_part_must_come_from_every_host() -> None:
    whole, parts = handles()
    with pytest.raises(ProtocolError, match="has 1 parts; there are 2 hosts"):
        HandleBook(2).put(whole, parts[:1])


def test_a_name_is_taken_until_it_is_over() -> None:
    book = HandleBook(2)
    whole, parts = handles()
    book.put(whole, parts)
    book.put(whole, parts)
    with pytest.raises(ProtocolError, match="is not over and has that name"):
        book.put(whole, list(reversed(parts)))


def test_what_was_never_put_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"'1\.0@0:2'; it was never packed, or is over"):
        HandleBook(2).parts("1.0@0:2")


def test_it_is_forgotten_when_its_step_landed_and_its_events_are_told_in_any_order() -> None:
    for order in (("staged", "fwd_bwd", "landed"), ("landed", "fwd_bwd", "staged"), ("fwd_bwd", "landed", "staged")):
        book = HandleBook(2)
        whole, parts = handles()
        following, its_parts = handles(step=2, generation=8)
        book.put(whole, parts)
        book.put(following, its_parts)
        for what in order:
            assert book.knows(whole.request_id), order
            if what == "landed":
                book.landed(1)
            else:
                book.told(whole.request_id, what)
        assert not book.knows(whole.request_id)
        assert book.whole_of(0, parts[0].request_id) == parts[0].request_id
        assert book.knows(following.request_id)
        assert len(book) == 1


def test_an_evaluated_one_is_not_forgotten_by_a_landing_nor_a_trained_one_by_an_evaluation() -> None:
    book = HandleBook(2)
    whole, parts = handles()
    trained, its_parts = handles(generation=8)
    book.put(whole, parts, aux=True)
    book.put(trained, its_parts)
    book.landed(5)
    book.over(trained.request_id)
    assert len(book) == 2
    book.over(whole.request_id)
    assert len(book) == 1


def test_a_restore_forgets_all() -> None:
    book = HandleBook(2)
    whole, parts = handles()
    book.put(whole, parts)
    book.landed(9)
    book.clear()
    assert len(book) == 0
    book.put(whole, parts)
    for kind in ("staged", "fwd_bwd"):
        book.told(whole.request_id, kind)
    assert book.knows(whole.request_id), "the landing was of what is over"
