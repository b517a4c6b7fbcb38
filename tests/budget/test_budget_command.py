"""``shmstage budget`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "packing"))
from test_bundle_facts import make_bundle

from shmstage import cli

GOLDEN = (
    *("--rows", "64", "--tokens", "65536", "--layers", "60", "--top-k", "10", "--experts", "512"),
    *("--word-fields", "7", "--slots", "3", "--platform", "cpu"),
)  # fmt: skip
SMALL = ("--platform", "cpu", "--limit", "10GB")


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def budget(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = cli.main(["budget", *arguments, "--json"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    found: dict[str, Any] = json.loads(out)
    return code, found


def test_the_golden_run_fits_into_a_terabyte(capsys: pytest.CaptureFixture[str]) -> None:
    """L2: the figures through the command line."""
    arguments = (*GOLDEN, "--routing-encoding", "dense", "--limit", "1TB")
    code, found = budget(*arguments, capsys=capsys)
    assert code == 0
    assert found["needs"]["slot_payload"] == found["needs"]["slot"] == 5_150_605_312
    assert (found["verdict"], found["binding"]["available"]) == ("fits", 10**12)
    assert not Path("runs").exists()


def test_packed_routing_has_its_own_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """L2: packed ids alone are 2,831,155,200 bytes; validity and offsets are fields of their own."""
    arguments = (*GOLDEN, "--routing-encoding", "ragged_packed", "--fill", "1.0", "--limit", "1TB")
    _, found = budget(*arguments, capsys=capsys)
    sizes = {field["name"]: field["nbytes"] for field in found["fields"]}
    assert sizes["routed_experts_packed"] == 2_831_155_200
    assert (sizes["routed_experts_validity"], sizes["routed_experts_offsets"]) == (31_457_280, 260)
    assert sum(sizes.values()) == found["needs"]["slot_payload"]


def test_what_does_not_fit_is_exit_1_and_says_what_binds_and_what_would_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = budget(*GOLDEN, "--limit", "10GB", capsys=capsys)
    assert code == 1
    assert found["verdict"] == "does not fit"
    assert (found["binding"]["name"], found["binding"]["kind"]) == ("the limit given", "given")
    assert found["binding"]["headroom"] == 10**10 - found["binding"]["need"] < 0
    for suggestion in found["suggestions"]:
        flags = [
            word
            for key, value in suggestion["change"].items()
            for word in ("--" + key.replace("_", "-"), str(value))
        ]
        # a later flag beats an earlier one
        again, _ = budget(*GOLDEN, *flags, "--limit", "10GB", capsys=capsys)
        assert again == 0, suggestion
    assert found["suggestions"]


def test_low_headroom_is_exit_4_only_when_asked_to_be_strict(capsys: pytest.CaptureFixture[str]) -> None:
    _, roomy = budget(*GOLDEN, "--limit", "1TB", capsys=capsys)
    limit = str(roomy["binding"]["need"] + 1)
    assert budget(*GOLDEN, "--limit", limit, capsys=capsys)[0] == 0
    code, found = budget(*GOLDEN, "--limit", limit, "--strict", capsys=capsys)
    assert (code, found["verdict"]) == (4, "low headroom")
    assert budget(*GOLDEN, "--limit", "1TB", "--strict", capsys=capsys)[0] == 0
    assert budget(*GOLDEN, "--limit", "1GB", "--strict", capsys=capsys)[0] == 1


def test_device_memory_is_a_limit_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--param-bytes", "10GB", "--limit", "1TB", "--device-memory")
    code, found = budget(*arguments, "80GB", capsys=capsys)
    assert code == 0
    assert {limit["kind"] for limit in found["limits"]} == {"given", "device"}
    code, found = budget(*arguments, "40GB", capsys=capsys)
    assert (code, found["binding"]["kind"]) == (1, "device")
    assert found["needs"]["optimizer_state"] == 2 * 2 * 10**10  # Adam, twice while it is restored


def test_settings_come_from_a_file_the_environment_and_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.toml").write_text("rows = 8\ntokens = 512\nslots = 4\n")
    monkeypatch.setenv("SHMSTAGE_TOKENS", "1024")
    code, found = budget("--config", "run.toml", "--slots", "5", "--explain", *SMALL, capsys=capsys)
    assert code == 0
    assert found["fields"][0]["shape"] == [8, 1024]
    origins = found["origins"]
    assert origins["rows"] == {"value": 8, "origin": "file run.toml"}
    assert origins["tokens"] == {"value": 1024, "origin": "$SHMSTAGE_TOKENS"}
    assert origins["slots"] == {"value": 5, "origin": "--slots"}
    assert origins["aux_slots"] == {"value": 1, "origin": "default"}
    assert origins["platform"] == {"value": "cpu", "origin": "--platform"}
    assert origins["fill"] == {"value": "1", "origin": "assumed"}


def test_late_fields_that_settings_ask_for_are_in_the_slot(capsys: pytest.CaptureFixture[str]) -> None:
    plain = {field["name"] for field in budget(*SMALL, capsys=capsys)[1]["fields"]}
    _, found = budget("--recompute-old-logps", "--reference-logps", *SMALL, capsys=capsys)
    assert {field["name"] for field in found["fields"]} - plain == {"ref_per_token_logps", "sampler_is_weights"}


def test_a_bundle_gives_exact_fields_and_nothing_is_assumed_about_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_bundle(tmp_path / "b"))
    code, found = budget("--bundle", path, "--rows", "3", "--tokens", "64", "--explain", *SMALL, capsys=capsys)
    assert code == 0
    shapes = {field["name"]: field["shape"] for field in found["fields"]}
    assert shapes["routed_experts"] == [3, 64, 5, 3]
    assert "returns" in shapes
    assert not any("word_fields" in text or "routing" in text for text in found["assumed"])
    assert found["needs"]["held_trajectories"] == sum(f.stat().st_size for f in Path(path).glob("shard-*"))
    assert found["origins"]["layers"] == {"value": 5, "origin": f"bundle {path}"}
    code = cli.main(["budget", "--bundle", path, "--layers", "3"])
    assert code == 2
    assert f"--layers 3: the bundle {path} says it" in capsys.readouterr().err


def test_an_evaluation_bundle_counts_its_layout_and_its_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = make_bundle(tmp_path / "e")
    shape = ("--rows", "3", "--tokens", "64", *SMALL)
    _, without = budget(*shape, capsys=capsys)
    _, found = budget(*shape, "--eval-bundle", str(evaluation), capsys=capsys)
    assert found["needs"]["slot_payload"] == without["needs"]["slot_payload"]
    assert found["needs"]["slot"] > without["needs"]["slot"]
    shards = sum(file.stat().st_size for file in evaluation.glob("shard-*"))
    assert found["needs"]["processes"] - without["needs"]["processes"] == shards


def test_what_nobody_said_is_marked_as_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = budget("--limit", "10GB", capsys=capsys)
    said = "\n".join(found["assumed"])
    for text in ("word_fields = 6", "no routing", "platform = ", "no parameters", "fill = 1", "activations"):
        assert text in said
    state = ("--param-bytes", "1GB", "--optimizer-bytes", "2GB")
    _, found = budget(*GOLDEN, *state, "--fill", "0.5", *SMALL, capsys=capsys)
    said = "\n".join(found["assumed"])
    for text in ("word_fields", "no routing", "platform = ", "no parameters", "fill = 1", "Adam"):
        assert text not in said


def test_a_live_source_is_journaled_and_hosts_have_an_object_store(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = budget("--source", "mine:make", "--hosts", "2", *SMALL, capsys=capsys)
    names = {amount["name"]: amount["scope"] for amount in found["amounts"]}
    assert (names["journal"], names["object_store"]) == ("disk", "shm")
    assert found["fields"][0]["shape"] == [2, 256]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "0"), "rows = '0' (--rows): must be greater than or equal to 1"),
        (("--limit", "10 apples"), "is no size; give bytes"),
        (("--limit", "disk=1GB"), "no limit is of kind 'disk'"),
        (("--fill", "0"), "give a part above 0, up to 1"),
        (("--fill", "1.5"), "give a part above 0, up to 1"),
        (("--fill", "much"), "is no number"),
        (("--fill", "nan"), "is no number"),
        (("--layers", "3"), "give both --layers and --top-k"),
        (("--experts", "3"), "give --layers and --top-k, too"),
        (("--layers", "0", "--top-k", "1"), "--layers 0: give 1 to"),
        (("--layers", "3", "--top-k", "9", "--experts", "8"), "cannot choose more than there are"),
        (("--layers", "3", "--top-k", "2", "--routing-encoding", "ragged_packed"), "needs the number of experts"),
        (("--word-fields", "5"), "give 6 to 64"),
        (("--optimizer-bytes", "1GB"), "without --param-bytes"),
        (("--platform", "cpu", "--device-memory", "80GB"), "drop it or use --platform accelerator"),
        (("--hosts", "0"), "--hosts 0: give 1 to"),
        (("--bundle", "nowhere"), "give the directory of a bundle"),
        (("--no-such-flag",), "`shmstage budget --help` lists all options"),
        (("--live", "nobody", "--strict"), "--strict are of no use there"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = budget(*arguments, *(("--limit", "1GB") if "--limit" not in arguments else ()), capsys=capsys)
    assert code == 2
    assert said in found["error"]["text"]
    assert found["error"]["exit_code"] == 2


def test_people_get_tables_and_a_verdict_line(capsys: pytest.CaptureFixture[str]) -> None:
    """L3: bytes, GB and GiB stand there with their labels."""
    assert cli.main(["budget", *GOLDEN, "--limit", "10GB", "--explain"]) == 1
    out = capsys.readouterr().out
    for text in ("routed_experts", "64×65536×60×10", "5033164800", "97.7%", "GB (1e9)", "19.19 GiB", "slots = 3 x"):
        assert text in out
    assert "most that fits, all else as it is:" in out
    assert out.splitlines()[-1].startswith("does not fit: shm and host memory needs ")


def run_real(*arguments: str, cwd: Path, prelude: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shmstage.cli", *arguments]
    if prelude:
        command = ["unshare", "-m", "sh", "-c", f'{prelude} && exec "$@"', "sh", *command]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90, check=False)


def needs_mounts() -> None:
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mount namespaces cannot be made here: " + done.stderr.decode().strip())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--limit", "1TB"), 0),
        (("--limit", "10GB"), 1),
        (("--limit", "10 apples"), 2),
        (("--limit", "64GB", "--strict"), 4),
    ],
)
def test_exit_codes_through_the_real_command_line(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    done = run_real("budget", *GOLDEN, *arguments, "--json", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.slow
def test_a_limit_that_cannot_be_read_is_exit_3_unless_one_is_given(tmp_path: Path) -> None:
    """L4: a cgroup path that is not under the mount falls back to its root, and what is unreadable is never guessed."""
    needs_mounts()
    # what cannot be read stands where cgroup v1 and v2 have their limits
    broken = (
        "mount -t tmpfs none /sys/fs/cgroup && mkdir -p /sys/fs/cgroup/memory/memory.limit_in_bytes "
        "/sys/fs/cgroup/memory.max /sys/fs/cgroup/unified/memory.max"
    )
    done = run_real("budget", "--json", cwd=tmp_path, prelude=broken)
    assert done.returncode == 3, done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("LimitUnreadableError", 3)
    assert "cannot read the memory limit of cgroup /sys/fs/cgroup" in error["text"]
    assert run_real("budget", "--limit", "10GB", cwd=tmp_path, prelude=broken).returncode == 0


@pytest.mark.slow
def test_a_small_shared_memory_mount_binds_although_ram_is_plenty(tmp_path: Path) -> None:
    """S20, S21, L1: 64 MB /dev/shm as docker gives it, one clear failure; the verdict names it and --shm-size."""
    needs_mounts()
    docker = "mount -t tmpfs -o size=64m none /dev/shm"
    shape = ("--rows", "64", "--tokens", "16384")
    done = run_real("budget", *shape, "--json", cwd=tmp_path, prelude=docker)
    found = json.loads(done.stdout)
    assert (done.returncode, found["binding"]["kind"], found["binding"]["available"]) == (1, "mount", 64 << 20)
    assert "--shm-size" in found["binding"]["name"]
    run = run_real("run", *shape, cwd=tmp_path, prelude=docker)
    assert run.returncode == 2
    (line,) = [line for line in run.stderr.splitlines() if "Error" in line]
    assert line.startswith("BudgetError: slots = 3 + aux_slots = 1 of rows = 64 x tokens = 16384 take")
    assert "--shm-size" in line
    assert not list(tmp_path.iterdir())
