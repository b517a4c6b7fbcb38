"""Late fields in a fleet: each host's agent writes those of its own slots."""

from __future__ import annotations

from typing import Any, final

import xxhash

from shmstage.errors import ProtocolError, shown
from shmstage.memory.handle import Handle
from shmstage.orchestrator.doors import Answer, Doors
from shmstage.orchestrator.handle_book import HandleBook
from shmstage.orchestrator.late_fields import Patch
from shmstage.wire.handles import handle_to_wire


@final
class FleetLateFields:
    """By the agents' doors for what is not training; the program's thread has them."""

    def __init__(self, doors: Doors, book: HandleBook, *, sampler_is_cap: float, timeout_s: float) -> None:
        self._doors = doors
        self._book = book
        self._cap = sampler_is_cap
        self._timeout_s = timeout_s

    def before_scoring(self, handle: Handle) -> None:
        self._each("late_before", handle)

    def after_scoring(self, handle: Handle) -> Patch:
        """A field's digest is over those of the hosts' parts, in the order of hosts."""
        told = [(answer.where, _patch(answer)) for answer in self._each("late_after", handle, cap=self._cap)]
        _, first = told[0]
        names = [name for name, _ in first.digests]
        for where, patch in told:
            if (patch.fields, patch.loss_tokens, [name for name, _ in patch.digests]) != (
                first.fields, first.loss_tokens, names
            ):  # fmt: skip
                raise ProtocolError(f"{where}: {patch} differs from {told[0][0]}: {first}")
        digests = []
        for position, name in enumerate(names):
            parts = [bytes.fromhex(patch.digests[position][1]) for _, patch in told]
            digests.append((name, parts[0].hex() if len(parts) == 1 else xxhash.xxh3_128_hexdigest(b"".join(parts))))
        return Patch(first.fields, first.loss_tokens, tuple(digests))

    def _each(self, command: str, handle: Handle, **more: Any) -> list[Answer]:
        asked = [{"handle": handle_to_wire(part), **more} for part in self._book.parts(handle.request_id)]
        return self._doors.each(command, asked, timeout_s=self._timeout_s)


def _patch(answer: Answer) -> Patch:
    fields, digests = answer.any("fields"), answer.any("digests")
    good = type(fields) is list and all(type(name) is str for name in fields) and type(digests) is list
    good = good and all(
        type(pair) is list and len(pair) == 2 and all(type(each) is str for each in pair) and _is_digest(pair[1])
        for pair in digests
    )
    if not good:
        raise ProtocolError(f"{answer.where}: want fields and [name, digest] of each, got {shown([fields, digests])}")
    return Patch(tuple(fields), answer.count("loss_tokens"), tuple((name, digest) for name, digest in digests))


def _is_digest(text: str) -> bool:
    return len(text) == 32 and all(letter in "0123456789abcdef" for letter in text)
