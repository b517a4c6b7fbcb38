"""Stores and agents without Ray: two hosts in one process, their doors over tcp with keys, pieces by a plain call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from shmstage.errors import AuthError, PeerLostError, PoolError, ProtocolError, SettingsError, WaitTimeoutError
from shmstage.launch import store_commands
from shmstage.launch.door import Arguments, Door, Speaker
from shmstage.launch.host_agent import HostAgent
from shmstage.launch.ray_actors import check_shared
from shmstage.launch.source_share import SourceShare
from shmstage.launch.trajectory_store import TrajectoryStore
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.reader import PoolReader
from shmstage.orchestrator.input import Input
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.fill import fill_microbatch, microbatch_digest
from shmstage.packing.journal import Journal
from shmstage.packing.parts import Wanted, digest_of_rows, part_of
from shmstage.packing.pieces import decode_pieces
from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings
from shmstage.packing.reference import Key, RoutingShape, TrajectoryReference
from shmstage.packing.trajectory import Group, Trajectory
from shmstage.packing.window import Window
from shmstage.settings import Settings
from shmstage.transport.client import Client
from shmstage.transport.curve import ClientAuth, ServerAuth, new_keys
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel
from shmstage.wire.handles import handle_from_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Hello

RUN = "agents"
ROWS, TOKENS = 4, 64
ORCHESTRATOR = new_keys()


def trajectory(number: int) -> Trajectory:
    noise = np.random.default_rng(number)
    length = int(noise.integers(5, 40))
    scores = noise.random((length - 1, 2, 8))
    return Trajectory(
        trajectory_id=f"t{number}",
        group_id=f"g{number // 2}",
        tokens=noise.integers(1, 99, length, dtype=np.int32),
        loss_mask=noise.integers(0, 2, length).astype(np.float32),
        advantages=noise.standard_normal(length).astype(np.float32),
        old_logprobs=noise.standard_normal(length).astype(np.float32),
        routing=np.argsort(scores, axis=-1)[..., :2].astype(np.int16),
        experts=8,
    )


class Given:
    """A source of so many groups of two."""

    def __init__(self, groups: int, *, replayable: bool = True) -> None:
        self.replayable = replayable
        self.asked: list[int] = []
        self._groups = [Group(f"g{n}", n, (trajectory(2 * n), trajectory(2 * n + 1))) for n in range(groups)]

    def groups(self, cursor: int) -> Iterator[Group]:
        self.asked.append(cursor)
        yield from self._groups[cursor:]


class Sharded(Given):
    def shard(self, index: int, count: int) -> Given:
        part = Given(0, replayable=False)
        part._groups = self._groups[index::count]
        return part


def settings_at(out: Path, **changes: Any) -> Settings:
    return Settings(run=RUN, out=out, rows=ROWS, tokens=TOKENS, **changes)


def store_of(source: Given, out: Path, index: int = 0, count: int = 2, **changes: Any) -> TrajectoryStore:
    share = SourceShare(source, index, count, out / "journal")
    return TrajectoryStore(settings_at(out, **changes), share, None, index, count)


def read_all(store: TrajectoryStore, cursor: int = 0, pass_number: int = 1) -> list[list[Any]]:
    found: list[list[Any]] = []
    while True:
        answer = store.read(pass_number, cursor, 2, 5.0)
        found += answer["groups"]
        if answer["end"]:
            return found
        cursor = found[-1][0] + 1


@pytest.fixture
def stack(nothing_survives: Path) -> Iterator[Any]:
    from contextlib import ExitStack

    with ExitStack() as opened:
        yield opened


# --- stores -----------------------------------------------------------------------------------------------------


def test_a_journal_is_resumed_by_as_many_stores_as_have_written_it_and_by_no_run_on_one_host(tmp_path: Path) -> None:
    """P4: groups numbered otherwise would be trained twice or never."""
    for index in range(2):
        store_of(Sharded(4, replayable=False), tmp_path, index).close()
    store_of(Sharded(4, replayable=False), tmp_path, 1).close()
    with pytest.raises(SettingsError, match=r"store-0-of-2 is of a launch with another number of hosts than 3"):
        store_of(Sharded(4, replayable=False), tmp_path, 0, count=3)
    with pytest.raises(SettingsError, match=r"is of a `shmstage launch`"):
        Input(Given(4, replayable=False), settings_at(tmp_path))
    other = tmp_path / "other"
    Input(Given(4, replayable=False), settings_at(other)).close()
    with pytest.raises(SettingsError, match=r"is of a `shmstage run`"):
        store_of(Given(4, replayable=False), other, count=1)


def test_each_store_gives_its_share_of_a_replayable_source_under_the_sources_own_numbers(tmp_path: Path) -> None:
    stores = [store_of(Given(5), tmp_path, index) for index in range(2)]
    given = [[(group[0], group[1]) for group in read_all(store)] for store in stores]
    assert given == [[(0, "g0"), (2, "g2"), (4, "g4")], [(1, "g1"), (3, "g3")]]
    for store in stores:
        store.close()


def test_parts_of_a_sharded_live_source_are_numbered_as_one(tmp_path: Path) -> None:
    stores = [store_of(Sharded(5, replayable=False), tmp_path, index) for index in range(2)]
    given = [[(group[0], group[1]) for group in read_all(store)] for store in stores]
    assert given == [[(0, "g0"), (2, "g2"), (4, "g4")], [(1, "g1"), (3, "g3")]]
    assert [store.open_session(1)["sharded"] for store in stores] == [True, True]
    for store in stores:
        store.close()


def test_a_live_source_that_cannot_be_shared_is_asked_in_one_store_only(tmp_path: Path) -> None:
    sources = [Given(3, replayable=False) for _ in range(2)]
    stores = [store_of(source, tmp_path, index) for index, source in enumerate(sources)]
    assert [store.open_session(1)["stores"] for store in stores] == [1, 1]
    assert [len(read_all(store)) for store in stores] == [3, 0]
    assert (sources[0].asked, sources[1].asked) == ([0], [])
    for store in stores:
        store.close()


def test_what_a_live_source_gave_is_read_again_from_the_journal_by_the_next_store(tmp_path: Path) -> None:
    first = store_of(Sharded(6, replayable=False), tmp_path, 1)
    before = read_all(first)
    told = first.first("train", 5.0)
    first.close()
    second = store_of(Sharded(6, replayable=False), tmp_path, 1)
    again = second.read(1, 3, 1, 5.0)["groups"]
    assert [(group[0], group[1], group[3][0][6]) for group in again] == [(3, "g3", before[1][3][0][6])]
    assert second.first("train", 5.0) == told
    second.close()


def test_what_is_let_go_of_memory_is_still_in_the_journal_until_it_is_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    covered: list[int] = []
    monkeypatch.setattr(Journal, "release", lambda self, cursor: covered.append(cursor))
    store = store_of(Given(4, replayable=False), tmp_path)
    groups = read_all(store)
    second_group = groups[1][3][0][0]
    store.release(second_group + 1)  # the first group and half of the second
    store.release(second_group + 1)
    assert store.held_nbytes == sum(each[4] for group in groups for each in group[3] if each[0] > second_group)
    assert [group[0] for group in store.read(1, 1, 9, 5.0)["groups"]][:1] == [1]  # still to be had
    assert not covered
    store.covered(3)
    assert covered == [3]
    store.close()


def test_numbers_never_repeat_and_a_second_pass_reads_anew(tmp_path: Path) -> None:
    store = store_of(Given(4), tmp_path)
    first, second = read_all(store), read_all(store, pass_number=2)
    numbers = [[each[0] for group in groups for each in group[3]] for groups in (first, second)]
    assert len({*numbers[0], *numbers[1]}) == 8
    assert [group[1:3] for group in first] == [group[1:3] for group in second]
    store.close()


def test_groups_trained_before_a_resume_are_not_held(tmp_path: Path) -> None:
    store = store_of(Given(6), tmp_path)
    groups = store.read(1, 3, 9, 5.0)["groups"]
    assert [group[0] for group in groups] == [4]
    assert store.held_nbytes == sum(each[4] for group in groups for each in group[3])
    store.close()


def read_ahead(store: TrajectoryStore) -> None:
    """Until the store has read all that its source gives."""
    with store._condition:
        assert store._condition.wait_for(lambda: store._run is not None and store._run.ended, 20.0)


def test_groups_that_are_passed_over_are_let_go(tmp_path: Path) -> None:
    store = store_of(Given(8), tmp_path)
    assert [group[0] for group in store.read(1, 0, 1, 5.0)["groups"]] == [0]
    read_ahead(store)
    (group,) = store.read(1, 5, 9, 5.0)["groups"]
    assert (group[0], group[3][0][0]) == (6, 6)
    for number in (2, 5):  # of groups 2 and 4, which nobody was told of
        with pytest.raises(ProtocolError, match=f"no trajectory number {number}"):
            store.pieces(np.array([number]), np.array([0]), np.array([1]))
    assert store.pieces(np.array([1, 6]), np.array([0, 0]), np.array([1, 1]))
    assert store.held_nbytes == sum(trajectory(n).nbytes for n in (0, 1, 12, 13))
    store.close()


def test_the_end_is_told_when_everything_was_given_and_not_before(tmp_path: Path) -> None:
    store = store_of(Given(6), tmp_path)
    answers = [store.read(1, 0, 1, 5.0)]
    read_ahead(store)
    answers += [store.read(1, cursor, 1, 5.0) for cursor in (1, 3, 5)]
    told = [([group[0] for group in answer["groups"]], answer["end"]) for answer in answers]
    assert told == [([0], False), ([2], False), ([4], True), ([], True)]
    store.close()


def test_a_new_orchestrator_is_given_nothing_that_was_read_for_the_one_before(tmp_path: Path) -> None:
    store = store_of(Given(6), tmp_path)
    store.open_session(1)
    store.read(1, 0, 1, 5.0)
    read_ahead(store)
    store.open_session(2)
    (group,) = store.read(1, 1, 1, 5.0)["groups"]  # it resumes just where the dead one was
    assert group[0] == 2
    assert store.pieces(np.array([group[3][0][0]]), np.array([0]), np.array([1]))
    store.close()


def test_what_is_evaluated_has_numbers_of_its_own_and_is_kept_for_every_orchestrator(tmp_path: Path) -> None:
    share, evaluated = (SourceShare(Given(groups), 1, 2, tmp_path / "journal") for groups in (4, 6))
    store = TrajectoryStore(settings_at(tmp_path), share, evaluated, 1, 2)
    for epoch in (1, 2):
        store.open_session(epoch)
        answers = [store.read_evaluation("eval", cursor, 2) for cursor in (0, 4)]
        assert [[group[0] for group in answer["groups"]] for answer in answers] == [[1, 3], [5]]
        assert [answer["end"] for answer in answers] == [False, True]
        trained, scored = (
            {each[0]: each for group in groups for each in group[3]}
            for groups in (read_all(store), answers[0]["groups"] + answers[1]["groups"])
        )
        assert not trained.keys() & scored.keys() and len(scored) == 6
        store.release(max(trained) + 1)
        numbers = np.array([*scored])
        pieces = decode_pieces(store.pieces(numbers, np.zeros_like(numbers), np.ones_like(numbers)))
        assert [piece.digest for piece in pieces] == [each[6] for each in scored.values()]
        assert store.held_nbytes == 0
    store.close()


def test_a_shards_journal_lets_go_of_its_own_groups_before_the_covered_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store 1 of 2 gives groups 1, 3, 5; its journal counts them from 0."""
    own: list[int] = []
    monkeypatch.setattr(Journal, "release", lambda self, cursor: own.append(cursor))
    store = store_of(Sharded(8, replayable=False), tmp_path, 1)
    for covered in range(6):
        store.covered(covered)
    assert own == [0, 0, 1, 1, 2, 2]
    store.close()


