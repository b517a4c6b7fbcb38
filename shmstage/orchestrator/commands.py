"""What the schedule can ask for, and how it names micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is to be done next. All but ``BOOKKEEP`` and ``FINISH`` are trainer commands."""

    FWD_BWD = "fwd_bwd"
    STAGE = "stage_fwd_bwd"
    FWD_BWD_STAGED = "fwd_bwd_staged"
    APPLY_DEFERRED = "apply_deferred_update"
    UPDATE = "update"
    GET_METRICS = "get_metrics"
    SAVE_CHECKPOINT = "save_checkpoint"
    SYNC_WEIGHTS = "prepare_weight_sync"
    EVAL = "eval_step"
    SCORE_REFERENCE = "per_token_logps reference"
    SCORE_ACTOR = "per_token_logps actor"
    PATCH = "patch_staged"
    BOOKKEEP = "bookkeep"
    FINISH = "finish"


FORWARD = (Kind.FWD_BWD, Kind.FWD_BWD_STAGED)
SCORE = (Kind.SCORE_REFERENCE, Kind.SCORE_ACTOR)

Key = tuple[int, int]
"""(step, index) of a micro-batch."""


@dataclass(frozen=True)
class Command:
    """One thing to do. ``index`` is -1 where no micro-batch is meant."""

    kind: Kind
    step: int
    index: int = -1
    is_final: bool = False
    defer_update: bool = False

    @property
    def key(self) -> Key:
        return (self.step, self.index)


@dataclass(frozen=True, slots=True, order=True)
class Micro:
    """A micro-batch as the schedule knows it."""

    step: int
    index: int
    is_final: bool

    @property
    def key(self) -> Key:
        return (self.step, self.index)
