"""A scraper sees what the step lines say, under names it can rely on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shmstage.launch.metrics import COUNTERS, GAUGES, RunCollector
from shmstage.memory.inspect import PoolSnapshot, ProcessSnapshot, SlotSnapshot

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "attempt": 1, "loss": -0.25, "grad_norm": 1.5, "denominator": 30.0, "microbatches": 3,
        "tokens": 100, "loss_tokens": 60, "segments": 9, "bytes": 4096, "row_efficiency": 0.9,
        "microbatch_efficiency": 0.8, "step_s": 0.3, "boundary_idle_s": 0.002, "pack_s": 0.01, "slot_wait_s": 0.02,
        "data_wait_s": 0.03, "upload_s": 0.04, "exposed_s": 0.0, "snapshot_wait_s": 0.05, "staged": True,
        "latch": {"level": "on", "reason": ""}, **more,
    }  # fmt: skip


class Scraped:
    """A collector, what it said of its failures, and the text it gives."""

    def __init__(self, out: Path, pools: list[PoolSnapshot] | None = None) -> None:
        self.said: list[str] = []
        self.pools = pools or []
        self.collector = RunCollector(
            "run-7", "serial", out, pools=lambda: self.pools, failed=self.said.append
        )
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(self.collector)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def samples(self) -> Samples:
        return samples_of(self.text())


def samples_of(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(name: str, labels: Mapping[str, str] = {}) -> tuple[str, tuple[tuple[str, str], ...]]:
    return f"shmstage_{name}", tuple(sorted(labels.items()))


def test_every_metric_has_help_type_and_a_name_in_base_units_even_before_the_first_step(tmp_path: Path) -> None:
    text = Scraped(tmp_path).text()
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.M))
    types = dict(re.findall(r"^# TYPE (\S+) (.+)$", text, re.M))
    assert helps.keys() == types.keys()
    assert len(helps) > 30
    for name, kind in types.items():
        assert name.startswith("shmstage_")
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(s|ms|ns|mb|kb|nbytes)(_|$)", name), name
        assert helps[name].endswith("."), name
    known = {family.name for family in text_string_to_metric_families(text)}
    assert known == {name.removesuffix("_total") for name in helps}


def test_totals_and_last_values_are_the_step_lines(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path)
    lines = [line(1, boundary_idle_s=None, exposed_s=None, staged=False), line(2, tokens=7), line(3, step_s=0.7)]
    scraped.collector.steps(lines[:1])
    scraped.collector.steps(lines[1:])
    found = scraped.samples()
    assert found[labelled("steps_total")] == 3
    assert found[labelled("staged_steps_total")] == 2
    for name, (key, _) in COUNTERS.items():
        assert found[labelled(f"{name}_total")] == sum(each[key] or 0 for each in lines), name
    for name, (key, _) in GAUGES.items():
        assert found[labelled(name)] == lines[-1][key], name
    assert found[labelled("packing_efficiency_ratio", {"of": "row"})] == 0.9
    assert found[labelled("boundary_idle_seconds_count")] == 2
    assert found[labelled("boundary_idle_seconds_sum")] == 0.004
    assert found[labelled("step_seconds_bucket", {"le": "0.25"})] == 0
    assert found[labelled("step_seconds_bucket", {"le": "0.5"})] == 2
    assert found[labelled("step_seconds_bucket", {"le": "+Inf"})] == 3


def test_what_a_bound_says_is_in_its_bucket(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path)
    scraped.collector.steps([line(1, step_s=0.25), line(2, step_s=1e9)])
    found = scraped.samples()
    assert found[labelled("step_seconds_bucket", {"le": "0.1"})] == 0
    assert found[labelled("step_seconds_bucket", {"le": "0.25"})] == 1
    assert found[labelled("step_seconds_bucket", {"le": "300.0"})] == 1


def test_a_loss_that_is_no_number_any_more_is_shown_and_spoils_no_total(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path)
    scraped.collector.steps([json.loads(json.dumps(line(1, loss=float("nan"), pack_s=float("nan"), upload_s="?")))])
    found = scraped.samples()
    assert str(found[labelled("loss")]) == "nan"
    assert (found[labelled("pack_seconds_total")], found[labelled("upload_seconds_total")]) == (0, 0)


@pytest.mark.parametrize("level", ["on", "after_update", "off"])
def test_the_latch_is_at_one_place(level: str, tmp_path: Path) -> None:
    scraped = Scraped(tmp_path)
    scraped.collector.steps([line(1, latch={"level": level, "reason": ""})])
    places = {labels[0][1]: value for (name, labels), value in scraped.samples().items() if name == "shmstage_latch"}
    assert places == {"on": 0, "after_update": 0, "off": 0} | {level: 1}


def slot(number: int, state: Any, aux: bool = False) -> SlotSnapshot:
    return SlotSnapshot(number, aux, state, 2, 0, 1, 0, None, ())


def pool(role: str, epoch: int, *slots: SlotSnapshot) -> PoolSnapshot:
    owner = ProcessSnapshot(role, 7, True, "running", "")
    return PoolSnapshot(
        "shmstage.x", owner=owner, epoch=epoch, slots=slots, counters={}, allocated_nbytes=1000, heartbeat_s=0.5
    )


def test_slots_are_those_of_the_newest_epochs_pool(tmp_path: Path) -> None:
    old = pool("orchestrator", 1, slot(0, "writing"))
    new = pool("orchestrator", 2, slot(0, "free"), slot(1, "published"), slot(2, "free"), slot(3, "writing", True))
    weights = pool("trainer", 9, slot(0, "free"))
    half_made = PoolSnapshot("shmstage.y", problem="being made")
    found = Scraped(tmp_path, [old, new, weights, half_made]).samples()
    states = {labels: value for (name, labels), value in found.items() if name == "shmstage_slots"}
    assert {tuple(dict(key).values()): value for key, value in states.items()} == {
        ("train", "free"): 2, ("train", "writing"): 0, ("train", "published"): 1,
        ("aux", "free"): 0, ("aux", "writing"): 1, ("aux", "published"): 0,
    }  # fmt: skip
    assert found[labelled("pool_bytes", {"pool": "microbatches"})] == 2000
    assert found[labelled("pool_bytes", {"pool": "weights"})] == 1000
    assert found[labelled("heartbeat_age_seconds")] == 0.5


def test_children_checkpoint_and_weights_are_shown_as_they_are_now(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path)
    found = scraped.samples()
    assert (labelled("checkpoint_step") in found, labelled("weights_version") in found) == (False, False)
    for name in ("0", "12", ".partial-14"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "weights.json").write_text('{"version": 13}')
    scraped.collector.children({"launcher": 1, "trainer": 5, "orchestrator": None}, 2, {"trainer": 3})
    found = scraped.samples()
    assert (found[labelled("checkpoint_step")], found[labelled("weights_version")]) == (12, 13)
    assert [found[labelled("up", {"role": role})] for role in ("trainer", "orchestrator")] == [1, 0]
    assert (found[labelled("restarts_total", {"role": "trainer"})], found[labelled("epoch")]) == (3, 2)
    assert found[labelled("run_info", {"run": "run-7", "boundary": "serial"})] == 1


def test_a_part_that_cannot_be_shown_is_said_once_and_takes_no_other_with_it(tmp_path: Path) -> None:
    scraped = Scraped(tmp_path)
    (tmp_path / "weights.json").write_text("{}")
    scraped.pools = [None]  # type: ignore[list-item]
    scraped.collector.steps([line(1)])
    for _ in range(2):
        found = scraped.samples()
        assert found[labelled("steps_total")] == 1
        assert not any(name == "shmstage_slots" for name, _ in found)
    assert len(scraped.said) == 2
    assert "metrics are left out" in scraped.said[0]
    assert "weights.json" in scraped.said[1]
