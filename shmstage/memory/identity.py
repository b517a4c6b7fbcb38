"""Who is alive: every process holds a lock on a file of its own for as long as it lives.

The kernel drops an flock when its last descriptor closes, however the process ended, and everyone who sees
the file can try the lock, across pid namespaces too. Nobody living is ever judged dead by a clock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import select
import weakref
from functools import cache
from typing import final

from shmstage.errors import ForkedError, PoolError
from shmstage.memory.failures import cannot
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
                raise cannot(f"cannot make the lifetime lock {path}", error) from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # at most a prober's instant
                if os.fstat(descriptor).st_nlink == 0:  # swept between its creation and its lock
                    os.close(descriptor)
                    continue
                os.write(descriptor, _self_description(role, token).encode())
            except OSError as error:
                os.close(descriptor)
                os.unlink(path)
                raise cannot(f"cannot lock {path}", error) from None
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
            raise cannot(f"cannot watch the lifetime lock {lock_path}", error) from None
        else:
            self._open_pidfd()
        self._finalizer = weakref.finalize(self, _close_all, self._descriptor, self._pidfd)

    def dead(self) -> bool:
        """True once the lock can be had, its file was gone from the start (an orderly end), or the pidfd says so."""
        if self._gone or not self._finalizer.alive:
            return self._gone
        try:
            # Shared: two watchers that try at the same moment must not take each other for the owner.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # Held: it lives, even if somebody has removed the file's name.
            self._gone = _readable(self._pidfd)
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
        try:
            facts = _parse(os.pread(self._descriptor, 4096, 0))
        except OSError:  # a pipe of that name: its lock may say something, its content nothing
            return
        self.role = facts.get("role", "")[:40]
        comparable = all(facts.get(key) == value for key, value in _namespace_facts().items())
        file_pid = _number(facts.get("pid", ""))
        if not self.pid:
            self.pid, self.start_ticks = file_pid, _number(facts.get("start_ticks", ""))
        if not comparable or not self.pid or file_pid != self.pid:
            return
        try:
            pidfd = os.pidfd_open(self.pid)
        except (OSError, OverflowError):  # already gone, no pid at all, or an old kernel: the lock decides alone
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


@cache
def _word_of(pid: int) -> int:
    facts = _namespace_facts()
    if len(facts) < 2:
        return 0
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


def namespace_word() -> int:
    """Equal in processes that mean the same thing by a pid (same boot, same pid namespace); 0: not known."""
    return _word_of(os.getpid())


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


def _number(text: str) -> int:
    # anybody may have written the file: "²" is a digit, too
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


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
