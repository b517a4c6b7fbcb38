"""Steps of a run on their way into a bundle: each micro-batch on disk as it was planned, joined when all have trained.

Until then they lie in `.<name>.recording` beside the bundle to be, each micro-batch a bundle of its own that appears
whole or not at all; the bundle itself appears under its name at the end. So a run that is killed leaves nothing that
reads as whole, and its successor goes on with what is there.

In the bundle each micro-batch is a batch, so that it is a window of its own and is planned again just as it was: see
`replay_of`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shmstage.errors import BundleError, SettingsError, shown
from shmstage.memory.locks import lock_exclusively
from shmstage.packing.bundle import read_manifest, seal, write_bundle
from shmstage.packing.bundle_files import appearing, sync_file
from shmstage.packing.manifest import joined
from shmstage.packing.trajectory import MAX_ID_CHARACTERS, Trajectory
from shmstage.records import read_json, write_json

#: what `provenance["format"]` says of a recorded bundle
FORMAT = "recorded"
WHOSE = "whose.json"
#: safetensors holds the interpreter while it copies, 3 to 5 ms a MiB here: so long no other thread of the job runs
SHARD_NBYTES = 8 << 20
#: of the settings, what a micro-batch's plan depends on
PLANNED_BY = ("rows", "tokens", "max_segments_per_row", "segment_align", "max_real_tokens")


@final
class Recording:
    """What has been recorded for the bundle at `path`. One process at a time; one thread but for `digest_of`.

    Attribute `is_done`: something is at `path` already; `manifest`: of the bundle, once it is made, be it before the
    run was resumed. None where what is there is not this run's.
    """

    def __init__(self, path: Path, whose: Mapping[str, Any], *, goes_on: bool) -> None:
        """`whose`: JSON that tells this run from others; `goes_on`: it may have recorded something before.

        Raises `BundleError` if `path` exists, or is being recorded by somebody who lives.
        """
        self.path = path
        self.is_done = goes_on and os.path.lexists(path)
        self.manifest = _manifest_of(path, whose.get("run")) if self.is_done else None
        self._parts: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._ids: set[str] = set()
        self._lock = -1
        self._folder = path.parent / f".{path.name[:200]}.recording"
        if self.is_done:
            return
        check_is_free(path)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # what another run left in it is removed: nobody may have us do that to a directory of his choice
            if self._folder.is_symlink():
                raise BundleError(f"{self._folder} is a link; remove it, or choose another --record")
            self._lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not lock_exclusively(self._lock):
                raise BundleError(f"{path} is being recorded by a living run; choose another --record")
            self._take_over(dict(whose), goes_on=goes_on)
        except OSError as error:
            self.close()
            raise BundleError(f"{path} cannot be recorded: {error.strerror}; choose another --record") from None
        except BaseException:
            self.close()
            raise

    @property
    def steps(self) -> list[int]:
        """Of which there is something, in order."""
        return sorted({step for step, _ in self._parts})

    def count(self, step: int) -> int:
        """How many micro-batches of the step there are."""
        return sum(1 for found, _ in self._parts if found == step)

    def digest_of(self, step: int, index: int) -> str | None:
        """The digest of a micro-batch that is recorded already."""
        part = self._parts.get((step, index))
        return None if part is None else str(part["provenance"]["digest"])

    def write(self, step: int, index: int, number: int, trajectories: Sequence[Trajectory], digest: str) -> None:
        """Keep one micro-batch, durably. `number`: which one of the recording; `trajectories` in order of arrival.

        They keep their ids, apart from one that comes a second time; a group is one of this micro-batch alone.
        """
        renamed: list[Trajectory] = []
        groups = 0
        for place, trajectory in enumerate(trajectories):
            # counted, so that a replay gets them in this order whatever they are called
            groups += not place or trajectory.group_id != trajectories[place - 1].group_id
            name = trajectory.trajectory_id
            if name in self._ids:  # it has been trained before, in another pass
                name = f"{step}.{index}.{place} {name}"[:MAX_ID_CHARACTERS]
            self._ids.add(name)
            group = f"{step}.{index}.{groups} {trajectory.group_id}"[:MAX_ID_CHARACTERS]
            renamed.append(trajectory.renamed(trajectory_id=name, group_id=group, batch_index=number))
        loss_tokens = sum(trajectory.loss_tokens for trajectory in renamed)
        provenance = {"step": step, "index": index, "digest": digest, "loss_tokens": loss_tokens}
        written = write_bundle(self._part(step, index), renamed, provenance=provenance, shard_nbytes=SHARD_NBYTES)
        self._parts[step, index] = written.manifest

    def finish(self, steps: Sequence[int], provenance: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the bundle of these steps, which are in order and recorded; returns its manifest.

        Raises `BundleError`; then everything stays for a next try.
        """
        found = {key: part for key, part in sorted(self._parts.items()) if key[0] in steps}
        told = dict(provenance) | {
            "format": FORMAT,
            "steps": list(steps),
            "microbatches": [dict(part["provenance"]) for part in found.values()],
        }
        manifest = joined(list(found.values()), told, where=str(self.path))
        files = [self._part(*key) / shard["file"] for key, part in found.items() for shard in part["shards"]]
        # in the folder, so that a kill leaves nothing that a successor does not remove
        with appearing(self.path, made_in=self._folder) as directory:
            for file, shard in zip(files, manifest["shards"], strict=True):
                _link(file, directory / shard["file"])
            seal(directory, manifest)
        self.manifest, self.is_done = manifest, True
        self.forget()
        return manifest

    def forget(self) -> None:
        """Remove what was kept on the way."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._parts.clear()

    def close(self) -> None:
        """What is recorded stays, for a successor."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- what lies in the folder ----------------------------------------------------------------------------

    def _part(self, step: int, index: int) -> Path:
        return self._folder / f"{step:015d}-{index:07d}"

    def _take_over(self, whose: dict[str, Any], *, goes_on: bool) -> None:
        """Read what this run recorded before; remove what another one has left, and what was half written."""
        try:
            is_ours = goes_on and read_json(self._folder / WHOSE, "remove it") == whose
        except (FileNotFoundError, SettingsError):
            is_ours = False
        for entry in sorted(os.scandir(self._folder), key=lambda entry: entry.name):
            if not entry.is_dir(follow_symlinks=False):
                continue
            part = self._whole(Path(entry.path)) if is_ours else None
            if part is None:
                shutil.rmtree(entry.path, ignore_errors=True)
                continue
            told = part["provenance"]
            self._parts[told["step"], told["index"]] = part
            self._ids.update(each["id"] for each in part["trajectories"])
        if not is_ours:  # a full disk does not end a run that is started again
            write_json(self._folder / WHOSE, whose)

    def _whole(self, folder: Path) -> Mapping[str, Any] | None:
        """The manifest of a part that can be relied on."""
        try:
            part = read_manifest(folder)
            told = part["provenance"]
            sizes = all((folder / shard["file"]).stat().st_size == shard["nbytes"] for shard in part["shards"])
            return part if sizes and self._part(told["step"], told["index"]) == folder else None
        except (BundleError, OSError, KeyError, TypeError, ValueError):
            return None


