"""A handle: what travels instead of a micro-batch's bytes."""

from __future__ import annotations

from dataclasses import dataclass

NO_DIGEST = b"\0" * 16


@dataclass(frozen=True, slots=True)
class Handle:
    """Names one published generation of one slot. Run, epoch and pool are fixed in the handshake.

    A handle that arrived may lie; only ``PoolReader.lease`` decides whether it is true.
    """

    slot: int
    generation: int
    layout_id: int
    digest: bytes = NO_DIGEST
    rows: int = 0
    step: int = 0
    index: int = 0
    is_final: bool = False
    loss_tokens: int = 0
    segments: int = 0

    @property
    def request_id(self) -> str:
        """The micro-batch's identity in logs, metrics and errors, the same staged and unstaged."""
        return f"{self.step}.{self.index}@{self.slot}:{self.generation}"

    def describe(self) -> str:
        """One line for a log; never raises, whatever the fields hold."""
        try:
            return (
                f"micro-batch {self.request_id} layout={self.layout_id} digest={self.digest.hex()[:8]} "
                f"rows={self.rows} segments={self.segments} loss_tokens={self.loss_tokens}"
                f"{' final' if self.is_final else ''}"
            )
        except Exception:
            return object.__repr__(self)
