"""What goes into checkpoints, and what is known to be safe: saved, published, written.

A step counts as done only when its checkpoint is durable *and* its step line is written: a restart goes back to the
newest step of which both hold, so nothing before it is needed any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from shmstage.errors import RunFailedError, SettingsError, shown
from shmstage.orchestrator.feeder import PackedMicrobatch
from shmstage.orchestrator.resume import ResumeState, state_to_metadata
from shmstage.records import read_json, write_json

if TYPE_CHECKING:
    from shmstage.orchestrator.ledger import Ledger

PUBLISHED = "weights.json"
#: step lines remembered for hooks that judge a checkpoint after its line was written
LINES_KEPT = 4


def last_published(out: Path) -> int:
    """The newest version of the weights that was published in OUT's run, 0 at the first start."""
    path, remedy = out / PUBLISHED, "restore it or choose another --out"
    try:
        version = read_json(path, remedy).get("version")
    except FileNotFoundError:
        return 0
    if type(version) is not int or not 0 <= version < 1 << 64:
        raise SettingsError(f"{path}: version is {shown(version)}, want an integer from 0 of 64 bits; {remedy}")
    return version


@final
class Saving:
    """One per session with the trainer. ``start``: where the input stood when it began, ``first_step`` - 1 trained."""

    def __init__(
        self,
        out: Path,
        plan: Mapping[str, Any],
        *,
        start: ResumeState,
        first_step: int,
        restored_line: Mapping[str, Any] | None = None,
    ) -> None:
        """``restored_line`` is the step line of the checkpoint gone back to: its hook may have to run again."""
        self.saved = first_step - 1
        self.published = last_published(out)
        self._out = out
        self._plan = dict(plan)
        self._input = {first_step - 1: start}
        self._paths: dict[int, str] = {}
        self._lines: dict[int, Mapping[str, Any]] = {}
        if restored_line is not None:
            self._lines[first_step - 1] = restored_line
            self._paths[first_step - 1] = str(out / "checkpoints" / str(first_step - 1))
        self._durable = first_step - 1
        self._written = first_step - 1
        self._told = first_step - 1

    def trained(self, packed: PackedMicrobatch) -> None:
        """A micro-batch went into its forward call: after it the input stands where its stamp says."""
        self._input[packed.handle.step] = packed.state_after

    def metadata(self, step: int) -> dict[str, Any]:
        """What ``save_checkpoint(step)`` carries; states of older steps are forgotten."""
        self._input = {k: state for k, state in self._input.items() if k >= step}
        return {"step": step, "plan": self._plan, **state_to_metadata(self._input[step], self._out, step)}

    def checkpoint_durable(self, step: int, value: Mapping[str, Any]) -> int | None:
        """Noted; returns the step up to which nothing is needed any more, if that has moved on."""
        self.saved = max(self.saved, step)
        self._durable = max(self._durable, step)
        self._paths[step] = str(value.get("path", ""))
        return self._newly_safe()

    def line_ready(self, line: Mapping[str, Any], *, written: bool) -> int | None:
        """Noted; returns as ``checkpoint_durable``. A line that could not be written makes nothing safe."""
        self._lines[line["step"]] = line
        while len(self._lines) > LINES_KEPT:
            del self._lines[min(self._lines)]
        if written and line["step"] == self._written + 1:  # after a hole nothing more is safe
            self._written = line["step"]
        return self._newly_safe()

    def publishing(self, version: int) -> None:
        """Noted in OUT before it is done: whoever restarts must not go back behind what a reader may have seen."""
        if version <= self.published and (self._out / PUBLISHED).exists():
            return
        self.published = max(self.published, version)
        try:
            write_json(self._out / PUBLISHED, {"version": self.published})
        except OSError as error:
            raise RunFailedError(f"{self._out / PUBLISHED}: {error.strerror}; free space and --resume") from None

    def facts(self, step: int, ledger: Ledger) -> dict[str, Any] | None:
        """What ``on_checkpoint`` is told; ``None`` while metrics or evaluation of the step are missing."""
        facts: dict[str, Any] = {"path": self._paths.get(step, ""), "metrics": {}, "eval": None}
        if step in self._lines:
            return facts | {key: self._lines[step][key] for key in ("metrics", "eval")}
        return ledger.facts(step, facts)

    def _newly_safe(self) -> int | None:
        safe = self._durable if self._written >= self._durable else self._told
        if safe <= self._told:
            return None
        self._told = safe
        return safe
