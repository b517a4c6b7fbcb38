"""A profile of some steps: what is in it carries the micro-batches' names, and training does not notice it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from rig import DEADLINE_S, rigged, toy_engine

from shmstage.trainer import profile
from shmstage.trainer.profile import ProfiledEngine


def profiled(directory: Path, first: int, last: int) -> Callable[[], Any]:
    return lambda: ProfiledEngine(toy_engine(), directory, first, last)


def traces(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in directory.rglob("*.xplane.pb")]


@pytest.mark.slow
def test_the_profile_holds_the_chosen_steps_under_the_names_of_their_microbatches(tmp_path: Path) -> None:
    with rigged(profiled(tmp_path, 2, 3)) as rig:
        rig.train_step(1)
        rig.train_step(2)
        staged, last = rig.publish(3, 0), rig.publish(3, 1, final=True)
        rig.call("stage_fwd_bwd", handle=staged)
        rig.call("fwd_bwd_staged", request_id=staged.request_id)
        rig.call("fwd_bwd", handle=last)
        rig.train_step(4)
    (trace,) = traces(tmp_path)
    assert list(tmp_path.rglob("*.trace.json.gz"))
    for name in ("fwd_bwd 2.0@", "fwd_bwd 2.2@", "update 2", "update 3", f"stage {staged.request_id}",
                 f"fwd_bwd {staged.request_id}", f"stage {last.request_id}"):  # fmt: skip
        assert name.encode() in trace, name
    for name in ("fwd_bwd 1.", "stage 1.", "update 1", "fwd_bwd 4.", "update 4"):
        assert name.encode() not in trace, name


@pytest.mark.slow
def test_a_profiled_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    digests = []
    for make in (profiled(tmp_path, 1, 2), toy_engine):
        with rigged(make) as rig:
            for step in (1, 2, 3):
                rig.train_step(step)
            digests.append(rig.digest())
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_run_that_ends_before_the_last_step_of_the_profile_writes_what_there_is(tmp_path: Path) -> None:
    with rigged(profiled(tmp_path, 1, 99)) as rig:
        rig.train_step(1, microbatches=1)
    (trace,) = traces(tmp_path)
    assert b"update 1" in trace


class Recorder:
    """Stands in for the two calls of JAX."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.calls: list[str] = []
        for name in ("start", "stop"):
            monkeypatch.setattr(profile, f"{name}_profile", self._call(name, fails == name))

    def _call(self, name: str, fails: bool) -> Callable[..., None]:
        def call(*_: Path) -> None:
            self.calls.append(name)
            if fails:
                raise RuntimeError("the profiler is busy")

        return call


class Engine:
    """Says what was asked of it; its update has a token."""

    def __init__(self) -> None:
        self.closed = False

    def update(self) -> jax.Array:
        return jax.numpy.zeros(())

    def close(self) -> None:
        self.closed = True


def step(engine: ProfiledEngine, number: int) -> jax.Array | None:
    with engine.annotate("fwd_bwd", number, f"{number}.0@0:2"):
        pass
    with engine.annotate("update", number, str(number)):
        return engine.update()


def test_the_end_waits_for_the_update_and_the_command_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, landed = Recorder(monkeypatch), threading.Event()
    monkeypatch.setattr(profile, "failure_of", lambda token: landed.wait(DEADLINE_S))
    inner = Engine()
    engine = ProfiledEngine(inner, tmp_path, 2, 2)  # type: ignore[arg-type]
    for number in (1, 2, 3):
        assert step(engine, number) is not None
    assert recorder.calls == ["start"]
    landed.set()
    engine.close()
    assert recorder.calls == ["start", "stop"]
    assert inner.closed


def test_the_last_update_is_over_in_the_profile_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    engine = ProfiledEngine(Engine(), tmp_path, 2, 2)  # type: ignore[arg-type]
    with engine.annotate("fwd_bwd", 2, "2.0@0:2"):
        pass
    with engine.annotate("update", 2, "2"):
        engine.update()
        assert "shmstage-profile" not in {thread.name for thread in threading.enumerate()}
        assert recorder.calls == ["start"]
    engine.close()
    assert recorder.calls == ["start", "stop"]


def test_a_profile_is_taken_once_also_if_its_steps_are_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    engine = ProfiledEngine(Engine(), tmp_path, 2, 3)  # type: ignore[arg-type]
    for number in (3, 4, 2, 3):  # restored behind its beginning, then before it
        step(engine, number)
    engine.close()
    assert recorder.calls == ["start", "stop"]


@pytest.mark.parametrize(("fails", "calls"), [("start", ["start"]), ("stop", ["start", "stop"])])
def test_a_profiler_that_fails_is_logged_once_and_ends_no_step(
    fails: str, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(monkeypatch, fails)
    engine = ProfiledEngine(Engine(), tmp_path, 1, 2)  # type: ignore[arg-type]
    for number in (1, 2, 3):
        assert step(engine, number) is not None
    engine.close()
    assert recorder.calls == calls
    assert sum("the run goes on" in text for text in caplog.messages) == 1


def test_what_else_an_engine_has_is_the_engines_own(tmp_path: Path) -> None:
    inner = toy_engine()
    engine = ProfiledEngine(inner, tmp_path, 1, 2)
    assert engine.weights == inner.weights
    assert getattr(engine, "settle", None) is None
    assert getattr(engine, "snapshots", True) is True
    engine.close()
