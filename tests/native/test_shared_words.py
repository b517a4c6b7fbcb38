"""Words that two processes touch are only ever touched through ``native/atomics.h``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: words written by one process while another may read them; the rest of the headers is written once, before ``ready``
SHARED = (
    "generation", "target_mask", "layout_id", "index", "step", "since_ns", "ended", "late_versions", "free_sequence",
    "waiter_count", "counters", "latest", "cell_owners", "cell_words", "consumer_pids", "heartbeat_ns", "ready",
)  # fmt: skip
#: a word of a header that is stored to without one of the functions of atomics.h
PLAIN_STORE = re.compile(
    rf"(?:\.|->)(?:{'|'.join(SHARED)})(?:\[[^\]]*\])?\s*(?:[-+|&^]?=(?!=)|\+\+|--)"
    rf"|(?:\+\+|--)\w[\w.>-]*(?:\.|->)(?:{'|'.join(SHARED)})\b"
)


def plain_stores(text: str) -> list[str]:
    code = re.sub(r"//.*", "", text)
    return [match.group(0) for match in PLAIN_STORE.finditer(code)]


@pytest.mark.parametrize("name", ["slots.cpp", "cells.cpp", "bindings.cpp"])
def test_no_shared_word_is_stored_to_but_through_the_atomics(name: str) -> None:
    """S60: a plain store may become visible before the data that it speaks of."""
    assert plain_stores((ROOT / "native" / name).read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "header.generation = generation + 1;", "pool.pool->free_sequence += 1;", "header.ended[consumer] = generation;",
        "++pool.pool->waiter_count;", "pool.pool->counters[kWaits]++;",
    ],
)  # fmt: skip
def test_a_plain_store_would_be_found(line: str) -> None:
    assert plain_stores(line)


@pytest.mark.parametrize("line", ["if (header.generation == 1) {", "const auto x = load_acquire(header.generation);"])
def test_reading_is_no_store(line: str) -> None:
    assert not plain_stores(line)


def test_python_maps_headers_for_the_native_core_alone() -> None:
    """S60: a byte written from Python is ordered against nothing; payload views begin behind the headers."""
    writes = re.compile(r"pwrite|os\.write\(|struct\.pack_into|\.mmap\[")
    found = {
        path.name: writes.findall(path.read_text())
        for path in (ROOT / "shmstage" / "memory").glob("*.py")
        if writes.search(path.read_text())
    }
    assert found == {"identity.py": ["os.write("]}  # the text of a lifetime lock
