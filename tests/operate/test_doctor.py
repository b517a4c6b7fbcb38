"""What doctor finds: each check on made-up machines, reading on fake trees, and the real command in a 64 MB mount."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from namespaces import on_mount

from shmstage.memory.limits import Limit
from shmstage.memory.machine import Machine, read_machine
from shmstage.operate.doctor_command import examine, main
from shmstage.operate.machine_checks import (
    Finding,
    check_leftovers,
    check_machine,
    check_runtime_dir,
    check_software,
)
from shmstage.transport.endpoints import endpoint_for, socket_path

GB = 10**9
SOUND = Machine(
    uid=1000, user="ann", shm_dir="/dev/shm", shm_fstype="tmpfs", shm_options=("rw", "huge=advise"), shm_writable=True,
    limits=(Limit("the mount", 60 * GB, "mount", 64 * GB), Limit("available RAM", 100 * GB, "ram", 128 * GB)),
    limits_problem="", remove_ipc=None, lingers=False, foreign_namespaces=(), huge_policy="never", numa_nodes=1,
    rlimits={"nofile": 1024, "memlock": 8 << 20, "fsize": None, "as": None}, kernel="6.1", can_populate=True,
    has_pidfd=True,
)  # fmt: skip


def found(check: str, **facts: object) -> Finding:
    return {finding.check: finding for finding in check_machine(replace(SOUND, **facts))}[check]  # type: ignore[arg-type]


def limits(mount: int, *more: Limit, left: int | None = None) -> tuple[Limit, ...]:
    return (Limit("the mount /dev/shm", mount if left is None else left, "mount", mount), *more)


def test_a_sound_machine_gives_nothing_to_do() -> None:
    findings = check_machine(SOUND)
    assert {finding.level for finding in findings} == {"ok"}
    assert not any(finding.remedy for finding in findings)


def test_dockers_64_mb_are_a_problem_whose_remedy_names_the_switches() -> None:
    """S20: the message names --shm-size and the memory emptyDir."""
    bad = found("mount", limits=limits(64 << 20))
    assert bad.level == "problem" and "docker's default" in bad.text
    assert "--shm-size" in bad.remedy and "emptyDir" in bad.remedy
    assert found("mount", limits=limits((64 << 20) + 4096)).level == "ok"


def test_a_full_unwritable_or_unreal_shared_memory_is_a_problem() -> None:
    """S24: a directory on a disk is not taken for shared memory."""
    assert "nearly full" in found("mount", limits=limits(10 * GB, left=GB // 2)).text
    assert found("mount", shm_options=("ro",)).level == "problem"
    assert found("mount", shm_writable=False).level == "problem"
    assert "overlay, not memory" in found("mount", shm_fstype="overlay").text
    assert "is not known" in found("mount", limits=()).text


def test_df_is_compared_with_the_cgroup_and_the_ram() -> None:
    """S25, S26, S28: what df shows is not what there is."""
    group = Limit("the cgroup /pod/x", 5 * GB, "cgroup", 6 * GB)
    note = found("limits", limits=limits(25 * GB, group))
    assert note.level == "note" and "/pod/x leaves 5 GB" in note.text and "pools count against it" in note.text
    ram = Limit("available RAM", 10 * GB, "ram", 16 * GB)
    assert "shows 25 GB, the machine has 16 GB" in found("limits", limits=limits(25 * GB, ram)).text
    assert found("limits", limits_problem="cannot read x").remedy.endswith("exit code 3")


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        ({"remove_ipc": True}, "problem"),
        ({"remove_ipc": True, "uid": 999}, "ok"),
        ({"remove_ipc": True, "lingers": True}, "ok"),
        ({"remove_ipc": False}, "ok"),
        ({"remove_ipc": None}, "ok"),
    ],
)
def test_remove_ipc_matters_only_to_people_who_log_out(facts: dict[str, object], level: str) -> None:
    finding = found("RemoveIPC", **facts)
    assert finding.level == level
    assert bool(finding.remedy) == (level == "problem")


def test_a_container_is_told_with_whom_it_can_share_a_pool() -> None:
    """Pids mean nothing across pid namespaces."""
    finding = found("namespaces", foreign_namespaces=("pid", "ipc"))
    assert finding.level == "note" and "pid and ipc namespaces" in finding.text


@pytest.mark.parametrize(
    ("options", "policy", "level"),
    [
        (("huge=always",), "never", "ok"), (("huge=within_size",), "never", "ok"), ((), "force", "ok"),
        (("huge=never",), "force", "ok"),
        (("huge=never",), "never", "note"), ((), "advise", "note"), (("huge=always",), "deny", "note"),
    ],
)  # fmt: skip
def test_huge_pages_need_the_mount_and_the_kernel(options: tuple[str, ...], policy: str, level: str) -> None:
    assert found("huge pages", shm_options=options, huge_policy=policy).level == level


def test_several_memory_nodes_are_pointed_out() -> None:
    """S33: the policy is a choice, named."""
    assert found("NUMA", numa_nodes=2).remedy == 'numa = "interleave" spreads it over all'


@pytest.mark.parametrize(
    ("rlimits", "what"),
    [({"nofile": 128}, "ulimit -n"), ({"fsize": GB}, "ulimit -f"), ({"as": GB}, "ulimit -v")],
)
def test_limits_of_the_shell_that_are_too_small_are_problems(rlimits: dict[str, int], what: str) -> None:
    """Which ulimit it is, and what to type."""
    finding = found("ulimits", rlimits=SOUND.rlimits | rlimits)
    assert finding.level == "problem" and what in finding.text and finding.remedy.startswith(what)


def test_an_old_kernel_is_a_note() -> None:
    assert "MADV_POPULATE_WRITE and pidfd" in found("kernel", can_populate=False, has_pidfd=False).text
    assert "slower" in found("kernel", can_populate=False).text


def test_leftovers_are_a_problem_once_they_are_in_the_way() -> None:
    """S8: what earlier runs left is counted before anything is added."""
    assert check_leftovers(SOUND, 0, 0).level == "ok"
    assert check_leftovers(SOUND, GB, 3).level == "note"
    bad = check_leftovers(SOUND, 30 * GB, 3)
    assert (bad.level, bad.remedy) == ("problem", "shmstage gc")


@pytest.mark.parametrize(
    ("count", "endpoints", "text"),
    [
        (1, 0, "1 file of dead processes holds 1 GB of shared memory"),
        (0, 1, "1 socket or lock of dead processes"),
        (2, 2, "2 files of dead processes hold 1 GB of shared memory, and 2 sockets or locks of dead processes"),
    ],
)
def test_leftovers_among_the_sockets_are_counted_too(count: int, endpoints: int, text: str) -> None:
    finding = check_leftovers(SOUND, GB * bool(count), count, endpoints)
    assert (finding.level, finding.text, finding.remedy) == ("note", text, "shmstage gc")


def test_the_lock_of_a_killed_launcher_is_a_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gc sees it; a runtime directory that cannot be used has its own finding and hides nothing in memory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:  # pytest's own is too long for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        path = socket_path(endpoint_for("killed", "launcher"))
        lock = path.with_name(path.name + ".lock")
        lock.touch()
        assert "1 socket or lock of dead" in {finding.check: finding.text for finding in examine()}["leftovers"]
        lock.unlink()
        path.parent.rmdir()
        path.parent.write_text("in the way")
        findings = {finding.check: finding for finding in examine()}
        assert findings["sockets"].level == "problem" and "leftovers" in findings


def test_sockets_and_software_have_their_own_findings() -> None:
    assert check_runtime_dir("/run/x", "", 0o700, "").level == "ok"
    assert check_runtime_dir("/run/x", "", 0o750, "").remedy == "chmod 0700 /run/x"
    assert check_runtime_dir("/tmp/x", "", 0o700, "/very/long").level == "note"
    assert check_runtime_dir("", "/x belongs to somebody else", 0, "").level == "problem"
    assert check_software([("python", "3.11"), ("jax", "")]).level == "problem"
    assert check_software([("jax", "1"), ("optax", "")]).remedy == "pip install 'shmstage[train]'"


def test_every_problem_and_note_has_exactly_one_remedy() -> None:
    worst = replace(
        SOUND, limits=limits(64 << 20), limits_problem="cannot read x", remove_ipc=True, foreign_namespaces=("pid",),
        shm_options=(), numa_nodes=2, rlimits={"nofile": 64}, can_populate=False,
    )  # fmt: skip
    for finding in check_machine(worst):
        assert finding.level != "ok" and finding.remedy, finding


# --- reading ----------------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str], links: dict[str, str] | None = None) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, target in (links or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    return str(root)


def test_a_container_s_tree_is_read(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/mounts": "overlay / overlay rw 0 0\nshm /dev/shm tmpfs rw,nosuid,size=65536k,huge=advise 0 0\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1073741824\n",
            "sys/fs/cgroup/memory.current": "73741824\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
        },
        {"proc/self/ns/pid": "pid:[4026532201]", "proc/self/ns/ipc": "ipc:[4026531839]"},
    )
    machine = read_machine(root)
    assert (machine.shm_fstype, machine.huge_option, machine.huge_policy) == ("tmpfs", "advise", "advise")
    assert machine.foreign_namespaces == ("pid",)
    assert machine.numa_nodes == 2
    group = machine.limit("cgroup")
    assert group is not None and (group.available_nbytes, group.total_nbytes) == (10**9, 1 << 30)
    assert machine.remove_ipc is None


def test_an_unreadable_cgroup_is_a_problem_and_the_mount_is_still_judged(tmp_path: Path) -> None:
    """L4: an unreadable limit is said, not guessed."""
    machine = read_machine(tree(tmp_path, {
        "proc/self/cgroup": "0::/\n", "proc/self/mounts": "tmpfs /dev/shm tmpfs rw 0 0\n",
        "sys/fs/cgroup/memory.max": "lots\n", "sys/fs/cgroup/memory.current": "1\n",
    }))  # fmt: skip
    assert "cannot read the memory limit" in machine.limits_problem
    findings = {finding.check: finding for finding in check_machine(machine)}
    assert findings["limits"].level == "problem" and "is not known" not in findings["mount"].text


def test_the_innermost_and_last_mount_counts(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/self/mounts": "a / ext4 rw 0 0\nb /dev devtmpfs rw 0 0\nc /dev/shm ext4 ro 0 0\nd /dev/shm tmpfs rw 0 0\n"
        "e /dev/shmoo nfs rw 0 0\n"
    })  # fmt: skip
    assert read_machine(root).shm_fstype == "tmpfs"
    assert read_machine(root, shm_dir="/dev").shm_fstype == "devtmpfs"
    assert read_machine(str(tmp_path / "nothing")).shm_fstype == ""


@pytest.mark.parametrize(
    ("files", "removes"),
    [
        ({}, True),
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, True),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, False),
        ({"usr/lib/systemd/logind.conf": "[Login]\nRemoveIPC=no\n", "etc/systemd/logind.conf": "[Login]\n"}, True),
        ({"etc/systemd/logind.conf": "RemoveIPC=no", "etc/systemd/logind.conf.d/9.conf": "RemoveIPC = yes"}, True),
        ({"usr/lib/systemd/logind.conf.d/9.conf": "RemoveIPC=no"}, False),
        ({"usr/lib/systemd/logind.conf.d/9.conf": "RemoveIPC=no", "etc/systemd/logind.conf.d/9.conf": ""}, True),
        ({"usr/lib/systemd/logind.conf.d/9.conf": "RemoveIPC=no", "run/systemd/logind.conf.d/1.conf": "RemoveIPC=1"},
         False),
    ],
)  # fmt: skip
def test_logind_s_files_are_read_in_its_order(tmp_path: Path, files: dict[str, str], removes: bool) -> None:
    running = {"run/systemd/system/x": "", "run/systemd/seats/x": ""}
    assert read_machine(tree(tmp_path, running | files)).remove_ipc is removes


# --- the command ------------------------------------------------------------------------------------------


def test_the_worst_is_said_first_and_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [set(finding) for finding in findings] == [{"check", "level", "text", "remedy"}] * len(findings)
    levels = [finding["level"] for finding in findings]
    assert levels == sorted(levels, key=["problem", "note", "ok"].index)
    assert code == int("problem" in levels)
    assert len({finding["check"] for finding in findings}) == len(findings) == 11


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_it_can_be_read_on_any_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    words = " ".join(" ".join(lines).split())
    for finding in examine():
        assert finding.level in words and all(word in words.replace(" ", "") for word in finding.check.split())


@pytest.mark.slow
def test_in_a_real_64_mb_mount_it_ends_with_1(tmp_path: Path) -> None:
    """S20: told at once, not under load."""
    command = [sys.executable, "-m", "shmstage.cli", "doctor", "--json"]
    done = on_mount("size=64m", command, cwd=str(tmp_path))
    assert done.returncode == 1, done.stderr
    (mount,) = [item for item in json.loads(done.stdout)["findings"] if item["check"] == "mount"]
    assert mount["level"] == "problem" and "67.1 MB" in mount["text"] and "--shm-size" in mount["remedy"]
