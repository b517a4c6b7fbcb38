"""One orchestrator from its first byte to its last: its site, trainers one after another, clean-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from shmstage.errors import PluginError, SettingsError, TransportError
from shmstage.events import Events, open_events
from shmstage.memory.usage import own_use
from shmstage.orchestrator.assembly import assemble, hooks_of
from shmstage.orchestrator.beginning import begin_attempt
from shmstage.orchestrator.connection import Connection
from shmstage.orchestrator.hooks import Hooks
from shmstage.orchestrator.layouts import Layouts
from shmstage.orchestrator.local_site import LocalSite
from shmstage.orchestrator.recorder import Recorder, recorder_of
from shmstage.orchestrator.resume import ResumeState, state_from_metadata
from shmstage.orchestrator.site import Site
from shmstage.orchestrator.step_lines import last_step, read_step_lines, roll_back
from shmstage.orchestrator.summary import summarise
from shmstage.packing.plan import Planner, PlanSettings
from shmstage.packing.reference import Described
from shmstage.packing.routing import is_encoded
from shmstage.records import JsonLines, write_json
from shmstage.settings import Settings


def train(
    settings: Settings, *, epoch: int, stop_requested: Callable[[], bool], peers_file: Path | None = None
) -> dict[str, Any]:
    """Run the orchestrator to its end; returns what ``summary.json`` holds, less what only the launcher can know.

    ``peers_file`` names the doors of a fleet's hosts; ``None``: everything is on this one.

    A trainer that dies is waited for: its successor restores and goes on. ``epoch`` > 1 follows an orchestrator that
    died. Raises what ended the run; pool, sockets and lock file are gone either way.
    """
    if epoch > 1:
        settings = settings.model_copy(update={"resume": True})
    with ExitStack() as stack:
        events = open_events(settings, "orchestrator", epoch, own_use)
        stack.callback(events.close)
        site = _site(
            settings, peers_file, epoch=epoch, stack=stack, stop_requested=stop_requested, events=events
        )
        hooks = hooks_of(settings)
        if hooks is not None:
            stack.callback(hooks.close)
        recorder = recorder_of(settings)
        if recorder is not None:
            stack.push(recorder.ended_by)
        site.open()
        again = epoch > 1
        while True:
            trainer = site.connect(again=again)
            try:
                summary = _attempt(settings, site, trainer, hooks, stop_requested, events, recorder)
                return summary if recorder is None else recorder.added_to(summary)
            except TransportError as error:
                site.failed(error)
                if not trainer.watch.dead():
                    raise
                print(f"{error}; waiting for the next trainer", flush=True)
            except Exception as error:
                site.failed(error)
                raise
            finally:
                trainer.close()
            site.trainer_died()
            again = True


def _site(settings: Settings, peers_file: Path | None, **opened: Any) -> Site:
    if peers_file is None:
        return LocalSite(settings, **opened)
    # not needed, and not loaded, on one host
    from shmstage.orchestrator.fleet_site import FleetSite, channels_of

    return FleetSite(settings, channels_of(peers_file), **opened)


def _attempt(
    settings: Settings,
    site: Site,
    trainer: Connection,
    hooks: Hooks | None,
    stop_requested: Callable[[], bool],
    events: Events,
    recorder: Recorder | None,
) -> dict[str, Any]:
    """Everything with one incarnation of the trainer, from restore to shutdown."""
    client, layouts = trainer.client, site.layouts
    path = settings.out_dir / "steps.jsonl"
    try:
        restored, metadata = client.restore_checkpoint(at_most=last_step(path))
        first_step = (restored or 0) + 1
        check_engine_can(settings, client.info()["optional"], layouts)
        plan = plan_facts(settings, site.first)
        if restored:
            _check_same_plan(metadata.get("plan", {}), plan)
        begun = begin_attempt(
            settings.out_dir, seen=roll_back(path, to_step=restored or 0), first_step=first_step,
            param_digest=lambda: client.info(param_digest=True)["param_digest"],
        )  # fmt: skip
        compile_s = sum(
            client.compile(site.slot_layout_id(layout_id), uses) for layout_id, uses in layouts.uses(settings).items()
        )
        with ExitStack() as stack:
            written = read_step_lines(path)
            steps = JsonLines(path)
            stack.callback(steps.close)
            parts = assemble(
                settings, site.workplace(trainer), client, hooks, plan=plan,
                start=state_from_metadata(metadata, settings.out_dir) if restored else ResumeState.start(),
                first_step=first_step, attempt=begun.attempt, write_step=steps.write, sync_lines=steps.sync,
                restored_line=written[-1] if restored and written else None, stop_requested=stop_requested,
                events=events, recorder=recorder,
            )  # fmt: skip
            program, planner = parts.program, parts.intake.planner
            stack.callback(parts.feeder.close)
            program.prepare(restored)
            trainer.stop_in_good_order()
            program.run(parts.feeder)
            parts.intake.finish()
        if program.ended_by is None:
            final_digest = client.shutdown(discard=False)
        else:  # no update has followed the one that was judged
            final_digest = client.info(param_digest=True)["param_digest"]
            client.shutdown(discard=True)
    except BaseException:
        trainer.abandon()
        raise
    lines = list(read_step_lines(path))
    summary = summarise(lines)
    trained = sum(len(line["trajectory_ids"]) for line in lines if line["step"] >= first_step)
    return {
        **summary,
        "warnings": [*summary["warnings"], *site.warnings(), *_warnings_of_input(settings, site, planner)],
        "run": settings.run,
        "ended_by": program.ended_by,
        "first_step": begun.first_step,
        "initial_param_digest": begun.initial_param_digest,
        "param_digest": final_digest,
        "microbatches_per_step": settings.microbatches_per_step,
        "dropped_trajectories": planner.dropped,
        "empty_trajectories": planner.skipped_empty,
        "compile_s": compile_s,
        **site.summary(trained),
    }


def _warnings_of_input(settings: Settings, site: Site, planner: Planner) -> Iterator[str]:
    if planner.dropped or planner.skipped_empty:
        yield f"not trained: {planner.dropped} over-long and {planner.skipped_empty} empty trajectories"
    if settings.routing_encoding != "dense" and site.first.routing is None:
        yield f"routing_encoding = {settings.routing_encoding} has no effect: the input carries no routing"


def check_engine_can(settings: Settings, optional: Sequence[str], layouts: Layouts) -> None:
    """Raises ``PluginError`` for a setting that needs what the engine does not have: not at its first use."""
    encoded = any(is_encoded(field.name for field in layout.fields) for layout in layouts.all)
    if encoded and "decodes_routing" not in optional:
        raise PluginError(
            f"routing_encoding = {settings.routing_encoding}: engine {settings.engine} does not decode routing; let it "
            "(shmstage.trainer.decode.with_dense_routing, decodes_routing = True) or use dense"
        )
    scoring = [name for name in ("recompute_old_logps", "reference_logps") if getattr(settings, name)]
    needs = {"per_token_logps": scoring, "eval_step": ["eval_every"] if settings.eval_every else []}
    for method, wanted_by in needs.items():
        if wanted_by and method not in optional:
            raise PluginError(
                f"{' and '.join(wanted_by)}: engine {settings.engine} has no {method}; give it one (OptaxEngine: "
                "logps_fn) or leave the setting out"
            )


def plan_facts(settings: Settings, first: Described) -> dict[str, Any]:
    """What decides which trajectory is trained in which micro-batch: kept in each checkpoint, compared on resume."""
    names = ("microbatches_per_step", "order", *(field.name for field in fields(PlanSettings)))
    return {**{name: getattr(settings, name) for name in names}, "first_trajectory": first.digest.hex()}


def _check_same_plan(then: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if then.get(name) != value:
            raise SettingsError(
                f"resume: {name} was {then.get(name)!r} when the checkpoint was written and is {value!r} now; "
                "trajectories would be trained twice or never; use the old value, or another --out"
            )


def write_summary(settings: Settings, summary: dict[str, Any]) -> None:
    write_json(settings.out_dir / "summary.json", summary)
