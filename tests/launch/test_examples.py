"""The files in examples/launch do what they say: they are run with stand-ins for ray, shmstage and Slurm, which write
down how they were called, and every call must be one that the real command takes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from jobset_schema import JOBSET, SERVICE

from shmstage import cli

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"
JOBSET_FILE = EXAMPLES / "jobset.yaml"
ADDRESS = "10.0.0.1"
#: what the files use of Slurm
SRUN_OPTIONS = {"--overlap", "--nodes", "--ntasks", "--ntasks-per-node", "--nodelist", "--exclude"}
SBATCH_OPTIONS = {
    "--job-name", "--nodes", "--ntasks-per-node", "--exclusive", "--time", "--requeue", "--output"
}  # fmt: skip

#: writes its name and arguments down, each ended by a NUL, and what ends a record; in one go (a newline would have bash
#: write twice), since calls in the background write into the same file
WRITE_DOWN = r"""printf "%s\0" "${0##*/}" "$@" $'\036' >>"$CALLS" """
STAND_INS = {
    "ray": '[[ $RAY_AUTH_MODE$RAY_worker_niceness == token0 && $RAY_AUTH_TOKEN ]] || exit 9; ' + WRITE_DOWN,
    "shmstage": WRITE_DOWN,
    "srun": WRITE_DOWN + '; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": WRITE_DOWN + "; seq -f node%g 3",
    "hostname": f'[ $# -eq 0 ] && echo node1 || echo "{ADDRESS} 172.17.0.1"',
    "getent": f'echo "{ADDRESS} node1"',
}


@dataclass(frozen=True)
class Rehearsal:
    """Runs a script where the stand-ins come first on the path."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, command: list[str | Path], **environment: str) -> list[list[str]]:
        """The calls that it made, in any order where it puts some into the background."""
        stand_ins = self.directory / "bin"
        stand_ins.mkdir(exist_ok=True)
        for name, script in STAND_INS.items():
            (stand_ins / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
            (stand_ins / name).chmod(0o755)
        calls = self.directory / "calls"
        calls.unlink(missing_ok=True)
        known = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "CALLS": str(calls), "HOME": str(self.directory)}
        done = subprocess.run(
            command, cwd=self.directory, env=known | environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        found: list[list[str]] = [[]]
        for word in calls.read_text().split("\0")[:-1]:
            if word == "\036":
                found.append([])
            else:
                found[-1].append(word)
        return found[:-1]


@pytest.fixture
def rehearsal(tmp_path: Path) -> Rehearsal:
    return Rehearsal(tmp_path)


SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-3]"}


