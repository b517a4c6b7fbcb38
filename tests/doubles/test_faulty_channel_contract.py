"""Wrapped with an empty plan, each channel keeps the whole contract: the same suite as for the channels themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transport.test_channel_contract import *  # noqa: F403
from transport.test_channel_contract import KINDS, Pair, opened_server

from shmstage.testing.fault_plan import FaultPlan
from shmstage.testing.faulty_channel import FaultyChannel, FaultyServerChannel
from shmstage.transport.channel import Channel


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened: list[Channel] = []
    inner, make = opened_server(request.param)
    server = FaultyServerChannel(inner, FaultPlan())

    def connect() -> Channel:
        opened.append(FaultyChannel(make(), FaultPlan()))
        return opened[-1]

    yield Pair(server, connect)
    for channel in opened:
        channel.close()
    server.close()
