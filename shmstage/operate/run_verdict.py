"""What state a run is in, in one word and one sentence, and what a person can do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shmstage.memory.inspect import UNFINISHED, PoolSnapshot, ProcessSnapshot
from shmstage.memory.limits import format_nbytes
from shmstage.settings import Settings

State = Literal[
    "starting",
    "running",
    "restarting",
    "stopped",
    "orphaned",
    "finished",
    "failed",
    "ended",
    "killed",
    "alive",
    "unclear",
]
_CHILDREN = ("orchestrator", "trainer")
DEFAULT_STOP_GRACE_S = float(Settings.model_fields["stop_grace_s"].default)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``text`` says why it is so, ``remedies`` what can be done, one sentence each."""

    state: State
    text: str
    remedies: tuple[str, ...] = ()


def judge(
    processes: Iterable[ProcessSnapshot],
    pools: Iterable[PoolSnapshot],
    *,
    finished: bool = False,
    failures: Mapping[str, str] | None = None,
    has_steps: bool = False,
    out: str = "",
    checkpoint: int | None = None,
    grace_s: float = DEFAULT_STOP_GRACE_S,
) -> Verdict:
    """Of one run. Without ``out`` nothing is known but what lies in shared memory."""
    known, pools = list(processes), list(pools)
    living = [process for process in known if process.alive is not False and process.pid]
    frozen = [process for process in living if process.state in ("stopped", "traced")]
    launcher = next((process for process in known if process.role == "launcher"), None)
    left = _left_behind(known, pools)
    if frozen:
        return _of_stopped(frozen, launcher is not None and launcher.alive is False, checkpoint)
    if launcher is None:
        return _of_memory_alone(known, living, left, [pool for pool in pools if pool.problem])
    if launcher.alive is not False:
        return _of_living_launcher(known, has_steps, launcher.alive)
    if children := [process for process in living if process.role in _CHILDREN]:
        text = f"the launcher is dead; {_names(children)} of it still {'ends' if len(children) == 1 else 'end'}"
        return Verdict("orphaned", text, (f"that takes up to {2 * grace_s:g} s by itself; look again then",))
    unsure = [pool for pool in pools if pool.problem == UNFINISHED]
    remedies = ["`shmstage gc` frees what is left"] if left or unsure else []
    again = f"`shmstage run --resume {out}` goes on from checkpoint {checkpoint}" if checkpoint is not None else ""
    tail = f"; {left} left behind" if left else ""
    tail += "".join(f"; {pool.name} is {pool.problem}" for pool in unsure)
    tail += f"; {_names(living)} still {'lives' if len(living) == 1 else 'live'}" if living else ""
    if finished:
        return Verdict("finished", f"it has made all its steps{tail}", tuple(remedies))
    remedies = [again, *remedies] if again else remedies
    told = {role: text for role, text in (failures or {}).items() if not text.startswith("StoppedError")}
    if "launcher" in told:  # it knows the whole of it; the children tell their parts
        told = {"launcher": told["launcher"]}
    if told:
        said = "; ".join(f"the {role} says: {text}" for role, text in told.items())
        return Verdict("failed", f"{said}{tail}", tuple(remedies))
    if left:
        return Verdict("killed", f"the launcher and its children are dead{tail}", tuple(remedies))
    clean = tail or " and left nothing in shared memory"
    how = "was stopped" if failures else "ended"
    return Verdict("ended", f"it {how} before its last step{clean}", tuple(remedies))


def _of_stopped(frozen: Sequence[ProcessSnapshot], launcher_is_dead: bool, checkpoint: int | None) -> Verdict:
    numbers = " ".join(str(process.pid) for process in frozen)
    how = f"{_names(frozen)} {'is' if len(frozen) == 1 else 'are'} stopped (SIGSTOP or a debugger)"
    if not launcher_is_dead:
        text = f"{how}: nothing is lost, nothing goes on"
        return Verdict("stopped", text, (f"`kill -CONT {numbers}` lets it go on",))
    reached = f"what was trained after checkpoint {checkpoint}" if checkpoint is not None else "what was trained"
    text = f"the launcher is dead, and {how}: the run will not go on, and {reached} may be lost"
    return Verdict("orphaned", text, (f"`kill -CONT {numbers}` lets it save what it can, and end; look again then",))


def _of_living_launcher(known: Sequence[ProcessSnapshot], has_steps: bool, sure: bool | None) -> Verdict:
    present = {process.role for process in known if process.alive is not False}
    missing = [role for role in _CHILDREN if role not in present]
    if missing:
        text = f"the {' and the '.join(missing)} {'is' if len(missing) == 1 else 'are'} not there"
        return Verdict("restarting" if has_steps else "starting", f"{text}: not started yet, or about to be restarted")
    unseen = [process for process in known if process.alive is None]
    if sure is None or unseen:
        text = f"{_names(unseen)} cannot be seen from here, perhaps because this is another container"
        return Verdict("running" if has_steps else "starting", text)
    if not has_steps:
        return Verdict("starting", "all its processes are alive; no step is complete yet")
    return Verdict("running", "all its processes are alive")


def _of_memory_alone(
    known: Sequence[ProcessSnapshot], living: Sequence[ProcessSnapshot], left: str, odd: Sequence[PoolSnapshot]
) -> Verdict:
    if sure := [process for process in living if process.alive]:
        return Verdict("alive", f"{_names(sure)} {'is' if len(sure) == 1 else 'are'} alive")
    if living:
        return Verdict("unclear", f"nobody can tell from here whether {_names(living)} lives")
    if left:
        return Verdict("killed", f"its processes are dead; {left} left behind", ("`shmstage gc` frees what is left",))
    if odd:
        unsure = any(pool.problem == UNFINISHED for pool in odd)
        remedies = ("`shmstage gc` removes it unless somebody is making it",) if unsure else ()
        return Verdict("unclear", "; ".join(f"{pool.name}: {pool.problem}" for pool in odd), remedies)
    return Verdict("ended", "nothing of it is left")


def _left_behind(processes: Sequence[ProcessSnapshot], pools: Sequence[PoolSnapshot]) -> str:
    """What the dead of a run have in shared memory, in words; "" for nothing."""
    dead = [pool for pool in pools if pool.owner.alive is False]
    parts = []
    if dead:
        nbytes = format_nbytes(sum(pool.allocated_nbytes for pool in dead))
        parts.append(f"{len(dead)} pool{'s' * (len(dead) > 1)} of {nbytes}")
    if locks := sum(1 for process in processes if process.lock and process.alive is False):
        parts.append(f"{locks} lock{'s' * (locks > 1)}")
    return " and ".join(parts)


def _names(processes: Sequence[ProcessSnapshot]) -> str:
    return " and ".join(f"the {process.role or 'process'} (pid {process.pid})" for process in processes)
