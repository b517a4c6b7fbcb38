"""Hosts on one machine: each with its own network, mounts, name, IPC and processes, its own tmpfs at /dev/shm, joined
by veth pairs on a bridge.

    with made_hosts(2) as hosts:
        hosts[0].run(["ping", "-c1", hosts[1].name], timeout_s=5)
        hosts.cut(hosts[1])

Nothing of it is in the machine's own namespaces: the bridge lives in a network namespace too, so two rigs never meet
and nothing has a name to collide. A host is held by one process, the first of its pid namespace: when that ends, the
kernel ends whatever runs in the host and drops its interfaces and mounts. It ends when its standard input does, which
is a pipe from here: a rig whose maker was killed goes away as well.

The file system (but /dev/shm) is the machine's, as OUT is on a file system that all hosts share.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, final

import psutil

NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
TOOLS = ("unshare", "nsenter", "setsid", "ip", "tc")
MADE_WITHIN_S = 30.0
GONE_WITHIN_S = 20.0
NETWORK = "10.77.0."
#: a limited interface lets this much through at once; more than the 64 KiB that the kernel sends as one packet
BURST_NBYTES = 128 * 1024

# $1 its name, $2 its /etc/hosts, $3 the size of its /dev/shm. The pid is read before /proc is the host's own; an
# ignored SIGCHLD makes the kernel reap what is left to this process, the first of the host.
KEEP_HOST = """set -e
read -r pid rest </proc/self/stat
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o size="$3",mode=1777 none /dev/shm
mount --bind "$2" /etc/hosts
echo "$1" >/proc/sys/kernel/hostname
trap '' CHLD
echo "$pid"
exec cat >/dev/null"""
KEEP_SWITCH = """set -e
read -r pid rest </proc/self/stat
echo "$pid"
exec cat >/dev/null"""


class HostError(Exception):
    """A host could not be made, or a command in it did not do as it was told."""


def missing_tools() -> str | None:
    """Which tools a machine lacks, though it could have them."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"needs {', '.join(missing)} (`make host-tools`, as root)" if missing else None


def why_not() -> str | None:
    """Why no hosts can be made here; None where they can."""
    if missing := missing_tools():
        return missing
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "sh", "-c", "mount -t tmpfs none /dev/shm && ip link add type veth"],
        capture_output=True, text=True, timeout=MADE_WITHIN_S, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"needs root, for unshare {' '.join(NAMESPACES)}: {tried.stderr.strip()}"


