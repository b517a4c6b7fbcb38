"""Arguments of a command as they arrive: right names, right types, or ``ProtocolError`` before anything happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from shmstage.errors import ProtocolError
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.wire.handles import handle_from_wire

#: plain arguments that ``trainer_calls.jsonl`` keeps besides the micro-batch's identity
RECORDED = ("step", "version", "defer_update", "role", "discard", "epoch", "sync", "uses")


@final
class Arguments:
    """Taken one by one; ``finish`` refuses what nobody asked for."""

    def __init__(self, command: str, given: Mapping[str, Any]) -> None:
        self._command = command
        self._left = dict(given)

    def handle(self, name: str = "handle") -> Handle:
        return handle_from_wire(self._take(name))

    def layout(self, name: str = "layout") -> Layout:
        return Layout.from_wire(self._typed(name, list))

    def has(self, name: str) -> bool:
        return name in self._left

    def text(self, name: str) -> str:
        return str(self._typed(name, str))

    def count(self, name: str) -> int:
        value = self._typed(name, int)
        if value < 0:
            raise ProtocolError(f"{self._command}: {name} = {value}; want 0 or more")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._typed(name, bool)) if name in self._left else default

    def mapping(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self._typed(name, dict)
        return value

    def texts(self, name: str) -> list[str]:
        value: list[Any] = self._typed(name, list)
        if not all(type(item) is str for item in value):
            raise ProtocolError(f"{self._command}: {name} = {value!r:.80}; want a list of strings")
        return value

    def pairs(self, name: str) -> list[tuple[int, int]]:
        """A list of ``[slot, generation]``; absent = empty."""
        value: list[Any] = self._typed(name, list) if name in self._left else []
        if not all(type(p) is list and len(p) == 2 and all(type(n) is int for n in p) for p in value):
            raise ProtocolError(f"{self._command}: {name} = {value!r:.80}; want a list of [slot, generation]")
        return [(pair[0], pair[1]) for pair in value]

    def finish(self) -> None:
        if self._left:
            raise ProtocolError(f"{self._command}: unknown arguments {sorted(self._left)}")

    def _take(self, name: str) -> Any:
        if name not in self._left:
            raise ProtocolError(f"{self._command}: argument {name!r} is missing")
        return self._left.pop(name)

    def _typed(self, name: str, kind: type) -> Any:
        value = self._take(name)
        if type(value) is not kind:
            raise ProtocolError(f"{self._command}: {name} = {value!r:.80}; want {kind.__name__}")
        return value


def for_the_record(command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The received command as a line of ``trainer_calls.jsonl``; never raises, whatever arrived."""
    record: dict[str, Any] = {"command": command}
    try:
        if command == "prepare":
            record |= {"of": str(given["command"])[:40], "sequence": given["sequence"]}
            given = given["arguments"]
        if "handle" in given:
            handle = handle_from_wire(given["handle"])
            record.update(step=handle.step, index=handle.index, request_id=handle.request_id)
        elif "request_id" in given:
            name = str(given["request_id"])
            step, _, index = name.partition("@")[0].partition(".")
            record.update(step=int(step), index=int(index), request_id=name)
        record.update({key: given[key] for key in RECORDED if key in given})
    except (ProtocolError, ValueError, LookupError, TypeError, AttributeError) as error:
        record["malformed"] = str(error)[:200]
    return record
