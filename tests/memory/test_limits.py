"""How much memory is left, by every limit that applies."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shmstage.errors import BudgetError, LimitUnreadableError
from shmstage.memory import limits as limits_module
from shmstage.memory.limits import Limit, check_fits, format_nbytes, read_limits


def _group(root: Path, path: str, version: int, limit: str, used: int, cache: int = 0) -> None:
    group = root / path.strip("/")
    group.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\nshmem 2\n")


def _read(tmp_path: Path, membership: str) -> dict[str, int]:
    (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    found = read_limits(proc_root=str(tmp_path / "proc"), cgroup_root=str(tmp_path / "cgroup"))
    return {limit.name: limit.available_nbytes for limit in found if "cgroup" in limit.name}


def test_every_ancestor_of_a_v2_cgroup_counts(tmp_path: Path) -> None:
    """L1"""
    root = tmp_path / "cgroup"
    _group(root, "pod", 2, "1000", 300)
    _group(root, "pod/worker", 2, "5000", 100)
    _group(root, "pod/worker/inner", 2, "max", 100)
    assert _read(tmp_path, "0::/pod/worker/inner\n") == {"the cgroup /pod/worker": 4900, "the cgroup /pod": 700}


def test_every_ancestor_of_a_v1_memory_cgroup_counts(tmp_path: Path) -> None:
    """L1"""
    root = tmp_path / "cgroup" / "memory"
    _group(root, "", 1, str((1 << 63) - 4096), 10)  # "no limit" as v1 writes it
    _group(root, "docker", 1, "2000", 500)
    _group(root, "docker/box", 1, "3000", 100)
    assert _read(tmp_path, "7:cpu:/x\n4:cpuset,memory:/docker/box\n0::/\n") == {
        "the cgroup /docker/box": 2900, "the cgroup /docker": 1500,
    }  # fmt: skip


def test_cache_that_would_be_given_back_is_not_counted_as_used(tmp_path: Path) -> None:
    _group(tmp_path / "cgroup", "pod", 2, "1000", 900, cache=400)
    assert _read(tmp_path, "0::/pod\n") == {"the cgroup /pod": 500}


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    _group(tmp_path / "cgroup", "pod", 2, "1000", 1200)
    assert _read(tmp_path, "0::/pod\n") == {"the cgroup /pod": 0}


def test_in_a_container_that_sees_its_own_group_as_the_root_that_one_counts(tmp_path: Path) -> None:
    """L4"""
    _group(tmp_path / "cgroup", "", 2, "1000", 100)
    assert _read(tmp_path, "0::/kubepods/pod7/box\n") == {"the cgroup /": 900}


@pytest.mark.parametrize("broken", ["memory.max", "memory.current", "memory.stat"])
def test_a_limit_that_exists_but_cannot_be_read_is_never_guessed(tmp_path: Path, broken: str) -> None:
    """L4"""
    _group(tmp_path / "cgroup", "pod", 2, "1000", 100)
    (tmp_path / "cgroup/pod" / broken).unlink()
    (tmp_path / "cgroup/pod" / broken).mkdir()
    with pytest.raises(LimitUnreadableError, match="pod"):
        _read(tmp_path, "0::/pod\n")


def test_a_kernel_without_cgroups_has_no_such_limit(tmp_path: Path) -> None:
    found = read_limits(proc_root=str(tmp_path / "none"), cgroup_root=str(tmp_path))
    assert [limit.name.split(" (")[0] for limit in found] == ["the mount /dev/shm", "available RAM"]


def test_a_mount_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LimitUnreadableError):
        read_limits(str(tmp_path / "absent"))


def test_the_smallest_limit_binds_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S25, S28, L1, L3"""
    # A mount larger than what backs it: the machine's memory binds.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000, total=9000))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=100, f_blocks=100, f_frsize=1000))
    _group(tmp_path / "cgroup", "pod", 2, "max", 1)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    roots = {"proc_root": str(tmp_path / "proc"), "cgroup_root": str(tmp_path / "cgroup")}
    assert check_fits(5000, "x", "y", read_limits(**roots)).name == "available RAM"
    _group(tmp_path / "cgroup", "pod", 2, "4000", 100)
    assert check_fits(3900, "x", "y", read_limits(**roots)).name == "the cgroup /pod"
    with pytest.raises(BudgetError) as caught:
        check_fits(3901, "3 slots of 1.3 kB", "use rows = 2", read_limits(**roots))
    assert str(caught.value) == "3 slots of 1.3 kB need 3.9 kB; the cgroup /pod leaves 3.9 kB; use rows = 2"


def test_the_real_limits_of_this_machine_can_be_read() -> None:
    limits = limits_module.read_limits()
    assert {"available RAM"} <= {limit.name for limit in limits}
    assert all(limit.available_nbytes >= 0 for limit in limits)


def test_a_budget_of_no_limits_is_not_silently_everything() -> None:
    with pytest.raises(LimitUnreadableError):
        check_fits(1, "x", "y", [])


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (5_150_000_000, "5.15 GB"), (999_400_000, "999 MB"), (999_600_000, "1 GB"),
     (15_450_000_000, "15.4 GB"), (3 << 40, "3.299 TB")],
)  # fmt: skip
def test_bytes_are_written_in_decimal_units(nbytes: int, text: str) -> None:
    """L3"""
    assert format_nbytes(nbytes) == text
    assert Limit("x", nbytes).available_nbytes == nbytes
