"""A real run that is scraped, profiled and timed, by a scraper that hangs among others."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from command_line import finish, pids, start, wait_for_line, wait_for_step
from test_metrics import labelled, samples_of

from shmstage.launch.metrics import COUNTERS, GAUGES

pytestmark = pytest.mark.slow


def test_a_run_is_scraped_profiled_and_timed_while_it_goes_on_and_nothing_is_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--boundary", "staged_before_update", "--weight-sync", "async", "--steps", "10000", "--out", "out")
    observed = ("--metrics-port", "0", "--profile-steps", "2:3", "--step-timing-log")
    process = start("run", *options, *observed, cwd=tmp_path)
    said = wait_for_line(process, "where metrics are", lambda line: line.startswith("metrics on "))
    url = urllib.parse.urlsplit(said.split()[-1])
    hanging = socket.create_connection((url.hostname, url.port))
    wait_for_step(process, 4)
    assert json.loads((out / "run.json").read_text())["metrics"] == {"host": url.hostname, "port": url.port}
    with urllib.request.urlopen(url.geturl(), timeout=20) as response:
        found = samples_of(response.read().decode())
    who = pids(out)

    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    hanging.close()
    assert code == 130, err
    with pytest.raises(OSError):
        socket.create_connection((url.hostname, url.port))

    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    seen = lines[: int(found[labelled("steps_total")])]
    assert len(seen) >= 3  # the fourth was said a moment before it was counted, perhaps
    for name, (key, _) in COUNTERS.items():
        assert found[labelled(f"{name}_total")] == sum(line[key] or 0 for line in seen), name
    for name, (key, _) in GAUGES.items():
        assert found[labelled(name)] == seen[-1][key], name
    slots = {key: value for key, value in found.items() if key[0] == "shmstage_slots"}
    assert sum(slots.values()) == 4  # three and an auxiliary one
    assert {found[labelled("up", {"role": role})] for role in who if role != "launcher"} == {1}
    assert found[labelled("checkpoint_step")] == 0
    assert found[labelled("weights_version")] >= 1

    trace = b"".join(path.read_bytes() for path in (out / "profile").rglob("*.xplane.pb"))
    for name in ("fwd_bwd 2.0@", "stage 3.0@", "update 3"):
        assert name.encode() in trace, name
    timed = re.findall(r"TRAINER_STEP_TIMING .*timing=(\{.*\})$", (out / "trainer.log").read_text(), re.M)
    reports = [json.loads(text) for text in timed]
    assert [report["train_step"] for report in reports][: len(lines)] == [line["step"] for line in lines]
    for report in reports:
        ready = [each["ready_ago_s"] for each in (*report["mb"], report["update"])]
        assert len(ready) == 4 or report is reports[-1]  # a stop closes the step it finds open
        assert ready == sorted(ready, reverse=True)
