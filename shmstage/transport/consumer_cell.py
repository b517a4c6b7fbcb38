"""What a producer knows of one of its consumers: who it is, what it was sent, whether it left."""

from __future__ import annotations

from typing import final

from shmstage.errors import PoolError, ProtocolError
from shmstage.memory.handle import Handle
from shmstage.memory.identity import PeerWatch
from shmstage.wire.messages import Attach


@final
class ConsumerCell:
    """One consumer's place; a dead one's place can be taken by another.

    ``waiting`` holds the handles published for this place while nobody was there to be sent them.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.peer = b""
        self.watch: PeerWatch | None = None
        self.waiting: list[Handle] = []
        self.sent = 0
        self.end_sent = False
        self.lost = ""
        self.finished = False

    @property
    def attached(self) -> bool:
        """Somebody is there and is being sent handles."""
        return self.watch is not None and not self.lost and not self.finished

    def describe(self) -> str:
        """The consumer for an error message."""
        who = self.watch.describe() if self.watch is not None else "not attached yet"
        return f"consumer {self.index} ({who})"

    def occupy(self, peer: bytes, watch: PeerWatch) -> None:
        """A consumer takes the place; its numbers start afresh."""
        self.peer, self.watch = peer, watch
        self.sent, self.end_sent, self.lost, self.finished = 0, False, "", False

    def lose(self, reason: str) -> None:
        """It is gone before the end of the stream; what it was not sent, nobody gets."""
        self.lost = f"{self.describe()} {reason}"
        self.waiting.clear()


def watch_of(attach: Attach) -> PeerWatch:
    """A watch on the living process that attaches. Raises ``ProtocolError`` unless its lock is one of ours."""
    try:
        watch = PeerWatch(attach.lock_path, attach.pid, attach.start_ticks)
    except PoolError as error:
        raise ProtocolError(str(error)) from None
    if watch.dead():
        watch.close()
        raise ProtocolError(f"{watch.describe()} is dead; its attach comes too late")
    return watch
