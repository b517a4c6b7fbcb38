"""Many hosts: on each a trainer, an agent that packs for it, and a store of trajectories; here plans and references.

Nothing is watched from here: a process on another host cannot be proven dead by its lock. The launcher knows, and ends
this process; every call has its deadline all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shmstage.errors import ProtocolError, shown
from shmstage.events import Events
from shmstage.memory.layout import Layout
from shmstage.orchestrator.connection import Connection, Interrupt
from shmstage.orchestrator.doors import Answer, Doors
from shmstage.orchestrator.fleet_late import FleetLateFields
from shmstage.orchestrator.fleet_layouts import (
    HostRanges,
    check_cover,
    local_layout,
    read_ranges,
    the_same_on_all,
)
from shmstage.orchestrator.fleet_packer import FleetPacker
from shmstage.orchestrator.fleet_source import EvaluationReferences, FleetSource
from shmstage.orchestrator.handle_book import HandleBook
from shmstage.orchestrator.layouts import Layouts, layouts_of
from shmstage.orchestrator.site import Evaluation, Workplace
from shmstage.orchestrator.trainer_fleet import Member, TrainerFleet
from shmstage.packing.reference import Described
from shmstage.packing.routing import is_encoded
from shmstage.packing.window import Window
from shmstage.settings import Settings
from shmstage.transport.channel import Channel
from shmstage.transport.client import Client
from shmstage.transport.curve import ClientAuth
from shmstage.transport.peers_file import Door, read_hosts_file
from shmstage.transport.zmq import ZmqChannel
from shmstage.wire.messages import PROTOCOL_VERSION, Hello


@final
@dataclass(frozen=True)
class FleetChannels:
    """To the doors of all hosts, each in the order of ``names``, which are how errors call the hosts."""

    names: Sequence[str]
    trainers: Sequence[Channel]
    feeds: Sequence[Channel]
    auxes: Sequence[Channel]
    stores: Sequence[Channel]


def channels_of(peers_file: Path) -> FleetChannels:
    """What the launcher's file names. Raises ``SettingsError``."""
    peers = read_hosts_file(peers_file)

    def connected(doors: Sequence[Door]) -> list[Channel]:
        return [ZmqChannel.connect_tcp(door.endpoint, ClientAuth(door.key, peers.client)) for door in doors]

    hosts = peers.hosts
    return FleetChannels(
        [host.name for host in hosts], connected([host.trainer for host in hosts]),
        connected([host.feed for host in hosts]), connected([host.aux for host in hosts]),
        connected([host.store for host in hosts]),
    )  # fmt: skip


class RemoteWatch:
    """Of processes on other hosts: whether they live is for the launcher to know."""

    def dead(self) -> bool:
        return False

    def close(self) -> None:
        pass


@final
@dataclass(frozen=True)
class _Place:
    """Where micro-batches of one layout lie: the layout of each host's slots, and each host's window."""

    local: Layout
    windows: tuple[Window, ...]


@final
class FleetSite:
    """One epoch's, for one session: whoever loses a trainer here loses the gang, and the launcher makes a new one."""

    def __init__(
        self,
        settings: Settings,
        channels: FleetChannels,
        *,
        epoch: int,
        stack: ExitStack,
        stop_requested: Callable[[], bool],
        events: Events,
    ) -> None:
        """Takes the channels over. Meets the stores; raises as ``FleetSource``."""
        self._settings = settings
        self._names = tuple(channels.names)
        self._events = events
        self._interrupt = Interrupt(stop_requested)
        self._book = HandleBook(len(self._names))
        self._fleet = TrainerFleet(
            [
                Member(name, Client(channel, stop=self._interrupt))
                for name, channel in zip(self._names, channels.trainers, strict=True)
            ],
            self._book,
        )
        stack.callback(self._fleet.close)
        self._feeds, self._auxes, self._stores = (
            Doors(what, self._names, each)
            for what, each in (("agent", channels.feeds), ("agent", channels.auxes), ("store", channels.stores))
        )
        for doors in (self._feeds, self._auxes, self._stores):
            stack.callback(doors.close)
            doors.stop = stop_requested
        self._hello = Hello(
            version=PROTOCOL_VERSION, run_id=settings.run, epoch=epoch, pool="", layouts=[], withdrawn=[],
            lock_path="", pid=0, start_ticks=0,
        )  # fmt: skip
        told = [Answer(info, self._stores.who(host)) for host, info in enumerate(self._met(self._stores))]
        self._source = FleetSource(
            self._stores, told, passes=settings.passes, timeout_s=settings.call_timeout_s, stop=stop_requested
        )
        self._evaluation: EvaluationReferences | None = None
        if settings.eval_bundle is not None:
            self._evaluation = self._source.evaluation()
        self._layouts: Layouts
        self._places: dict[int, _Place] = {}
        self._pools: list[Answer] = []
        self._packers: list[FleetPacker] = []

    @property
    def first(self) -> Described:
        return self._source.first

    @property
    def layouts(self) -> Layouts:
        return self._layouts

    def open(self) -> None:
        """Trainers let go of what was before, then say what lies where; then agents reserve their pools."""
        settings = self._settings
        self._fleet.hello([self._hello] * len(self._names), settings.start_timeout_s)
        for doors in (self._feeds, self._auxes):
            self._met(doors)
        evaluated = self._evaluation.first if self._evaluation is not None else None
        self._layouts = layouts_of(settings, self.first, evaluated, tiles=self._tiles(evaluated))
        for layout in self._layouts.all:
            ranges = self._ranges(layout)
            windows = tuple(each.window for each in ranges)
            check_cover(windows, settings.rows, settings.tokens)
            local = the_same_on_all([local_layout(layout, each) for each in ranges], self._names)
            self._places[layout.layout_id] = _Place(local, windows)
        train = self._places[self._layouts.train.layout_id]
        asked = {
            "layouts": [self._places[layout.layout_id].local.to_wire() for layout in self._layouts.all],
            "slots": settings.slots, "aux_slots": settings.aux_slots,
        }  # fmt: skip
        tiles = list(self._ranges_tiles)
        self._pools = self._auxes.each(
            "open_pool",
            [
                asked | {"windows": [[w.row_begin, w.row_end, w.token_begin, w.token_end]], "tiles": tiles}
                for w in train.windows
            ],
            timeout_s=settings.start_timeout_s + settings.call_timeout_s,
        )

    def connect(self, *, again: bool) -> Connection:
        layouts = self._layouts.all
        local = [self._places[layout.layout_id].local.to_wire() for layout in layouts]
        hellos = [
            Hello(
                version=PROTOCOL_VERSION, run_id=self._hello.run_id, epoch=self._hello.epoch,
                pool=pool.take("pool", str), layouts=local, withdrawn=[], lock_path="", pid=0, start_ticks=0,
                global_layouts=[layout.to_wire() for layout in layouts],
            )
            for pool in self._pools
        ]  # fmt: skip
        self._fleet.hello(hellos, self._settings.start_timeout_s)
        return Connection(
            self._fleet, RemoteWatch(), self._interrupt, self._settings.call_timeout_s, self._events
        )
