"""A whole run over two hosts trains what a run on one host trains: same micro-batches, same denominators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fleet_trainers import DoubleFleet
from input_making import make_group

from shmstage.errors import BudgetError, LayoutError, ProtocolError, SettingsError
from shmstage.orchestrator import fleet_site
from shmstage.orchestrator.session import train
from shmstage.orchestrator.step_lines import read_step_lines
from shmstage.packing.bundle import write_bundle
from shmstage.packing.source import BundleSource
from shmstage.packing.trajectory import Group
from shmstage.packing.window import Window
from shmstage.settings import BOUNDARIES, Boundary, Settings
from shmstage.testing.doubles_trainer import DoubleTrainer
from shmstage.testing.engines import MemoryStore
from shmstage.testing.engines_packed import PackedToyEngine
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqServerChannel

BUNDLE = Path(fleet_site.__file__).parents[1] / "demo" / "bundle"
RUN = "fleet-session"
ROWS, TOKENS = 4, 16
HALVES = (Window(0, 2, 0, TOKENS), Window(2, 4, 0, TOKENS))
#: what must be the same wherever micro-batches lie
SAME = (
    "step", "denominator", "digests", "trajectory_ids", "trajectory_passes", "staged", "row_efficiency",
    "microbatch_efficiency",
)  # fmt: skip
#: prompts in three batches; the last step of a pass is short, its last micro-batch has padding rows
GROUPS = [make_group(i, i // 8, [(5 * i + j) % 12 + 1 for j in range(3)]) for i in range(24)]
EVALUATED = [make_group(100 + i, 0, [7, 9]) for i in range(5)]


def run_settings(out: Path, **more: Any) -> Settings:
    """A planned stage waits for its micro-batch, so that nothing depends on speed."""
    given: dict[str, Any] = {
        "latch": False, "stage_wait_s": 60.0, "slot_timeout_s": 60.0, "call_timeout_s": 60.0, "rows": ROWS,
        "tokens": TOKENS, "microbatches_per_step": 2, "bundle": out.parent / "bundle",
    }  # fmt: skip
    return Settings(run=RUN, out=out, **given | more)


def on_one_host(settings: Settings) -> dict[str, Any]:
    """A local run, with the real worker on a thread."""
    trainer = DoubleTrainer(
        RUN, PackedToyEngine(settings.tokens, store=MemoryStore()), ZmqServerChannel.bind(endpoint_for(RUN, "trainer"))
    )
    trainer.start()
    try:
        return train(settings, epoch=1, stop_requested=lambda: False)
    finally:
        trainer.close()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "bundle", [t for group in GROUPS for t in group.trajectories], provenance={})
    write_bundle(tmp_path / "evaluated", [t for group in EVALUATED for t in group.trajectories], provenance={})
    return tmp_path


@pytest.fixture
def in_a_fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def run(fleet: DoubleFleet, settings: Settings, epoch: int = 1) -> dict[str, Any]:
        fleet.start_trainers()
        monkeypatch.setattr(fleet_site, "channels_of", lambda path: fleet.channels())
        return train(settings, epoch=epoch, stop_requested=lambda: False, peers_file=Path("peers.json"))

    return run


def two_hosts(windows: Sequence[Window] = HALVES, groups: Sequence[Group] = GROUPS, **store: Any) -> DoubleFleet:
    return DoubleFleet(RUN, groups, windows, (2, 1), **store)


def figures(out: Path, *names: str) -> list[dict[str, Any]]:
    return [{name: line[name] for name in (*SAME, *names)} for line in read_step_lines(out / "steps.jsonl")]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_step_lines(out / "steps.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_two_hosts_train_the_demo_as_one_does_in_every_mode(
    boundary: Boundary, tmp_path: Path, in_a_fleet: Any
) -> None:
    demo: dict[str, Any] = {
        "bundle": BUNDLE, "tokens": 256, "steps": 6, "microbatches_per_step": 3, "boundary": boundary
    }  # fmt: skip
    one = on_one_host(run_settings(tmp_path / "one", **demo))
    halves = (Window(0, 2, 0, 256), Window(2, 4, 0, 256))
    with two_hosts(halves, list(BundleSource(BUNDLE).groups(0))) as fleet:
        two = in_a_fleet(fleet, run_settings(tmp_path / "two", **demo))
    assert figures(tmp_path / "two") == figures(tmp_path / "one")
    for name in ("digests", "denominators", "trajectories", "steps", "staged_boundaries", "warnings"):
        assert two[name] == one[name], name
    # before the first update both have the same parameters
    assert losses(tmp_path / "two")[0] == pytest.approx(losses(tmp_path / "one")[0], rel=1e-5)
    assert two["hosts"] == 2
    told = sum(channel.sent_nbytes + channel.received_nbytes for channel in fleet.counted)
    assert two["orchestrator_bytes_per_trajectory"] == round(told / two["trajectories"]["trained"], 1) <= 256
    assert len(two["fetched_nbytes_per_host"]) == 2 and min(two["fetched_nbytes_per_host"]) > 0
    assert one.keys() <= two.keys()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["arrival", "prompt_batch"])
def test_passes_and_the_end_of_the_input_are_where_one_host_has_them(
    order: str, bundle: Path, in_a_fleet: Any
) -> None:
    more = {"steps": None, "passes": 2, "order": order, "boundary": "staged_before_update"}
    one = on_one_host(run_settings(bundle / "one", **more))
    with two_hosts(expected=lambda batch: 8) as fleet:
        two = in_a_fleet(fleet, run_settings(bundle / "two", **more))
    assert figures(bundle / "two") == figures(bundle / "one")
    assert two["trajectories"] == one["trajectories"]
    assert two["trajectories"]["trained"] == 2 * 72 and two["trajectories"]["min_times"] == 1


@pytest.mark.slow
def test_a_gang_that_is_started_again_goes_on_where_the_last_checkpoint_is(bundle: Path, in_a_fleet: Any) -> None:
    more = {"passes": 2, "boundary": "staged_before_update", "checkpoint_every": 2}
    one = on_one_host(run_settings(bundle / "one", steps=9, **more))
    with two_hosts() as fleet:
        in_a_fleet(fleet, run_settings(bundle / "two", steps=5, **more))
        again = in_a_fleet(fleet, run_settings(bundle / "two", steps=9, **more), epoch=2)
        # the second gang's trainers let go of the pool before, if any, before agents ask for memory
        assert [len(trainer.hellos) for trainer in fleet.trainers] == [2, 2]
        assert all(trainer.hellos[0] == "" and trainer.hellos[1] for trainer in fleet.trainers)
    want, got = figures(bundle / "one"), figures(bundle / "two")
    # the first step after a start is not staged
    assert [line.pop("staged") for line in got] == [line.pop("staged") and line["step"] != 6 for line in want]
    assert got == want
    assert again["trajectories"] == one["trajectories"]
    assert again["first_step"] == 1
    # of the bytes of this process, over what it trained itself
    assert again["orchestrator_bytes_per_trajectory"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("boundary", ["serial", "staged_before_update"])
def test_scores_and_evaluations_come_from_every_hosts_own_slots(
    boundary: Boundary, bundle: Path, in_a_fleet: Any
) -> None:
    more: dict[str, Any] = {
        "steps": 2, "passes": 1, "boundary": boundary, "recompute_old_logps": True, "reference_logps": True,
        "eval_bundle": bundle / "evaluated", "eval_every": 1,
    }  # fmt: skip
    on_one_host(run_settings(bundle / "one", **more))
    with two_hosts(evaluated=EVALUATED) as fleet:
        in_a_fleet(fleet, run_settings(bundle / "two", **more))
        commands = [command for command, _ in fleet.hosts.agents[1].aux.heard]
    assert figures(bundle / "two") == figures(bundle / "one")
    lines = [read_step_lines(bundle / which / "steps.jsonl") for which in ("one", "two")]
    for one, two in zip(*lines, strict=True):
        assert one["eval"]["denominator"] == two["eval"]["denominator"] > 0
        assert [set(each) for each in one["late_digests"]] == [set(each) for each in two["late_digests"]]
    assert losses(bundle / "two")[0] == pytest.approx(losses(bundle / "one")[0], rel=1e-5)
    assert commands.count("late_before") == commands.count("late_after") == 4
    assert commands.count("pack") > 2


@pytest.mark.slow
def test_a_host_that_packs_other_trajectories_ends_the_run_by_its_name(bundle: Path, in_a_fleet: Any) -> None:
    def swap(answer: dict[str, Any]) -> None:
        answer["row_digests"] = answer["row_digests"][16:] + answer["row_digests"][:16]

    with two_hosts() as fleet:
        fleet.hosts.agents[1].spoil = swap
        with pytest.raises(ProtocolError, match=r"the agent of host 1 \(node-1\), pack: row 2 of micro-batch 1\.0"):
            in_a_fleet(fleet, run_settings(bundle / "two", steps=2))
        # nobody is left with a micro-batch that the others have not
        assert not any("fwd_bwd" in trainer.received for trainer in fleet.trainers)


@pytest.mark.slow
def test_a_plan_that_an_agent_has_forgotten_is_told_again(bundle: Path, in_a_fleet: Any) -> None:
    on_one_host(run_settings(bundle / "one", steps=3))
    with two_hosts() as fleet:
        for agent in fleet.hosts.agents:
            agent.forgets = True
        in_a_fleet(fleet, run_settings(bundle / "two", steps=3))
    assert figures(bundle / "two") == figures(bundle / "one")


@pytest.mark.slow
def test_an_agent_without_memory_for_its_pool_is_named(bundle: Path, in_a_fleet: Any) -> None:
    with two_hosts() as fleet:
        fleet.hosts.agents[1].refuses_pool = BudgetError("1 GB does not fit; use fewer slots")
        with pytest.raises(BudgetError, match=r"the agent of host 1 \(node-1\): 1 GB does not fit"):
            in_a_fleet(fleet, run_settings(bundle / "two", steps=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "error", "text"),
    [
        ((Window(0, 2, 0, TOKENS), Window(1, 3, 0, TOKENS)), LayoutError, "row 3, token 0 of a micro-batch lies on no"),
        ((Window(0, 3, 0, TOKENS), Window(3, 4, 0, TOKENS)), SettingsError, "host 1 .node-1. .1, 16.; let the engine"),
    ],
)
def test_what_no_host_holds_or_hosts_hold_unequally_is_refused_before_anything_starts(
    windows: Sequence[Window], error: type[Exception], text: str, bundle: Path, in_a_fleet: Any
) -> None:
    with two_hosts(windows) as fleet:
        with pytest.raises(error, match=text):
            in_a_fleet(fleet, run_settings(bundle / "two", steps=1))
        assert all(agent.pool is None for agent in fleet.hosts.agents)
