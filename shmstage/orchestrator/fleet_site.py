"""Many hosts: on each a trainer, an agent that packs for it, and a store of trajectories; here plans and references.

Nothing is watched from here: a process on another host cannot be proven dead by its lock. The launcher knows, and ends
this process; every call has its deadline all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from shmstage.errors import ProtocolError
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
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.reference import Described
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
        told = self._stores.hello(self._hello, settings.start_timeout_s)
        self._source = FleetSource(self._stores, told, passes=settings.passes, timeout_s=settings.call_timeout_s)
        self._evaluation: EvaluationReferences | None = None
        if settings.eval_bundle is not None:
            self._evaluation = self._source.evaluation()
        self._layouts: Layouts
        #: layout of whole micro-batches → where they lie
        self._places: dict[int, _Place] = {}
        self._pools: list[Answer] = []
        self._packer: FleetPacker | None = None
        self._remembered = False

    @property
    def first(self) -> Described:
        return self._source.first

    @property
    def layouts(self) -> Layouts:
        return self._layouts

    def open(self) -> None:
        """Trainers let go of what was before and say what lies where; then the agents reserve their pools."""
        settings = self._settings
        self._fleet.hello([self._hello] * len(self._names), settings.start_timeout_s)
        self._auxes.hello(self._hello, settings.start_timeout_s)
        feeds = self._feeds.hello(self._hello, settings.start_timeout_s)
        self._remembered = all(feed.any("remembers_plans") is True for feed in feeds)
        evaluated = self._evaluation.first if self._evaluation is not None else None
        tiles = self._tiles()
        encoded = settings.routing_encoding != "dense"
        self._layouts = layouts_of(settings, self.first, evaluated, tiles=tiles if encoded else None)
        places = [self._place(layout) for layout in self._layouts.all]
        self._places = {layout.layout_id: place for layout, place in zip(self._layouts.all, places, strict=True)}
        asked = {
            "layouts": [place.local.to_wire() for place in places], "tiles": list(tiles), "slots": settings.slots,
            "aux_slots": settings.aux_slots,
        }  # fmt: skip
        each = [
            asked | {"windows": [_bounds(place.windows[host]) for place in places]}
            for host in range(len(self._names))
        ]
        self._pools = self._auxes.each("open_pool", each, timeout_s=settings.call_timeout_s)
        # from now on a stop cuts no wait short: the step that is open is brought to its end
        self._auxes.stop = self._feeds.stop = lambda: False

    def connect(self, *, again: bool) -> Connection:
        layouts = self._layouts.all
        local = [self._places[layout.layout_id].local.to_wire() for layout in layouts]
        whole = [layout.to_wire() for layout in layouts]
        hellos = [
            replace(self._hello, pool=pool.take("pool", str), layouts=local, global_layouts=whole)
            for pool in self._pools
        ]
        self._fleet.hello(hellos, self._settings.start_timeout_s)
        return Connection(self._fleet, RemoteWatch(), self._interrupt, self._settings.call_timeout_s, self._events)

    def workplace(self, trainer: Connection) -> Workplace:
        settings = self._settings
        self._packer = self._packer_for(self._layouts.train, aux=False)
        evaluation = None
        if self._evaluation is not None and self._layouts.evaluate is not None:
            evaluation = Evaluation(self._evaluation, self._packer_for(self._layouts.evaluate, aux=True))
        late = None
        if settings.recompute_old_logps:
            late = FleetLateFields(
                self._auxes, self._book, sampler_is_cap=settings.sampler_is_cap, timeout_s=settings.call_timeout_s
            )
        return Workplace(
            source=self._source, packer=self._packer, microbatch_nbytes=self._nbytes_of(self._layouts.train),
            evaluation=evaluation, late=late,
        )  # fmt: skip

    def slot_layout_id(self, layout_id: int) -> int:
        return self._places[layout_id].local.layout_id

    def failed(self, error: Exception) -> None:
        pass  # the agents' pools say nothing of it

    def trainer_died(self) -> None:
        pass  # nobody here can know

    def warnings(self) -> list[str]:
        return []

    def summary(self, trained: int) -> dict[str, Any]:
        told = sum(doors.nbytes for doors in (self._feeds, self._auxes, self._stores))
        return {
            "hosts": len(self._names),
            "orchestrator_bytes_per_trajectory": round(told / trained, 1) if trained else None,
            "fetched_nbytes_per_host": self._packer.fetched_nbytes if self._packer is not None else [],
            "pool_nbytes": sum(pool.count("nbytes") for pool in self._pools),
            "backing": self._pools[0].take("backing", dict),
        }

    # --- what lies where ------------------------------------------------------------------------------------

    def _tiles(self) -> tuple[int, int]:
        """Into how many parts rows and tokens are cut, over all hosts. Routing does not matter for that."""
        plain = microbatch_layout(self._settings.rows, self._settings.tokens)
        return self._ranges(plain)[0].tiles

    def _place(self, layout: Layout) -> _Place:
        ranges = self._ranges(layout)
        windows = tuple(each.window for each in ranges)
        check_cover(windows, self._settings.rows, self._settings.tokens)
        return _Place(the_same_on_all([local_layout(layout, each) for each in ranges], self._names), windows)

    def _ranges(self, layout: Layout) -> list[HostRanges]:
        told = self._fleet.each("ranges", {"layout": layout.to_wire()}, self._settings.call_timeout_s)
        found = [
            read_ranges(answer, layout, f"the trainer of {name}")
            for name, answer in zip(self._names, told, strict=True)
        ]
        if len({each.tiles for each in found}) != 1:
            raise ProtocolError(f"trainers differ in how a micro-batch is cut: {[each.tiles for each in found]}")
        return found

    def _packer_for(self, layout: Layout, *, aux: bool) -> FleetPacker:
        settings, place = self._settings, self._places[layout.layout_id]
        return FleetPacker(
            self._auxes if aux else self._feeds, place.windows, place.local.layout_id, self._book,
            rows=settings.rows, tokens=settings.tokens, nbytes=self._nbytes_of(layout), slots=settings.slots,
            slot_timeout_s=settings.slot_timeout_s, call_timeout_s=settings.call_timeout_s, aux=aux,
            remembered=self._remembered,
        )  # fmt: skip

    def _nbytes_of(self, layout: Layout) -> int:
        return len(self._names) * self._places[layout.layout_id].local.payload_nbytes


def _bounds(window: Window) -> list[int]:
    return [window.row_begin, window.row_end, window.token_begin, window.token_end]
