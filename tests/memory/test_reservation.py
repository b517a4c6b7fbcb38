"""Space is checked, then reserved: what does not fit is a BudgetError, never a signal, and leaves nothing."""

from __future__ import annotations

import errno
import os

import pytest
from namespaces import run_on_mount
from pool_making import LAYOUT, RUN

from shmstage import _native
from shmstage.errors import BudgetError, PoolError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.limits import Limit
from shmstage.memory.names import list_objects
from shmstage.memory.pool import Pool

SMALL = [Limit("the cgroup /pod/x", 20_000)]


def test_a_pool_beyond_the_limit_is_refused_before_anything_is_allocated(
    identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6, L3"""
    def allocated(*arguments: object) -> None:
        raise AssertionError("allocated")

    with monkeypatch.context() as patched, pytest.raises(BudgetError) as caught:  # what clears up needs the real ones
        for name in ("open", "posix_fallocate", "ftruncate"):
            patched.setattr(os, name, allocated)
        Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=3, identity=identity, limits=SMALL)
    assert str(caught.value) == (
        "3 slots of 8.19 kB need 32.8 kB; the cgroup /pod/x leaves 20 kB; "
        "use fewer slots, or fewer rows or tokens per micro-batch"
    )


def test_the_limits_of_the_machine_are_read_unless_given(identity: ProcessIdentity) -> None:
    huge = Layout.of({"x": ("uint8", (1 << 45,))})
    with pytest.raises(BudgetError, match="leaves"):
        Pool.create(RUN, epoch=1, layouts=[huge], slots=2, identity=identity)
    with pytest.raises(BudgetError, match="the limit is"):
        Pool.create(RUN, epoch=1, layouts=[huge], slots=5, identity=identity)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_space_that_is_gone_after_the_check_is_a_budget_error_that_leaves_nothing(
    identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """S18"""
    before, descriptors = list_objects(RUN), len(os.listdir("/proc/self/fd"))
    real = os.posix_fallocate

    def full(descriptor: int, begin: int, nbytes: int) -> None:
        if nbytes > 4096:
            raise OSError(code, "x")
        real(descriptor, begin, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BudgetError, match="fewer slots"):
        Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
    monkeypatch.setattr(_native, "populate", lambda mapping, writable: errno.EFAULT)
    monkeypatch.setattr(os, "posix_fallocate", real)
    with pytest.raises(BudgetError):
        Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
    assert list_objects(RUN) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_any_other_failure_to_reserve_is_a_pool_error(
    identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> None:
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr(os, "posix_fallocate", failing)
    with pytest.raises(PoolError, match="Input/output error"):
        Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)


def test_an_old_kernel_that_cannot_prefault_still_gets_a_pool(
    identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "populate", lambda mapping, writable: errno.EINVAL)
    Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity).close()


_ON_A_TINY_MOUNT = """
from shmstage.errors import BudgetError
from shmstage.memory.limits import Limit
identity = ProcessIdentity.create(RUN, "orchestrator")
layout = Layout.of({"x": ("uint8", (1 << 20,))})
for limits in (None, [Limit("believed", 1 << 40)]):
    try:
        Pool.create(RUN, epoch=1, layouts=[layout], slots=3, identity=identity, limits=limits)
    except BudgetError as error:
        print(str(error).split(";")[-2])
free = os.statvfs("/dev/shm")
print(len(os.listdir("/dev/shm")), free.f_bavail * free.f_frsize > 2_000_000)
Pool.create(RUN, epoch=1, layouts=[layout], slots=1, identity=identity).close()
identity.close()
"""


@pytest.mark.slow
def test_a_full_mount_is_a_budget_error_never_a_bus_error() -> None:
    """S18, S19, S21, S30"""
    checked, reserved, left = run_on_mount("size=2200k", _ON_A_TINY_MOUNT)
    assert "the mount /dev/shm" in checked and "leaves" in checked
    assert "No space left on device" in reserved
    assert left == "1 True"  # the lifetime lock; the space was given back
