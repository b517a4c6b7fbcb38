"""The benchmark past one machine: its verdicts follow its figures, and what it measures is what a launch does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of ``bench/``, which finds its neighbours as it does when it is run."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])  # what it adds goes again
    return importlib.import_module


def told(ours_s: float, plain_s: float) -> dict[str, Any]:
    """Two hosts, two rounds: 100 bytes each."""
    measured = {"ours": [(ours_s, 100)] * 2, "plain": [(plain_s, 100)] * 2}
    return {"payload_nbytes": 200, "microbatches": 2, "rounds": [measured] * 2, "left": []}


def test_the_rate_is_bytes_per_second_of_a_host_and_judged_within_a_round(bench: Callable[[str], Any]) -> None:
    multihost = bench("multihost")
    figure = multihost.figures_of_rate(told(2.0, 1.0), 2)
    assert figure["nbytes_per_s_per_host"]["ours"]["median"] == 50
    assert figure["nbytes_per_s_per_host"]["plain"]["median"] == 100
    assert figure["ratio"]["median"] == 0.5
    assert figure["fetched_nbytes_per_microbatch"] == 100
    verdicts = multihost.targets_of({"2": {"rate": figure}})
    assert [(each["value"], each["target"], each["met"]) for each in verdicts] == [(0.5, 0.8, False)]
    met = multihost.figures_of_rate(told(1.2, 1.0), 2)
    assert multihost.targets_of({"2": {"rate": met}})[0]["met"]


def summary(trained: int) -> dict[str, Any]:
    return {
        "fetched_nbytes_per_host": [60_000, 40_000],
        "orchestrator_bytes_per_trajectory": 100.0,
        "trajectories": {"trained": trained},
        "leaked_pools": 0,
    }


def test_the_share_is_counted_at_the_head_or_told_where_it_has_no_interface(bench: Callable[[str], Any]) -> None:
    multihost = bench("multihost")
    counted = multihost.figures_of_share(summary(5), 2000)
    assert (counted["share"], counted["told_nbytes"]) == (0.02, 500)
    assert not multihost.targets_of({"2": {"share": counted}})[0]["met"]
    only_told = multihost.figures_of_share(summary(5), None)
    assert only_told["share"] == 0.005
    assert multihost.targets_of({"2": {"share": only_told}})[0]["met"]
    assert multihost.leftovers({"2": {"share": counted, "rate": {"left": ["shmstage.x"]}}}) == ["2 hosts: shmstage.x"]


@pytest.mark.parametrize("payload_nbytes", [1_000_000, 64_000_000])
def test_a_micro_batch_has_at_least_the_size_that_was_asked_for(
    payload_nbytes: int, bench: Callable[[str], Any]
) -> None:
    given = bench("multihost").source_settings(payload_nbytes)
    bits = int(given["experts"] - 1).bit_length()
    of_token = 6 * 4 + given["layers"] * (given["top_k"] * bits / 8 + 1 / 8)
    assert payload_nbytes <= given["rows"] * given["tokens"] * of_token <= payload_nbytes * 1.05 + 100_000
    assert given["experts"] <= 128 and given["rows"] % 4 == 0


def test_requests_are_told_apart_by_store_and_micro_batch(bench: Callable[[str], Any]) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    brought = [(1, 10), (0, 20), (0, 21), (1, 11)]
    assert bench("multihost_rate").by_microbatch(brought, 2, 2) == [[(0, 20), (1, 10)], [(0, 21), (1, 11)]]


class Here:
    """An actor's method, called here."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        class Call:
            remote = staticmethod(getattr(self._actor, name))

        return Call


@pytest.mark.slow
def test_what_it_lands_is_what_was_planned_and_a_wrong_byte_ends_it(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    multihost, rate, actors = bench("multihost"), bench("multihost_rate"), bench("multihost_actors")
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)
    monkeypatch.setattr(rate, "placed", lambda what, settings: placed(actors, what, settings))
    what = {
        "agents": ["h1", "h2"], "stores": ["h1", "h2"], "rounds": 2,
        "settings": multihost.settings_of("bench-test", tmp_path, 300_000),
    }  # fmt: skip
    found = rate.measure(what)
    assert found["microbatches"] == multihost.MICROBATCHES
    assert found["left"] == []
    for measured in found["rounds"]:
        for arm in ("ours", "plain"):
            assert sum(nbytes for _, nbytes in measured[arm]) >= 300_000 * found["microbatches"] * 0.9

    def spoilt(part: Any) -> bytes:
        return bytes(16 * part.window.rows)

    monkeypatch.setattr("shmstage.launch.host_agent.row_digests", spoilt)
    with pytest.raises(SystemExit, match="landed with another digest"):
        rate.measure(what)


def placed(actors: Any, what: dict[str, Any], settings: Any) -> tuple[list[Any], list[Any]]:
    text = settings.model_dump_json()
    stores = [Here(actors.StoreSide(text, i, len(what["stores"]))) for i in range(len(what["stores"]))]
    agents = [Here(actors.HostSide(text, i, len(what["agents"]), stores)) for i in range(len(what["agents"]))]
    assert np.array_equal(stores[0].plain.remote(0), np.empty(0, np.uint8))
    return stores, agents
