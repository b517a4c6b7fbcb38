"""The hosts are hosts: own address, name, /dev/shm, processes; cables that can be cut and limited; gone afterwards."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hosts import BURST_NBYTES, Host, HostError, Hosts, end_with_children, made_hosts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hosts_allowed")]

#: says its port, then tells who connects that it is there and sends back what it gets until there is no more
SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        connection = server.accept()[0]
        with connection:
            connection.sendall(socket.gethostname().encode() + b"\\n")
            while data := connection.recv(1 << 16):
                connection.sendall(data)
"""
#: who answers at an address
ASK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as connection:
        print(connection.makefile().readline().strip())
except OSError as error:
    print("nobody:", type(error).__name__)
"""


def serve(host: Host) -> tuple[subprocess.Popen[str], str]:
    process = host.start([sys.executable, "-c", SERVE, host.name])
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_each_host_has_its_name_and_reaches_the_other_by_name(two_hosts: Hosts) -> None:
    first, second = two_hosts
    say = "import socket; n = socket.gethostname(); print(n, socket.gethostbyname(n))"
    assert [host.python(say).split() for host in two_hosts] == [["h0", "10.77.0.1"], ["h1", "10.77.0.2"]]
    process, port = serve(second)
    try:
        assert first.python(ASK, "h1", port, 5).strip() == "h1"
    finally:
        end_with_children(process)


def test_what_lies_in_one_dev_shm_is_in_no_other(two_hosts: Hosts) -> None:
    first, second = two_hosts
    second.python("open('/dev/shm/shmstage.only-here', 'w').close()")
    try:
        assert second.shared_memory() == {"shmstage.only-here"}
        assert first.shared_memory() == set()
        assert first.python("import os; print(os.listdir('/dev/shm'))").strip() == "[]"
        assert not Path("/dev/shm/shmstage.only-here").exists()
    finally:
        second.path("/dev/shm/shmstage.only-here").unlink()


def test_a_command_has_a_deadline_and_is_killed_by_the_pid_that_its_host_knows(two_hosts: Hosts) -> None:
    host = two_hosts[0]
    with pytest.raises(HostError, match="took longer than 0.5 s"):
        host.run(["sleep", "1000"], timeout_s=0.5)
    assert host.processes() == []
    process = host.start(["sh", "-c", "echo $$; exec sleep 1000"])
    assert process.stdout is not None
    host.kill(int(process.stdout.readline()))
    assert process.wait(10) == -signal.SIGKILL
    end_with_children(process)
    process.communicate()


def test_a_cut_host_is_silent_and_a_mended_one_answers_on_the_same_connection(two_hosts: Hosts) -> None:
    first, second = two_hosts
    process, port = serve(second)
    talk = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as connection:
    lines = connection.makefile()
    print(lines.readline().strip(), flush=True)
    sys.stdin.readline()
    connection.sendall(b"sent while cut\\n")
    print("sent", flush=True)
    print(lines.readline().strip(), flush=True)
"""
    speaker = first.start([sys.executable, "-c", talk, "h1", port], stdin=subprocess.PIPE)
    assert speaker.stdin is not None and speaker.stdout is not None
    try:
        assert speaker.stdout.readline() == "h1\n"
        two_hosts.cut(second)
        try:
            assert first.python(ASK, "h1", port, 0.5).startswith("nobody:")
            received = second.traffic()[0]
            speaker.stdin.write("\n")
            speaker.stdin.flush()
            assert speaker.stdout.readline() == "sent\n"
            assert second.traffic()[0] == received
        finally:
            two_hosts.mend(second)
        assert speaker.stdout.readline() == "sent while cut\n"
        assert speaker.wait(10) == 0
    finally:
        end_with_children(speaker)
        end_with_children(process)


def test_no_more_bytes_arrive_than_the_limit_lets_through(two_hosts: Hosts) -> None:
    """tbf counts bytes: in any span of time at most rate x span and one burst, however busy the cores are."""
    first, second = two_hosts
    bits_per_s, nbytes = 16_000_000, 2_000_000
    two_hosts.limit(second, bits_per_s)
    process, port = serve(second)
    send = """
import socket, sys, time
nbytes = int(sys.argv[3])
began = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
    lines = connection.makefile("rb")
    lines.readline()
    sent = received = 0
    while received < nbytes:  # both ways: what comes back has passed both limits
        if sent < nbytes:
            connection.sendall(bytes(min(50_000, nbytes - sent)))
            sent += min(50_000, nbytes - sent)
        received += len(lines.read1(1 << 16))
print(time.monotonic() - began)
"""
    try:
        before = second.traffic()
        elapsed_s = float(first.python(send, "h1", port, nbytes))
        after = second.traffic()
    finally:
        end_with_children(process)
        two_hosts.unlimit(second)
    for n in (0, 1):
        assert nbytes < after[n] - before[n]  # the counters count
    assert nbytes <= elapsed_s * bits_per_s / 8 + BURST_NBYTES


def test_nothing_of_a_rig_is_left_also_when_its_user_fails() -> None:
    interfaces = set(os.listdir("/sys/class/net"))
    with pytest.raises(ZeroDivisionError), made_hosts(2) as hosts:
        process, _ = serve(hosts[1])
        inside = [p.pid for host in hosts for p in host.processes()]
        assert inside
        directory, keepers = hosts[0].directory.parent, [host.pid for host in hosts]
        assert set(os.listdir("/sys/class/net")) == interfaces  # bridge and cables are not among the machine's own
        raise ZeroDivisionError
    process.communicate()
    assert not directory.exists()
    assert not any(psutil.pid_exists(pid) for pid in [*inside, *keepers])


def test_a_rig_whose_maker_is_killed_goes_away() -> None:
    code = """
import sys
from hosts import made_hosts
with made_hosts(2) as hosts:
    sleeper = hosts[1].start(["sh", "-c", "echo on; exec sleep 1000"])
    sleeper.stdout.readline()
    print(hosts[0].directory.parent, *(host.pid for host in hosts), flush=True)
    sys.stdin.readline()
"""
    here = str(Path(__file__).parent)
    maker = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": here},
    )  # fmt: skip
    assert maker.stdout is not None
    directory, *keepers = maker.stdout.readline().split()
    pidfds = [os.pidfd_open(int(pid)) for pid in keepers]
    maker.kill()
    maker.communicate()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 20)[0], "a host outlived its maker"
        os.close(pidfd)
    shutil.rmtree(directory)  # the one thing that a killed maker leaves


def test_two_rigs_at_once_do_not_meet(two_hosts: Hosts) -> None:
    process, port = serve(two_hosts[1])
    try:
        with made_hosts(1) as others:
            assert others[0].python(ASK, two_hosts[1].address, port, 0.5).startswith("nobody:")
        assert two_hosts[0].python(ASK, two_hosts[1].address, port, 5).strip() == "h1"
    finally:
        end_with_children(process)


def test_jax_joins_processes_of_two_hosts_over_gloo(two_hosts: Hosts) -> None:
    code = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("h0:7777", 2, int(sys.argv[1]))
from jax.experimental import multihost_utils
import numpy as np
found = multihost_utils.process_allgather(np.float32(1 + jax.process_index()))
print("told", jax.device_count(), found.tolist())
jax.distributed.shutdown()
"""
    running = [host.start([sys.executable, "-c", code, str(host.index)]) for host in two_hosts]
    try:
        for process in running:
            out, err = process.communicate(timeout=60)
            assert [line for line in out.splitlines() if line.startswith("told")] == ["told 2 [1.0, 2.0]"], err
    finally:
        for process in running:
            end_with_children(process)
