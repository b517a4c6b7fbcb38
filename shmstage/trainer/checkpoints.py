"""Checkpoints on disk through orbax: one directory per step, complete once it has its final name.

Only host arrays go in: orbax given arrays still being computed blocks its caller for the rest of the computation.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, final

import jax

from shmstage.errors import CheckpointError, MissingExtraError

METADATA = "metadata.json"
STATE = "state"
PARTIAL = ".partial-"
REPLACED = ".replaced-"


class CheckpointStore(Protocol):
    """Where checkpoints are kept. ``save`` is called on the snapshot thread, the rest on the command thread.

    It may have ``discard_above(step)``: put the checkpoints of later steps out of the way, durably on return. Without
    it, those that a restore went back behind stay until their step is saved again, and a later restore may take them.
    """

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""

    def save(self, step: int, tree: Any, metadata: Mapping[str, object]) -> str:
        """Keep a pytree of numpy arrays and plain metadata, durably on return; says where."""

    def load(self, step: int, template: Any) -> tuple[Any, dict[str, Any]]:
        """The pytree, of ``template``'s structure, shapes and dtypes, and the metadata with ``"step"`` added."""


@final
class OrbaxStore:
    """The checkpoints under one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        found = [entry for entry in self.directory.iterdir() if entry.name.isdecimal()]
        return sorted(int(entry.name) for entry in found if (entry / METADATA).is_file())

    def save(self, step: int, tree: Any, metadata: Mapping[str, object]) -> str:
        """Write a pytree of numpy arrays and plain metadata; returns when both are under their final name.

        An older checkpoint of the same step is replaced. Raises ``CheckpointError``.
        """
        checkpointer = _checkpointer()
        partial = self.directory / f"{PARTIAL}{step}"
        final_path = self.directory / str(step)
        try:
            text = json.dumps({**metadata, "step": step})
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            with checkpointer() as writer:
                writer.save(partial / STATE, tree)
            (partial / METADATA).write_text(text)
            _flush(partial)
            # a rename is what makes it complete: whoever is killed before it leaves no half checkpoint
            replaced = self.directory / f"{REPLACED}{step}"
            shutil.rmtree(replaced, ignore_errors=True)
            if final_path.exists():
                final_path.rename(replaced)
            partial.rename(final_path)
            _flush_directory(self.directory)
            shutil.rmtree(replaced, ignore_errors=True)
        except Exception as error:  # orbax and tensorstore have error kinds of their own
            raise CheckpointError(f"checkpoint {step} in {self.directory} was not written: {error}") from error
        return str(final_path)

    def load(self, step: int, template: Any) -> tuple[Any, dict[str, Any]]:
        """The pytree of numpy arrays, of ``template``'s structure, shapes and dtypes, and the metadata.

        Raises ``CheckpointError`` if it cannot be read or is of another model.
        """
        checkpointer = _checkpointer()
        path = self.directory / str(step)
        try:
            metadata = json.loads((path / METADATA).read_text())
            with checkpointer() as reader:
                tree = reader.restore(path / STATE, item=template)
            # orbax hands out arrays of another shape without a word
            jax.tree.map_with_path(_check_leaf, template, tree)
        except Exception as error:  # orbax raises errors of many kinds for a tree that does not match
            raise CheckpointError(
                f"checkpoint {path} cannot be restored into this model: {type(error).__name__}: {error}; if it is "
                "damaged, move it away to resume from the one before"
            ) from error
        return tree, metadata

    def discard_above(self, step: int) -> None:
        """Put the checkpoints of later steps aside, durably on return. Raises ``CheckpointError``.

        They are no checkpoints any more, and go for good when their steps are saved again: somebody may have shortened
        ``steps.jsonl`` by mistake.
        """
        later = [found for found in self.steps() if found > step]
        try:
            for found in reversed(later):
                away = self.directory / f"{REPLACED}{found}"
                shutil.rmtree(away, ignore_errors=True)
                (self.directory / str(found)).rename(away)
            if later:
                _flush_directory(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints {later} in {self.directory}, later than the restored {step}, were not removed: {error}; "
                "remove them: a restart would take one of them"
            ) from error


def _flush(tree: Path) -> None:
    """Durable means that a machine that loses power has it, too: files first, then the directories that name them."""
    paths = [tree, *tree.rglob("*")]
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in paths:
        if path.is_dir():
            _flush_directory(path)


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_leaf(path: Any, want: Any, got: Any) -> None:
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        name = jax.tree_util.keystr(path)
        raise ValueError(f"{name} is {got.dtype}{got.shape} there and {want.dtype}{want.shape} here")


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ModuleNotFoundError as error:
        raise MissingExtraError("checkpoints need orbax-checkpoint; pip install 'shmstage[train]'") from error
    if jax.process_count() == 1:
        return orbax.PyTreeCheckpointer
    # this process reads and writes by itself; else orbax has the devices of all hosts wait for each other, on a thread
    # that must not run programs, for an order of commands that hosts need not keep there
    me = jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    handler = orbax.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return lambda: orbax.Checkpointer(handler, multiprocessing_options=alone)
