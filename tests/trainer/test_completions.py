from __future__ import annotations

import pytest

from shmstage.errors import ProtocolError, TokenFailedError
from shmstage.memory.handle import Handle
from shmstage.trainer.completions import Completions
from shmstage.trainer.timing import StepTiming
from shmstage.wire.messages import TokenEvent

HANDLE = Handle(0, 2, 9, step=1, index=0)


class Refusing:
    """A server that takes no good news of one kind."""

    def __init__(self, kind: str) -> None:
        self.sent: list[TokenEvent] = []
        self._kind = kind

    def emit(self, event: TokenEvent) -> None:
        if event.ok and event.kind == self._kind:
            raise ProtocolError("it cannot travel")
        self.sent.append(event)


def train_one(completions: Completions) -> None:
    uploaded = completions.upload_reporter(HANDLE, "staged", 0)
    completions.dispatched("fwd_bwd", (HANDLE.request_id, 1, 0), None, 1, 2)
    uploaded(3, "")
    completions.dispatched("update", ("update.1", 1, 0), None, 4, 5)


@pytest.mark.parametrize("kind", ["staged", "fwd_bwd", "update"])
def test_a_token_that_cannot_be_reported_is_a_failed_one_here_and_there(kind: str) -> None:
    server = Refusing(kind)
    completions = Completions(server.emit, StepTiming(), timeout_s=1.0)
    train_one(completions)
    # what one side takes for failed the other must not take for good
    by_kind = {event.kind: event for event in server.sent}
    assert len(by_kind) == len(server.sent) == 3
    assert (by_kind[kind].ok, by_kind["update"].ok) == (False, False)
    assert f"{kind} of step 1 cannot be reported: it cannot travel" in by_kind[kind].error
    assert kind in [failure.kind for failure in completions.failures()]
    with pytest.raises(TokenFailedError, match="step 1 failed: .*it cannot travel"):
        completions.health.require_landed(1)
    completions.close()


def test_a_step_whose_tokens_travel_lands() -> None:
    completions = Completions(Refusing("").emit, StepTiming(), timeout_s=1.0)
    train_one(completions)
    completions.health.require_landed(1)
    assert completions.failures() == []
    completions.close()


def test_an_upload_that_is_never_reported_fails_the_update_instead_of_leaving_it_open() -> None:
    server = Refusing("")
    completions = Completions(server.emit, StepTiming(), timeout_s=0.01)
    completions.upload_reporter(HANDLE, "staged", 0)
    completions.dispatched("update", ("update.1", 1, 0), None, 4, 5)
    (update,) = server.sent
    assert not update.ok
    assert "uploads of step 1 not reported after 0.01 s" in update.error
    completions.close()
