"""Which limit binds, to the byte; what counts towards which; limits given in place of those found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from budget_making import given, small

from shmstage.budget import bounds as bounds_module
from shmstage.budget.bounds import bounds_from
from shmstage.budget.formula import forecast
from shmstage.budget.platform import platform_here
from shmstage.budget.report import report_on, verdict_line
from shmstage.budget.verdict import Bound, BoundKind, Judgement, bounds_of_machine, judge
from shmstage.errors import LimitUnreadableError, SettingsError
from shmstage.memory.limits import read_limits

INPUTS = small(param_nbytes=1_000_000, platform="accelerator", process_nbytes=5_000_000)
SHM = forecast(INPUTS).total("steady", "shm")
# the checkpoint's host copy makes that moment the largest of host memory
BOTH = forecast(INPUTS).total("checkpoint", "shm", "host")
# the restart's second copy of the parameters does not outweigh gradients and their sums
DEVICE = forecast(INPUTS).total("steady", "device")


def judged(*bounds: Bound) -> Judgement:
    return judge(forecast(INPUTS), bounds)


def machine(**available: int) -> list[Bound]:
    roomy = {"mount": 10 * SHM, "cgroup": 10 * BOTH, "ram": 10 * BOTH, "device": 10 * DEVICE, **available}
    return [Bound(f"the {kind}", kind, nbytes) for kind, nbytes in roomy.items()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "need"), [("mount", SHM), ("cgroup", BOTH), ("ram", BOTH), ("given", BOTH), ("device", DEVICE)]
)
def test_each_limit_bounds_what_it_is_about_to_the_byte(kind: BoundKind, need: int) -> None:
    """L1, L3: bytes are compared; exactly as much as is needed fits, one byte less does not."""
    for short in (0, 1):
        found = judge(forecast(INPUTS), [Bound("it", kind, need - short)])
        assert found.binding.need_nbytes == need
        assert found.binding.headroom_nbytes == -short
        assert found.verdict == ("does not fit" if short else "low headroom")


@pytest.mark.parametrize(("kind", "need"), [("mount", SHM), ("cgroup", BOTH), ("ram", BOTH), ("device", DEVICE)])
def test_the_limit_with_the_least_left_binds(kind: str, need: int) -> None:
    """L1: the smallest of mount, cgroup, RAM and device memory binds, each against what it holds."""
    found = judge(forecast(INPUTS), machine(**{kind: need + 10}))
    assert (found.binding.bound.kind, found.binding.headroom_nbytes) == (kind, 10)


def test_shared_memory_counts_inside_a_cgroup_limit() -> None:
    """S26, S28: a cgroup smaller than the mount binds although the mount alone would do."""
    cgroup = BOTH - SHM // 2
    found = judge(forecast(INPUTS), machine(cgroup=cgroup))
    assert (found.verdict, found.binding.bound.kind) == ("does not fit", "cgroup")
    # private memory alone would fit
    assert forecast(INPUTS).total("checkpoint", "host") <= cgroup


def test_private_memory_does_not_count_towards_the_mount() -> None:
    assert judge(forecast(INPUTS), machine(mount=2 * SHM)).verdict == "fits"
    assert 2 * SHM < BOTH


def test_the_moment_that_needs_most_is_the_one_that_counts() -> None:
    found = {fit.bound.kind: fit.moment for fit in judge(forecast(INPUTS), machine()).fits}
    assert found == {"mount": "steady", "cgroup": "checkpoint", "ram": "checkpoint", "device": "steady"}


def test_less_than_a_tenth_left_is_low_headroom() -> None:
    assert judged(Bound("it", "ram", BOTH * 10 // 9 + 1)).verdict == "fits"
    assert judged(Bound("it", "ram", BOTH * 10 // 9 - 1)).verdict == "low headroom"


def test_one_limit_with_low_headroom_is_enough_although_another_binds_in_bytes() -> None:
    """The one that the verdict comes from is named, not the one with fewer bytes left and enough of them."""
    tight = Bound("the device", "device", DEVICE + DEVICE // 20)
    roomy = Bound("the mount", "mount", SHM + SHM // 5)
    assert SHM // 5 < DEVICE // 20  # bytes left
    found = judged(roomy, tight)
    assert (found.verdict, found.binding.bound.name) == ("low headroom", "the device")
    report = report_on(INPUTS, [roomy, tight])
    assert verdict_line(report).startswith("low headroom: device memory needs ")
    assert "; the device leaves " in verdict_line(report)


def test_a_limit_on_what_is_not_needed_leaves_all_of_it() -> None:
    found = judge(forecast(small()), [*given(10**12), Bound("device", "device", 0)])
    assert found.verdict == "fits"


def test_without_any_limit_nothing_is_guessed() -> None:
    with pytest.raises(LimitUnreadableError, match="no memory limit is known"):
        judged()


def test_the_machines_limits_are_those_that_a_pool_is_checked_against() -> None:
    limits, bounds = read_limits(), bounds_of_machine()
    assert [(bound.name, bound.kind, bound.total_nbytes) for bound in bounds] == [
        (limit.name, limit.kind, limit.total_nbytes) for limit in limits
    ]


FOUND = [Bound("m", "mount", 1), Bound("c1", "cgroup", 2), Bound("c2", "cgroup", 3), Bound("r", "ram", 4)]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ([], [("mount", 1), ("cgroup", 2), ("cgroup", 3), ("ram", 4)]),
        (["10GB"], [("given", 10**10)]),
        (["cgroup=10GB"], [("cgroup", 10**10), ("mount", 1), ("ram", 4)]),
        (["mount=1GiB", "ram=5"], [("mount", 2**30), ("ram", 5), ("cgroup", 2), ("cgroup", 3)]),
        (["10", "mount=5"], [("given", 10), ("mount", 5)]),
    ],
)
def test_a_limit_given_stands_for_all_or_for_its_kind(
    limits: list[str], left: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds_module, "bounds_of_machine", lambda: list(FOUND))
    assert [(bound.kind, bound.available_nbytes) for bound in bounds_from(limits)] == left
    with_device = bounds_from(limits, "80GB")
    assert (with_device[-1].kind, with_device[-1].available_nbytes) == ("device", 80 * 10**9)


def test_limits_that_are_all_given_need_none_to_be_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """L4: an unreadable limit is an error of its own, unless what is given makes it moot."""

    def unreadable() -> list[Bound]:
        raise LimitUnreadableError("cannot read it")

    monkeypatch.setattr(bounds_module, "bounds_of_machine", unreadable)
    assert bounds_from(["1GB"])
    assert len(bounds_from(["mount=1", "cgroup=2", "ram=3"])) == 3
    with pytest.raises(LimitUnreadableError):
        bounds_from(["mount=1GB", "ram=1GB"])


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (["swap=1GB"], "no limit is of kind 'swap'; use mount, cgroup, ram"),
        (["1GB", "2GB"], "given twice"),
        (["ram=1GB", "ram=1GB"], "given twice"),
        (["ram="], "is no size"),
        (["most"], "is no size"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(limits: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        bounds_from(limits)


@pytest.mark.parametrize(
    ("named", "nodes", "platform"),
    [
        ("cpu", ["nvidia0"], "cpu"),
        ("CPU,cuda", [], "cpu"),
        ("tpu", [], "accelerator"),
        ("cuda,cpu", [], "accelerator"),
        ("", ["null", "nvidiactl"], "cpu"),
        ("", ["nvidia0"], "accelerator"),
        ("", ["accel0"], "accelerator"),
        ("", ["kfd"], "accelerator"),
    ],
)
def test_the_platform_is_told_without_jax(named: str, nodes: list[str], platform: str, tmp_path: Path) -> None:
    for node in nodes:
        (tmp_path / node).touch()
    assert platform_here({"JAX_PLATFORMS": named} if named else {}, tmp_path) == platform
