"""A whole run over two hosts trains what a run on one host trains: same micro-batches, same denominators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fleet_trainers import DoubleFleet

from shmstage.errors import ProtocolError, SettingsError
from shmstage.orchestrator import fleet_site
from shmstage.orchestrator.session import train
from shmstage.orchestrator.step_lines import read_step_lines
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
ROWS, TOKENS = 4, 256
HALVES = (Window(0, 2, 0, TOKENS), Window(2, 4, 0, TOKENS))
RUN = "fleet-session"
#: what must be the same wherever micro-batches lie
SAME = ("step", "denominator", "digests", "trajectory_ids", "trajectory_passes", "staged", "rows_used", "real_tokens")


def run_settings(out: Path, **more: Any) -> Settings:
    """A planned stage waits for its micro-batch, so that nothing depends on speed."""
    given = {"steps": 3, "latch": False, "stage_wait_s": 60.0, "slot_timeout_s": 60.0, "call_timeout_s": 60.0} | more
    return Settings(run=RUN, out=out, bundle=BUNDLE, **given)


def on_one_host(settings: Settings) -> dict[str, Any]:
    """A local run, with the real worker on a thread."""
    trainer = DoubleTrainer(
        RUN, PackedToyEngine(TOKENS, store=MemoryStore()), ZmqServerChannel.bind(endpoint_for(RUN, "trainer"))
    )
    trainer.start()
    try:
        return train(settings, epoch=1, stop_requested=lambda: False)
    finally:
        trainer.close()


Fleet = Callable[..., DoubleFleet]


@pytest.fixture
def in_a_fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[[DoubleFleet, Settings, int], dict[str, Any]]:
    def run(fleet: DoubleFleet, settings: Settings, epoch: int = 1) -> dict[str, Any]:
        fleet.start_trainers()
        monkeypatch.setattr(fleet_site, "channels_of", lambda path: fleet.channels())
        return train(settings, epoch=epoch, stop_requested=lambda: False, peers_file=Path("peers.json"))

    return run


def groups_of_bundle() -> Sequence[Group]:
    return list(BundleSource(BUNDLE).groups(0))


def figures(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in SAME if name in line} for line in read_step_lines(out / "steps.jsonl")]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_step_lines(out / "steps.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_two_hosts_train_what_one_does_in_every_mode(boundary: Boundary, tmp_path: Path, in_a_fleet: Any) -> None:
    one = on_one_host(run_settings(tmp_path / "one", boundary=boundary))
    with DoubleFleet(RUN, groups_of_bundle(), HALVES, (2, 1)) as fleet:
        two = in_a_fleet(fleet, run_settings(tmp_path / "two", boundary=boundary))
    assert figures(tmp_path / "two") == figures(tmp_path / "one")
    assert two["digests"] == one["digests"] and two["denominators"] == one["denominators"]
    assert two["trajectories"] == one["trajectories"]
    # before the first update both have the same parameters
    assert losses(tmp_path / "two")[0] == pytest.approx(losses(tmp_path / "one")[0], rel=1e-5)
    assert two["hosts"] == 2
    assert two["orchestrator_bytes_per_trajectory"] <= 256
    assert len(two["fetched_nbytes_per_host"]) == 2 and min(two["fetched_nbytes_per_host"]) > 0
    assert one.keys() <= two.keys()
