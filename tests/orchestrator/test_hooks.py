"""Hooks: asked when a checkpoint is durable and complete, recorded in OUT, never able to end a step by a log line."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmstage.errors import SettingsError, WaitTimeoutError
from shmstage.orchestrator.hooks import Hooks, Judging, Verdict


class Recorder:
    def __init__(self, answers: Mapping[int, Any] | None = None) -> None:
        self.answers = dict(answers or {})
        self.asked: list[tuple[int, Mapping[str, Any]]] = []
        self.lines: list[Mapping[str, Any]] = []

    def on_checkpoint(self, step: int, facts: Mapping[str, Any]) -> Any:
        self.asked.append((step, facts))
        answer = self.answers.get(step)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def on_step_end(self, line: Mapping[str, Any]) -> None:
        self.lines.append(line)
        raise OSError("exporter gone")


@contextmanager
def hooks_of(hook: object, out: Path) -> Iterator[tuple[Hooks, queue.SimpleQueue[Verdict]]]:
    heard: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    hooks = Hooks(hook, out)
    hooks.listen(heard.put)
    try:
        yield hooks, heard
    finally:
        hooks.close()


@pytest.mark.parametrize(("answer", "go_on"), [(None, True), (True, True), (0, True), (False, False)])
def test_only_false_ends_the_run(tmp_path: Path, answer: object, go_on: bool) -> None:
    with hooks_of(Recorder({4: answer}), tmp_path) as (hooks, heard):
        hooks.ask(4, {})
        assert heard.get(timeout=10) == Verdict(4, go_on)


def test_a_hook_that_raises_is_a_verdict_with_its_error_and_is_not_recorded(tmp_path: Path) -> None:
    with hooks_of(Recorder({4: SystemExit(3)}), tmp_path) as (hooks, heard):
        hooks.ask(4, {})
        verdict = heard.get(timeout=10)
        assert not verdict.go_on
        assert verdict.error == "on_checkpoint(4) raised SystemExit: 3"
    with hooks_of(Recorder(), tmp_path) as (hooks, _):
        assert hooks.verdict_of(4) is None


def test_verdicts_are_found_again_in_out(tmp_path: Path) -> None:
    with hooks_of(Recorder({2: False}), tmp_path) as (hooks, heard):
        hooks.ask(1, {})
        hooks.ask(2, {})
        heard.get(timeout=10)
        heard.get(timeout=10)
    with hooks_of(Recorder(), tmp_path) as (hooks, _):
        assert [hooks.verdict_of(step) for step in (1, 2, 3)] == [True, False, None]


def test_what_on_step_end_raises_is_logged_once_and_never_ends_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B1"""
    hook = Recorder()
    with hooks_of(hook, tmp_path) as (hooks, _):
        hooks.step_ended({"step": 1})
        hooks.step_ended({"step": 2})
    assert [line["step"] for line in hook.lines] == [1, 2]  # close has waited for it
    assert capsys.readouterr().out.count("on_step_end raised OSError: exporter gone") == 1


def test_a_hook_without_on_checkpoint_decides_nothing(tmp_path: Path) -> None:
    with hooks_of(object(), tmp_path) as (hooks, _):
        assert not hooks.decides
        judging = Judging(hooks, lambda step: {})
        judging.durable(3)
        assert judging.going_on == ()


def test_a_checkpoint_is_judged_when_its_metrics_and_evaluation_are_there(tmp_path: Path) -> None:
    known: dict[int, dict[str, Any]] = {}
    hook = Recorder()
    with hooks_of(hook, tmp_path) as (hooks, heard):
        judging = Judging(hooks, known.get)
        judging.durable(3)
        judging.ask()
        assert judging.going_on == (3,)
        assert heard.empty()
        known[3] = {"eval": {"loss": 0.25}}
        judging.ask()
        verdict = heard.get(timeout=10)
        judging.heard(verdict)
        assert judging.going_on == ()
    assert hook.asked == [(3, {"eval": {"loss": 0.25}})]


