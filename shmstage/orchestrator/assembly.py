"""Puts the parts of one session with the trainer together, as the settings ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from shmstage.events import NO_EVENTS, Events
from shmstage.memory.identity import PeerWatch
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.orchestrator.evaluation import Evaluator
from shmstage.orchestrator.feeder import Feeder
from shmstage.orchestrator.hooks import Hooks
from shmstage.orchestrator.input import Input
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.latch import Latch
from shmstage.orchestrator.late_fields import LateFields
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.program import Program
from shmstage.orchestrator.resume import ResumeState
from shmstage.orchestrator.saving import Saving, last_published
from shmstage.orchestrator.schedule import Config
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.packing.fields import late_fields, microbatch_layout, optional_fields
from shmstage.packing.held_form import HeldForm
from shmstage.packing.plan import PlanSettings
from shmstage.packing.routing import experts_for
from shmstage.packing.source import BundleSource
from shmstage.packing.trajectory import Trajectory
from shmstage.plugins import make
from shmstage.settings import Settings


@final
@dataclass(frozen=True)
class Layouts:
    """What slots hold: micro-batches to train and, with an evaluation bundle, those to evaluate."""

    train: Layout
    evaluate: Layout | None
    #: their routing's number of experts, 0 where it is not known
    experts: int = 0
    eval_experts: int = 0

    @property
    def all(self) -> list[Layout]:
        """Each once: an evaluation bundle may have the very layout of the input."""
        return list(dict.fromkeys(layout for layout in (self.train, self.evaluate) if layout is not None))

    def uses(self, settings: Settings) -> dict[int, set[str]]:
        """Layout id → what the trainer compiles programs for: those of a first evaluation or scoring take long, too."""
        found: dict[int, set[str]] = {self.train.layout_id: {"train"}}
        if settings.recompute_old_logps or settings.reference_logps:
            found[self.train.layout_id].add("score")
        if self.evaluate is not None and settings.eval_every:
            found.setdefault(self.evaluate.layout_id, set()).add("evaluate")
        return found


def layouts_of(settings: Settings, first: Trajectory, evaluation: BundleSource | None) -> Layouts:
    """Taken from the first trajectory of each: all of an input carry the same fields."""
    evaluated = first_evaluated(evaluation)
    evaluate, eval_experts = None, 0
    if evaluated is not None:
        evaluate, eval_experts = layout_of(evaluated, settings, late=()), experts_of(evaluated, settings)
    train = layout_of(first, settings, late=late_fields(settings))
    return Layouts(train, evaluate, experts_of(first, settings), eval_experts)


def experts_of(first: Trajectory, settings: Settings) -> int:
    """Experts that the routing of trajectories like ``first`` is encoded for; 0: not known. ``SettingsError``."""
    if first.routing is None:
        return 0
    who = f"trajectory {first.trajectory_id!r}"
    return experts_for(settings.routing_encoding, asked=settings.experts, said=first.experts, who=who)


def layout_of(first: Trajectory, settings: Settings, *, late: tuple[str, ...]) -> Layout:
    """The layout of micro-batches of trajectories like ``first``."""
    layers, top_k = first.routing.shape[1:] if first.routing is not None else (0, 0)
    return microbatch_layout(
        settings.rows, settings.tokens, optional=optional_fields(first), layers=int(layers), top_k=int(top_k),
        late=late, encoding=settings.routing_encoding, experts=experts_of(first, settings),
        max_real_tokens=settings.max_real_tokens,
    )  # fmt: skip


def first_evaluated(evaluation: BundleSource | None) -> Trajectory | None:
    """Stands for all of an evaluation bundle: they carry the same fields."""
    return next(iter(evaluation.groups(0))).trajectories[0] if evaluation is not None else None


def evaluation_source(settings: Settings) -> BundleSource | None:
    """The evaluation bundle, if one is named. Raises ``BundleError``."""
    if settings.eval_bundle is None:
        return None
    return BundleSource(settings.eval_bundle, settings.routing_encoding, settings.experts)


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
    source: Input,
    evaluation: BundleSource | None,
    layouts: Layouts,
    pool: Pool,
    client: TrainerClient,
    trainer: PeerWatch,
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
) -> Parts:
    """Everything between the restored trainer and the first command; the caller closes the feeder."""
    latch = Latch(
        enabled=settings.latch and settings.boundary.startswith("staged"), min_upload_s=settings.latch_min_upload_s,
        staged_after=settings.boundary == "staged_after_update",
    )  # fmt: skip
    ledger = Ledger(
        mode=settings.boundary, tokens_per_microbatch=settings.rows * settings.tokens, rows=settings.rows,
        slot_nbytes=layouts.train.payload_nbytes, latch=latch,
    )  # fmt: skip
    evaluator = None
    if evaluation is not None and layouts.evaluate is not None and settings.eval_every:
        evaluator = Evaluator(
            evaluation, plan_settings(settings), pool, layouts.evaluate, slot_timeout_s=settings.slot_timeout_s,
            peers=[trainer], stop=stop_requested, form=HeldForm(settings.routing_encoding, layouts.eval_experts),
        )  # fmt: skip
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
        stage_wait_s=settings.stage_wait_s, attempt=attempt, heartbeat=pool.heartbeat, hooks=hooks,
        evaluator=evaluator, events=events,
        late=LateFields(pool, sampler_is_cap=settings.sampler_is_cap) if settings.recompute_old_logps else None,
    )  # fmt: skip
    if hooks is not None:
        hooks.listen(program.deliver)
    intake = Intake(
        source, plan_settings(settings), passes=source.passes, resume=start, order=settings.order,
        max_held_bytes=settings.max_held_bytes, form=HeldForm(settings.routing_encoding, layouts.experts),
    )  # fmt: skip
    feeder = Feeder(
        intake, pool, layouts.train, microbatches_per_step=settings.microbatches_per_step, first_step=first_step,
        last_step=settings.step_cap, slot_timeout_s=settings.slot_timeout_s, peers=[trainer], deliver=program.deliver,
        events=events,
    )  # fmt: skip
    return Parts(program, feeder, intake)
