"""Wrapped with an empty plan, each channel keeps the whole contract: the same suite as for the channels themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport.test_channel_contract import *  # noqa: F403
from transport.test_channel_contract import Pair

from shmstage.testing.fault_plan import FaultPlan
from shmstage.testing.faulty_channel import FaultyChannel, FaultyServerChannel
from shmstage.testing.memory_channel import MemoryServerChannel
from shmstage.transport.channel import Channel
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel


@pytest.fixture(params=["zmq", "memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened: list[Channel] = []
    endpoint = endpoint_for("faulty-contract", "server")
    inner = ZmqServerChannel.bind(endpoint) if request.param == "zmq" else MemoryServerChannel()
    server = FaultyServerChannel(inner, FaultPlan())

    def connect() -> Channel:
        channel = inner.connect() if isinstance(inner, MemoryServerChannel) else ZmqChannel.connect(endpoint)
        opened.append(FaultyChannel(channel, FaultPlan()))
        return opened[-1]

    yield Pair(server, connect)
    for channel in opened:
        channel.close()
    server.close()