def test_the_restored_checkpoints_hook_runs_again_unless_out_records_its_verdict(tmp_path: Path) -> None:
    with hooks_of(Recorder(), tmp_path) as (hooks, heard):
        judging = Judging(hooks, lambda step: {})
        assert judging.restored(5) is None
        judging.ask()
        assert heard.get(timeout=10) == Verdict(5, True)
    with hooks_of(Recorder(), tmp_path) as (hooks, heard):
        judging = Judging(hooks, lambda step: {})
        verdict = judging.restored(5)
        assert verdict == Verdict(5, True)
        assert judging.heard(verdict)
        assert judging.going_on == ()


def test_a_verdict_that_an_earlier_session_asked_for_is_recorded_and_decides_nothing(tmp_path: Path) -> None:
    hook, begun, go_on = Recorder({6: False}), threading.Event(), threading.Event()
    judge = hook.on_checkpoint

    def slowly(step: int, facts: Mapping[str, Any]) -> Any:
        begun.set()
        go_on.wait(10)
        return judge(step, facts)

    hook.on_checkpoint = slowly  # type: ignore[method-assign]
    with hooks_of(hook, tmp_path) as (hooks, before):
        hooks.ask(6, {})
        assert begun.wait(10)
        after: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        hooks.listen(after.put)  # the trainer died, another session goes on from step 4
        judging = Judging(hooks, lambda step: {})
        judging.restored(4)
        judging.ask()
        go_on.set()
        verdicts = [after.get(timeout=10), after.get(timeout=10)]
        assert [judging.heard(verdict) for verdict in verdicts] == [False, True]
        assert before.empty()
        assert hooks.verdict_of(6) is False


@pytest.mark.parametrize("line", ['{"step": 0}', '{"step": [1], "go_on": true}', '{"step": 1, "go_on": 1}'])
def test_a_record_that_holds_no_verdict_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "hooks.jsonl").write_text('{"step": 1, "go_on": true}\n' + line + "\n")
    with pytest.raises(SettingsError, match=r"hooks\.jsonl line 2 is no verdict"):
        Hooks(Recorder(), tmp_path)


def test_on_step_end_gets_a_copy_and_may_exit_as_it_likes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Rude:
        def on_step_end(self, line: dict[str, Any]) -> None:
            line["metrics"].clear()
            line.clear()
            raise SystemExit(4)

    line = {"step": 1, "metrics": {"loss": 0.5}}
    with hooks_of(Rude(), tmp_path) as (hooks, _):
        hooks.step_ended(line)
    assert line == {"step": 1, "metrics": {"loss": 0.5}}
    assert "on_step_end raised SystemExit: 4; the run goes on" in capsys.readouterr().out


def test_a_verdict_whose_listener_is_gone_is_recorded_and_the_next_one_is_heard(tmp_path: Path) -> None:
    def gone(verdict: Verdict) -> None:
        raise OSError("closed")

    hooks = Hooks(Recorder(), tmp_path)
    hooks.listen(gone)
    hooks.ask(1, {})
    heard: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    hooks.ask(2, {})
    hooks.close()
    assert [hooks.verdict_of(step) for step in (1, 2)] == [True, True]
    assert heard.empty()


def test_a_hook_that_does_not_answer_in_time_ends_the_wait_with_its_checkpoint(tmp_path: Path) -> None:
    release, now = threading.Event(), [0.0]
    hook = Recorder()
    hook.on_checkpoint = lambda step, facts: release.wait(10)  # type: ignore[method-assign]
    with hooks_of(hook, tmp_path) as (hooks, _):
        judging = Judging(hooks, lambda step: {}, timeout_s=60.0, clock=lambda: now[0])
        judging.durable(3)
        judging.ask()
        now[0] = 60.0
        judging.check()
        now[0] = 60.5
        said = r"on_checkpoint\(3\) has not returned within 60 s; raise hook_timeout_s"
        with pytest.raises(WaitTimeoutError, match=said):
            judging.check()
        release.set()
