"""The trainer as the program sees it: one method per worker command, typed results, nothing of sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from shmstage.events import NO_EVENTS, Events
from shmstage.memory.handle import Handle
from shmstage.wire.handles import handle_to_wire, named_by
from shmstage.wire.messages import TicketEvent, TokenEvent


class Calls(Protocol):
    """What carries the commands: a ``transport.Client``, or a ``TrainerFleet`` of several."""

    @property
    def sequence(self) -> int: ...

    def call(self, command: str, arguments: dict[str, Any], *, timeout_s: float) -> dict[str, Any]: ...

    def events(self, timeout_s: float) -> list[TokenEvent | TicketEvent]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ForwardResult:
    """Reply to a forward call: it proves dispatch, not completion."""

    updated: bool
    upload_s: float
    snapshot_wait_s: float
    payload_digest: str


@final
class TrainerClient:
    """Calls the worker, one command at a time; every call has the deadline ``timeout_s``."""

    def __init__(self, client: Calls, *, timeout_s: float, events: Events = NO_EVENTS) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._events = events

    def _call(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self._noted(command, arguments, self._timeout_s)

    def _noted(
        self, command: str, arguments: dict[str, Any], timeout_s: float, of_step: int = -1
    ) -> dict[str, Any]:
        """``of_step``: where the arguments do not say it."""
        begin_ns = time.monotonic_ns()
        try:
            return self._client.call(command, arguments, timeout_s=timeout_s)
        finally:
            end_ns = time.monotonic_ns()
            step, index, request_id = named_by(arguments)
            self._events.note(
                "called", begin_ns, end_ns, step=max(step, of_step), index=index, request_id=request_id,
                command=command, sequence=self._client.sequence,
            )  # fmt: skip

    def events(self, timeout_s: float) -> list[TokenEvent | TicketEvent]:
        """Token and ticket events in order; waits up to ``timeout_s`` for the first, or until ``wake``."""
        return self._client.events(timeout_s)

    def missing(self) -> str:
        """Of a trainer that spans hosts, which of them have not told what others have; "" where nothing is known."""
        missing: Callable[[], list[str]] | None = getattr(self._client, "missing", None)
        told = missing() if missing is not None else []
        return f"; missing: {'; '.join(told)}" if told else ""

    @property
    def wake(self) -> Callable[[], None]:
        """Makes a waiting ``events`` return; may be called from any thread."""
        return self._client.wake

    def info(self, *, param_digest: bool = False) -> dict[str, Any]:
        return self._call("info", param_digest=param_digest)

    def compile(self, layout_id: int, uses: Collection[str]) -> float:
        """Compile the engine's programs for what a layout is used for (train, evaluate, score); returns seconds."""
        return float(self._call("compile", layout_id=layout_id, uses=sorted(uses))["compile_s"])

    def restore_checkpoint(self, *, at_most: int | None = None) -> tuple[int | None, dict[str, Any]]:
        """Restore the newest checkpoint (of step ``at_most`` or before): (its step or ``None``, its metadata).

        Opens the trainer's gate.
        """
        result = self._call("restore_checkpoint", **({} if at_most is None else {"at_most": at_most}))
        return result["step"], result["metadata"]

    def fwd_bwd(self, handle: Handle, *, defer_update: bool) -> ForwardResult:
        return _forward(self._call("fwd_bwd", handle=handle_to_wire(handle), defer_update=defer_update))

    def stage_fwd_bwd(self, handle: Handle) -> None:
        self._call("stage_fwd_bwd", handle=handle_to_wire(handle))

    def fwd_bwd_staged(self, request_id: str, *, defer_update: bool) -> ForwardResult:
        return _forward(self._call("fwd_bwd_staged", request_id=request_id, defer_update=defer_update))

    def per_token_logps(self, handle: Handle, role: str) -> int:
        """Score a micro-batch in its slot; returns the ticket of the late field."""
        return int(self._call("per_token_logps", handle=handle_to_wire(handle), role=role)["ticket"])

    def score_staged(self, request_id: str, role: str) -> int:
        """Score the staged arrays; returns the ticket of the late field."""
        return int(self._call("per_token_logps", request_id=request_id, role=role)["ticket"])

    def patch_staged(self, request_id: str, fields: Sequence[str], loss_tokens: int) -> None:
        self._call("patch_staged", request_id=request_id, fields=list(fields), loss_tokens=loss_tokens)

    def eval_step(self, handle: Handle) -> int:
        return int(self._call("eval_step", handle=handle_to_wire(handle))["ticket"])

    def apply_deferred_update(self, step: int = -1) -> float:
        """Run ``step``'s update, held back; returns the seconds it waited for snapshots."""
        return float(self._noted("apply_deferred_update", {}, self._timeout_s, step)["snapshot_wait_s"])

    def update(self, step: int = -1) -> float:
        """Close ``step``, whose last micro-batch was not marked final; returns the seconds it waited for snapshots."""
        return float(self._noted("update", {}, self._timeout_s, step)["snapshot_wait_s"])

    def get_metrics(self, step: int) -> int:
        return int(self._call("get_metrics", step=step)["ticket"])

    def save_checkpoint(self, step: int, metadata: dict[str, Any]) -> int:
        return int(self._call("save_checkpoint", step=step, metadata=metadata)["ticket"])

    def prepare_weight_sync(self, version: int, *, sync: bool = False) -> int:
        """Publish the weights; with ``sync`` a pool without a free buffer is a failure, not a skipped round."""
        return int(self._call("prepare_weight_sync", version=version, **({"sync": True} if sync else {}))["ticket"])

    def shutdown(self, *, discard: bool, timeout_s: float | None = None) -> str:
        """End the trainer; returns the digest of its final parameters, empty with ``discard``."""
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        result = self._noted("shutdown", {"discard": discard}, deadline_s)
        return str(result.get("param_digest", ""))


def _forward(result: dict[str, Any]) -> ForwardResult:
    return ForwardResult(
        updated=bool(result["updated"]),
        upload_s=float(result["upload_s"]),
        snapshot_wait_s=float(result["snapshot_wait_s"]),
        payload_digest=str(result["payload_digest"]),
    )