def test_a_stores_door_asks_the_store_for_what_it_was_asked() -> None:
    asked: list[tuple[Any, ...]] = []

    class Asked:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: asked.append((name, *arguments))

    store: Any = Asked()
    commands = store_commands.commands(store)
    for name, arguments in [
        ("read", {"pass_number": 2, "cursor": 3, "count": 4, "wait_s": 1.0}),
        ("read", {"pass_number": 2, "cursor": 3, "count": 4, "wait_s": 1e9}),
        ("read", {"what": "eval", "pass_number": 1, "cursor": 3, "count": 4, "wait_s": 1.0}),
        ("first", {"wait_s": 1e9}),
        ("first", {"what": "eval", "wait_s": 2}),
        ("expected", {"batch_index": 6}),
        ("release", {"below": 7}),
        ("covered", {"cursor": 8}),
    ]:
        commands[name](Arguments(name, arguments), lambda: False)
    longest = store_commands.MAX_WAIT_S
    assert asked == [
        ("read", 2, 3, 4, 1.0), ("read", 2, 3, 4, longest), ("read_evaluation", "eval", 3, 4),
        ("first", "train", longest), ("first", "eval", 2.0), ("expected", 6), ("release", 7), ("covered", 8),
    ]  # fmt: skip


def test_reading_goes_ahead_only_as_far_as_there_is_room_and_release_makes_none(tmp_path: Path) -> None:
    nbytes = max(trajectory(n).nbytes for n in range(40))
    store = store_of(Given(20), tmp_path, 0, 1, max_held_bytes=4 * 4 * nbytes)  # a quarter of it is read ahead
    for cursor in range(10):
        answer = store.read(1, cursor, 1, 5.0)
        assert len(answer["groups"]) == 1
        assert store.held_nbytes <= 2 * nbytes * (cursor + 1) + 4 * nbytes
    store.close()


