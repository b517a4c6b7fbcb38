"""Hosts for the tests of this folder: two that a module shares, or as many as a test makes for itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from hosts import Hosts, made_hosts, missing_tools, why_not
from skipping import skip_unless_ci

pytest.register_assert_rewrite("launching")
_why_not = cache(why_not)


def need_hosts() -> None:
    if reason := missing_tools():
        skip_unless_ci(f"hosts as namespaces: {reason}")
    if reason := _why_not():  # the kernel's, or the container's, to decide
        pytest.skip(f"hosts as namespaces: {reason}")


@pytest.fixture
def hosts_allowed() -> None:
    need_hosts()


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    need_hosts()
    with made_hosts(2) as hosts:
        yield hosts
