"""Packs in a fleet: plans go out to the agents of all hosts, bytes never come here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import xxhash

from shmstage.errors import ProtocolError
from shmstage.memory.handle import Handle
from shmstage.orchestrator.doors import Answer, Doors
from shmstage.orchestrator.handle_book import HandleBook
from shmstage.orchestrator.intake import Planned, Upcoming
from shmstage.orchestrator.packer import Filled
from shmstage.packing.parts import Part, digest_of_rows, part_of, read_part, row_digests
from shmstage.packing.plan import PlannedMicrobatch
from shmstage.packing.reference import TrajectoryReference
from shmstage.packing.trajectory import check_same_fields
from shmstage.packing.window import Window
from shmstage.wire.handles import DIGEST_NBYTES, handle_from_wire

#: micro-batches that agents are told of before their turn
LOOKS_AHEAD = 2


@final
class FleetPacker:
    """``windows``: what each host holds. ``fetched_nbytes``: per host, what came over the network for it.

    ``aux``: into the slots that training never takes, by ``doors`` of their own. ``layout_id``: of the layout of every
    host's slots. ``remembered``: agents keep the plans they were told of ahead, so these need not travel twice.
    """

    def __init__(
        self,
        doors: Doors,
        windows: Sequence[Window],
        layout_id: int,
        book: HandleBook,
        *,
        rows: int,
        tokens: int,
        nbytes: int,
        slots: int,
        slot_timeout_s: float,
        call_timeout_s: float,
        aux: bool = False,
        remembered: bool = False,
    ) -> None:
        self.looks_ahead = 0 if aux else LOOKS_AHEAD
        self.fetched_nbytes = [0] * len(doors)
        self._doors = doors
        self._windows = tuple(windows)
        self._layout_id = layout_id
        self._book = book
        self._whole = Window(0, rows, 0, tokens)
        self._nbytes = nbytes
        self._free_slots = slots
        self._slot_timeout_s = slot_timeout_s
        # an agent that waits as long as it may still has to say so
        self._answer_timeout_s = slot_timeout_s + call_timeout_s
        self._call_timeout_s = call_timeout_s
        self._aux = aux
        self._remembered = remembered
        self._told: deque[tuple[PlannedMicrobatch, list[Part]]] = deque(maxlen=LOOKS_AHEAD)

    def ahead(self, upcoming: Sequence[Upcoming]) -> None:
        for each in upcoming:
            if self._parts_told(each.plan) is None:
                parts = self._parts(each.plan, _references(each.trajectories))
                self._told.append((each.plan, parts))
                self._doors.each("prefetch", [_spelled(part) for part in parts], timeout_s=self._call_timeout_s)

    def pack(self, planned: Planned, *, step: int, index: int, is_final: bool, stop: Callable[[], bool]) -> Filled:
        plan = planned.plan
        references = _references({number: arrival.trajectory for number, arrival in planned.arrivals.items()})
        check_same_fields(references.values())
        whole = part_of(plan, references, self._whole)
        rows = row_digests(read_part(whole.plan, whole.digests, self._whole))
        named: dict[str, Any] = {
            "step": step, "index": index, "is_final": is_final, "digest": digest_of_rows([rows]),
            "loss_tokens": sum(each.loss_tokens for each in references.values()),
            "segments": sum(each.loss_tokens > 0 for each in references.values()),
        }  # fmt: skip
        asked = named | {"aux": self._aux, "layout_id": self._layout_id, "timeout_s": self._slot_timeout_s}
        told = self._parts_told(plan)
        parts = told or self._parts(plan, references)
        begun_ns = time.monotonic_ns()
        answers = self._packed(asked, parts, known=told is not None and self._remembered, stop=stop)
        published_ns = time.monotonic_ns()
        handles = [self._checked(host, answer, named, rows) for host, answer in enumerate(answers)]
        handle = Handle(
            slot=handles[0].slot, generation=handles[0].generation, layout_id=self._layout_id,
            rows=len(plan.rows), **named,
        )  # fmt: skip
        self._book.put(handle, handles, aux=self._aux)
        pack_s, fetch_s = (max(answer.take(name, float) for answer in answers) for name in ("pack_s", "fetch_s"))
        # hosts' clocks are not ours; how long something took there is
        acquired_ns = max(begun_ns, published_ns - int(pack_s * 1e9))
        return Filled(
            handle=handle, real_tokens=plan.real_tokens, nbytes=self._nbytes, begun_ns=begun_ns,
            acquired_ns=acquired_ns, filled_ns=published_ns, published_ns=published_ns,
            fetch_s=min(fetch_s, (acquired_ns - begun_ns) / 1e9),
        )  # fmt: skip

    def free_slot_count(self) -> int:
        """Of the host with the fewest, after it packed last."""
        return self._free_slots

    def _packed(
        self, asked: Mapping[str, Any], parts: Sequence[Part], *, known: bool, stop: Callable[[], bool]
    ) -> list[Answer]:
        """``known``: the agents were told of these parts, and need not be told again."""
        before, self._doors.stop = self._doors.stop, stop
        try:
            said = [{**asked, **(_keyed(part) if known and part.plan else _spelled(part))} for part in parts]
            answers = self._doors.each("pack", said, timeout_s=self._answer_timeout_s)
            for host, part in enumerate(parts):
                if answers[host].any("unknown_plan"):  # told so long ago that it is forgotten
                    again = {**asked, **_spelled(part)}
                    answers[host] = self._doors.call(host, "pack", again, timeout_s=self._answer_timeout_s)
            return answers
        finally:
            if self._aux:  # what else goes by these doors is not cut short; telling ahead is, as packing was
                self._doors.stop = before

    def _parts(self, plan: PlannedMicrobatch, references: Mapping[int, TrajectoryReference]) -> list[Part]:
        return [part_of(plan, references, window) for window in self._windows]

    def _parts_told(self, plan: PlannedMicrobatch) -> list[Part] | None:
        return next((parts for told, parts in self._told if told is plan), None)

    def _checked(self, host: int, answer: Answer, named: Mapping[str, Any], rows: bytes) -> Handle:
        """The host's own handle. Raises ``ProtocolError`` if the host packed something else than was planned."""
        window = self._windows[host]
        digests = answer.take("row_digests", bytes)
        want = rows[window.row_begin * DIGEST_NBYTES : window.row_end * DIGEST_NBYTES]
        microbatch = f"micro-batch {named['step']}.{named['index']}"
        if digests != want:
            got, planned = _split(digests), _split(want)
            row = next((i for i in range(window.rows) if got[i : i + 1] != planned[i : i + 1]), window.rows - 1)
            raise ProtocolError(
                f"{answer.where}: row {window.row_begin + row} of {microbatch} has digest "
                f"{', '.join(got[row : row + 1]) or 'none'}, planned was {planned[row]}; that host holds other "
                "trajectories than the plan names"
            )
        handle = handle_from_wire(answer.any("handle"))
        if named != {name: getattr(handle, name) for name in named} or handle.layout_id != self._layout_id:
            raise ProtocolError(f"{answer.where}: {microbatch} came back as {handle.describe()}")
        self.fetched_nbytes[host] += answer.count("fetched_nbytes")
        free = answer.count("free_slots")
        self._free_slots = free if host == 0 else min(self._free_slots, free)
        return handle


def _spelled(part: Part) -> dict[str, bytes]:
    return {"plan": part.plan, "digests": part.digests}


def _keyed(part: Part) -> dict[str, bytes]:
    """Names what ``prefetch`` told."""
    return {"plan": b"", "digests": b"", "plan_key": xxhash.xxh3_128_digest(part.plan + part.digests)}


def _split(digests: bytes) -> list[str]:
    return [digests[at : at + DIGEST_NBYTES].hex() for at in range(0, len(digests), DIGEST_NBYTES)]


def _references(trajectories: Mapping[int, Any]) -> Mapping[int, TrajectoryReference]:
    # a fleet's input gives nothing else
    return cast(Mapping[int, TrajectoryReference], trajectories)