def test_a_new_orchestrator_is_told_nothing_of_what_the_one_before_held(tmp_path: Path) -> None:
    store = store_of(Given(4), tmp_path)
    store.open_session(1)
    numbers = [each[0] for group in read_all(store) for each in group[3]]
    store.open_session(1)  # the same one, on another connection
    assert store.held_nbytes > 0
    store.open_session(2)
    assert store.held_nbytes == 0
    with pytest.raises(ProtocolError, match=f"no trajectory number {numbers[0]} .it holds none"):
        store.pieces(np.array(numbers[:1]), np.array([0]), np.array([1]))
    store.close()


def test_what_the_source_raises_comes_after_everything_it_gave(tmp_path: Path) -> None:
    class Breaking(Given):
        def groups(self, cursor: int) -> Iterator[Group]:
            yield self._groups[0]
            raise SettingsError("the well is dry")

    store = store_of(Breaking(1), tmp_path, 0, 1)
    assert len(store.read(1, 0, 1, 5.0)["groups"]) == 1
    with pytest.raises(SettingsError, match="the well is dry"):
        store.read(1, 1, 1, 5.0)
    store.close()


def test_an_answer_that_would_be_long_is_cut_into_several(tmp_path: Path) -> None:
    many = Given(0)
    long_name = "x" * 190
    one = trajectory(1)
    members = [
        Trajectory(
            trajectory_id=f"{n:04}{long_name}",
            tokens=one.tokens,
            loss_mask=one.loss_mask,
            advantages=one.advantages,
            old_logprobs=one.old_logprobs,
        )
        for n in range(800)
    ]
    many._groups = [Group(f"g{n}", 0, tuple(members)) for n in range(3)]
    store = store_of(many, tmp_path, 0, 1)
    assert [len(store.read(1, cursor, 9, 5.0)["groups"]) for cursor in range(3)] == [1, 1, 1]
    store.close()


