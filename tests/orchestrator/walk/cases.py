"""One configuration of the walk: what the schedule is told, what the trainer is like, what may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from shmstage.orchestrator.schedule import Config
from shmstage.settings import Boundary, WeightSync

Trainer = Literal["tokens", "blocks", "waits"]
"""``tokens``: returns at dispatch. ``blocks``: no readiness tokens, a call returns when the device is done and the
worker emits the events itself. ``waits``: declines snapshots, so metrics, checkpoint and weights are waited for."""

Late = Literal["none", "recompute", "reference", "both"]

#: what may befall a path, at most ``Case.budget`` times
DISTURBANCES = (
    "stop", "memory", "latch", "crash", "hook ends", "reply lost", "reply late", "stage lost", "stage raised",
    "score raised", "upload failed", "token failed", "ticket failed",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``known_end``: the schedule is told the last step. The input may end earlier at any micro-batch, if ``free_end``.

    ``tight``: there is memory for one step's trajectories, so step k+1 is packed only after update k has landed.
    ``fine``: every single event is its own transition; else those that cannot change a decision ride along (world.py).
    """

    mode: Boundary
    steps: int
    microbatches: int
    trainer: Trainer = "tokens"
    replay: bool = False
    late: Late = "none"
    checkpoint_every: int = 0
    sync: WeightSync = "off"
    known_end: bool = True
    free_end: bool = True
    slots: int = 3
    buffers: int = 2
    hook: bool = False
    eval_every: int = 0
    deadline: bool = False
    tight: bool = False
    disturbances: frozenset[str] = frozenset()
    budget: int = 0
    fine: bool = False

    @property
    def stages(self) -> bool:
        return self.mode.startswith("staged")

    @property
    def reference(self) -> bool:
        return self.late in ("reference", "both")

    @property
    def recompute(self) -> bool:
        return self.late in ("recompute", "both")

    def config(self, restored: int, floor: int) -> Config:
        """What the schedule is told after a restore of step ``restored`` (0 at first start)."""
        return Config(
            self.mode, self.microbatches, self.steps if self.known_end else None,
            checkpoint_every=self.checkpoint_every, weight_sync=self.sync, first_step=restored + 1,
            stage_waits_for_deadline=self.deadline, recompute_logps=self.recompute, reference_logps=self.reference,
            eval_every=self.eval_every, hook=self.hook, weights_floor=floor,
        )  # fmt: skip

    def __str__(self) -> str:
        said = [f"{self.mode} {self.steps}x{self.microbatches}"]
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = "all" if value == frozenset(DISTURBANCES) else value
                if isinstance(value, frozenset) and shown is value:
                    missing = [name for name in DISTURBANCES if name not in value]
                    shown = "all-but:" + "+".join(missing) if len(missing) < len(value) else "+".join(sorted(value))
                said.append(field.name if value is True else f"{field.name}={shown}")
        return " ".join(said)