@final
@dataclass(frozen=True)
class Host:
    """``pid`` is its first process, as seen from here; ``directory`` is its own, below a short path."""

    index: int
    name: str
    address: str
    pid: int
    directory: Path
    environment: dict[str, str] = field(repr=False)

    def start(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[str]:
        """Begin ``command`` in this host; ``options`` are Popen's, ``env`` is added to the host's own."""
        extra: Mapping[str, str] = options.pop("env", {})
        cwd = Path(options.pop("cwd", ".")).absolute()
        # nsenter goes to the root of the host's mounts unless it is told where to stay
        inside = ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={cwd}", *map(os.fspath, command)]
        known: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        return subprocess.Popen(inside, env={**self.environment, **extra}, **known)

    def run(
        self, command: Sequence[str | os.PathLike[str]], *, timeout_s: float = 60.0, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` to its end, or end it and whatever it began at the deadline."""
        process = self.start(command, **options)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            out, err = end_with_children(process)
            text = f"{self.name}: {list(map(str, command))} took longer than {timeout_s:g} s\n{out}\n{err}"
            raise HostError(text) from error
        finally:
            end_with_children(process)
        if check and process.returncode != 0:
            raise HostError(f"{self.name}: {list(map(str, command))} exited {process.returncode}\n{out}\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def python(self, code: str, *arguments: object, **options: Any) -> str:
        """What ``code`` prints, run by this interpreter in this host."""
        return self.run([sys.executable, "-c", code, *map(str, arguments)], **options).stdout

    def path(self, inside: str) -> Path:
        """``inside`` of this host's mounts, as it can be opened from here: ``path("/dev/shm")``."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def shared_memory(self) -> set[str]:
        """Names of the pools and locks of ours in this host's /dev/shm."""
        return {path.name for path in self.path("/dev/shm").iterdir() if path.name.startswith("shmstage.")}

    def processes(self) -> list[psutil.Process]:
        """All that run in this host but its first."""
        return [p for p in in_pid_namespace(pid_namespace(self.pid)) if p.pid != self.pid]

    def pid_outside(self, pid: int) -> int:
        """Of the process that this host knows as ``pid``."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
                if int(numbers[-1]) == pid:
                    return process.pid
        raise HostError(f"{self.name} has no process {pid}")

    def kill(self, pid: int) -> None:
        """SIGKILL to what this host knows as ``pid``, from the outside."""
        os.kill(self.pid_outside(pid), signal.SIGKILL)

    def traffic(self) -> tuple[int, int]:
        """Bytes (received, sent) at its interface since it was made, headers included."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                numbers = counters.split()
                return int(numbers[0]), int(numbers[8])
        raise HostError(f"{self.name} has no interface eth0")


@final
class Hosts(Sequence[Host]):
    """What ``made_hosts`` gives: the hosts, and the cables between them."""

    def __init__(self, hosts: Sequence[Host], switch: int) -> None:
        self._hosts, self._switch = list(hosts), switch

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def cut(self, host: Host) -> None:
        """Pull its cable: no packet arrives or leaves, and no connection is told."""
        in_network(self._switch, f"ip link set v{host.index} down")

    def mend(self, host: Host) -> None:
        in_network(self._switch, f"ip link set v{host.index} up")

    def limit(self, host: Host, bits_per_s: int) -> None:
        """At most so much into the host and so much out of it, plus ``BURST_NBYTES`` at the beginning."""
        queue = f"root tbf rate {bits_per_s}bit burst {BURST_NBYTES} latency 100ms"
        in_network(host.pid, f"tc qdisc replace dev eth0 {queue}")
        in_network(self._switch, f"tc qdisc replace dev v{host.index} {queue}")

    def unlimit(self, host: Host) -> None:
        in_network(host.pid, "tc qdisc del dev eth0 root")
        in_network(self._switch, f"tc qdisc del dev v{host.index} root")


@contextlib.contextmanager
def made_hosts(count: int, *, shm: str = "512m", cpus: int = 2) -> Iterator[Hosts]:
    """``count`` hosts named h0, h1 …, all gone with everything in them at the end. Raises HostError.

    ``shm`` is the size of each one's /dev/shm; ``cpus`` what XLA believes to have.
    """
    directory = Path(tempfile.mkdtemp(prefix="hosts"))
    keepers: list[Keeper] = []
    try:
        names = [f"h{i}" for i in range(count)]
        lines = [f"{NETWORK}{i + 1} {name}" for i, name in enumerate(names)]
        (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        switch = Keeper(KEEP_SWITCH, "switch", namespaces=("--net", "--pid"))
        keepers.append(switch)
        in_network(switch.pid, "ip link add br0 type bridge", "ip link set br0 up")
        hosts = []
        for i, name in enumerate(names):
            keeper = Keeper(KEEP_HOST, name, str(directory / "hosts"), shm)
            keepers.append(keeper)
            address = f"{NETWORK}{i + 1}"
            in_network(
                switch.pid, f"ip link add v{i} type veth peer name eth0 netns {keeper.pid}",
                f"ip link set v{i} master br0", f"ip link set v{i} up",
            )  # fmt: skip
            in_network(
                keeper.pid, "ip link set lo up", f"ip addr add {address}/24 dev eth0", "ip link set eth0 up"
            )  # fmt: skip
            own = directory / str(i)
            (own / "run").mkdir(parents=True, mode=0o700)
            hosts.append(Host(i, name, address, keeper.pid, own, _environment(own, cpus)))
        yield Hosts(hosts, switch.pid)
    finally:
        left = [text for keeper in reversed(keepers) if (text := keeper.close())]
        shutil.rmtree(directory, ignore_errors=True)
        if left:
            raise HostError("; ".join(left))


def _environment(directory: Path, cpus: int) -> dict[str, str]:
    """This process's own, with runtime and temporary directories of the host's and a token for its Ray."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XDG_RUNTIME_DIR": str(directory / "run"),
        "RAY_TMPDIR": str(directory),
        "PJRT_NPROC": str(cpus),
        "JAX_PLATFORMS": "cpu",
    }


@final
class Keeper:
    """The process that holds a host: its namespaces last as long as it does."""

    def __init__(self, script: str, name: str, *arguments: str, namespaces: Sequence[str] = NAMESPACES) -> None:
        self.name = name
        # a session of its own and no child of ours: what runs in a host is not to be taken for what a test began
        started = subprocess.Popen(
            ["setsid", "--fork", "unshare", *namespaces, "--fork", "sh", "-c", script, "sh", name, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert started.stdin is not None
        self._lifeline: IO[str] = started.stdin
        try:
            self.pid = int(_line(started))
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            started.wait(MADE_WITHIN_S)
            for stream in (started.stdout, started.stderr):
                if stream is not None:
                    stream.close()
        self._pid_namespace = pid_namespace(self.pid)
        self._pidfd = os.pidfd_open(self.pid)

    def close(self) -> str | None:
        """End the host and all that runs in it. What is left after ``GONE_WITHIN_S`` is told."""
        self._lifeline.close()
        if not select.select([self._pidfd], [], [], 2.0)[0]:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        # the first process of a pid namespace is reaped after all others in it
        is_gone = bool(select.select([self._pidfd], [], [], GONE_WITHIN_S)[0])
        os.close(self._pidfd)
        if is_gone:
            return None
        return f"{self.name} is not gone: {[p.pid for p in in_pid_namespace(self._pid_namespace)]}"


def _line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None and started.stderr is not None
    if not select.select([started.stdout], [], [], MADE_WITHIN_S)[0]:
        raise HostError(f"no host within {MADE_WITHIN_S:g} s")
    line = started.stdout.readline()
    if not line:
        raise HostError(f"no host: {started.stderr.read().strip()}")
    return line


def in_network(pid: int, *commands: str) -> None:
    """Run each in the network namespace of ``pid``, with our own mounts and pids."""
    for command in commands:
        done = subprocess.run(
            ["nsenter", f"--target={pid}", "--net", *command.split()],
            capture_output=True, text=True, timeout=MADE_WITHIN_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise HostError(f"{command}: {done.stderr.strip()}")


def pid_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def in_pid_namespace(namespace: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if pid_namespace(process.pid) == namespace and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_with_children(process: subprocess.Popen[str]) -> tuple[str, str]:
    """SIGKILL to a command begun in a host and to its children; nsenter alone would leave them running.

    Nothing is done to one that has ended. What it began and left behind stays, as it would on a machine.
    """
    if process.poll() is not None:
        return "", ""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, GONE_WITHIN_S)
    process.kill()
    return process.communicate()


def new_token() -> str:
    return secrets.token_hex(32)
