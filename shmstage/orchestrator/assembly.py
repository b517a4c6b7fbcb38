"""Puts the parts of one session with the trainer together, as the settings ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from shmstage.events import NO_EVENTS, Events
from shmstage.orchestrator.evaluation import Evaluator
from shmstage.orchestrator.feeder import Feeder
from shmstage.orchestrator.hooks import Hooks
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.latch import Latch
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.program import Program
from shmstage.orchestrator.recorder import Recorder
from shmstage.orchestrator.resume import ResumeState
from shmstage.orchestrator.saving import Saving, last_published
from shmstage.orchestrator.schedule import Config
from shmstage.orchestrator.site import Workplace
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.packing.plan import PlanSettings
from shmstage.plugins import make
from shmstage.settings import Settings


def plan_settings(settings: Settings) -> PlanSettings:
    """What the planner needs of the settings."""
    return PlanSettings(
        rows=settings.rows, tokens=settings.tokens, max_segments_per_row=settings.max_segments_per_row,
        segment_align=settings.segment_align, max_real_tokens=settings.max_real_tokens,
        on_overlong=settings.on_overlong,
    )  # fmt: skip


def schedule_config(settings: Settings, first_step: int = 1, *, hook: bool = False, weights_floor: int = 0) -> Config:
    """What the schedule needs of the settings."""
    return Config(
        mode=settings.boundary, microbatches_per_step=settings.microbatches_per_step, last_step=settings.step_cap,
        checkpoint_every=settings.checkpoint_every, weight_sync=settings.weight_sync, first_step=first_step,
        stage_waits_for_deadline=settings.stage_wait_s is not None, recompute_logps=settings.recompute_old_logps,
        reference_logps=settings.reference_logps, eval_every=settings.eval_every, hook=hook,
        weights_floor=weights_floor,
    )  # fmt: skip


def hooks_of(settings: Settings) -> Hooks | None:
    """What ``hooks`` names, or nothing. Raises ``PluginError``, or the factory's own; the caller closes it."""
    if not settings.hooks:
        return None
    return Hooks(make("hooks", settings.hooks, settings.hooks_settings, needs=()), settings.out_dir)


@final
@dataclass(frozen=True)
class Parts:
    """One session's program, its feeder and what they were made of."""

    program: Program
    feeder: Feeder
    intake: Intake


def assemble(
    settings: Settings,
    workplace: Workplace,
    client: TrainerClient,
    hooks: Hooks | None,
    *,
    plan: Mapping[str, Any],
    start: ResumeState,
    first_step: int,
    attempt: int,
    write_step: Callable[[dict[str, Any]], bool],
    sync_lines: Callable[[], bool],
    stop_requested: Callable[[], bool],
    restored_line: Mapping[str, Any] | None = None,
    events: Events = NO_EVENTS,
    recorder: Recorder | None = None,
) -> Parts:
    """Everything between the restored trainer and the first command; the caller closes the feeder."""
    if recorder is not None:
        recorder.begin(first_step)
    latch = Latch(
        enabled=settings.latch and settings.boundary.startswith("staged"), min_upload_s=settings.latch_min_upload_s,
        staged_after=settings.boundary == "staged_after_update",
    )  # fmt: skip
    ledger = Ledger(
        mode=settings.boundary, tokens_per_microbatch=settings.rows * settings.tokens, rows=settings.rows,
        slot_nbytes=workplace.microbatch_nbytes, latch=latch,
    )  # fmt: skip
    evaluator = None
    if workplace.evaluation is not None and settings.eval_every:
        evaluated = workplace.evaluation
        evaluator = Evaluator(
            evaluated.source, plan_settings(settings), evaluated.packer, stop=stop_requested, form=evaluated.form
        )
    program = Program(
        schedule_config(
            settings, first_step, hook=hooks is not None and hooks.decides,
            weights_floor=last_published(settings.out_dir),
        ),
        client,
        ledger,
        Saving(settings.out_dir, plan, start=start, first_step=first_step, restored_line=restored_line),
        write_step=write_step, sync_lines=sync_lines, hook_timeout_s=settings.hook_timeout_s,
        stop_requested=stop_requested, call_timeout_s=settings.call_timeout_s,
        stage_wait_s=settings.stage_wait_s, attempt=attempt, heartbeat=workplace.heartbeat, hooks=hooks,
        evaluator=evaluator, events=events,
        late=workplace.late,
    )  # fmt: skip
    if hooks is not None:
        hooks.listen(program.deliver)
    intake = Intake(
        workplace.source, plan_settings(settings), passes=workplace.source.passes, resume=start, order=settings.order,
        max_held_bytes=settings.max_held_bytes, form=workplace.form,
    )  # fmt: skip
    feeder = Feeder(
        intake, workplace.packer, microbatches_per_step=settings.microbatches_per_step, first_step=first_step,
        last_step=settings.step_cap, deliver=program.deliver, events=events, recorder=recorder,
    )  # fmt: skip
    return Parts(program, feeder, intake)
