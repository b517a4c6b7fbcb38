"""Looking at pools and processes from outside, without their co-operation and without changing them.

Headers are copied out with ``pread``, never mapped: a run that hangs, was killed or is being swept can be looked at as
well as one that works. Nothing in them is believed before it was checked, and what is odd is said, not raised.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from shmstage import _native
from shmstage.errors import PoolError
from shmstage.memory.facts import COUNTERS, checked_facts, read_facts, unended_leases
from shmstage.memory.identity import PeerWatch, namespace_word, read_start_ticks
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, list_objects, lock_path_of
from shmstage.memory.objects import open_object

#: most slot headers that are copied: a header may claim any number
MAX_SLOTS = 16384
_SLOT_MASK = 0xFFFF  # of a cell's word, see cells.py
GONE = "removed while it was looked at"
#: problem of a pool whose maker, if it has one, cannot be told: between making a file and locking it is a moment
UNFINISHED = "being made, or half made and given up"
_WORDS = {"T": "stopped", "t": "traced", "Z": "zombie", "X": "zombie", "D": "blocked in the kernel"}

SlotState = Literal["free", "writing", "published"]


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """A process as its lifetime lock shows it. ``alive`` is ``None`` where nothing proves either.

    ``state`` is the kernel's word for it where its pid means the same here: "stopped" (SIGSTOP), "running", ...; ""
    where it is not known.
    """

    role: str
    pid: int
    alive: bool | None
    state: str
    lock: str


NOBODY = ProcessSnapshot("", 0, None, "", "")


@dataclass(frozen=True, slots=True)
class HolderSnapshot:
    """A consumer whose lease of a slot has not ended. ``pid`` 0: it never attached."""

    consumer: int
    pid: int
    alive: bool | None


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """One slot. ``seconds`` in this state, ``None`` if its clock says nothing here."""

    number: int
    aux: bool
    state: SlotState
    generation: int
    layout_id: int
    step: int
    index: int
    seconds: float | None
    holders: tuple[HolderSnapshot, ...]


@dataclass(frozen=True, slots=True)
class CellSnapshot:
    """A reader of a pool whose newest publication counts, and the slot it reads (``None``: nothing now)."""

    cell: int
    reader: ProcessSnapshot
    slot: int | None


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One pool file. ``problem`` says why what follows is missing or doubtful; "" for a sound pool.

    ``nbytes``: of the file; ``allocated_nbytes``: what it occupies now. ``heartbeat_s``: since the owner last said that
    it made progress. ``newest_slot``: of a pool with readers' cells.
    """

    name: str
    problem: str = ""
    run_id: str = ""
    nbytes: int = 0
    allocated_nbytes: int = 0
    epoch: int = 0
    owner: ProcessSnapshot = NOBODY
    heartbeat_s: float | None = None
    last_error: str = ""
    huge_pages: bool = False
    numa: str = "first touch"
    slot_nbytes: int = 0
    counters: dict[str, int] | None = None
    slots: tuple[SlotSnapshot, ...] = ()
    newest_slot: int | None = None
    cells: tuple[CellSnapshot, ...] = ()


def read_pools(run_id: str | None = None) -> list[PoolSnapshot]:
    """Every pool of this user (and of that run) as it is now, sorted by run and epoch. Raises nothing for odd files."""
    names = [name for name in list_objects(run_id) if not name.endswith(LOCK_SUFFIX)]
    found = [_read_pool(name) for name in names]
    # six characters of a hash name the run; its header says which it really is
    mine = [pool for pool in found if run_id is None or pool.run_id in ("", run_id)]
    return sorted(mine, key=lambda pool: (pool.run_id, pool.epoch, pool.name))


def read_processes(run_id: str | None = None) -> list[ProcessSnapshot]:
    """Everybody who has a lifetime lock (in that run), dead or alive, sorted by name of the lock."""
    locks = [name for name in list_objects(run_id) if name.endswith(LOCK_SUFFIX)]
    return [look_at_process(os.path.join(SHM_DIR, name)) for name in locks]


