"""Log-probs and evaluation: forward passes that train nothing, and the late fields they are written to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np

from shmstage.errors import EngineError, ProtocolError, WaitTimeoutError
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.memory.reader import Lease
from shmstage.trainer.completions import Completions
from shmstage.trainer.device_buffers import DeviceBuffers
from shmstage.trainer.digests import payload_digest
from shmstage.trainer.engine import TrainEngine
from shmstage.trainer.gate import Gate
from shmstage.trainer.host_copy import copy_bytes, host_copy, part_here
from shmstage.trainer.snapshots import Snapshots
from shmstage.trainer.stepper import Stage, Stepper

FIELD_OF_ROLE = {"actor": "old_per_token_logps", "reference": "ref_per_token_logps"}
#: the settings that need a method
NEEDED_BY = {"per_token_logps": "recompute_old_logps and reference_logps", "eval_step": "eval_every"}


@final
class Scorer:
    """Runs the engine's optional ``per_token_logps`` and ``eval_step`` and patches what is staged.

    ``buffers`` are its own: what is scored by handle never takes a place of what is trained.
    """

    def __init__(
        self,
        engine: TrainEngine,
        gate: Gate,
        buffers: DeviceBuffers,
        completions: Completions,
        snapshots: Snapshots,
        stepper: Stepper,
        timeout_s: float = 600.0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._buffers = buffers
        self._completions = completions
        self._snapshots = snapshots
        self._stepper = stepper
        self._timeout_s = timeout_s
        self._clock_ns = clock_ns

    def score_staged(self, request_id: str, role: str) -> int:
        """Score the staged arrays; returns a ticket."""
        field_of(role)
        self._gate.admit_staged(request_id)
        stage = self._stepper.stage
        assert stage is not None
        logps = self.optional("per_token_logps")(stage.batch.arrays, role)
        return self._write_later(stage.handle, logps, stage.lease, role, lambda: None)

    def score(self, handle: Handle, role: str) -> int:
        """Score a slot's micro-batch; returns a ticket. A training slot keeps its lease: it is still to be trained."""
        name, score = field_of(role), self.optional("per_token_logps")
        attachment = self._stepper.attachment
        keep = not attachment.is_aux(handle)
        lease = attachment.lease(handle)
        logps, check_upload = self._run(lease, lambda arrays: score(arrays, role), keep_lease=keep)
        writes = keep and name in attachment.layout(handle.layout_id).late_names
        return self._write_later(handle, logps, lease if writes else None, role, check_upload)

    def eval_step(self, handle: Handle) -> int:
        """Evaluate a slot's micro-batch, which is used up by it; returns a ticket for the engine's numbers."""
        evaluate = self.optional("eval_step")
        numbers, check_upload = self._run(self._stepper.attachment.lease(handle), evaluate, keep_lease=False)

        def resolve() -> dict[str, object]:
            found = as_numbers(numbers)
            check_upload()
            return found

        return self._snapshots.submit("eval", handle.step, resolve, apart=True, of=handle, about="eval")

    def patch_staged(self, request_id: str, fields: list[str], loss_tokens: int) -> None:
        """Read late fields of the staged micro-batch from its slot again; patching twice changes nothing.

        Raises ``ProtocolError`` for a field that is not a late field of its layout.
        """
        stage, layout = self.admit_patch(request_id, fields)
        arrays: dict[str, jax.Array] = {}
        if stage.lease is not None:
            begin_ns = self._clock_ns()
            # copies that nobody writes again: device_put may alias them, which it must not do to the slot
            copies = {name: np.array(stage.lease.late_views[name]) for name in fields}
            stage.lease.check()
            to = self._stepper.attachment.placement(stage.handle.layout_id)
            if to.spread is not None:
                arrays = to.spread(copies)
            else:
                arrays = jax.device_put(copies, {name: to.shardings[name] for name in copies})
            nbytes = sum(copy.nbytes for copy in copies.values())
            report = self._completions.upload_reporter(stage.handle, "patched", begin_ns, nbytes)
            self._completions.watch_upload(list(arrays.values()), report)
            stage.patched.update(fields)
            if stage.patched >= set(layout.late_names):
                stage.lease.end()
                stage.lease = None
        self._stepper.replace_staged(stage, arrays, loss_tokens)

    def admit_patch(self, request_id: str, fields: list[str]) -> tuple[Stage, Layout]:
        """What is to be patched; raises what ``patch_staged`` is refused with."""
        self._gate.admit_staged(request_id)
        stage = self._stepper.stage
        assert stage is not None
        layout = self._stepper.attachment.layout(stage.handle.layout_id)
        unknown = set(fields) - set(layout.late_names)
        if unknown:
            raise ProtocolError(f"patch_staged {request_id}: {sorted(unknown)} are not among {layout.late_names}")
        return stage, layout

    def _write_later(
        self, handle: Handle, logps: jax.Array, lease: Lease | None, role: str, check_upload: Callable[[], None]
    ) -> int:
        name = field_of(role)
        here = self._stepper.attachment.placement(handle.layout_id).rectangle(name)
        if here is None and not logps.is_fully_addressable:
            here = part_here(logps)  # a field that no slot has: what is computed here is what is told

        def resolve() -> dict[str, object]:
            values = host_copy(logps, here)
            check_upload()
            return _write_late(handle, name, values, lease)

        return self._snapshots.submit("logps", handle.step, resolve, apart=True, of=handle, about=role)

    def _run(
        self, lease: Lease, program: Callable[[Mapping[str, jax.Array]], Any], *, keep_lease: bool
    ) -> tuple[Any, Callable[[], None]]:
        """Upload, dispatch a program, and let the buffer go when that is over.

        Returns the results and what raises, on another thread, if they were computed from a slot that had moved on.
        """
        uploaded, errors = threading.Event(), list[str]()

        def on_uploaded(ready_ns: int, error: str) -> None:
            errors.append(error)
            uploaded.set()

        def check_upload() -> None:
            if not uploaded.wait(self._timeout_s):
                raise WaitTimeoutError(
                    f"upload of {lease.handle.request_id} not reported after {self._timeout_s:g} s; if the device is "
                    "only slow, raise call_timeout_s"
                )
            if errors[0]:
                raise EngineError(f"upload of {lease.handle.request_id}: {errors[0]}")

        to = self._stepper.attachment.placement(lease.handle.layout_id)
        try:
            batch = self._buffers.upload(
                lease, to.shardings, on_uploaded, keep_lease=keep_lease, spread=to.spread
            )
        except BaseException:
            if not keep_lease:
                lease.end()  # an aux slot's micro-batch is tried once: its producer must not wait for it
            raise
        resolved = self._buffers.resolver(batch.buffer)
        self._buffers.settled(batch.buffer)
        try:
            results = program(batch.take())
        except BaseException:
            resolved()
            raise
        self._completions.watch(results, resolved)
        return results, check_upload

    def optional(self, method: str) -> Callable[..., Any]:
        """The engine's method; raises ``EngineError`` if it has none."""
        found = getattr(self._engine, method, None)
        if found is None:
            raise EngineError(
                f"{method}: {type(self._engine).__name__} has no such method; give it one or leave "
                f"{NEEDED_BY[method]} off"
            )

        def call(*arguments: Any) -> Any:
            try:
                return found(*arguments)
            except NotImplementedError as error:
                raise EngineError(f"{method}: {type(self._engine).__name__} does not do it: {error}") from error

        return call


def as_numbers(values: Mapping[str, jax.Array]) -> dict[str, object]:
    """Scalars as Python floats; waits until they are computed."""
    return {name: float(host_copy(value)) for name, value in values.items()}


def field_of(role: str) -> str:
    """The late field that is scored in a role. Raises ``ProtocolError`` for another one."""
    if role not in FIELD_OF_ROLE:
        raise ProtocolError(f"role = {role!r}; want one of {', '.join(FIELD_OF_ROLE)}")
    return FIELD_OF_ROLE[role]


def _write_late(
    handle: Handle, name: str, values: np.ndarray[Any, Any], lease: Lease | None
) -> dict[str, object]:
    """Put scores into their late field; the digest is of what the field holds then."""
    version = 0
    if lease is not None and name in lease.late_views:
        field = lease.late_views[name]
        scores = np.empty(field.shape, field.dtype)
        np.copyto(scores, values, casting="same_kind")
        copy_bytes(field, scores)
        lease.commit_late(name)
        values, version = field, lease.late_version(name)
    return {
        "request_id": handle.request_id,
        "field": name,
        "written": version > 0,
        "version": version,
        "digest": payload_digest({name: values}),
    }