def slurm(rehearsal: Rehearsal) -> list[list[str]]:
    return rehearsal.run(
        ["bash", EXAMPLES / "slurm.sbatch", "--steps", "6"], **SLURM, SLURM_SUBMIT_DIR=str(rehearsal.directory)
    )


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    service, jobset = yaml.safe_load_all(JOBSET_FILE.read_text())
    return service, jobset


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name of each replicated job, its Job and its pod's spec."""
    for job in documents()[1]["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        yield job["name"], spec, spec["template"]["spec"]


def calls_of_pod(rehearsal: Rehearsal, name: str) -> list[list[str]]:
    pod = next(pod for found, _, pod in pods() if found == name)
    container = pod["containers"][0]
    given = {each["name"]: each.get("value", "secret") for each in container["env"]} | {"POD_IP": ADDRESS}
    return rehearsal.run([*container["command"], *container["args"]], **given)


def calls_of(rehearsal: Rehearsal, file: str) -> list[list[str]]:
    """All that a file does, in each of its roles."""
    script: list[str | Path] = ["bash", EXAMPLES / file]
    if file == "single_host.sh":
        return rehearsal.run([*script, "--steps", "6"]) + rehearsal.run([*script, "--steps", "6"], HOSTS="2")
    if file == "multi_host.sh":
        head = rehearsal.run([*script, "head", "2", "--steps", "6"], RAY_AUTH_TOKEN="t")
        return head + rehearsal.run([*script, "join", "10.0.0.9"], RAY_AUTH_TOKEN="t")
    if file == "slurm.sbatch":
        return slurm(rehearsal)
    return [call for name in ("head", "hosts") for call in calls_of_pod(rehearsal, name)]


ROLES = {
    "single_host.sh": ["shmstage launch", "shmstage run"],
    "multi_host.sh": ["ray start", "ray start", "ray status", "ray stop", "shmstage launch"],
    "slurm.sbatch": ["ray start", "ray start", "ray status", "shmstage launch"],
    "jobset.yaml": ["ray start", "ray start", "ray status", "shmstage launch"],
}


def test_every_file_is_tested_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == set(ROLES)


@pytest.mark.parametrize("file", [name for name in ROLES if name != "jobset.yaml"])
def test_bash_reads_the_script(file: str) -> None:
    done = subprocess.run(["bash", "-n", EXAMPLES / file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("file", ROLES)
def test_a_file_makes_the_calls_that_it_is_for(file: str, rehearsal: Rehearsal) -> None:
    calls = calls_of(rehearsal, file)
    assert sorted(" ".join(call[:2]) for call in calls if call[0] in ("ray", "shmstage")) == ROLES[file]


@pytest.mark.parametrize("file", ROLES)
def test_shmstage_takes_its_calls(file: str, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rehearsal.directory)
    for name, command, *arguments in calls_of(rehearsal, file):
        if name == "shmstage":
            assert cli.main([command, *arguments, "--print-config", "--json"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("file", [name for name in ROLES if name != "single_host.sh"])
def test_ray_takes_its_calls(file: str, rehearsal: Rehearsal) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="needs the extra `ray`")
    calls = [call[1:] for call in calls_of(rehearsal, file) if call[0] == "ray"]
    for call in calls:
        command = scripts.cli.commands[call[0]]
        with command.make_context(call[0], call[1:]) as context:  # parses and checks, calls nothing
            assert not context.args
            if call[0] == "start":  # what `ray start` itself refuses later on
                assert context.params["head"] == (context.params["address"] is None)
                assert context.params["include_dashboard"] in (None, not context.params["head"])


@pytest.mark.parametrize("file", ["multi_host.sh", "slurm.sbatch", "jobset.yaml"])
def test_launch_goes_to_the_head_that_was_started(file: str, rehearsal: Rehearsal) -> None:
    calls = calls_of(rehearsal, file)
    head = next(call for call in calls if call[:3] == ["ray", "start", "--head"])
    launch = next(call for call in calls if call[:2] == ["shmstage", "launch"])
    given = dict(option.split("=", 1) for option in head if "=" in option)
    assert launch[launch.index("--address") + 1] == f"{given['--node-ip-address']}:{given['--port']}"
    assert given["--node-ip-address"] == ADDRESS


@pytest.mark.parametrize("file", ["single_host.sh", "multi_host.sh", "slurm.sbatch"])
def test_a_run_that_left_checkpoints_goes_on_from_them(file: str, rehearsal: Rehearsal) -> None:
    out = {"single_host.sh": "single", "multi_host.sh": "multi", "slurm.sbatch": f"shmstage-{SLURM['SLURM_JOB_ID']}"}
    assert not any("--resume" in call for call in calls_of(rehearsal, file))
    (rehearsal.directory / "runs" / out[file] / "checkpoints" / "5").mkdir(parents=True)
    for call in calls_of(rehearsal, file):
        assert ("--resume" in call) == (call[0] == "shmstage" or (call[0] == "srun" and "shmstage" in call)), call


def test_multi_host_wants_a_token_and_a_role(rehearsal: Rehearsal) -> None:
    script = str(EXAMPLES / "multi_host.sh")
    for environment, said in (({}, "a secret that all hosts share"), ({"RAY_AUTH_TOKEN": "t"}, "usage: ")):
        known = {"PATH": os.environ["PATH"], **environment}
        done = subprocess.run(["bash", script], env=known, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert said in done.stderr


def test_slurm_gives_the_head_its_node_and_the_others_the_rest(rehearsal: Rehearsal) -> None:
    steps = [call[1:] for call in slurm(rehearsal) if call[0] == "srun"]
    split = [next(i for i, word in enumerate(step) if not word.startswith("--")) for step in steps]
    assert {word.split("=")[0] for step, i in zip(steps, split, strict=True) for word in step[:i]} == SRUN_OPTIONS
    started = {"--head" in step: step[:i] for step, i in zip(steps, split, strict=True) if "start" in step}
    assert "--nodelist=node1" in started[True]
    assert {"--exclude=node1", "--nodes=2"} <= set(started[False])
    launch = next(step for step in steps if "shmstage" in step)
    assert "--nodelist=node1" in launch
    assert launch[launch.index("--hosts") + 1] == "3"


def test_slurm_directives_are_sbatch_options() -> None:
    lines = [
        line.split() for line in (EXAMPLES / "slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert {word.split("=")[0] for _, word in lines} == SBATCH_OPTIONS


def test_the_job_set_has_the_fields_that_kubernetes_knows() -> None:
    service, jobset = documents()
    jsonschema.validate(service, SERVICE)
    jsonschema.validate(jobset, JOBSET)


def test_the_headless_service_selects_the_pods_and_bears_their_subdomain() -> None:
    service, jobset = documents()
    assert service["spec"]["selector"] == {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}
    assert service["metadata"]["name"] == jobset["spec"]["network"]["subdomain"]


@pytest.mark.parametrize("name", ["head", "hosts"])
def test_dev_shm_is_in_memory_with_a_limit_that_the_container_has_room_for(name: str) -> None:
    pod = next(pod for found, _, pod in pods() if found == name)
    container = pod["containers"][0]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    shm = next(v["emptyDir"] for v in pod["volumes"] if v["name"] == mounted["/dev/shm"])
    assert shm["medium"] == "Memory"
    # pages of /dev/shm count as the container's: room for the processes must be left
    assert 2 * gibibytes(shm["sizeLimit"]) <= gibibytes(container["resources"]["limits"]["memory"])
    store = next(word for word in container["args"][0].split() if word.startswith("--object-store-memory="))
    assert int(store.split("=")[1]) < gibibytes(shm["sizeLimit"]) << 30
    assert {v["name"] for v in pod["volumes"]} == set(mounted.values())


def gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity[:-2])


def test_there_are_as_many_host_pods_as_launch_wants_and_the_head_ends_the_run(rehearsal: Rehearsal) -> None:
    jobs = {name: job for name, job, _ in pods()}
    launch = next(call for call in calls_of_pod(rehearsal, "head") if call[0] == "shmstage")
    hosts = launch[launch.index("--hosts") + 1]
    assert str(jobs["hosts"]["parallelism"]) == str(jobs["hosts"]["completions"]) == hosts
    start = next(call for call in calls_of_pod(rehearsal, "head") if call[:2] == ["ray", "start"])
    assert "--num-cpus=0" in start  # none of the hosts is placed on the head
    jobset = documents()[1]
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["head"]
    joins = next(call for call in calls_of_pod(rehearsal, "hosts") if call[:2] == ["ray", "start"])
    name = f"{jobset['metadata']['name']}-head-0-0.{jobset['spec']['network']['subdomain']}"
    assert f"--address={name}:6379" in joins
