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

ASK = """
import os
import threading
import numpy as np
import ray
from shmstage.errors import ProtocolError, ShmstageError, WaitTimeoutError
from shmstage.launch.ray_stores import CHUNK_NBYTES, RayStores, answer
from shmstage.packing.parts import Wanted

ray.init(address="auto", log_to_driver=False)


class Parts:
    def pieces(self, numbers, begins, ends):
        if numbers[0] == 99:
            raise ProtocolError(f"store holds no trajectory number {numbers[0]}")
        return [np.arange(n, dtype=np.uint8) for n in range(int(numbers[0]), int(ends[0]), int(begins[0]))]


@ray.remote(num_cpus=0, max_concurrency=4)
class Store:
    def pieces(self, asked):
        if np.frombuffer(asked, np.int64)[0] == 98:
            threading.Event().wait(600)
        if np.frombuffer(asked, np.int64)[0] == 97:
            raise KeyError("a fault of ours")
        return answer(Parts(), asked)

    def end(self):
        os._exit(1)


def wanted(store, number, begin=1 << 19, end=(2 << 20) + 1):
    one = [np.array([n]) for n in (0, number, begin, end, 9)]
    return Wanted(store, *one, (bytes(16),))


def said(wanted):
    try:
        stores.ask(wanted).get()
    except ShmstageError as error:
        return type(error).__name__, str(error)


actors = [Store.options(resources={"h1": 1}).remote(), Store.options(resources={"h0": 1}).remote()]
stores = RayStores(120.0)
stores.know(actors, ["far", "near"])
asked = stores.ask([wanted(0, 0), wanted(1, 7), wanted(0, 3, 1, 4)])
found = asked.get()
assert asked.unanswered() == []
for store, (first, step, end) in zip(found, ((0, 1 << 19, (2 << 20) + 1), (7, 1 << 19, (2 << 20) + 1), (3, 1, 4))):
    assert [len(part) for part in store] == list(range(first, end, step))
    assert all((part == np.arange(len(part), dtype=np.uint8)).all() for part in store)
copied = sum(part.flags.owndata for store in found for part in store)
print("told copied", copied, "of", sum(len(store) for store in found))
print("told", said([wanted(1, 7), wanted(0, 99)]))
slow = stores.ask([wanted(1, 5), wanted(0, 98)])
ray.wait(slow._asked, num_returns=1, timeout=120)
print("told unanswered", slow.unanswered())
slow._timeout_s = 0.1
try:
    slow.get()
except WaitTimeoutError as error:
    print("told", error)
stores.ask([wanted(1, 7)]).get()
print("told", [text[:25] for text in said([wanted(1, 7), wanted(0, 97)])])
ray.wait([actors[0].end.remote()], timeout=120)
print("told", [text[:24] for text in said([wanted(1, 7), wanted(0, 5)])])
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    need_hosts()
    with made_hosts(2) as hosts, ray_on(hosts) as cluster:
        yield cluster


def test_an_object_made_on_one_host_is_fetched_by_another_over_the_cable(cluster: RayCluster) -> None:
    first, second = cluster.hosts
    before = second.traffic()[1]
    out = first.python(FETCH, NBYTES, timeout_s=250)
    assert f"told h1 {NBYTES} {(NBYTES - 1) % 256} 2" in out.splitlines()
    assert second.traffic()[1] - before > NBYTES


def test_pieces_come_without_a_copy_and_who_gives_none_is_named(cluster: RayCluster) -> None:
    out = cluster.hosts[0].python(ASK, timeout_s=250).splitlines()
    assert [line.removeprefix("told ") for line in out if line.startswith("told ")] == [
        "copied 0 of 10",
        "('ProtocolError', 'store holds no trajectory number 99')",
        "unanswered ['far']",
        "no pieces within 0.1 s from the store of far",
        "['RunFailedError', 'the store of far failed: ']",
        "['PeerLostError', 'the store of far is dead']",
    ]


def test_every_node_is_a_host_with_its_own_raylet_and_directory(cluster: RayCluster) -> None:
    for host in cluster.hosts:
        assert cluster.raylet(host).is_running()
        assert list(host.directory.glob("ray/session_*")), "its session directory is below its own"
    inside = {p.pid for host in cluster.hosts for p in host.processes()}
    assert len(inside) == sum(len(host.processes()) for host in cluster.hosts)
