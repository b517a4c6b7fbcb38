from __future__ import annotations

import pytest

from shmstage.errors import CheckpointError, ProtocolError, TransportError
from shmstage.trainer.reporting import TEXT_LIMIT, describe, report
from shmstage.wire.codec import encode
from shmstage.wire.messages import TicketEvent, TokenEvent


class Server:
    """Emits what can travel."""

    def __init__(self) -> None:
        self.sent: list[TokenEvent | TicketEvent] = []

    def emit(self, event: TokenEvent | TicketEvent) -> None:
        encode(event)
        self.sent.append(event)


@pytest.mark.parametrize("text", ["lost \udc80 byte", "x" * (2 << 20)], ids=["not_unicode", "over_the_frame_limit"])
def test_an_error_text_that_cannot_travel_is_told_shorter_and_escaped(text: str) -> None:
    server = Server()
    told = report(server.emit, TokenEvent(0, "fwd_bwd", "1.2@0:4", 1, 2, False, text, {"ready_ns": 5}))
    assert server.sent == [told]
    assert (told.ok, told.request_id, told.stamps) == (False, "1.2@0:4", {"ready_ns": 5})
    assert told.error.startswith(text[:5])
    assert "fwd_bwd of step 1 cannot be reported" in told.error
    assert len(told.error) <= TEXT_LIMIT + 100


def test_an_event_that_may_be_on_its_way_is_not_told_twice() -> None:
    tries = []

    def emit(event: TicketEvent) -> None:
        tries.append(event)
        raise TransportError("the server has stopped")

    event = TicketEvent(0, 1, "metrics", 2, True, {"loss": 1.0}, "", {})
    assert report(emit, event) == event
    assert tries == [event]


def test_a_listener_that_refuses_everything_raises_nothing() -> None:
    tries = []

    def emit(event: TicketEvent) -> None:
        tries.append((event.ok, event.value))
        raise ProtocolError("no")

    report(emit, TicketEvent(0, 1, "metrics", 2, True, {"loss": 1.0}, "", {}))
    assert tries == [(True, {"loss": 1.0}), (False, {})]


def test_errors_are_one_bounded_line_foreign_ones_with_their_class() -> None:
    assert describe(CheckpointError("disk\n  full")) == "disk full"
    assert describe(OSError("disk\nfull")) == "OSError: disk full"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(CheckpointError("x" * 10_000))) == TEXT_LIMIT