def look_at_process(lock_path: str, pid: int = 0, start_ticks: int = 0, namespace: int = 0) -> ProcessSnapshot:
    """Who holds a lifetime lock, or held it.

    ``pid``, ``start_ticks`` and ``namespace`` (of ``identity.namespace_word``, 0: not known) speak for a process whose
    lock somebody has tidied away.
    """
    lock = printable(os.path.basename(lock_path))
    try:
        watch = PeerWatch(lock_path, pid, start_ticks)
    except (PoolError, ValueError, OSError):  # a lock we may not look at proves nothing
        return ProcessSnapshot("", pid, None, "", lock)
    with contextlib.closing(watch):
        comparable = not pid or namespace == namespace_word() != 0
        same = comparable and bool(watch.start_ticks) and read_start_ticks(watch.pid) == watch.start_ticks
        alive: bool | None = not watch.dead()
        if watch.fileno_for_lock() < 0:
            alive = same if comparable else None
        return ProcessSnapshot(printable(watch.role), watch.pid, alive, process_state(watch.pid) if same else "", lock)


def process_state(pid: int, proc_root: str = "/proc") -> str:
    """The kernel's word for what a process does: "running" covers sleeping, too; "" if there is none of that pid."""
    try:
        with open(f"{proc_root}/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError, ValueError):
        return ""
    return _WORDS.get(letter, "running")


def printable(text: str) -> str:
    """Without control characters: what another process wrote must not steer a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _read_pool(name: str) -> PoolSnapshot:
    found = PoolSnapshot(name)
    try:
        with open_object(name) as descriptor:
            return _read_open_pool(found, descriptor)
    except FileNotFoundError:
        return replace(found, problem=GONE)
    except PoolError as error:
        return replace(found, problem=str(error))
    except OSError as error:
        return replace(found, problem=f"cannot be read: {error.strerror}")


def _read_open_pool(found: PoolSnapshot, descriptor: int) -> PoolSnapshot:
    status = os.fstat(descriptor)
    found = replace(found, nbytes=status.st_size, allocated_nbytes=status.st_blocks * 512)
    facts = read_facts(descriptor)
    if facts is None or not facts["magic"]:
        return replace(found, problem=_half_made(descriptor))
    found = replace(found, run_id=_text(facts["run_id"]), epoch=facts["epoch"], last_error=_text(facts["last_error"]))
    if facts["abi_version"] != _native.ABI_VERSION:
        ours = _native.ABI_VERSION
        return replace(found, problem=f"made by another version: its layout is {facts['abi_version']}, ours {ours}")
    lock_path = facts["lock_path"].decode(errors="replace")
    claims = (facts["owner_pid"], facts["owner_start_ticks"], facts["owner_namespace"])
    found = replace(found, owner=look_at_process(lock_path, *claims))
    if os.fstat(descriptor).st_nlink == 0:  # an owner that ends in order removes its pool before it gives up its lock
        return PoolSnapshot(found.name, problem=GONE)
    if not facts["ready"]:
        return replace(found, problem=_half_made(descriptor, owner_dead=found.owner.alive is False))
    try:
        facts = checked_facts(found.name, descriptor, facts["run_id"].decode(), facts["epoch"])
    except PoolError as error:
        return replace(found, problem=printable(str(error)))
    except UnicodeDecodeError:
        return replace(found, problem=f"its run id {found.run_id!r} is not UTF-8")
    return _with_slots(found, descriptor, facts)


def _half_made(descriptor: int, *, owner_dead: bool = False) -> str:
    """A pool's maker holds a lock on the file itself, from soon after it made it until the pool is ready."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "being made, or being removed, right now"
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return "half made, and its owner is dead" if owner_dead else UNFINISHED


def _with_slots(found: PoolSnapshot, descriptor: int, facts: dict[str, Any]) -> PoolSnapshot:
    count = min(facts["slot_count"], MAX_SLOTS)
    copied = _copy_headers(descriptor, _native.POOL_HEADER_NBYTES + count * _native.SLOT_HEADER_NBYTES)
    if copied is None:
        return replace(found, problem="became smaller while it was looked at")
    headers = _native.Headers(copied, count, facts["consumer_count"], facts["epoch"])
    pids = {consumer: headers.consumer_pid(consumer) for consumer in range(facts["consumer_count"])}
    alive = _alive_by_pid(found.run_id, set(pids.values()) - {0})
    now_ns = time.monotonic_ns()
    first_aux = facts["slot_count"] - facts["aux_slot_count"]
    missing = facts["slot_count"] - count
    return replace(
        found,
        problem=f"{missing} of its {facts['slot_count']} slots are not shown" if missing else "",
        heartbeat_s=_seconds_since(facts["heartbeat_ns"], now_ns),
        huge_pages=facts["huge_pages"],
        numa="interleaved" if facts["interleaved"] else "first touch",
        slot_nbytes=facts["slot_stride"],
        counters=dict(zip(COUNTERS, headers.counters(), strict=False)),
        slots=tuple(_slot(headers, number, number >= first_aux, pids, alive, now_ns) for number in range(count)),
        newest_slot=_slot_of(headers.latest()),
        cells=_cells(headers, found.run_id),
    )


def _copy_headers(descriptor: int, nbytes: int) -> bytearray | None:
    """A copy of which the slots did not change meanwhile, if three tries give one; else the last."""
    first_slot = _native.POOL_HEADER_NBYTES
    before = b""
    for _ in range(3):
        copied = os.pread(descriptor, nbytes, 0)
        if len(copied) < nbytes:
            return None
        if copied[first_slot:] == before:
            break
        before = copied[first_slot:]
    return bytearray(copied)


def _slot(
    headers: _native.Headers,
    number: int,
    aux: bool,
    pids: dict[int, int],
    alive: dict[int, bool | None],
    now_ns: int,
) -> SlotSnapshot:
    generation, mask, layout_id, step, index, ended = headers.slot_state(number)
    held = unended_leases(generation, mask, ended)
    state: SlotState = "writing" if generation % 2 else "published" if held else "free"
    return SlotSnapshot(
        number=number,
        aux=aux,
        state=state,
        generation=generation,
        layout_id=layout_id,
        step=step,
        index=index,
        seconds=_seconds_since(headers.slot_since_ns(number), now_ns),
        holders=tuple(HolderSnapshot(c, pids[c], alive.get(pids[c])) for c in held),
    )


def _cells(headers: _native.Headers, run_id: str) -> tuple[CellSnapshot, ...]:
    found = []
    for index in range(_native.MAX_CONSUMERS):
        identity, word = headers.cell(index)
        if identity:
            found.append(CellSnapshot(index, look_at_process(lock_path_of(run_id, identity)), _slot_of(word)))
    return tuple(found)


def _alive_by_pid(run_id: str, pids: set[int]) -> dict[int, bool | None]:
    """A header names consumers by pid alone; their lifetime locks say whether it is still them."""
    alive: dict[int, bool | None] = {}
    if pids:
        for process in read_processes(run_id):
            if process.pid in pids and not alive.get(process.pid):  # one alive is enough: a number may come again
                alive[process.pid] = process.alive
    for pid in pids - alive.keys():
        # Its lock is gone: it ended in order or was swept. A process that has the number now may be another one.
        alive[pid] = None if process_state(pid) else False
    return alive


def _slot_of(word: int) -> int | None:
    return (word & _SLOT_MASK) - 1 if word & _SLOT_MASK else None


def _seconds_since(then_ns: int, now_ns: int) -> float | None:
    """``None`` for never, and for what only another boot's clock can have said."""
    return (now_ns - then_ns) / 1e9 if 0 < then_ns <= now_ns else None


def _text(raw: bytes) -> str:
    return printable(raw.decode(errors="replace"))
