"""The real program over several hosts: what one trainer would have made, whatever happens to frames on the way."""

from __future__ import annotations

import pytest
from fleet.rig import FleetCase, assert_as_one_trainer, run

from shmstage.settings import BOUNDARIES, Boundary


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_every_mode_trains_what_one_trainer_would(mode: Boundary, hosts: int) -> None:
    case = FleetCase(mode=mode, hosts=hosts, checkpoint_every=2)
    outcome = run(case)
    assert_as_one_trainer(case, outcome)
    assert all(saved == [0, 2, 3] for saved in outcome.saved)
