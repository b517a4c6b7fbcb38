"""``native/slots.cpp`` and ``native/cells.cpp`` compiled so that a test decides which access happens next."""

from __future__ import annotations

import ctypes
import errno
import shutil
import struct
import subprocess
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

HERE = Path(__file__).parent / "stepped"
NATIVE = Path(__file__).parents[2] / "native"
POOL_NBYTES, SLOT_NBYTES, SLOTS = 4096, 320, 4
DONE = (1 << 64) - 1
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class Access(IntEnum):
    LOAD = 1
    STORE = 2
    SWAP = 3
    ADD = 4
    FUTEX_WAIT = 5
    FUTEX_WAKE = 6
    ASLEEP = 7


class Op(IntEnum):
    CLAIM = 0
    PUBLISH = 1
    DISCARD = 2
    LEASE_STATE = 3
    END_LEASE = 4
    LATEST = 5
    SET_LATEST = 6
    CLAIM_CELL = 7
    RELEASE_CELL = 8
    TAKE_LATEST = 9
    PUT_BACK = 10
    CELL = 11


def generation_word(slot: int) -> int:
    return POOL_NBYTES + slot * SLOT_NBYTES


def mask_word(slot: int) -> int:
    return generation_word(slot) + 8


def ended_word(slot: int, consumer: int) -> int:
    return generation_word(slot) + 64 + 8 * consumer


def cell_owner_word(cell: int) -> int:
    return 960 + 8 * cell


def cell_word(cell: int) -> int:
    return 1152 + 8 * cell


FREE_SEQUENCE, WAITER_COUNT, LATEST = 128, 132, 896


def build(where: Path) -> Path:
    """The library, from copies of the sources: next to them lies another ``atomics.h``."""
    assert COMPILER is not None
    for source in (*HERE.iterdir(), *(NATIVE / name for name in (
        "slots.cpp", "slots.h", "cells.cpp", "cells.h", "slot_header.h"
    ))):  # fmt: skip
        shutil.copy(source, where)
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    renamed = ["-Dsyscall=stepped_syscall", "-Dclock_gettime=stepped_clock_gettime"]
    for name in ("slots", "cells", "stepped"):
        extra = renamed if name == "slots" else []
        subprocess.run(
            [COMPILER, *flags, *extra, "-c", f"{name}.cpp", "-o", f"{name}.o"], cwd=where, check=True, timeout=120
        )
    subprocess.run(
        [COMPILER, "-shared", "slots.o", "cells.o", "stepped.o", "-o", "stepped.so"], cwd=where, check=True, timeout=120
    )
    return where / "stepped.so"


class SteppedCode:
    """Calls on their way, one per actor (0 to 7), and the words they share."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.stepped_memory.restype = ctypes.c_void_p
        self._library.stepped_pending.restype = self._library.stepped_result.restype = ctypes.c_uint64
        begin = self._library.stepped_memory()
        self._memory = (ctypes.c_char * (POOL_NBYTES + SLOTS * SLOT_NBYTES)).from_address(begin)

    def reset(self, *, slots: int = 0, consumers: int = 0, cells: int = 0) -> None:
        self._library.stepped_reset(slots, consumers, cells)

    def start(self, actor: int, op: Op, arguments: Sequence[int]) -> None:
        """Begins a call and runs it to its first access."""
        self._library.stepped_start(actor, int(op), (ctypes.c_uint64 * 4)(*arguments))

    def step(self, actor: int, error: int = 0) -> None:
        """Lets the pending access happen and runs on to the next. ``error``: what a sleep ends with."""
        self._library.stepped_step(actor, error)

    def interrupt(self, actor: int) -> None:
        """A signal arrives as the call is about to sleep."""
        self._library.stepped_step(actor, errno.EINTR)

    def drop(self, actor: int) -> None:
        self._library.stepped_drop(actor)

    def pending(self, actor: int) -> tuple[int, Access] | None:
        """(offset of the word, access) that comes next; ``None`` if no call is on its way."""
        pending = self._library.stepped_pending(actor)
        return None if pending == DONE else (pending >> 8, Access(pending & 0xFF))

    def woken(self, actor: int) -> bool:
        return bool(self._library.stepped_woken(actor))

    def result(self, actor: int) -> int:
        return int(self._library.stepped_result(actor))

    def u64(self, offset: int) -> int:
        return int(struct.unpack_from("<Q", self._memory, offset)[0])

    def u32(self, offset: int) -> int:
        return int(struct.unpack_from("<I", self._memory, offset)[0])
