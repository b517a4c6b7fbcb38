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
from namespaces import in_namespace
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


FILE = """
rows = 8
experts = 512
routing_encoding = "ragged_packed"
[budget]
layers = 60
top_k = 10
fill = 0.5
word_fields = 7
param_bytes = 1_000_000
param_dtype = "bfloat16"
param_leaves = 7
optimizer_bytes = "4MB"
platform = "accelerator"
hosts = 2
replay = true
device_memory = "80GB"
limit = ["mount=1GB", "cgroup=2GB", "ram=2GB"]
"""


def test_what_only_the_budget_is_told_comes_from_a_table_of_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same file that `shmstage run` reads, which has no use for it; a flag beats it."""
    Path("run.toml").write_text(FILE)
    code, found = budget("--config", "run.toml", "--layers", "6", "--explain", capsys=capsys)
    assert code == 0
    flags = (
        *("--rows", "8", "--layers", "6", "--top-k", "10", "--experts", "512", "--routing-encoding", "ragged_packed"),
        *("--fill", "0.5", "--word-fields", "7", "--param-bytes", "1000000", "--param-dtype", "bfloat16"),
        *("--param-leaves", "7", "--optimizer-bytes", "4MB", "--platform", "accelerator", "--hosts", "2", "--replay"),
        *("--device-memory", "80GB", "--limit", "mount=1GB", "--limit", "cgroup=2GB", "--limit", "ram=2GB"),
    )
    _, flagged = budget(*flags, capsys=capsys)
    origins = found.pop("origins")
    assert found == flagged
    assert origins["layers"] == {"value": 6, "origin": "--layers"}
    assert origins["top_k"] == {"value": 10, "origin": "file run.toml"}
    assert origins["limit"]["origin"] == origins["replay"]["origin"] == "file run.toml"
    assert cli.main(["run", "--config", "run.toml", "--print-config", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert "budget" not in printed
    assert printed["rows"] == {"value": 8, "origin": "file run.toml"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("layer = 3", "unknown key layer = 3 in [budget] of run.toml; did you mean layers?"),
        ("slots = 3", "it is a setting of the run: write it above the tables"),
        ("zzz = 3", "`shmstage budget --help` lists all of them"),
        ('layers = "3"', "layers = '3' in [budget] of run.toml must be a whole number"),
        ("layers = true", "must be a whole number"),
        ("layers = 0\ntop_k = 1", "layers (file run.toml) 0: give 1 to"),
        ("param_bytes = 1.5", 'must be bytes, or a text as "10GB"'),
        ("param_bytes = -1", "is no size; give bytes"),
        (f"param_bytes = {'9' * 5000}", "run.toml is not valid TOML"),
        ('platform = "gpu"', "must be one of cpu, accelerator"),
        ("platform = [1]", "must be one of cpu, accelerator"),
        ("replay = 1", "must be true or false"),
        ("fill = [1]", "must be a number above 0, up to 1"),
        ("fill = 2.0", "fill (file run.toml) '2.0': give a part above 0, up to 1"),
        ("fill = nan", "is no number"),
        ("limit = [1, {}]", "must be a size"),
        ('limit = "disk=1"', "no limit is of kind 'disk'"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_and_named(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text(f"[budget]\n{line}\n")
    code, found = budget("--config", "run.toml", capsys=capsys)
    assert (code, found["error"]["kind"]) == (2, "SettingsError")
    assert said in found["error"]["text"]


def test_a_budget_that_is_no_table_is_an_unknown_setting(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("budget = 3\n")
    _, found = budget("--config", "run.toml", capsys=capsys)
    assert "unknown setting budget = 3" in found["error"]["text"]


def test_smaller_parameters_have_larger_sums(capsys: pytest.CaptureFixture[str]) -> None:
    state = (*SMALL, "--param-bytes", "1MB")
    _, found = budget(*state, capsys=capsys)
    assert found["needs"]["accumulators"] == 10**6
    assert any("parameters are float32" in text for text in found["assumed"])
    _, found = budget(*state, "--param-dtype", "bfloat16", capsys=capsys)
    assert (found["needs"]["accumulators"], found["needs"]["gradients"]) == (2 * 10**6, 10**6)
    assert not any("parameters are float32" in text for text in found["assumed"])


def test_more_arrays_than_a_weights_pool_publishes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    state = (*SMALL, "--param-bytes", "1MB", "--weight-sync", "async")
    code, found = budget(*state, "--param-leaves", "257", capsys=capsys)
    assert code == 2
    assert "--param-leaves 257: weight_sync publishes at most 256" in found["error"]["text"]
    assert budget(*state, "--param-leaves", "256", capsys=capsys)[0] == 0
    said = "\n".join(budget(*state, capsys=capsys)[1]["assumed"])
    assert "more than 256 of them weight_sync refuses" in said


def test_checkpoints_that_held_bytes_may_force_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    held = (*SMALL, "--source", "mine:make", "--max-held-bytes", "1000000")
    assert any("counted as checkpoint_every = 1" in text for text in budget(*held, capsys=capsys)[1]["assumed"])
    every = (*held, "--checkpoint-every", "1")
    assert not any("counted as" in text for text in budget(*every, capsys=capsys)[1]["assumed"])


def test_a_limit_on_real_tokens_is_assumed_only_where_one_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    packed = (*GOLDEN, "--routing-encoding", "ragged_packed", "--limit", "1TB", "--fill")
    assert not any("max_real_tokens" in text for text in budget(*packed, "1.0", capsys=capsys)[1]["assumed"])
    said = budget(*packed, "0.5", capsys=capsys)[1]["assumed"]
    assert any("max_real_tokens = 2097152" in text for text in said)


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
    assert found["needs"]["evaluation_trajectories"] == shards
    assert found["needs"]["processes"] == without["needs"]["processes"]
    assert "scoring_buffer" not in found["needs"]
    _, run = budget(*shape, "--eval-bundle", str(evaluation), "--eval-every", "2", capsys=capsys)
    assert run["needs"]["scoring_buffer"] == run["needs"]["slot"] > run["needs"]["device_buffers"] // 2


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
        (("--process-bytes", "few"), "process_bytes = 'few' is no size"),
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
    # brackets are text, not rich's markup
    assert cli.main(["budget", *GOLDEN, "--routing-encoding", "ragged", "--limit", "1TB", "--explain"]) == 0
    assert "[rows, tokens, layers, top_k]" in " ".join(capsys.readouterr().out.split())
    assert out.splitlines()[-1].startswith("does not fit: shm and host memory needs ")
    assert "in brackets: shown beside, not counted" in out


def test_the_verdict_names_every_limit_that_is_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["budget", "--param-bytes", "28GB", "--device-memory", "80GB", "--limit", "64GB"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("does not fit: shm and host memory needs ")
    assert said.endswith("; the device memory is 88000049152 bytes (88 GB) short, too")
    assert cli.main(["budget", "--param-bytes", "28GB", "--device-memory", "800GB", "--limit", "64GB"]) == 1
    assert "too" not in capsys.readouterr().out.splitlines()[-1]


def run_real(*arguments: str, cwd: Path, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """``prelude``: mounts that only the command sees."""
    command = [sys.executable, "-m", "shmstage.cli", *arguments]
    if prelude:
        return in_namespace(prelude, command, cwd=cwd)
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90, check=False)


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
