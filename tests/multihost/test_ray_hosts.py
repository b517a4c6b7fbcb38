"""Ray joins the hosts: a node in each, and what one of them put another fetches over the cable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import need_hosts
from hosts import made_hosts
from ray_hosts import RayCluster, ray_on

pytestmark = pytest.mark.slow
NBYTES = 16_000_000

FETCH = """
import socket, sys
import numpy as np
import ray
ray.init(address="auto", log_to_driver=False)
@ray.remote(num_cpus=0, resources={"h1": 1})
def make(count):
    return socket.gethostname(), ray.put(np.arange(count, dtype=np.uint8))
where, reference = ray.get(make.remote(int(sys.argv[1])))
array = ray.get(reference)
print("told", where, array.nbytes, int(array[-1]), len([n for n in ray.nodes() if n["Alive"]]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    need_hosts()
    with made_hosts(2) as hosts, ray_on(hosts) as cluster:
        yield cluster


def test_an_object_made_on_one_host_is_fetched_by_another_over_the_cable(cluster: RayCluster) -> None:
    first, second = cluster.hosts
    before = second.traffic()[1]
    out = first.python(FETCH, NBYTES, timeout_s=90)
    assert f"told h1 {NBYTES} {(NBYTES - 1) % 256} 2" in out.splitlines()
    assert second.traffic()[1] - before > NBYTES


def test_every_node_is_a_host_with_its_own_raylet_and_directory(cluster: RayCluster) -> None:
    for host in cluster.hosts:
        assert cluster.raylet(host).is_running()
        assert list(host.directory.glob("ray/session_*")), "its session directory is below its own"
    inside = {p.pid for host in cluster.hosts for p in host.processes()}
    assert len(inside) == sum(len(host.processes()) for host in cluster.hosts)