def _manifest_of(path: Path, run: object) -> Mapping[str, Any] | None:
    """Of the bundle that the run recorded; None for everything else that may be there."""
    try:
        manifest = read_manifest(path)
    except BundleError:
        return None
    told = manifest["provenance"]
    is_ours = told.get("format") == FORMAT and told.get("run") == run and isinstance(told.get("steps"), list)
    return manifest if is_ours else None


def check_is_free(path: Path) -> None:
    """Raises `BundleError` if something is there."""
    if os.path.lexists(path):
        raise BundleError(f"{path} exists; a bundle is never overwritten: choose another --record, or remove it")


@final
@dataclass(frozen=True, slots=True)
class Replay:
    """What of a run a recorded bundle is, and how these settings differ from that run's.

    `is_exact`: each batch is a micro-batch of the run, and is planned as one.
    """

    is_exact: bool
    differences: tuple[str, ...]


def replay_of(provenance: Mapping[str, Any], settings: Mapping[str, Any]) -> Replay | None:
    """None for a bundle that is no recording. `settings` by name, as the run has them that trains it now."""
    told = provenance.get("settings")
    if provenance.get("format") != FORMAT or not isinstance(told, dict):
        return None
    differing = [name for name in told if name in settings and settings[name] != told[name]]
    texts = tuple(f"{name} = {shown(told[name])} there, {shown(settings[name])} here" for name in differing)
    return Replay(is_exact=not set(differing) & set(PLANNED_BY), differences=texts)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to, follow_symlinks=False)
    except OSError:  # not every file system has links
        shutil.copyfile(file, to, follow_symlinks=False)
        sync_file(to)
