"""The trainer's commands: asks the gate, drives the engine, and answers before the device is done.

One thread calls ``attach``, ``execute`` and ``close``. Nothing it does inside a step waits for the device, except for:
a place among the device buffers (training has its own, scoring by handle another), snapshot copies of arrays the update
donates, the overflow flags of an engine that has ``settle``, and every copy for one that declines snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar, final

from shmstage.errors import CheckpointError, EngineError, PeerRestartedError, PoolError, ProtocolError, ShmstageError
from shmstage.events import NO_EVENTS, Events
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.reservation import Numa
from shmstage.records import JsonLines
from shmstage.trainer.aliasing import nudge
from shmstage.trainer.arguments import Arguments, for_the_record
from shmstage.trainer.attachment import Attachment
from shmstage.trainer.completions import Completions
from shmstage.trainer.description import describe
from shmstage.trainer.device_buffers import DeviceBuffers
from shmstage.trainer.digests import param_digest
from shmstage.trainer.engine import TrainEngine, compile_for, restored
from shmstage.trainer.gate import COMMANDS, Gate
from shmstage.trainer.preparation import NO_IDENTITY, Preparation, compile_uses
from shmstage.trainer.ranges import ranges_of
from shmstage.trainer.scoring import Scorer, as_numbers
from shmstage.trainer.snapshots import Snapshots
from shmstage.trainer.stepper import Stepper
from shmstage.trainer.timing import StepTiming
from shmstage.trainer.weights import WeightsPool
from shmstage.wire.messages import Hello, TicketEvent, TokenEvent

Result = dict[str, Any]
T = TypeVar("T")


@final
class Worker:
    """Owns the engine, the device buffers and the pool of the current epoch.

    ``emit`` takes token and ticket events (their number left 0) from any thread. ``verify = "full"`` hashes the arrays
    given to the engine. ``calls_path`` records every received command. ``identity`` is needed for weight sync only.
    ``cancelled`` is polled while waiting for a device buffer. ``completions`` can be held until an answer is out.
    """

    def __init__(
        self,
        engine: TrainEngine,
        *,
        emit: Callable[[TokenEvent | TicketEvent], None],
        device_buffers: int = 2,
        verify: str = "digest",
        calls_path: Path | None = None,
        identity: ProcessIdentity | None = None,
        incarnation: int = 1,
        timeout_s: float = 600.0,
        cancelled: Callable[[], bool] = lambda: False,
        numa: Numa = "default",
        attach: Callable[[Hello, TrainEngine], Attachment] = Attachment,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_s: Callable[[], float] = time.time,
        events: Events = NO_EVENTS,
    ) -> None:
        self._engine = engine
        self._waits_for_snapshots = not getattr(engine, "snapshots", True)
        self._identity = identity
        self._incarnation, self._numa = incarnation, numa
        self._attach = attach
        self._timeout_s = timeout_s
        self._clock_ns = clock_ns
        self._wall_s = wall_s
        self._calls = JsonLines(calls_path) if calls_path is not None else None
        self._weights: WeightsPool | None = None
        self._updates = 0
        self.finished = False
        self._gate = Gate()
        self._timing = StepTiming()
        stamped: Any = {"clock_ns": clock_ns, "events": events}
        self._snapshots = Snapshots(emit, on_done=self._on_ticket_done, cancelled=cancelled, **stamped)
        self.completions = Completions(emit, self._timing, timeout_s=timeout_s, **stamped)
        waits: Any = {"watch": self.completions.watch_upload, "timeout_s": timeout_s, "cancelled": cancelled}
        self._buffers = DeviceBuffers(device_buffers, put=getattr(engine, "put", None), events=events, **waits)
        # of its own: a place among the trained ones could depend on the very micro-batch that waits to be scored
        score_buffers = DeviceBuffers(1, **waits)
        parts = (self.completions, self._snapshots)
        self._stepper = Stepper(
            engine, self._gate, self._buffers, *parts,
            hash_payload=verify == "full", timeout_s=timeout_s, clock_ns=clock_ns,
        )  # fmt: skip
        self._scorer = Scorer(engine, self._gate, score_buffers, *parts, self._stepper, timeout_s, clock_ns)
        self._first_checkpoint_durable = False
        self._commands: dict[str, Callable[[Arguments], Result]] = {n: getattr(self, f"_{n}") for n in COMMANDS}
        self._preparation = Preparation(
            self._gate, self._stepper, self._scorer, read_news=self._read_news,
            waits_for_snapshots=self._waits_for_snapshots, owns_weights=identity is not None,
        )  # fmt: skip
        self._commands |= self._preparation.commands

    # --- the two doors --------------------------------------------------------------------------------------

    def attach(self, hello: Hello) -> Result:
        """Take the pool of ``hello`` into use and return ``info``.

        A new epoch drops the stage, the deferral and the old pool and closes the gate; a repeated hello of the current
        one only ends the withdrawn leases. ``hello.pool == ""`` lets go of the old pool without a new one. A hello
        whose pool or layouts are not as announced changes nothing.
        """
        self._record("hello", {"epoch": hello.epoch})
        current = self._stepper.current
        if current is not None and hello.epoch < current.epoch:
            raise PeerRestartedError(f"epoch {hello.epoch} says hello, but epoch {current.epoch} has taken over")
        if current is None or (hello.epoch, hello.pool) != (current.epoch, current.pool):
            attachment = self._guarded("hello", lambda: self._attach(hello, self._engine)) if hello.pool else None
            try:
                self._detach()
            except BaseException:
                if attachment is not None:
                    attachment.close()
                raise
            self._stepper.attach(attachment)
        if self._stepper.current is not None:
            self._stepper.current.end_withdrawn(hello.withdrawn)
        return self._describe()

    def execute(self, command: str, arguments: Mapping[str, Any]) -> Result:
        """Run one command. Raises an error of ``shmstage.errors``; a refused command changes nothing."""
        self._record(command, arguments)
        run = self._commands.get(command)
        if run is None:
            raise ProtocolError(f"command {command[:40]!r} is not one of {', '.join(sorted(COMMANDS))}")
        if not self._preparation.begins(command, arguments):
            self._read_news()
        if command in COMMANDS:
            self._gate.admit(command)
        return self._guarded(command, lambda: run(Arguments(command, arguments)))

    def orchestrator_held(self) -> str:
        """Slots that the orchestrator has in hand, in words; "" without any or without a pool."""
        return self._stepper.current.held_by_owner() if self._stepper.current is not None else ""

    def close(self) -> None:
        """Wait for what is on the devices, end the threads, unmap, remove the weights pool."""
        with ExitStack() as stack:  # each of them, whatever the others raise; the last named goes first
            if self._calls is not None:
                stack.callback(self._close_record)
            stack.callback(getattr(self._engine, "close", lambda: None))
            if self._weights is not None:
                stack.callback(self._weights.close)
            stack.callback(self._snapshots.close)
            stack.callback(self.completions.close)
            stack.callback(self._detach)

    # --- commands -------------------------------------------------------------------------------------------

    def _info(self, given: Arguments) -> Result:
        wanted = given.flag("param_digest")
        given.finish()
        return {**self._describe(), **({"param_digest": param_digest(self._engine)} if wanted else {})}

    def _compile(self, given: Arguments) -> Result:
        example, uses = compile_uses(given, self._stepper)
        begin = time.monotonic()
        compile_for(self._engine, example, uses)
        return {"compile_s": time.monotonic() - begin}

    def _ranges(self, given: Arguments) -> Result:
        layout = given.layout()
        given.finish()
        return ranges_of(layout, self._engine.shardings(layout)).as_facts()

    def _fwd_bwd(self, given: Arguments) -> Result:
        handle, defer_update = given.handle(), given.flag("defer_update")
        given.finish()
        return self._stepped(self._stepper.fwd_bwd(handle, defer_update=defer_update))

    def _stage_fwd_bwd(self, given: Arguments) -> Result:
        handle = given.handle()
        given.finish()
        return self._stepper.stage_fwd_bwd(handle)

    def _fwd_bwd_staged(self, given: Arguments) -> Result:
        request_id, defer_update = given.text("request_id"), given.flag("defer_update")
        given.finish()
        return self._stepped(self._stepper.fwd_bwd_staged(request_id, defer_update=defer_update))

    def _patch_staged(self, given: Arguments) -> Result:
        request_id, fields, loss_tokens = given.text("request_id"), given.texts("fields"), given.count("loss_tokens")
        given.finish()
        self._scorer.patch_staged(request_id, fields, loss_tokens)
        return {"request_id": request_id}

    def _apply_deferred_update(self, given: Arguments) -> Result:
        given.finish()
        return self._stepped(self._stepper.apply_deferred_update())

    def _update(self, given: Arguments) -> Result:
        given.finish()
        return self._stepped(self._stepper.update())

    def _get_metrics(self, given: Arguments) -> Result:
        step = given.count("step")
        given.finish()
        self._gate.admit_snapshot("get_metrics", step)
        metrics = self._engine.metrics()
        return self._ticket("metrics", step, lambda landed_ns: as_numbers(metrics))

    def _get_step_timing(self, given: Arguments) -> Result:
        step = given.count("step")
        given.finish()
        return self._timing.report(step, self._clock_ns())

    def _eval_step(self, given: Arguments) -> Result:
        handle = given.handle()
        given.finish()
        return {"ticket": self._scorer.eval_step(handle)}

    def _per_token_logps(self, given: Arguments) -> Result:
        role = given.text("role")
        if given.has("request_id"):
            request_id = given.text("request_id")
            given.finish()
            return {"ticket": self._scorer.score_staged(request_id, role)}
        handle = given.handle()
        given.finish()
        return {"ticket": self._scorer.score(handle, role)}

    def _save_checkpoint(self, given: Arguments) -> Result:
        step, metadata = given.count("step"), given.mapping("metadata")
        given.finish()
        # whoever stops inside a step loses no more than that: its gradients lie apart from what is saved
        self._gate.admit_snapshot("save_checkpoint", step, inside=not self._waits_for_snapshots)
        snapshot = self._engine.save(step, metadata)

        def copy_with_stamps(landed_ns: int) -> None:
            metadata.update(landed_ns=landed_ns, landed_wall_s=self._wall_s() - (self._clock_ns() - landed_ns) / 1e9)
            snapshot.copy_to_host()

        return self._ticket("checkpoint", step, copy_with_stamps, snapshot.write, holds=True)

    def _prepare_weight_sync(self, given: Arguments) -> Result:
        version, sync = given.count("version"), given.flag("sync")
        given.finish()
        self._gate.admit_snapshot("prepare_weight_sync", version)
        if self._weights is None:
            if self._identity is None:
                raise EngineError(NO_IDENTITY)
            run_id = self._stepper.attachment.run_id
            self._weights = WeightsPool(run_id, self._incarnation, self._identity, numa=self._numa)
        pool, weights = self._weights, self._engine.weights()
        # from now on, not from when its turn comes: the update that waits for this copy has a deadline of its own, and
        # would say less about who is to blame
        deadline = time.monotonic() + self._timeout_s

        def publish(landed_ns: int) -> Mapping[str, object]:
            return pool.publish(version, weights, sync=sync, deadline=deadline)

        return self._ticket("weights", version, publish, holds=True)

    def _release_weight_sync(self, given: Arguments) -> Result:
        version = given.count("version")
        given.finish()
        return {"released": self._weights is not None and self._weights.release(version)}

    def _restore_checkpoint(self, given: Arguments) -> Result:
        withdrawn = given.pairs("withdrawn")
        at_most = given.count("at_most") if given.has("at_most") else None
        given.finish()
        if self._gate.state.phase == "open":
            # what was open is dropped now; if this fails, only another restore may go on
            self._gate.failed("the last restore_checkpoint did not succeed")
        # an old save must not commit after the choice below, an old failure must not be told after it
        self._quiesce()
        if self._stepper.current is not None:
            self._stepper.current.end_withdrawn(withdrawn)
        metadata = restored(self._engine, at_most)
        if metadata is None and self._updates:
            raise CheckpointError(
                f"there is no checkpoint and the parameters are {self._updates} updates away from the initial ones; "
                "start the trainer again"
            )
        step = None if metadata is None else int(str(metadata["step"]))
        self._timing.clear()
        self._gate.restored(step)
        return {"step": step, "metadata": dict(metadata or {})}

    def _shutdown(self, given: Arguments) -> Result:
        discard = given.flag("discard")
        given.finish()
        if discard:
            self._stepper.reset()
            self.finished = True  # ``close`` waits for what must not lose its memory; the answer need not
            return {"param_digest": ""}
        state = self._gate.state
        if state.phase == "open" and state.deferred_step is not None:
            self._stepped(self._stepper.apply_deferred_update())
        self.completions.drain(self._timeout_s)
        self._read_news()  # before they are emptied: parameters of a failed step have no digest
        self._quiesce()
        self.finished = True
        return {"param_digest": "" if self._gate.state.phase == "failed" else param_digest(self._engine)}

    # --- shared by them -------------------------------------------------------------------------------------

    def _describe(self) -> Result:
        return describe(self._engine, self._gate.state, self._stepper.host_memory)

    def _ticket(
        self,
        kind: str,
        step: int,
        copy: Callable[[int], Mapping[str, object] | None],
        write: Callable[[], Mapping[str, object]] | None = None,
        *,
        holds: bool = False,
    ) -> Result:
        """``copy`` runs once the last update has landed and is told when; now, if that was before our time."""
        last_update = self._gate.state.closed_step

        def copy_what_landed() -> Mapping[str, object] | None:
            return copy(self.completions.health.require_landed(last_update) or self._clock_ns())

        holds = holds or self._waits_for_snapshots
        number = self._snapshots.submit(kind, step, copy_what_landed, write, holds=holds)
        if self._waits_for_snapshots:
            self._snapshots.wait_copies(self._timeout_s)
        return {"ticket": number}

    def _stepped(self, result: Result) -> Result:
        self._updates += bool(result["updated"])
        return result

    def _on_ticket_done(self, kind: str, step: int, error: str) -> None:
        # on a snapshot thread, before the event goes out: whoever sees it may train at once
        if kind == "checkpoint" and step == 0 and not error:
            self._first_checkpoint_durable = True

    def _read_news(self) -> None:
        if self._first_checkpoint_durable:
            self._first_checkpoint_durable = False
            self._gate.checkpoint_durable()
        for failure in self.completions.failures():
            if failure.kind in ("staged", "patched") and self._stepper.upload_failed(failure.request_id, failure.error):
                continue
            self._gate.failed(f"{failure.kind} of {failure.request_id} failed on the device: {failure.error}")

    def _quiesce(self) -> None:
        """Nothing dispatched is left undone and nothing of it is kept: stage, deferral, tickets, failures."""
        self._stepper.reset()
        self.completions.drain(self._timeout_s)
        if self._weights is not None:
            self._weights.give_up_waiting(True)
        try:
            self._snapshots.join(self._timeout_s)
        finally:
            if self._weights is not None:
                self._weights.give_up_waiting(False)
        self.completions.health.clear()
        self.completions.failures()
        self._first_checkpoint_durable = False

    def _detach(self) -> None:
        """Unmap the pool, after everything that could still read it."""
        current = self._stepper.current
        self._quiesce()
        self._stepper.attach(None)
        self._gate.detached()
        self._preparation.forget()
        if current is not None:
            nudge()  # JAX may still hold views that an upload read
            with suppress(PoolError):  # its memory goes with the last array over it; none of ours is left
                current.close()

    def _guarded(self, command: str, run: Callable[[], T]) -> T:
        try:
            return run()
        except ShmstageError:
            raise
        except Exception as error:
            raise EngineError(f"{command}: {type(error).__name__}: {error}") from error

    def _close_record(self) -> None:
        if self._calls is not None:
            with suppress(OSError):  # a full disk is no reason to leave anything else open
                self._calls.close()

    def _record(self, command: str, arguments: Mapping[str, Any]) -> None:
        if self._calls is not None:
            self._calls.write(for_the_record(command, arguments))
