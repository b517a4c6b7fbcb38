"""Is the model right: the reference's measured arms, run through it from shared inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from results import verdict
from scale_inputs import (
    ARMS,
    NET_IDLE_S,
    PREDICTED_BEFORE_S,
    REFERENCE,
    TPU_RIG,
    TRAINER_BENCH,
    TRAINER_BENCH_COUNT,
    TRAINER_BENCH_EXTRA_S,
    TRAINER_BENCH_MICROBATCH_S,
    Reference,
)
from scale_reference import ReferenceLoop

TOLERANCE = 0.10
#: between the model's two ways to see the idle, instants and the device's own begin and end: a rounding to ns
SAME_IDLE_S = 1e-6
#: how far an input is turned, and how exactly, to see within which factors the calibration holds
TURNED, TURNS = 4.0, 8


def off(model: float, measured: float) -> float:
    return model / measured - 1


def order_of(arm: str) -> str:
    """``A0p`` is ``A0`` again."""
    return ARMS[arm[:2]]


def figures_of(given: Reference = REFERENCE) -> dict[str, dict[str, Any]]:
    """Every measured arm beside the model's; ``idle_s`` and ``step_s``: measured, model, off (a share, signed)."""
    found: dict[str, dict[str, Any]] = {}
    for (arm, count), (idle_s, step_s) in TPU_RIG.items():
        model = ReferenceLoop(given, order_of(arm), count).run()
        found[f"{arm} {count}"] = {
            "arm": arm, "order": order_of(arm), "microbatches_per_step": count,
            "idle_s": {"measured": idle_s, "model": model.idle_s, "off": off(model.idle_s, idle_s)},
            "step_s": {"measured": step_s, "model": model.step_s, "off": off(model.step_s, step_s)},
            "device_idle_s": model.device_idle_s,
            "idle_is": "an input's source" if count == 2 else "predicted",
            "step_is": "predicted",
        }  # fmt: skip
    return found


def targets_of(figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A0 to A3; what A0 repeated measured is shown, and is no target."""
    told = (("boundary idle", "idle_s"), ("step", "step_s"))
    return [
        verdict(
            f"{what} off the measured, %, {f['arm']}, {f['microbatches_per_step']} per step",
            100 * abs(f[key]["off"]), 100 * TOLERANCE,
        )
        for f in figures.values() if f["arm"] in ARMS for what, key in told
    ]  # fmt: skip


def holds(given: Reference) -> bool:
    return all(each["met"] for each in targets_of(figures_of(given)))


def problems_of(figures: dict[str, dict[str, Any]]) -> list[str]:
    missed = [each for each in targets_of(figures) if not each["met"]]
    problems = [f"the model is off: {each['name']}: {each['value']:.1f}" for each in missed]
    for name, each in figures.items():
        by_instants, truth = each["idle_s"]["model"], each["device_idle_s"]
        if abs(by_instants - truth) > SAME_IDLE_S:
            problems.append(f"{name}: idle {by_instants} s by its instants, {truth} s by the device's begin and end")
    return problems


def own_arrival_s(arm: str) -> float:
    """What the reference took off this arm's idle, 2 per step, for its own uploads."""
    return TPU_RIG[arm, 2][0] - NET_IDLE_S[arm]


def other_arrivals() -> dict[str, Any]:
    """How far off the model is with other choices of the upload's time, which varied most in the reference."""
    arms = list(NET_IDLE_S)
    one = sum(own_arrival_s(arm) for arm in arms) / len(arms)
    found: dict[str, Any] = {}
    choices = {
        f"one for all arms, {one:.2f} s": dict.fromkeys(arms, one),
        "each arm's own at 2 per step": {arm: own_arrival_s(arm) for arm in arms},
    }
    for name, arrival in choices.items():
        errors: dict[str, dict[str, float]] = {}
        for (arm, count), (idle_s, step_s) in TPU_RIG.items():
            # an arm's boundary upload; inside a step payloads go in train calls whatever the arm
            kind = "arrival_stage_s" if order_of(arm).startswith("staged") else "arrival_call_s"
            model = ReferenceLoop(replace(REFERENCE, **{kind: arrival[arm]}), order_of(arm), count).run()
            errors[f"{arm} {count}"] = {"idle_off": off(model.idle_s, idle_s), "step_off": off(model.step_s, step_s)}
        found[name] = errors
    return found


def held_out() -> list[dict[str, Any]]:
    """Figures that gave no input: another driver on the same chips, and what the reference expected of its own run."""
    bench = replace(
        REFERENCE, microbatch_s=TRAINER_BENCH_MICROBATCH_S, arrival_call_s=TRAINER_BENCH_EXTRA_S, placing_call_s=0.0,
        bookkeeping_s=0.0, arrival_stage_s=TRAINER_BENCH_EXTRA_S, placing_staged_s=0.0,
    )  # fmt: skip
    rows = []
    for arm, step_s in TRAINER_BENCH.items():
        model = ReferenceLoop(bench, ARMS[arm], TRAINER_BENCH_COUNT, blocks=False).run()
        rows.append(("step, RL trainer bench, 9 per step (its count is inferred), no flush", arm, step_s, model.step_s))
    for arm, step_s in PREDICTED_BEFORE_S.items():
        model = ReferenceLoop(REFERENCE, ARMS[arm], 3).run()
        rows.append(("step, 3 per step, as the reference predicted it before its run", arm, step_s, model.step_s))
    return [
        {"name": name, "arm": arm, "measured": measured, "model": model, "off": off(model, measured)}
        for name, arm, measured, model in rows
    ]


def ranges() -> dict[str, tuple[float, float]]:
    """Between which factors of each duration the calibration holds, the others as they are."""
    return {each.name: (_edge(each.name, 1 / TURNED), _edge(each.name, TURNED)) for each in _durations()}


def _durations() -> Iterator[Any]:
    return (each for each in fields(REFERENCE) if each.metadata["unit"] == "s")


def _edge(name: str, far: float) -> float:
    good = 1.0
    for _ in range(TURNS):
        middle = (good * far) ** 0.5
        if holds(replace(REFERENCE, **{name: getattr(REFERENCE, name) * middle})):
            good = middle
        else:
            far = middle
    return good
