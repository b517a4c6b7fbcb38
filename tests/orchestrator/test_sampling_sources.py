"""A source that samples while the run goes on: known by its example, told of weights, ended when nothing is wanted."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstage.errors import PluginError, SettingsError
from shmstage.launch.source_share import SourceShare
from shmstage.orchestrator.assembly import _listeners
from shmstage.orchestrator.hooks import Hooks
from shmstage.orchestrator.input import Input
from shmstage.orchestrator.summary import summarise
from shmstage.packing.trajectory import Group, Trajectory
from shmstage.settings import Settings


def made(name: str) -> Trajectory:
    ones = np.ones(3, np.float32)
    return Trajectory(
        trajectory_id=name, tokens=np.arange(3, dtype=np.int32), loss_mask=ones, advantages=ones, old_logprobs=ones,
        returns=ones,
    )  # fmt: skip


class Sampler:
    replayable = False

    def __init__(self) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.asked = 0
        self.closed = 0

    def example(self) -> Any:
        return made("example")

    def on_weights(self, published: Mapping[str, Any]) -> None:
        self.told.append(published)

    def groups(self, cursor: int) -> Iterator[Group]:
        self.asked += 1
        yield Group("g", 0, (made("t"),))

    def close(self) -> None:
        self.closed += 1


def sync(out: Path) -> Settings:
    return Settings(out=out, weight_sync="sync")


def test_the_example_stands_for_the_first_trajectory_and_nothing_is_sampled_for_it(tmp_path: Path) -> None:
    sampler = Sampler()
    source = Input(sampler, sync(tmp_path))
    assert source.first.trajectory_id == "example" and source.first.optional == {"returns"}
    assert sampler.asked == 0
    assert [group.group_id for group in source.groups(0)] == ["g"]
    source.close()


def test_an_example_that_is_no_trajectory_is_refused_and_the_source_ended(tmp_path: Path) -> None:
    sampler = Sampler()
    sampler.example = lambda: {"tokens": [1]}  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"example\(\) is a dict, want a Trajectory"):
        Input(sampler, sync(tmp_path))


def test_a_source_that_waits_for_weights_needs_them_published(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match='weight_sync = "off": source Sampler waits for weights'):
        Input(Sampler(), Settings(out=tmp_path))


def test_source_and_hooks_hear_of_each_version(tmp_path: Path) -> None:
    sampler, heard = Sampler(), queue.SimpleQueue[Mapping[str, Any]]()

    class Hook:
        def on_weights(self, published: Mapping[str, Any]) -> None:
            heard.put(published)
            raise OSError("gone")  # ends nothing

    source, hooks = Input(sampler, sync(tmp_path)), Hooks(Hook(), tmp_path)
    tell = _listeners(source, hooks)
    for version in (0, 1):
        tell({"version": version, "pool": "p"})
        assert heard.get(timeout=10) == {"version": version, "pool": "p"}
    assert [each["version"] for each in sampler.told] == [0, 1]
    assert not hooks.decides
    hooks.close()
    source.close()


def test_sources_and_hooks_without_on_weights_hear_nothing(tmp_path: Path) -> None:
    class Plain:
        replayable = True

        def groups(self, cursor: int) -> Iterator[Group]:
            yield Group("g", 0, (made("t"),))

    hooks = Hooks(object(), tmp_path)
    _listeners(Input(Plain(), Settings(out=tmp_path)), hooks)({"version": 1})
    _listeners(object(), None)({"version": 1})
    hooks.close()


def test_what_on_weights_raises_names_the_version(tmp_path: Path) -> None:
    sampler = Sampler()
    source = Input(sampler, sync(tmp_path))
    source._on_weights = lambda published: 1 / 0
    with pytest.raises(PluginError, match="on_weights raised ZeroDivisionError: .*, at version 7"):
        source.weights_published({"version": 7})
    source.close()


def test_a_source_is_ended_once(tmp_path: Path) -> None:
    sampler = Sampler()
    source = Input(sampler, sync(tmp_path))
    source.finish()
    source.finish()
    source.close()
    assert sampler.closed == 1


def test_what_close_raises_is_said_and_hides_no_other_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampler = Sampler()
    sampler.close = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    source = Input(sampler, sync(tmp_path))
    source.finish()
    source.close()
    assert "the source's close raised ZeroDivisionError: division by zero; the run goes on" in capsys.readouterr().out


def test_launch_refuses_a_source_that_waits_for_weights(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"a Sampler, waits for weights .* `shmstage run`"):
        SourceShare(Sampler(), 0, 1, tmp_path)


def line(step: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "step": step, "mode": "serial", "boundary_idle_s": None, "staged": False, "step_s": 1.0, "loss": 1.0,
        "trajectory_passes": [], "trajectory_ids": [], "denominator": 1.0, "digests": [], "payload_digests": [],
        "metrics": metrics,
    }  # fmt: skip


def test_the_summary_has_each_metric_per_step() -> None:
    got = summarise([line(1, {"loss": 1.0, "a": 1.0}), line(2, None), line(3, {"a": 3.0, "b": 4.0})])
    assert got["metrics"] == {"a": [1.0, None, 3.0], "b": [None, None, 4.0]}
    assert summarise([])["metrics"] == {}
