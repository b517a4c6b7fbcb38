"""The public transport API: arrays go through, misuse is refused, deaths are noticed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from forking import exit_code_in_forked_child

from shmstage.errors import (
    EndpointBusyError,
    ForkedError,
    InputError,
    LayoutError,
    PeerLostError,
    ProtocolError,
    SlotStateError,
    StaleHandleError,
    TransportError,
    WaitTimeoutError,
)
from shmstage.memory.sweep import list_objects
from shmstage.testing.memory_channel import MemoryServerChannel
from shmstage.transport.consumer import Consumer
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.producer import Producer
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel
from shmstage.wire.codec import decode, encode
from shmstage.wire.messages import PROTOCOL_VERSION, Attach, Attached, Ping, Published

FIELDS = {"tokens": ("int32", (2, 8)), "weights": ("bfloat16", (4,))}
WAIT_S = 20.0


@pytest.fixture
def producer() -> Iterator[Producer]:
    producer = Producer("stream", FIELDS, slots=2)
    yield producer
    producer._close(None)


def put(producer: Producer, value: int, timeout_s: float = WAIT_S) -> None:
    slot = producer.acquire(timeout_s)
    slot.views["tokens"][...] = value
    slot.publish(rows=value)


def take(consumer: Consumer) -> int:
    lease = consumer.receive(WAIT_S)
    assert lease is not None
    with lease:
        value = int(lease.views["tokens"][0, 0])
        assert (lease.views["tokens"] == value).all()
    return value


def pair(producer: Producer) -> Consumer:
    return Consumer(producer.name, timeout_s=WAIT_S)


# --- what goes through -----------------------------------------------------------------------------------------


def test_arrays_go_through_in_order_with_what_was_said_about_them(producer: Producer) -> None:
    with pair(producer) as consumer:
        for value in range(5):
            slot = producer.acquire(WAIT_S)
            assert slot.views["weights"].dtype.name == "bfloat16"
            slot.views["tokens"][...] = value
            sent = slot.publish(rows=2, step=value, index=1, digest=bytes(16), is_final=True, loss_tokens=9, segments=3)
            lease = consumer.receive(WAIT_S)
            assert lease is not None and lease.handle == sent
            assert (lease.views["tokens"] == value).all()
            lease.end()


def test_views_of_a_consumer_are_the_slot_itself_and_read_only(producer: Producer) -> None:
    with pair(producer) as consumer:
        put(producer, 1)
        lease = consumer.receive(WAIT_S)
        assert lease is not None
        with pytest.raises(ValueError, match="read-only"):
            lease.views["tokens"][0, 0] = 5
        assert not lease.views["tokens"].flags.owndata
        lease.end()
        with pytest.raises(SlotStateError):
            _ = lease.views


def test_loop_ends_at_the_end_of_the_stream_and_ends_its_leases(producer: Producer) -> None:
    seen: list[int] = []

    def read() -> None:
        with pair(producer) as consumer:
            seen.extend(int(lease.views["tokens"][0, 0]) for lease in consumer)
            assert consumer.receive(0.0) is None

    reader = threading.Thread(target=read)
    reader.start()
    for value in range(6):
        put(producer, value)
    producer.close(WAIT_S)
    reader.join()
    assert seen == list(range(6))


def test_every_consumer_reads_every_slot() -> None:
    with Producer("stream", FIELDS, slots=2, consumers=2) as producer:
        first, second = pair(producer), pair(producer)
        for value in range(4):
            put(producer, value)
            assert take(first) == value
            assert take(second) == value
        assert producer._pool.free_slot_count() == 2
        with pytest.raises(EndpointBusyError, match="serves 2 consumers, and all are there"):
            Consumer("stream", timeout_s=WAIT_S)
        readers = [threading.Thread(target=lambda c=c: (c.receive(WAIT_S), c.close())) for c in (first, second)]  # type: ignore[misc]
        for reader in readers:
            reader.start()
    for reader in readers:
        reader.join()


def test_what_was_published_before_a_consumer_came_waits_for_it(producer: Producer) -> None:
    put(producer, 1)
    put(producer, 2)
    with pytest.raises(WaitTimeoutError, match="not attached"):
        producer.acquire(0.0)
    with pair(producer) as consumer:
        assert [take(consumer), take(consumer)] == [1, 2]
        put(producer, 3)
        assert take(consumer) == 3


def test_example_arrays_describe_the_fields() -> None:
    with Producer("stream", {"x": np.zeros((3, 2), np.float32)}) as producer:
        assert producer.acquire(0.0).views["x"].shape == (3, 2)


def test_one_contract_on_the_in_process_channel_too() -> None:
    channel = MemoryServerChannel()
    producer = Producer("stream", FIELDS, channel=channel)
    consumer = Consumer("stream", timeout_s=WAIT_S, channel=channel.connect())
    put(producer, 7)
    assert take(consumer) == 7
    reader = threading.Thread(target=lambda: (consumer.receive(WAIT_S), consumer.close()))
    reader.start()
    producer.close(WAIT_S)
    reader.join()


def test_close_gives_back_slots_that_were_acquired_but_not_published(producer: Producer) -> None:
    slot = producer.acquire(0.0)
    producer.close(0.0)
    with pytest.raises(SlotStateError):
        _ = slot.views


def test_slot_left_without_publishing_is_free_again(producer: Producer) -> None:
    with producer.acquire(0.0), producer.acquire(0.0):
        pass
    assert producer._pool.free_slot_count() == 2


def test_nothing_is_left_in_shared_memory_after_close(producer: Producer) -> None:
    """S5"""
    consumer = pair(producer)
    assert len(list_objects("stream")) == 3  # the pool and two lifetime locks
    consumer.close()
    producer._close(None)
    assert list_objects("stream") == []


# --- misuse ------------------------------------------------------------------------------------------------------


def test_second_producer_of_a_name_is_refused_before_it_reserves(producer: Producer) -> None:
    before = list_objects("stream")
    with pytest.raises(EndpointBusyError):
        Producer("stream", FIELDS)
    assert list_objects("stream") == before
    put(producer, 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"x": ("object", (1,))}, "dtype 'object'"),
        ({"x": "float32"}, "want \\(dtype name, shape\\) or an example array"),
        ({"x": np.zeros(1), "y": ("int32", (1,))}, "all as example arrays"),
        ({"x": np.array(["a"])}, "cannot lie in a slot|not a dtype"),
    ],
)
def test_fields_that_cannot_lie_in_a_slot_are_refused_and_nothing_is_left(fields: dict[str, object], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Producer("stream", fields)  # type: ignore[arg-type]


def test_interrupt_while_the_producer_opens_leaves_nothing_and_no_trace_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        Producer("stream", FIELDS)
    (thread,) = started
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert list_objects("stream") == []
    assert caplog.records == []
    Producer("stream", FIELDS).close()


def test_slot_published_twice_is_refused(producer: Producer) -> None:
    slot = producer.acquire(0.0)
    slot.publish()
    with pytest.raises(SlotStateError):
        slot.publish()
    with pytest.raises(SlotStateError):
        _ = slot.views


def test_description_that_cannot_travel_is_refused_and_the_slot_stays_the_writers(producer: Producer) -> None:
    slot = producer.acquire(0.0)
    for described in ({"rows": -1}, {"rows": 2**32}, {"digest": b"short"}, {"is_final": 1}):
        with pytest.raises(InputError, match=r"handle\."):
            slot.publish(**described)  # type: ignore[arg-type]
    slot.publish()


def test_closed_ends_refuse(producer: Producer) -> None:
    consumer = pair(producer)
    slot = producer.acquire(0.0)
    consumer.close()
    consumer.close()
    with pytest.raises(TransportError, match="is closed"):
        consumer.receive(0.0)
    producer._close(None)
    producer.close()
    with pytest.raises(TransportError, match="is closed"):
        producer.acquire(0.0)
    with pytest.raises(TransportError, match="is closed"):
        slot.publish()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_is_refused_whatever_locks_other_threads_held_at_the_fork(producer: Producer) -> None:
    """S61. The locks are taken by hand: the receiving thread holds one of them at an instant nobody can choose."""
    consumer = pair(producer)
    publishing = producer.acquire(WAIT_S)
    locks = (producer._lock, producer._channel._socket._lock, consumer._channel._socket._lock)  # type: ignore[attr-defined]

    def refusals() -> int:
        refused = 0
        for use in (
            lambda: producer.acquire(0.0),
            lambda: publishing.publish(),
            lambda: producer.close(0.0),
            lambda: consumer.receive(0.0),
            lambda: consumer.close(),
        ):
            try:
                use()
            except ForkedError:
                refused += 1
        return refused

    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        assert exit_code_in_forked_child(refusals) == 5
    publishing.abandon()
    put(producer, 3)
    assert take(consumer) == 3
    consumer.close()


def test_consumer_without_a_producer_ends_at_its_deadline() -> None:
    with pytest.raises(WaitTimeoutError, match=r"no producer named 'nobody' answered within 0\.01 s"):
        Consumer("nobody", timeout_s=0.01)


def test_wait_for_a_slot_that_is_never_published_says_how_far_it_came(producer: Producer) -> None:
    with pair(producer) as consumer:
        put(producer, 1)
        take(consumer)
        with pytest.raises(WaitTimeoutError, match=r"published nothing within 0\.01 s; 1 slots came before"):
            consumer.receive(0.01)


def test_wait_for_a_free_slot_names_its_holder(producer: Producer) -> None:
    with pair(producer) as consumer:
        put(producer, 1)
        put(producer, 2)
        with pytest.raises(WaitTimeoutError, match=rf"held by consumer 0 \(pid {os.getpid()}"):
            producer.acquire(0.01)
        lease = consumer.receive(WAIT_S)
        assert lease is not None
        lease.end()
        put(producer, 3)


def test_close_past_its_deadline_names_the_holder_and_gives_everything_back(producer: Producer) -> None:
    put(producer, 1)
    with pytest.raises(WaitTimeoutError, match="not attached"):
        producer.close(0.01)
    assert list_objects("stream") == []


def test_arrays_kept_beyond_their_lease_delay_only_the_unmapping(
    producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = pair(producer)
    put(producer, 5)
    lease = consumer.receive(WAIT_S)
    assert lease is not None
    kept = lease.views["tokens"]
    lease.end()
    with caplog.at_level(logging.INFO):
        consumer.close()
    assert "still alive" in caplog.text
    assert kept[0, 0] == 5


def test_hostile_frames_are_refused_and_the_producer_goes_on(
    producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    channel = ZmqChannel.connect(endpoint_for("stream", "producer"))
    elsewhere = Attach(PROTOCOL_VERSION, "/etc/passwd", 1, 1)
    gone = Attach(PROTOCOL_VERSION, producer._identity.lock_path[:-10] + "zzzzz.lock", 1, 1)
    for frame, says in (
        (b"\xc1", "not msgpack"),
        (encode(Ping(1)), "takes no Ping"),
        (encode(elsewhere), "not a lifetime lock of this user"),
        (encode(gone), "is dead; its attach comes too late"),
    ):
        channel.send(frame)
        answer = decode(channel.recv(WAIT_S) or b"")
        assert isinstance(answer, Attached) and says in answer.refusal
    channel.close()
    with pair(producer) as consumer:
        put(producer, 1)
        assert take(consumer) == 1


def test_handle_that_was_lost_on_the_way_is_noticed(producer: Producer) -> None:
    """S82"""
    consumer = pair(producer)
    producer._cells[0].sent += 1
    put(producer, 1)
    with pytest.raises(ProtocolError, match="a handle was lost"):
        consumer.receive(WAIT_S)
    consumer.close()


def test_lying_handle_is_refused(producer: Producer) -> None:
    consumer = pair(producer)
    lie = [9, 2, producer.layout.layout_id, bytes(16), 0, 0, 0, False, 0, 0]
    producer._channel.send(producer._cells[0].peer, encode(Published(1, lie)))
    with pytest.raises((ProtocolError, StaleHandleError)):
        consumer.receive(WAIT_S)
    consumer.close()


# --- deaths ------------------------------------------------------------------------------------------------------


def test_consumer_that_leaves_early_is_a_loss_until_another_takes_its_place(producer: Producer) -> None:
    consumer = pair(producer)
    put(producer, 1)
    take(consumer)
    put(producer, 2)
    consumer.close()
    with pytest.raises(PeerLostError, match=r"left after 1 of 2 slots, holding slot \d .*; start another consumer of"):
        producer.acquire(WAIT_S)
    assert producer._pool.free_slot_count() == 2
    with pair(producer) as another:
        put(producer, 3)
        assert take(another) == 3


def test_consumer_gives_up_its_identity_only_when_its_good_bye_was_read(producer: Producer) -> None:
    consumer = pair(producer)
    with producer._lock:  # the producer reads nothing now
        leaving = threading.Thread(target=consumer.close)
        leaving.start()
        leaving.join(0.2)
        watch = producer._cells[0].watch
        assert leaving.is_alive() and watch is not None and not watch.dead()
    leaving.join()
    with pytest.raises(PeerLostError, match="left after 0 of 0 slots"):
        producer.acquire(0.0)


def test_slot_in_hand_when_a_consumer_dies_can_still_be_published_for_the_next(producer: Producer) -> None:
    consumer = pair(producer)
    slot = producer.acquire(0.0)
    slot.views["tokens"][...] = 4
    consumer.close()
    with pytest.raises(PeerLostError):
        slot.publish()
    with pair(producer) as another:
        slot.publish()
        assert take(another) == 4


@pytest.mark.slow
def test_producer_that_fails_is_no_end_of_stream() -> None:
    with pytest.raises(RuntimeError), Producer("stream", FIELDS) as producer:
        consumer = pair(producer)
        put(producer, 1)
        raise RuntimeError("the producer's own")
    assert take(consumer) == 1  # what was published is still read
    with pytest.raises(PeerLostError, match="after 1 slots, before the end of the stream"):
        consumer.receive(WAIT_S)
    consumer.close()


def run(code: str) -> subprocess.Popen[str]:
    code = f"import os, signal\nfrom shmstage import Producer, Consumer\n{code}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(WAIT_S)


@pytest.mark.slow
def test_killed_consumer_is_noticed_and_its_leases_end(producer: Producer) -> None:
    """S12, S50"""
    process = run("lease = Consumer('stream').receive(20)\nos.kill(os.getpid(), signal.SIGKILL)")
    put(producer, 1)
    put(producer, 2)
    held = r"slot 0 generation 2 \(micro-batch 0\.0\), slot 1 generation 2"
    with pytest.raises(PeerLostError, match=rf"consumer 0 \(consumer {process.pid} .*died, holding {held}"):
        producer.acquire(WAIT_S)
    assert producer._pool.free_slot_count() == 2
    assert finish(process) == -signal.SIGKILL
    with pair(producer) as another:
        put(producer, 3)
        assert take(another) == 3
    producer._close(None)
    Producer("stream", FIELDS).close()  # every start sweeps what the dead consumer left


@pytest.mark.slow
def test_killed_producer_is_noticed_and_its_pool_swept_by_the_next() -> None:
    """S3, S50"""
    process = run(
        "p = Producer('stream', {'tokens': ('int32', (2, 8))})\n"
        "s = p.acquire()\ns.views['tokens'][...] = 6\ns.publish()\n"
        "p.acquire(); p.acquire()\ntry:\n    p.acquire(20)\nfinally:\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    consumer = pair_name()
    assert take(consumer) == 6
    process.send_signal(signal.SIGKILL)
    held = r".*slot 1 was being written \(generation 1\), slot 2 was being written"
    with pytest.raises(PeerLostError, match=rf"producer {process.pid} .*before the end of the stream; {held}"):
        consumer.receive(WAIT_S)
    consumer.close()
    assert finish(process) == -signal.SIGKILL
    assert len(list_objects("stream")) == 2  # the dead one's pool and lock
    Producer("stream", FIELDS).close()
    assert list_objects("stream") == []


def pair_name() -> Consumer:
    return Consumer("stream", timeout_s=WAIT_S)


def test_socket_of_a_producer_is_gone_after_close(producer: Producer) -> None:
    producer.close()
    ZmqServerChannel.bind(endpoint_for("stream", "producer")).close()
