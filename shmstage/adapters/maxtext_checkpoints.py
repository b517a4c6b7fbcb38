"""Checkpoints that MaxText writes and reads itself, as snapshots of a ``TrainEngine``.

MaxText saves whatever it holds: inside a step its accumulated gradients too, and when it is closed once more. A half
step must not become a checkpoint, since training goes on from whole ones only; so nothing is saved inside a step, and
an engine with something unsaved is not closed but left to the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from shmstage.errors import CheckpointError


@final
class MaxTextCheckpoints:
    """``directory`` is where ``engine`` keeps them, a directory per step; ``wait`` returns when the device is idle."""

    def __init__(self, engine: Any, directory: Path | str | None, wait: Callable[[], None]) -> None:
        self._engine = engine
        self._directory = Path(directory) if directory is not None else None
        self._wait = wait
        self._kept: int | None = None

    def save(self, step: int, metadata: Mapping[str, object]) -> MaxTextSnapshot:
        if self._directory is None:
            raise CheckpointError(f"checkpoint {step}: the MaxTextEngine was made without checkpoint_dir")
        return MaxTextSnapshot(self, step, metadata)

    def begin(self, step: int, metadata: Mapping[str, object]) -> None:
        """Have MaxText copy its state to the host and start to write it."""
        self._wait()
        self._engine.save_checkpoint({**metadata, "step": step}, step=step, force=True)

    def finish(self, step: int) -> str:
        """Wait until it is on disk; where. Raises ``CheckpointError`` if it is not."""
        self._wait_written()
        assert self._directory is not None
        path = self._directory / str(step)
        if not path.is_dir():
            raise CheckpointError(
                f"MaxText wrote no checkpoint {step}: there is no {path}; set enable_checkpointing=True, and give "
                "MaxTextEngine the configuration's checkpoint_dir"
            )
        self._kept = step
        return str(path)

    def restore(self, *, half_a_step: bool) -> dict[str, object] | None:
        """The newest checkpoint's metadata; ``None`` without any. ``half_a_step``: gradients are accumulated."""
        if half_a_step:
            # nothing of the contract drops them. What this update makes of the parameters, the restore replaces
            self._engine.update()
        found = self._engine.restore_checkpoint() if self._directory is not None else None
        if found is None:
            self._refuse_nothing(half_a_step)
            return None
        half = int(getattr(self._engine, "micro_step_count", 0))
        if half:
            raise CheckpointError(
                f"the newest checkpoint in {self._directory} was taken inside a step, after {half} micro-batches; move "
                "it away to resume from the one before"
            )
        if "step" not in found:
            raise CheckpointError(
                f"the newest checkpoint in {self._directory} has the metadata {sorted(found)} and no step: shmstage "
                "did not write it; start anew with another --out"
            )
        self._kept = int(found["step"])
        return {**found, "step": self._kept}

    def close(self, *, half_a_step: bool) -> None:
        unsaved = self._directory is not None and self._kept != self._engine.train_step
        if half_a_step or unsaved:
            self._wait_written()
        else:
            self._engine.close()

    def _refuse_nothing(self, half_a_step: bool) -> None:
        # MaxText logs why it could not read a checkpoint, and goes on as if there was none
        kept = self._steps()
        if kept:
            raise CheckpointError(
                f"checkpoint {kept[-1]} in {self._directory} was not restored, or shmstage did not write it; the "
                "trainer's log says more. Move it away to resume from the one before, or start with another --out"
            )
        if half_a_step:
            raise CheckpointError(
                "there is no checkpoint, and MaxText cannot drop the gradients of half a step; start the trainer again"
            )

    def _steps(self) -> list[int]:
        if self._directory is None or not self._directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self._directory.iterdir() if entry.name.isdecimal())

    def _wait_written(self) -> None:
        # the contract has no call for it. An engine without this attribute saves before it returns, or ``finish`` tells
        wait = getattr(getattr(self._engine, "_checkpoint_manager", None), "wait_until_finished", None)
        if wait is not None:
            wait()


@final
class MaxTextSnapshot:
    """A checkpoint being taken; the worker waits for the copy, so that MaxText is called by one thread at a time."""

    def __init__(self, checkpoints: MaxTextCheckpoints, step: int, metadata: Mapping[str, object]) -> None:
        self._checkpoints = checkpoints
        self._step = step
        self._metadata = metadata

    def copy_to_host(self) -> None:
        self._checkpoints.begin(self._step, self._metadata)

    def write(self) -> dict[str, object]:
        return {"step": self._step, "path": self._checkpoints.finish(self._step)}
