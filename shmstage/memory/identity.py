"""Who is alive: every process holds a lock on a file of its own for as long as it lives.

The kernel drops an flock when its last descriptor closes, however the process ended, and everyone who sees
the file can try the lock, across pid namespaces too. Nobody living is ever judged dead by a clock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import weakref
from typing import final

from shmstage.errors import ForkedError, PoolError
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, is_ours, new_name

_ALIVE: weakref.WeakSet[ProcessIdentity] = weakref.WeakSet()


@final
class ProcessIdentity:
    """This process's proof of life in one run. Close it last: to peers a closed one is a dead process.

    Attributes: ``lock_path``, ``token`` (32 hex digits, new per instance), ``pid``, ``start_ticks``,
    ``role``.
    """

    def __init__(self, lock_path: str, token: str, role: str, descriptor: int) -> None:
        """Use ``create``."""
        self.lock_path = lock_path
        self.token = token
        self.role = role
        self.pid = os.getpid()
        self.start_ticks = read_start_ticks(self.pid)
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, _remove_lock, lock_path, descriptor, self.pid)
        _ALIVE.add(self)

    @classmethod
    def create(cls, run_id: str, role: str) -> ProcessIdentity:
        """Makes and locks the file; removed at ``close`` or at a normal exit. Raises ``PoolError``."""
        token = secrets.token_hex(16)
        while True:
            path = os.path.join(SHM_DIR, new_name(run_id) + LOCK_SUFFIX)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            except OSError as error:
                raise PoolError(f"cannot make the lifetime lock {path}: {error.strerror}") from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # at most a prober's instant
                if os.fstat(descriptor).st_nlink == 0:  # swept between its creation and its lock
                    os.close(descriptor)
                    continue
                os.write(descriptor, _self_description(role, token).encode())
            except OSError as error:
                os.close(descriptor)
                os.unlink(path)
                raise PoolError(f"cannot lock {path}: {error.strerror}") from None
            return cls(path, token, role, descriptor)

    def check_not_forked(self) -> None:
        """Raises ``ForkedError`` in a forked child, where the lock and the mappings are somebody else's."""
        if os.getpid() != self.pid:
            raise ForkedError(f"identity of process {self.pid} used in forked child {os.getpid()}; use spawn")

    def close(self) -> None:
        """Removes the file and gives up the lock; idempotent."""
        self._finalizer()


def _remove_lock(path: str, descriptor: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    # Unlinked while still locked: nobody can find it unlocked and judge its holder to have crashed.
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    os.close(descriptor)


def _close_in_forked_child() -> None:
    # A child that kept the descriptor would hold the lock for its dead parent. Closing does not unlock.
    for identity in _ALIVE:
        if identity._finalizer.detach() is not None:
            os.close(identity._descriptor)


os.register_at_fork(after_in_child=_close_in_forked_child)


@final
class PeerWatch:
    """Watches whether the process that owns a lock file still lives.

    ``pid`` and ``start_ticks`` are for messages and for a second proof: where this process sees the very same
    process (same boot, same pid namespace, same start time), a pidfd also notices a death while some forked
    child still holds the lock.
    """

    def __init__(self, lock_path: str, pid: int = 0, start_ticks: int = 0) -> None:
        self.lock_path = lock_path
        self.pid = pid
        self.start_ticks = start_ticks
        self.role = ""
        self._descriptor = -1
        self._pidfd = -1
        self._gone = False
        directory, name = os.path.split(lock_path)
        # the path comes from a message or a header: nothing but a lock of ours is ever opened
        if directory != SHM_DIR or not name.endswith(LOCK_SUFFIX) or not is_ours(name):
            raise PoolError(f"{lock_path[:80]!r} is not a lifetime lock of this user")
        try:
            self._descriptor = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._gone = True
        except OSError as error:
            raise PoolError(f"cannot watch the lifetime lock {lock_path}: {error.strerror}") from None
        else:
            self._open_pidfd()
        self._finalizer = weakref.finalize(self, _close_all, self._descriptor, self._pidfd)

    def dead(self) -> bool:
        """True once the lock can be had, its file is gone (an orderly end), or the pidfd says so."""
        if self._gone or not self._finalizer.alive:
            return self._gone
        try:
            # Shared: two watchers that try at the same moment must not take each other for the owner.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # The owner unlinks before it unlocks; the link count tells an orderly end without a race.
            self._gone = os.fstat(self._descriptor).st_nlink == 0 or _readable(self._pidfd)
        else:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._gone = True
        return self._gone

    def fileno_for_lock(self) -> int:
        """The descriptor of the lock file, -1 if it was gone from the start."""
        return self._descriptor

    def describe(self) -> str:
        """The peer's role, pid and lock for an error message."""
        who = f"{self.role or 'process'} {self.pid or '?'}"
        return f"{who} (lock {os.path.basename(self.lock_path)})"

    def close(self) -> None:
        """Stops watching; idempotent. ``dead`` keeps its last answer."""
        self._finalizer()

    def _open_pidfd(self) -> None:
        facts = _parse(os.pread(self._descriptor, 4096, 0))
        self.role = facts.get("role", "")[:40]
        comparable = all(facts.get(key) == value for key, value in _namespace_facts().items())
        file_pid = facts.get("pid", "")
        if not self.pid and file_pid.isdigit():
            self.pid, self.start_ticks = int(file_pid), int(facts.get("start_ticks", "0") or 0)
        if not comparable or not self.pid or file_pid != str(self.pid):
            return
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:  # already gone, or an old kernel: the lock decides alone
            return
        # Read after the pidfd was opened: now the number cannot be reused for another process.
        if self.start_ticks and read_start_ticks(self.pid) == self.start_ticks:
            self._pidfd = pidfd
        else:
            os.close(pidfd)


def read_start_ticks(pid: int) -> int:
    """When a process started, in ticks since boot: with the pid it names a process for good. 0 = unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command name may hold anything, so fields count from the last parenthesis.
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _namespace_facts() -> dict[str, str]:
    """What must be equal for two processes to mean the same thing by a pid."""
    facts = {}
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            facts["boot_id"] = boot_id.read().strip()
        facts["pid_namespace"] = os.readlink("/proc/self/ns/pid")
    except OSError:
        facts["boot_id"] = f"unknown to process {os.getpid()}"  # equal to nobody's
    return facts


def _self_description(role: str, token: str) -> str:
    pid = os.getpid()
    facts = {"role": role, "pid": str(pid), "start_ticks": str(read_start_ticks(pid)), "token": token}
    return "".join(f"{key}={value}\n" for key, value in {**facts, **_namespace_facts()}.items())


def _parse(text: bytes) -> dict[str, str]:
    lines = text.decode(errors="replace").splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def _readable(pidfd: int) -> bool:
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