# --- agents -----------------------------------------------------------------------------------------------------


class Direct:
    """The stores of all hosts, called as they are; ``blocked`` makes them wait."""

    def __init__(self, stores: list[TrajectoryStore]) -> None:
        self.stores = stores
        self.asked: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def ask(self, wanted: Sequence[Wanted]) -> Called:
        self.asked += [each.store for each in wanted]
        return Called(self, wanted)


class Called:
    def __init__(self, direct: Direct, wanted: Sequence[Wanted]) -> None:
        self.direct, self.wanted = direct, wanted

    def get(self) -> list[list[npt.NDArray[np.uint8]]]:
        assert self.direct.may_answer.wait(30.0)
        stores = self.direct.stores
        return [stores[each.store].pieces(each.numbers, each.begins, each.ends) for each in self.wanted]

    def unanswered(self) -> list[str]:
        return [f"host {each.store}" for each in self.wanted]


class Hosts:
    """Two stores and as many agents as windows, with a client at each agent's feed and aux door."""

    def __init__(self, out: Path, stack: Any, windows: list[Window], groups: int = 8, **changes: Any) -> None:
        self.stack, self.windows = stack, windows
        self.settings = settings_at(out, **changes)
        self.stores = [store_of(Given(groups), out, index) for index in range(2)]
        for store in self.stores:
            stack.callback(store.close)
        self.direct = Direct(self.stores)
        self.trainer_lost: str | None = None
        self.identity = ProcessIdentity.create(RUN, "agent")
        stack.callback(self.identity.close)
        self.agents: list[HostAgent] = []
        self.feeds: list[Client] = []
        self.auxes: list[Client] = []
        for rank in range(len(windows)):
            agent = HostAgent(
                self.settings, rank=rank, hosts=len(windows), name=f"host {rank} (here)", epoch=3,
                identity=self.identity, stores=self.direct, trainer_lost=lambda: self.trainer_lost,
            )  # fmt: skip
            stack.callback(agent.close_pool)
            self.agents.append(agent)
            self.feeds.append(self.client(agent.welcome, agent.commands))
            self.auxes.append(self.client(agent.welcome, agent.commands))
        self.references: dict[int, TrajectoryReference] = {}
        self.trajectories: dict[int, Trajectory] = {}
        self._read()

    def client(self, welcome: Callable[[Hello], dict[str, Any]], commands: Any, epoch: int = 3) -> Client:
        keys = new_keys()
        channel = ZmqServerChannel.bind_tcp("127.0.0.1", ServerAuth(keys, frozenset({ORCHESTRATOR.public})))
        door = Door("door", channel, Speaker.of(os.getpid()), welcome, commands)
        self.stack.callback(door.close)
        client = Client(ZmqChannel.connect_tcp(channel.endpoint, ClientAuth(keys.public, ORCHESTRATOR)))
        self.stack.callback(client.close)
        self.info = client.hello(hello(epoch), 10.0).info
        return client

    def _read(self) -> None:
        arrival = 0
        for store in self.stores:
            client = self.client(store_commands.welcome(store), store_commands.commands(store))
            answer = client.call("read", {"pass_number": 1, "cursor": 0, "count": 99, "wait_s": 5.0}, timeout_s=10.0)
            for _, group_id, batch, members in answer["groups"]:
                for number, name, version, length, nbytes, loss, digest, optional, experts, routing in members:
                    self.references[arrival] = TrajectoryReference(
                        Key(store.index, number), name, group_id, batch, version, length, nbytes, loss, digest,
                        frozenset(optional), experts, RoutingShape(tuple(routing)),
                    )  # fmt: skip
                    self.trajectories[arrival] = trajectory(int(name[1:]))
                    arrival += 1

    def plans(self) -> list[PlannedMicrobatch]:
        planner = Planner(PlanSettings(rows=ROWS, tokens=TOKENS))
        for arrival, reference in self.references.items():
            planner.add(arrival, reference.length)
        return planner.flush()

    def open(self, slots: int = 2) -> None:
        for rank, window in enumerate(self.windows):
            layout = layout_of(window.rows, window.tokens)
            bounds = [window.row_begin, window.row_end, window.token_begin, window.token_end]
            told = self.auxes[rank].call(
                "open_pool",
                {"layouts": [layout.to_wire()], "windows": [bounds], "tiles": [1, 1], "slots": slots, "aux_slots": 1},
                timeout_s=10.0,
            )
            assert told["nbytes"] > 0

    def part(self, plan: PlannedMicrobatch, rank: int) -> dict[str, bytes]:
        part = part_of(plan, self.references, self.windows[rank])
        return {"plan": part.plan, "digests": part.digests}

    def pack(self, planned: PlannedMicrobatch, rank: int, *, aux: bool = False, **changes: Any) -> dict[str, Any]:
        window = self.windows[rank]
        arguments = {
            "step": 1, "index": 0, "is_final": True, "aux": aux, "loss_tokens": 7,
            "layout_id": layout_of(window.rows, window.tokens).layout_id, "segments": 3,
            "digest": microbatch_digest(planned, self.references), "timeout_s": 10.0,
            **self.part(planned, rank), **changes,
        }  # fmt: skip
        client = self.auxes[rank] if aux else self.feeds[rank]
        return client.call("pack", arguments, timeout_s=20.0)

    def arrays(self, rank: int, packed: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        opened = self.agents[rank]._open
        assert opened is not None
        with ProcessReader(opened.pool.name, opened.layouts) as reader:
            return reader.copy(packed["handle"])


class ProcessReader:
    """A consumer of a pool, for one look."""

    def __init__(self, name: str, layouts: Any) -> None:
        self._reader = PoolReader.attach(name, run_id=RUN, epoch=3)
        for layout in layouts.values():
            self._reader.register(layout)

    def __enter__(self) -> ProcessReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def copy(self, handle: Any) -> dict[str, npt.NDArray[Any]]:
        with self._reader.lease(handle_from_wire(handle)) as lease:
            return {name: np.array(view) for name, view in lease.views.items()}


def layout_of(rows: int, tokens: int) -> Any:
    return microbatch_layout(rows, tokens, optional=frozenset({"routing"}), layers=2, top_k=2)


def hello(epoch: int) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION, run_id=RUN, epoch=epoch, pool="", layouts=[], withdrawn=[], lock_path="", pid=0,
        start_ticks=0,
    )  # fmt: skip


