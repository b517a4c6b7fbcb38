"""One micro-batch, one handle per host: which slot holds each host's part of it.

Every host publishes its part in a slot and generation of its own, so each has its own request id for the same
micro-batch. The program knows the whole's handle only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from shmstage.errors import ProtocolError
from shmstage.memory.handle import Handle

#: what is the same in all parts of a micro-batch
SHARED = ("step", "index", "digest", "is_final", "loss_tokens")
#: events that follow every trained micro-batch; until they are told its request ids are needed
AWAITED = frozenset({"staged", "fwd_bwd"})


@dataclass(slots=True)
class _Entry:
    whole: Handle
    parts: tuple[Handle, ...]
    aux: bool
    told: set[str] = field(default_factory=set)


@final
class HandleBook:
    """Written by whoever packs, read by whoever calls; any thread.

    Forgets a trained micro-batch when its step has landed and its events are told, another one when it is over.
    """

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._entries: dict[str, _Entry] = {}
        self._wholes: list[dict[str, str]] = [{} for _ in range(hosts)]
        self._landed = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, whole: Handle, parts: Sequence[Handle], *, aux: bool = False) -> None:
        """``parts`` in the order of the hosts; ``aux``: evaluated, not trained.

        Raises ``ProtocolError`` for a part that is not of this micro-batch, or a request id that is taken.
        """
        if len(parts) != self._hosts:
            raise ProtocolError(f"{whole.describe()} has {len(parts)} parts; there are {self._hosts} hosts")
        for host, part in enumerate(parts):
            for name in SHARED:
                wanted, found = getattr(whole, name), getattr(part, name)
                if wanted != found:
                    raise ProtocolError(
                        f"part {host} of {whole.describe()}: {name} is {found!r}, of the whole it is {wanted!r}"
                    )
        with self._lock:
            known = self._entries.get(whole.request_id)
            if known is not None and known.parts != tuple(parts):
                raise ProtocolError(f"{whole.describe()}: {known.whole.describe()} is not over and has that name")
            self._entries[whole.request_id] = _Entry(whole, tuple(parts), aux)
            for wholes, part in zip(self._wholes, parts, strict=True):
                wholes[part.request_id] = whole.request_id

    def parts(self, request_id: str) -> tuple[Handle, ...]:
        """The hosts' handles. Raises ``ProtocolError`` for a micro-batch that was never put, or is forgotten."""
        with self._lock:
            entry = self._entries.get(request_id)
        if entry is None:
            raise ProtocolError(f"no host has a part of micro-batch {request_id!r}; it was never packed, or is over")
        return entry.parts

    def knows(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._entries

    def whole_of(self, host: int, request_id: str) -> str:
        """The whole's request id for a host's own; the id itself where nothing is known of it."""
        with self._lock:
            return self._wholes[host].get(request_id, request_id)

    # --- what makes it forget -------------------------------------------------------------------------------

    def told(self, request_id: str, kind: str) -> None:
        """An event of that kind is told of on all hosts."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.told.add(kind)
                self._forget_if_over(request_id, entry)

    def landed(self, step: int) -> None:
        """The update of ``step`` is over on all hosts."""
        with self._lock:
            self._landed = max(self._landed, step)
            for request_id, entry in list(self._entries.items()):
                self._forget_if_over(request_id, entry)

    def over(self, request_id: str) -> None:
        """An evaluation is over."""
        with self._lock:
            entry = self._entries.get(request_id)
            if entry is not None and entry.aux:
                self._forget(request_id, entry)

    def clear(self) -> None:
        """A restore: nothing that was packed before it will be named again."""
        with self._lock:
            self._entries.clear()
            for wholes in self._wholes:
                wholes.clear()
            self._landed = 0

    def _forget_if_over(self, request_id: str, entry: _Entry) -> None:
        if not entry.aux and entry.whole.step <= self._landed and entry.told >= AWAITED:
            self._forget(request_id, entry)

    def _forget(self, request_id: str, entry: _Entry) -> None:
        del self._entries[request_id]
        for wholes, part in zip(self._wholes, entry.parts, strict=True):
            wholes.pop(part.request_id, None)
