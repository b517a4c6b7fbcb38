"""The commands a trainer must receive, written down from the contract's table, independent of the schedule's code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shmstage.settings import Boundary

#: one received command as text, for example ``fwd_bwd 3.0 defer`` or ``get_metrics 3``
Call = str

#: what the trainer receives besides, outside the boundary's contract
OUTSIDE = (
    *("hello", "info", "compile", "ranges", "restore_checkpoint", "get_step_timing", "release_weight_sync", "shutdown"),
    "eval_step",  # how many there are is the evaluation bundle's business
)


def expected_calls(
    mode: Boundary,
    *,
    microbatches: Sequence[int],
    microbatches_per_step: int,
    checkpoint_every: int = 0,
    weight_sync: bool = False,
    recompute_old_logps: bool = False,
    end_came_late: bool = False,
) -> list[Call]:
    """All calls of an undisturbed run in which every planned stage finds its micro-batch packed.

    ``microbatches`` counts each step's. ``end_came_late``: at the last call of a last step that is whole the end of
    input was not known yet, so a stage was planned, and its update deferred, for a micro-batch that never came.
    """
    calls: list[Call] = ["save_checkpoint 0"]
    if weight_sync:
        calls.append("prepare_weight_sync 0")
    staged = mode.startswith("staged")
    for k, count in enumerate(microbatches, start=1):
        more = k < len(microbatches)
        planned = mode == "staged_before_update" and count == microbatches_per_step and (more or end_came_late)
        for i in range(count):
            name = f"{k}.{i}"
            defer = " defer" if planned and i == count - 1 else ""
            scored = [f"per_token_logps {name} actor"] if recompute_old_logps else []
            if not staged or (k == 1 and i == 0):
                calls += [*scored, f"fwd_bwd {name}{defer}"]
                continue
            if i > 0:
                calls.append(f"stage_fwd_bwd {name}")
            if scored:
                calls += [*scored, f"patch_staged {name}"]
            calls.append(f"fwd_bwd_staged {name}{defer}")
        if count < microbatches_per_step:
            calls.append("update")
        if staged and more:
            calls.append(f"stage_fwd_bwd {k + 1}.0")
        if planned:
            calls.append("apply_deferred_update")
        calls.append(f"get_metrics {k}")
        saved = checkpoint_every > 0 and k % checkpoint_every == 0
        if saved:
            calls.append(f"save_checkpoint {k}")
        if weight_sync:
            calls.append(f"prepare_weight_sync {k}")
        if not more and not saved:
            calls.append(f"save_checkpoint {k}")  # what was trained last is always saved, once the schedule is done
    return calls


def received_calls(records: Iterable[Mapping[str, Any]]) -> list[Call]:
    """The trainer's own record of what it received, in the same words.

    Reference log-probs are left out: they are asked for as soon as a micro-batch is packed, whenever that is.
    """
    told = (record for record in records if record["command"] not in OUTSIDE)
    return [_as_call(record) for record in told if record.get("role") != "reference"]


def _as_call(record: Mapping[str, Any]) -> Call:
    command = str(record["command"])
    if command in ("fwd_bwd", "stage_fwd_bwd", "fwd_bwd_staged"):
        defer = " defer" if record.get("defer_update") else ""
        return f"{command} {record['step']}.{record['index']}{defer}"
    if command == "per_token_logps":
        return f"{command} {record['step']}.{record['index']} {record['role']}"
    if command == "patch_staged":
        return f"{command} {record['step']}.{record['index']}"
    if command in ("apply_deferred_update", "update"):
        return command
    return f"{command} {record['version'] if command == 'prepare_weight_sync' else record['step']}"
