"""A strict reader of Chrome trace JSON: what a viewer would mend in silence is a fault here.

It shares nothing with what writes traces. Times are compared in whole nanoseconds, as decimals and never as floats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NoReturn, final

_KEYS: Final = {
    "X": {"ph", "pid", "tid", "ts", "dur", "name", "cat", "args"},
    "i": {"ph", "pid", "tid", "ts", "name", "cat", "args", "s"},
    "C": {"ph", "pid", "ts", "name", "args"},
    "s": {"ph", "pid", "tid", "ts", "name", "cat", "id"},
    "t": {"ph", "pid", "tid", "ts", "name", "cat", "id"},
    "f": {"ph", "pid", "tid", "ts", "name", "cat", "id", "bp"},
}
_OF_PROCESS: Final = {"process_name": ("name", str), "process_sort_index": ("sort_index", int)}
_OF_THREAD: Final = {"thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}
_LABELS: Final = ("labels", str)
_LARGEST: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """What a viewer should find; `arrows` are the pieces between two stops of a flow."""

    slices: int
    instants: int
    flows: int
    arrows: int
    counters: int


def faults_of(text: str) -> list[str]:
    """Everything that is wrong with a trace, one line each; empty for a good one."""
    try:
        trace = _parsed(text)
    except (ValueError, RecursionError) as error:
        return [f"no strict JSON: {error}"]
    events = trace.get("traceEvents")
    if type(events) is not list or not all(type(event) is dict for event in events):
        return ["traceEvents is no list of objects"]
    return _Check().faults(events)


def counts_of(text: str) -> TraceCounts:
    phases = [event["ph"] for event in _parsed(text)["traceEvents"]]
    return TraceCounts(
        slices=phases.count("X"),
        instants=phases.count("i"),
        flows=phases.count("s"),
        arrows=phases.count("t") + phases.count("f"),
        counters=phases.count("C"),
    )


def _parsed(text: str) -> dict[str, Any]:
    text.encode()  # a lone surrogate raises ValueError
    parsed = json.loads(text, parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    if type(parsed) is not dict:
        raise ValueError("the top is no object")
    return parsed


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object has a key twice: {[key for key, _ in pairs]}")
    for text in (*found, *found.values()):
        if type(text) is str:
            text.encode()
    return found


@dataclass(slots=True)
class _Flow:
    identity: Any
    ended: bool = False


@final
class _Check:
    def __init__(self) -> None:
        self._now = 0
        self._named: dict[tuple[str, int, int | None], int] = {}
        self._process_of: dict[int, int] = {}
        self._open: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        self._flows: dict[int, _Flow] = {}

    def faults(self, events: list[dict[str, Any]]) -> list[str]:
        found = [f"event {n} {event}: {fault}" for n, event in enumerate(events) for fault in self._of(event)]
        found += [f"flow {number} has no end" for number, flow in self._flows.items() if not flow.ended]
        return found + list(self._unnamed())

    def _of(self, event: dict[str, Any]) -> Iterator[str]:
        phase = event.get("ph")
        if phase == "M":
            yield from self._metadata(event)
            return
        if phase not in _KEYS:
            yield f"unknown phase {phase!r}"
            return
        if set(event) != _KEYS[phase]:
            yield f"keys of {phase} are {sorted(_KEYS[phase])}"
            return
        if type(event["name"]) is not str or not event["name"]:
            yield "no name"
        if type(event.get("args", {})) is not dict:
            yield "args are no object"
            return
        at = _nanoseconds(event["ts"])
        if at is None or at < 0:
            yield "ts is no time from 0 in whole nanoseconds"
            return
        if at < self._now:
            yield f"comes after an event of {self._now} ns"
        self._now = max(self._now, at)
        yield from self._place(event)
        yield from {"X": self._slice, "i": self._instant, "C": self._counter}.get(phase, self._flow)(event, at)

    def _metadata(self, event: dict[str, Any]) -> Iterator[str]:
        name, args = event.get("name"), event.get("args")
        of_thread = name in _OF_THREAD
        key, kind = {**_OF_PROCESS, **_OF_THREAD, "process_labels": _LABELS}.get(str(name), ("", str))
        if not key:
            yield f"unknown metadata {name!r}"
        elif type(args) is not dict or set(args) != {key} or type(args[key]) is not kind or args[key] == "":
            yield f"args of {name} are one {kind.__name__}, {key!r}"
        elif set(event) != {"ph", "pid", "name", "args", *(["tid"] if of_thread else [])}:
            yield "keys of metadata are ph, pid, name, args, and tid for a thread"
        elif any(type(event[k]) is not int or not 0 < event[k] < 1 << 31 for k in ("pid", "tid") if k in event):
            yield "pid and tid are integers from 1"
        else:
            if self._open or self._flows or self._now:
                yield "metadata after events"
            known = (str(name), event["pid"], event.get("tid"))
            if known in self._named:
                yield f"a second {name}"
            self._named[known] = 1
            if of_thread and self._process_of.setdefault(event["tid"], event["pid"]) != event["pid"]:
                yield f"thread {event['tid']} belongs to process {self._process_of[event['tid']]}"

    def _place(self, event: dict[str, Any]) -> Iterator[str]:
        pid, tid = event["pid"], event.get("tid")
        if any(type(number) is not int for number in (pid, tid) if number is not None):
            yield "pid and tid are integers from 1"
            return
        if any((name, pid, None) not in self._named for name in _OF_PROCESS):
            yield f"process {pid} has no name or no place"
        if tid is not None and any((name, pid, tid) not in self._named for name in _OF_THREAD):
            yield f"thread {tid} of process {pid} has no name or no place"

    def _slice(self, event: dict[str, Any], at: int) -> Iterator[str]:
        length = _nanoseconds(event["dur"])
        if length is None or length < 0:
            yield "dur is no length from 0 in whole nanoseconds"
            return
        around = self._around(event, at)
        if around and around[-1][0] < at + length:
            yield f"overlaps the slice until {around[-1][0]} ns and is not within it"
        around.append((at + max(length, 1), event["args"].get("id")))

    def _instant(self, event: dict[str, Any], at: int) -> Iterator[str]:
        if event["s"] != "t":
            yield "its scope is no thread's"
        self._around(event, at).append((at + 1, event["args"].get("id")))

    def _counter(self, event: dict[str, Any], at: int) -> Iterator[str]:
        values = event["args"].values()
        if not values or any(type(v) not in (int, Decimal) or not -_LARGEST < v < _LARGEST for v in values):
            yield "counts nothing, or something that is no number"

    def _flow(self, event: dict[str, Any], at: int) -> Iterator[str]:
        number, phase = event["id"], event["ph"]
        if type(number) is not int:
            yield "its id is no integer"
            return
        # a viewer takes what began last on the thread, an instant too, without asking whether it is over
        begun = self._open.get((event["pid"], event["tid"]))
        if not begun or begun[-1][0] <= at:
            yield "the last slice or instant before it is not around it"
            return
        identity = begun[-1][1]
        if identity is None:
            yield "the slice around it is of no micro-batch"
        if phase == "f" and event["bp"] != "e":
            yield "its end is not bound to the slice around it"
        known = self._flows.get(number)
        if phase == "s":
            if known is not None:
                yield f"a second begin of flow {number}"
            self._flows[number] = _Flow(identity)
        elif known is None or known.ended:
            yield f"flow {number} has no begin, or is over"
        else:
            known.ended = phase == "f"
            if known.identity != identity:
                yield f"leads from micro-batch {known.identity!r} to {identity!r}"

    def _around(self, event: dict[str, Any], at: int) -> list[tuple[int, Any]]:
        """Ends of the slices of its thread that are open at `at`, the innermost last.

        What has no length takes its nanosecond: viewers differ in whether something that begins there is within it.
        """
        slices = self._open.setdefault((event["pid"], event["tid"]), [])
        while slices and slices[-1][0] <= at:
            slices.pop()
        return slices

    def _unnamed(self) -> Iterator[str]:
        """Names come in pairs with places."""
        for name, pid, tid in self._named:
            for other in _OF_PROCESS if tid is None else _OF_THREAD:
                if name != "process_labels" and (other, pid, tid) not in self._named:
                    yield f"{other} is missing of process {pid}, thread {tid}"
            if tid is not None and any((of, pid, None) not in self._named for of in _OF_PROCESS):
                yield f"thread {tid} belongs to process {pid}, which has no name"


def _nanoseconds(microseconds: Any) -> int | None:
    if type(microseconds) is int:
        return microseconds * 1000
    if type(microseconds) is not Decimal:
        return None
    if not -_LARGEST < microseconds < _LARGEST or microseconds != microseconds.quantize(Decimal("0.001")):
        return None
    return int(microseconds * 1000)
