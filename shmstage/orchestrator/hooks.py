"""What a user hangs into a run: told of durable checkpoints, where it may end the run, and of finished steps.

    hooks = "module:factory"      factory(settings) -> object with on_checkpoint, on_step_end, on_weights

``on_checkpoint(step, facts) -> bool | None``: ``False`` ends the run there; the next update waits for the answer.
``on_step_end(line)``: gets each step line; what it raises is logged once and never ends a step.
``on_weights(published)``: a version can be taken by readers, ``shmstage.WeightsReader(published)``; as ``on_step_end``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shmstage.errors import SettingsError, WaitTimeoutError, shown
from shmstage.records import JsonLines, is_count, read_json_lines

VERDICTS = "hooks.jsonl"


@dataclass(frozen=True)
class Verdict:
    """What the hook said of checkpoint ``step``; ``error`` if it raised, which ends the run."""

    step: int
    go_on: bool
    error: str = ""


@final
class Hooks:
    """Runs ``on_checkpoint`` on a thread of its own, so that micro-batches go out meanwhile.

    Verdicts are kept in OUT, and ``verdict_of`` finds them after a restart. One object serves all sessions with the
    trainer: a hook that judges while the trainer is started again is never called twice at once.
    """

    def __init__(self, hook: Any, out: Path) -> None:
        self._on_checkpoint: Callable[..., Any] | None = getattr(hook, "on_checkpoint", None)
        self._on_step_end: Callable[..., Any] | None = getattr(hook, "on_step_end", None)
        self._on_weights: Callable[..., Any] | None = getattr(hook, "on_weights", None)
        self._deliver: Callable[[Verdict], None] = lambda verdict: None
        self._known = _recorded(out / VERDICTS)
        self._record = JsonLines(out / VERDICTS)
        self._to_do: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="hooks", daemon=True)
        self._thread.start()

    @property
    def decides(self) -> bool:
        """True if updates have to wait for it."""
        return self._on_checkpoint is not None

    def verdict_of(self, step: int) -> bool | None:
        """What OUT records of checkpoint ``step``; ``None`` if the hook has not spoken on it."""
        return self._known.get(step)

    def listen(self, deliver: Callable[[Verdict], None]) -> None:
        """Verdicts go to ``deliver`` from now on, on the hook's thread."""
        self._deliver = deliver

    def ask(self, step: int, facts: Mapping[str, Any]) -> None:
        """Have checkpoint ``step`` judged; the answer goes to who listens."""
        self._to_do.put(lambda: self._tell(self._judge(step, facts)))

    def step_ended(self, line: Mapping[str, Any]) -> None:
        """``on_step_end`` gets a copy, on the hook's thread: nobody waits for it."""
        if self._on_step_end is not None:
            copy = deepcopy(dict(line))
            self._to_do.put(lambda: self._inform("on_step_end", self._on_step_end, copy))

    def weights_published(self, published: Mapping[str, Any]) -> None:
        """``on_weights`` gets a copy, on the hook's thread."""
        if self._on_weights is not None:
            copy = deepcopy(dict(published))
            self._to_do.put(lambda: self._inform("on_weights", self._on_weights, copy))

    def _inform(self, name: str, tell: Callable[..., Any] | None, what: dict[str, Any]) -> None:
        assert tell is not None
        try:
            tell(what)
        except BaseException as error:  # SystemExit, too
            if name not in self._failed:
                self._failed.add(name)
                print(f"{name} raised {type(error).__name__}: {error}; the run goes on", flush=True)

    def close(self, timeout_s: float = 10.0) -> None:
        """Lets the hook finish what it was told; one that hangs dies with the process, and that is said."""
        self._to_do.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            print(f"the hook has not returned within {timeout_s:g} s of the end of the run; not waited for", flush=True)
        self._record.close()

    def _run(self) -> None:
        while (do := self._to_do.get()) is not None:
            try:
                do()
            except Exception as error:  # who listened is gone with its trainer; what was said is in the record
                print(f"a verdict found no listener: {error}", flush=True)

    def _tell(self, verdict: Verdict) -> None:
        self._deliver(verdict)  # looked up when it is known: the session may be another than when it was asked for

    def _judge(self, step: int, facts: Mapping[str, Any]) -> Verdict:
        assert self._on_checkpoint is not None
        try:
            go_on = self._on_checkpoint(step, facts) is not False
        except BaseException as error:  # SystemExit, too: it would end the thread without a word
            return Verdict(step, False, f"on_checkpoint({step}) raised {type(error).__name__}: {error}")
        self._known[step] = go_on
        self._record.write({"step": step, "go_on": go_on})
        return Verdict(step, go_on)


def _recorded(path: Path) -> dict[int, bool]:
    known: dict[int, bool] = {}
    for number, line in enumerate(read_json_lines(path), 1):
        step, go_on = line.get("step"), line.get("go_on")
        if not is_count(step) or type(go_on) is not bool:
            raise SettingsError(f"{path} line {number} is no verdict: {shown(line, 200)}; remove the line, or the file")
        known[step] = go_on
    return known


@final
class Judging:
    """Checkpoints on their way through ``on_checkpoint``: durable first, then complete with what is known of them.

    ``facts_of(step)`` is ``None`` while metrics or the evaluation of the step are missing. Without a hook that decides
    it does nothing.
    """

    def __init__(
        self,
        hooks: Hooks | None,
        facts_of: Callable[[int], Mapping[str, Any] | None],
        *,
        timeout_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hooks = hooks if hooks is not None and hooks.decides else None
        self._facts_of = facts_of
        self._timeout_s = timeout_s
        self._clock = clock
        self._durable: list[int] = []
        self._asked: dict[int, float] = {}

    @property
    def going_on(self) -> tuple[int, ...]:
        """The checkpoints a verdict is missing on."""
        return (*self._durable, *sorted(self._asked))

    def restored(self, step: int) -> Verdict | None:
        """The verdict in OUT; without one the hook may have been killed while it judged, and is asked again."""
        known = self._hooks.verdict_of(step) if self._hooks is not None else None
        if known is None:
            self.durable(step)
            return None
        self._asked[step] = self._clock()
        return Verdict(step, known)

    def durable(self, step: int) -> None:
        if self._hooks is not None:
            self._durable.append(step)

    def ask(self) -> None:
        """Pass on what is complete now."""
        for step in list(self._durable):
            facts = self._facts_of(step)
            if facts is not None and self._hooks is not None:
                self._durable.remove(step)
                self._asked[step] = self._clock()
                self._hooks.ask(step, facts)

    def heard(self, verdict: Verdict) -> bool:
        """False if that was not asked here: it was, by a session with a trainer that is dead."""
        return self._asked.pop(verdict.step, None) is not None

    def check(self) -> None:
        """Raises ``WaitTimeoutError`` if the hook has not answered in time."""
        for step, asked_at in self._asked.items():
            if self._clock() - asked_at > self._timeout_s:
                raise WaitTimeoutError(
                    f"on_checkpoint({step}) has not returned within {self._timeout_s:g} s; raise hook_timeout_s if it "
                    "may take longer"
                )
