"""Where ``multihost.py`` measures: a head and hosts as namespaces (tests/multihost), or raylets on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "multihost"))

from hosts import made_hosts, why_not
from ray_hosts import ray_on

Run = Callable[[Sequence[str], float], subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Places:
    """A Ray cluster: ``head`` has no CPU to give away, ``hosts`` one each; both are names of resources.

    ``run(command, timeout_s)`` runs something on the head. ``traffic()``: all bytes so far at the head's interface, in
    both directions; ``None`` where it has none of its own.
    """

    kind: str
    address: str
    head: str
    hosts: list[str]
    run: Run
    traffic: Callable[[], int | None]


@contextlib.contextmanager
def places(count: int, *, store_nbytes: int, pool_nbytes: int) -> Iterator[Places]:
    """``count`` hosts beside a head; ``store_nbytes`` of object store and room for a pool in each one's /dev/shm."""
    with _namespaces(count, store_nbytes, pool_nbytes) if why_not() is None else _local(count, store_nbytes) as found:
        yield found


@contextlib.contextmanager
def _namespaces(count: int, store_nbytes: int, pool_nbytes: int) -> Iterator[Places]:
    shm_mb = (store_nbytes * 5 // 4 + pool_nbytes) // 1_000_000 + 32
    with (
        made_hosts(count + 1, shm=f"{shm_mb}m") as hosts,
        ray_on(hosts, cpus=[0] + [1] * count, store_nbytes=store_nbytes) as cluster,
    ):
        head = hosts[0]

        def run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
            return head.run(command, timeout_s=timeout_s, check=False)

        names = [host.name for host in hosts]
        yield Places("namespaces", cluster.address, names[0], names[1:], run, lambda: sum(head.traffic()))


@contextlib.contextmanager
def _local(count: int, store_nbytes: int) -> Iterator[Places]:
    from ray.cluster_utils import Cluster

    names = [f"h{i}" for i in range(count + 1)]
    given = {"object_store_memory": store_nbytes}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "resources": {names[0]: 1000}, "include_dashboard": False, **given},
    )
    try:
        for name in names[1:]:
            cluster.add_node(num_cpus=1, resources={name: 1000}, **given)

        def run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            return subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
            )

        yield Places("local cluster", str(cluster.address), names[0], names[1:], run, lambda: None)
    finally:
        cluster.shutdown()