BY_ROWS = [Window(0, 2, 0, TOKENS), Window(2, 4, 0, TOKENS)]
BY_TOKENS = [Window(0, ROWS, 0, 32), Window(0, ROWS, 32, TOKENS)]


@pytest.mark.parametrize("windows", [BY_ROWS, BY_TOKENS], ids=["rows", "tokens"])
def test_the_windows_of_all_hosts_together_are_the_micro_batch_of_one_host(
    tmp_path: Path, stack: Any, windows: list[Window]
) -> None:
    hosts = Hosts(tmp_path, stack, windows)
    hosts.open()
    plan = hosts.plans()[0]
    whole = {name: np.zeros(field.shape, field.dtype) for name, field in by_name(layout_of(ROWS, TOKENS)).items()}
    fill_microbatch(plan, hosts.trajectories, whole)
    for rank, window in enumerate(windows):
        packed = hosts.pack(plan, rank)
        for name, array in hosts.arrays(rank, packed).items():
            expected = whole[name][window.row_begin : window.row_end, window.token_begin : window.token_end]
            assert np.array_equal(array, expected), name
        if windows is BY_ROWS:
            rows = packed["row_digests"]
            hosts.__dict__.setdefault("rows", []).append(rows)
    if windows is BY_ROWS:
        assert digest_of_rows(hosts.__dict__["rows"]) == microbatch_digest(plan, hosts.trajectories)


