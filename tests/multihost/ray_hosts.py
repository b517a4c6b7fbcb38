"""A Ray cluster whose nodes are hosts of their own: the head in the first, a node in each of the others.

    with made_hosts(2) as hosts, ray_on(hosts) as cluster:
        hosts[0].python("import ray; ray.init(address='auto') …")

What Ray keeps is below each host's own directory, and ends with the host.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import psutil
from hosts import Host, Hosts, new_token

PORT = 6379
MB = 1_000_000
START_WITHIN_S = 90.0
#: a node whose host was cut off is declared dead after about (timeout + period) x threshold = 9 s; Ray's own 50 s are
#: for clusters whose nodes are busy for longer than a test may take
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3500",
    "RAY_health_check_failure_threshold": "2",
}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # no worker is started before it is asked for: each is 100 MB and a second of a core
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Ray's workers are nice (15), and so would be the trainers that they start, to whatever else is on these cores
    "RAY_worker_niceness": "0",
}


@final
@dataclass(frozen=True)
class RayCluster:
    hosts: Hosts
    address: str
    store_nbytes: int

    def raylet(self, host: Host) -> psutil.Process:
        """The raylet of that host, as seen from here."""
        return next(p for p in host.processes() if p.name() == "raylet")


@contextlib.contextmanager
def ray_on(hosts: Hosts, *, cpus: Sequence[int] | None = None, store_nbytes: int = 100 * MB) -> Iterator[RayCluster]:
    """Ray on every host, ``cpus`` of each (default 1); ended with the hosts, whatever became of it."""
    token = new_token()
    for host in hosts:
        host.environment.update(HEALTH, **QUIET, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    address = f"{hosts[0].address}:{PORT}"
    each = list(cpus or [1] * len(hosts))
    start_node(hosts[0], address, each[0], store_nbytes)
    with ThreadPoolExecutor(len(hosts)) as threads:
        others = [threads.submit(start_node, host, address, each[host.index], store_nbytes) for host in hosts[1:]]
        for node in others:
            node.result()
    for host in hosts:
        host.environment["RAY_ADDRESS"] = address
    yield RayCluster(hosts, address, store_nbytes)


def start_node(host: Host, address: str, cpus: int, store_nbytes: int) -> None:
    where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if host.index == 0 else [f"--address={address}"]
    host.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={host.address}",
            f"--temp-dir={host.directory}/ray", f"--num-cpus={cpus}",
            f"--object-store-memory={store_nbytes}",
            "--disable-usage-stats", "--include-log-monitor=false", "--resources", json.dumps({host.name: 1000}),
        ],
        timeout_s=START_WITHIN_S,
    )  # fmt: skip
