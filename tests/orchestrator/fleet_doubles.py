"""Hosts of a fleet in one process: agents and stores that speak as the real ones do, on real pools and real fills."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

import xxhash

from shmstage.errors import PoolError, ProtocolError, ShmstageError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.orchestrator.late_fields import LateFields
from shmstage.packing.parts import read_part, row_digests
from shmstage.packing.pieces import decode_pieces, encode_pieces
from shmstage.packing.slot_fields import views_to_fill
from shmstage.packing.trajectory import Group, Trajectory
from shmstage.packing.window import Window
from shmstage.packing.window_fill import fill_window
from shmstage.testing.memory_channel import MemoryChannel, MemoryServerChannel
from shmstage.transport.server import Server
from shmstage.wire.handles import handle_from_wire, handle_to_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Hello, Welcome

POLL_S = 0.02
Commands = Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]


class DoubleDoor:
    """One endpoint and the thread that answers there. ``heard``: (command, arguments) in order."""

    def __init__(self, welcome: Callable[[Hello], dict[str, Any]], commands: Commands) -> None:
        self.heard: list[tuple[str, Mapping[str, Any]]] = []
        self.waits = threading.Event()
        self._channel = MemoryServerChannel()
        self._welcome = welcome
        self._commands = commands
        self._closing = False
        self._server = Server(self._channel, incarnation=7)
        self._server.start()
        self._thread = threading.Thread(target=self._run, name="double door", daemon=True)
        self._thread.start()

    def connect(self) -> MemoryChannel:
        return self._channel.connect()

    def given_up(self) -> bool:
        return self._closing or self._server.hello_waiting

    def close(self) -> None:
        self._closing = True
        self._thread.join(20.0)
        self._server.close()

    def _run(self) -> None:
        while not self._closing:
            pending = self._server.next_request(POLL_S)
            if pending is None:
                continue
            try:
                if pending.hello is not None:
                    pending.welcome(Welcome(PROTOCOL_VERSION, 7, 1, 1, "", self._welcome(pending.hello)))
                    continue
                self.heard.append((pending.command, pending.arguments))
                pending.reply(self._commands[pending.command](pending.arguments))
            except Exception as error:
                pending.fail(error)


class DoubleStore:
    """Holds every group that was read until it is released. ``live``: groups come as ``give`` says, and only once."""

    def __init__(
        self,
        groups: Sequence[Group],
        index: int,
        count: int,
        *,
        expected: Callable[[int], int | None] | None = None,
        evaluated: Sequence[Group] = (),
        live: bool = False,
    ) -> None:
        self.held: dict[int, Trajectory] = {}
        self.released: list[int] = []
        self.covered: list[int] = []
        self._groups = list(groups)
        self._index, self._count = index, count
        self._live = live
        self._expected = expected
        self._next_number = 100 * index
        self._evaluated = self._numbered(enumerate(evaluated))
        self._given: dict[int, list[Any]] = {}
        self.door = DoubleDoor(
            lambda hello: {
                "store": index, "stores": count, "replayable": not live, "sharded": live,
                "knows_batches": expected is not None, "held_nbytes": 0,
            },
            {
                "read": self._read, "first": self._first, "release": self._release, "covered": self._cover,
                "expected": lambda given: {"groups": expected(given["batch_index"]) if expected else None},
            },
        )  # fmt: skip

    def pieces(self, numbers: Any, begins: Any, ends: Any) -> Any:
        spans = list(zip(begins.tolist(), ends.tolist(), strict=True))
        return encode_pieces([self.held[number] for number in numbers.tolist()], spans)

    def _numbered(self, groups: Any) -> list[list[Any]]:
        return [
            [number, group.group_id, group.batch_index, [self._describe(t) for t in group.trajectories]]
            for number, group in groups
            if number % self._count == self._index
        ]

    def _describe(self, t: Trajectory, number: int | None = None) -> list[Any]:
        if number is None:
            number, self._next_number = self._next_number, self._next_number + 1
            self.held[number] = t
        shape = list(t.routing.shape) if t.routing is not None else []
        return [
            number, t.trajectory_id, t.policy_version, t.length, t.nbytes, t.loss_tokens, t.digest, sorted(t.optional),
            t.experts, shape,
        ]  # fmt: skip

    def _read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        cursor, count = given["cursor"], given["count"]
        if given.get("what", "train") == "eval":
            return {"groups": [group for group in self._evaluated if group[0] >= cursor], "end": True}
        mine = [n for n in range(cursor, len(self._groups)) if n % self._count == self._index][:count]
        return {"groups": self._numbered((n, self._groups[n]) for n in mine), "end": len(mine) < count}

    def _first(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if given["what"] == "eval":
            return {"group": self._evaluated[0] if self._evaluated else None, "end": True}
        for number in range(self._index, len(self._groups), self._count):
            group = self._groups[number]
            if group.trajectories:
                first = [self._describe(group.trajectories[0], 0)]
                return {"group": [number, group.group_id, group.batch_index, first], "end": False}
        return {"group": None, "end": True}

    def _cover(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self.covered.append(given["cursor"])
        return {}

    def _release(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self.released.append(given["below"])
        for number in [number for number in self.held if number < given["below"]]:
            del self.held[number]
        return {}


class DoubleAgent:
    """A host: a real pool, real fills. ``spoil``: changes an answer to ``pack`` before it is sent."""

    def __init__(self, run: str, rank: int, stores: Sequence[DoubleStore]) -> None:
        self.pool: Pool | None = None
        self.forgets = False
        self.refuses_pool: ShmstageError | None = None
        self.remembered: dict[bytes, tuple[bytes, bytes]] = {}
        self.spoil: Callable[[dict[str, Any]], None] = lambda answer: None
        self._run = run
        self._stores = stores
        self._epoch = 1
        self._identity = ProcessIdentity.create(run, "agent")
        self._late: LateFields
        commands = {
            "open_pool": self._open, "prefetch": self._prefetch, "pack": self._pack, "late_before": self._late_before,
            "late_after": self._late_after, "close_pool": lambda given: self._close_pool() or {},
        }  # fmt: skip
        self.feed, self.aux = (DoubleDoor(self._welcome, commands) for _ in range(2))

    def close(self) -> None:
        self.feed.close()
        self.aux.close()
        self._close_pool()
        self._identity.close()

    def _welcome(self, hello: Hello) -> dict[str, Any]:
        self._epoch = hello.epoch
        return {"rank": 0, "hosts": 2, "name": "double", "remembers_plans": True}

    def _close_pool(self) -> None:
        pool, self.pool = self.pool, None
        if pool is not None:
            with suppress(PoolError):
                pool.close()

    def _open(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self._close_pool()
        if self.refuses_pool is not None:
            raise self.refuses_pool
        layouts = [Layout.from_wire(wire) for wire in given["layouts"]]
        self._windows = {layout.layout_id: Window(*w) for layout, w in zip(layouts, given["windows"], strict=True)}
        pool = self.pool = Pool.create(
            self._run, epoch=self._epoch, layouts=layouts, slots=given["slots"], aux_slots=given["aux_slots"],
            identity=self._identity,
        )  # fmt: skip
        self._late = LateFields(pool, sampler_is_cap=2.0)
        return {"pool": pool.name, "nbytes": pool.nbytes, "backing": asdict(pool.backing)}

    def _prefetch(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self.remembered[xxhash.xxh3_128_digest(given["plan"] + given["digests"])] = given["plan"], given["digests"]
        return {}

    def _pack(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if self.pool is None:
            raise ProtocolError("no pool")
        plan, digests = given["plan"], given["digests"]
        if "plan_key" in given:
            if self.forgets or given["plan_key"] not in self.remembered:
                return {"unknown_plan": True}
            plan, digests = self.remembered.pop(given["plan_key"])
        part = read_part(plan, digests, self._windows[given["layout_id"]])
        pieces: dict[int, Any] = {}
        nbytes = 0
        for wanted in part.wanted():
            parts = self._stores[wanted.store].pieces(wanted.numbers, wanted.begins, wanted.ends)
            nbytes += sum(each.nbytes for each in parts)
            pieces.update(wanted.matched(decode_pieces(parts)))
        slot = self.pool.acquire(
            self.pool.layouts[given["layout_id"]], timeout_s=given["timeout_s"], aux=given["aux"],
            stop=lambda: self.feed.given_up() or self.aux.given_up(),
        )  # fmt: skip
        with slot:
            late = self.pool.layouts[given["layout_id"]].late_names
            fill_window(part, pieces, views_to_fill(next(iter(pieces.values()), None), slot.views, late))
            names = ("step", "index", "is_final", "digest", "loss_tokens", "segments")
            handle = slot.publish(rows=part.window.rows, **{name: given[name] for name in names})
        answer = {
            "handle": handle_to_wire(handle), "row_digests": row_digests(part), "slot_wait_s": 0.0, "fetch_s": 0.0,
            "pack_s": 0.001, "fetched_nbytes": nbytes, "free_slots": self.pool.free_slot_count(),
        }  # fmt: skip
        self.spoil(answer)
        return answer

    def _late_before(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self._late.before_scoring(handle_from_wire(given["handle"]))
        return {}

    def _late_after(self, given: Mapping[str, Any]) -> dict[str, Any]:
        patch = self._late.after_scoring(handle_from_wire(given["handle"]))
        digests = [list(pair) for pair in patch.digests]
        return {"fields": list(patch.fields), "loss_tokens": patch.loss_tokens, "digests": digests}


class DoubleHosts:
    """Stores and agents of ``count`` hosts, and channels to them. Used with ``with``."""

    def __init__(self, run: str, groups: Sequence[Group], count: int = 2, **store: Any) -> None:
        self._stack = ExitStack()
        self.names = [f"host {rank} (node-{rank})" for rank in range(count)]
        self.stores: list[DoubleStore] = []
        for rank in range(count):
            self.stores.append(DoubleStore(groups, rank, count, **store))
            self._stack.callback(self.stores[-1].door.close)
        self.agents = [DoubleAgent(run, rank, self.stores) for rank in range(count)]
        for agent in self.agents:
            self._stack.callback(agent.close)

    def __enter__(self) -> DoubleHosts:
        return self

    def __exit__(self, *about: object) -> None:
        self._stack.close()