def by_name(layout: Any) -> dict[str, Any]:
    return {field.name: field for field in layout.fields}


def test_what_was_prefetched_is_fetched_once(tmp_path: Path, stack: Any) -> None:
    hosts = Hosts(tmp_path, stack, BY_ROWS)
    hosts.open()
    plan = hosts.plans()[0]
    for _ in range(2):
        hosts.feeds[0].call("prefetch", hosts.part(plan, 0), timeout_s=10.0)
    packed = hosts.pack(plan, 0)
    assert len(hosts.direct.asked) == len(set(hosts.direct.asked))  # each store once
    assert packed["fetched_nbytes"] > 0 and packed["free_slots"] == 1


def test_a_plan_that_was_prefetched_is_named_instead_of_sent_and_a_forgotten_one_is_asked_for(
    tmp_path: Path, stack: Any
) -> None:
    hosts = Hosts(tmp_path, stack, BY_ROWS)
    assert hosts.info.get("remembers_plans") is None  # of a store
    hosts.open()
    plan = hosts.plans()[0]
    part = hosts.part(plan, 0)
    key = xxhash.xxh3_128_digest(part["plan"] + part["digests"])
    by_key = {"plan": b"", "digests": b"", "plan_key": key}
    assert hosts.pack(plan, 0, **by_key) == {"unknown_plan": True}
    hosts.feeds[0].call("prefetch", part, timeout_s=10.0)
    packed = hosts.pack(plan, 0, **by_key)
    again = hosts.pack(plan, 0)
    assert packed["row_digests"] == again["row_digests"]
    assert hosts.pack(plan, 0, **by_key) == {"unknown_plan": True}


def test_no_more_than_a_few_micro_batches_are_fetched_ahead(tmp_path: Path, stack: Any) -> None:
    hosts = Hosts(tmp_path, stack, BY_ROWS, groups=40)
    hosts.open()
    plans = hosts.plans()
    assert len(plans) > 5
    for plan in plans:
        hosts.feeds[0].call("prefetch", hosts.part(plan, 0), timeout_s=10.0)
    ahead = hosts.agents[0]._open.ahead  # type: ignore[union-attr]
    assert sum(wish.request is not None for wish in ahead._wishes.values()) == 4
    hosts.pack(plans[-1], 0)  # one that was not begun is fetched when it is packed
    assert sum(wish.request is not None for wish in ahead._wishes.values()) == 4


def test_a_wait_for_pieces_and_one_for_a_slot_end_at_the_deadline_and_say_who_is_waited_for(
    tmp_path: Path, stack: Any
) -> None:
    hosts = Hosts(tmp_path, stack, BY_ROWS)
    hosts.open(slots=2)
    plan = hosts.plans()[0]
    hosts.direct.may_answer.clear()
    with pytest.raises(WaitTimeoutError, match="no pieces in time from the store of host 0, host 1"):
        hosts.pack(plan, 0, timeout_s=0.05)
    hosts.direct.may_answer.set()
    for _ in range(2):
        hosts.pack(plan, 0)
    with pytest.raises(WaitTimeoutError, match=r"no free slot .*micro-batch 1\.0"):
        hosts.pack(plan, 0, timeout_s=0.05)
    assert hosts.pack(plan, 0, aux=True)["free_slots"] == 0  # evaluation has a place of its own


def test_a_wait_ends_when_the_trainer_is_dead_and_names_it(tmp_path: Path, stack: Any) -> None:
    hosts = Hosts(tmp_path, stack, BY_ROWS)
    hosts.open(slots=2)
    plan = hosts.plans()[0]
    for _ in range(2):
        hosts.pack(plan, 0)
    hosts.trainer_lost = "the trainer (pid 7) was killed by signal 9"
    with pytest.raises(PeerLostError, match=r"host 0 \(here\): the trainer \(pid 7\) was killed"):
        hosts.pack(plan, 0)


def test_a_second_pool_takes_the_place_of_the_first_and_without_one_nothing_is_packed(
    tmp_path: Path, stack: Any
) -> None:
    hosts = Hosts(tmp_path, stack, BY_ROWS)
    plan = hosts.plans()[0]
    with pytest.raises(PoolError, match="open_pool comes first"):
        hosts.pack(plan, 0)
    hosts.open()
    first = hosts.agents[0]._open.pool.name  # type: ignore[union-attr]
    hosts.open()
    assert not os.path.exists("/dev/shm" + first)
    hosts.pack(plan, 0)
    hosts.auxes[0].call("close_pool", {}, timeout_s=10.0)
    with pytest.raises(PoolError):
        hosts.pack(plan, 0)


def test_a_piece_that_is_not_what_the_plan_says_is_refused_and_the_slot_stays_free(tmp_path: Path, stack: Any) -> None:
    hosts = Hosts(tmp_path, stack, BY_ROWS)
    hosts.open()
    plan = hosts.plans()[0]
    part = hosts.part(plan, 0)
    with pytest.raises(ProtocolError):
        hosts.pack(plan, 0, digests=bytes(len(part["digests"])))
    with pytest.raises(ProtocolError, match="step wants int"):
        hosts.pack(plan, 0, step="1")
    assert hosts.pack(plan, 0)["free_slots"] == 1


def test_a_client_with_another_key_is_not_let_in(tmp_path: Path, stack: Any) -> None:
    keys = new_keys()
    channel = ZmqServerChannel.bind_tcp("127.0.0.1", ServerAuth(keys, frozenset({ORCHESTRATOR.public})))
    door = Door("door", channel, Speaker.of(os.getpid()), lambda hello: {}, {})
    stack.callback(door.close)
    client = Client(ZmqChannel.connect_tcp(channel.endpoint, ClientAuth(keys.public, new_keys())))
    stack.callback(client.close)
    with pytest.raises(AuthError):
        client.hello(hello(1), 20.0)


def test_an_out_that_is_not_shared_is_said_with_host_and_file(tmp_path: Path) -> None:
    (tmp_path / ".shared-1").write_text("secret")
    check_shared("host 1 (b)", str(tmp_path), ".shared-1", "secret")
    with pytest.raises(SettingsError, match=r"host 1 \(b\): .*\.shared-2: No such file.*all hosts share"):
        check_shared("host 1 (b)", str(tmp_path), ".shared-2", "secret")
    with pytest.raises(SettingsError, match="another one here"):
        check_shared("host 1 (b)", str(tmp_path), ".shared-1", "other")
