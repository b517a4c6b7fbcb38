"""One owner per socket path: a lock file held for life, and the rule for a socket file somebody left behind.

ZeroMQ lets a second ``bind`` on the same path succeed and steal the clients, so the lock comes before the bind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, final

from shmstage.errors import EndpointBusyError, TransportError
from shmstage.memory.locks import lock_exclusively

_held: weakref.WeakSet[EndpointLock] = weakref.WeakSet()


@final
class EndpointLock:
    """Exclusive ownership of a socket path from construction to ``release``."""

    def __init__(self, path: Path) -> None:
        """Takes the lock and clears a stale socket file.

        Raises ``EndpointBusyError`` if a living process owns the path, ``TransportError`` if something stands
        there that is not a stale socket of this user.
        """
        self._socket_path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._fd = self._take()
        # What stands at the path itself is not ours until it is cleared.
        self._give_up = weakref.finalize(self, _give_up, self._fd, (self._lock_path,), os.getpid())
        _held.add(self)
        try:
            if problem := _why_not_stale(path):
                raise problem
            path.unlink(missing_ok=True)
        except BaseException:
            self.release()
            raise
        self._give_up.detach()
        self._give_up = weakref.finalize(self, _give_up, self._fd, (path, self._lock_path), os.getpid())

    def _take(self) -> int:
        while True:
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise TransportError(f"cannot open {self._lock_path}: {error.strerror}") from error
            if not lock_exclusively(fd):
                os.close(fd)
                raise EndpointBusyError(
                    f"{self._socket_path} is owned by a living process (it holds {self._lock_path}); "
                    "stop that run or choose another run id"
                )
            # The owner before us removes the file when it leaves: a lock on a removed file protects nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._lock_path).st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)

    def release(self) -> None:
        """Removes socket and lock file and lets go; harmless twice. Also happens at exit."""
        self._give_up()
        _held.discard(self)

    def forget(self) -> None:
        """In a forked child: closes the child's copy of the lock, which leaves the parent's as it is."""
        if self._give_up.detach() is not None:
            os.close(self._fd)


class EndpointLook(NamedTuple):
    """A socket path, whether a dead process left socket or lock there, and how that is known.

    ``found``: the socket, or its lock where that is all there is, as of a launcher.
    """

    path: Path
    stale: bool
    reason: str
    found: Path


def clear_stale_endpoints(paths: Iterable[Path], *, dry_run: bool = False) -> list[Path]:
    """Of these socket paths, those that a dead process left behind, socket or lock file; removed unless ``dry_run``.

    Whatever a living process owns, or is not a socket of ours, is left alone.
    """
    return [look.path for look in sweep_endpoints(paths, dry_run=dry_run) if look.stale]


def sweep_endpoints(paths: Iterable[Path], *, dry_run: bool) -> list[EndpointLook]:
    """Of these socket paths, those where something stands; what is stale is removed unless ``dry_run``."""
    looks = [look for path in paths if (look := look_at_endpoint(path)) is not None]
    return looks if dry_run else [_remove(look) if look.stale else look for look in looks]


def look_at_endpoint(path: Path) -> EndpointLook | None:
    """``None`` if nothing stands there. Changes nothing."""
    lock = path.with_name(path.name + ".lock")
    if not (os.path.lexists(path) or os.path.lexists(lock)):
        return None
    problem = _why_locked(lock)
    if not problem:
        error = _why_not_stale(path)
        problem = "" if error is None else str(error)
    found = path if os.path.lexists(path) else lock
    return EndpointLook(path, not problem, problem or "no living process holds the lock", found)


def _remove(look: EndpointLook) -> EndpointLook:
    try:
        EndpointLock(look.path).release()
    except TransportError as error:  # it came to life, or changed, after the look
        return look._replace(stale=False, reason=str(error))
    return look


def _why_locked(lock: Path) -> str:
    """Why nobody may take the lock now; "" if anybody may, which is so where there is none."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"its lock cannot be opened: {error.strerror}"
    try:
        # shared, and only for this moment: ``lock_exclusively`` of an owner that starts now tries again
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return "a living process holds the lock"
    except OSError as error:
        return f"its lock cannot be looked at: {error.strerror}"
    finally:
        os.close(fd)


def _give_up(fd: int, paths: tuple[Path, ...], pid: int) -> None:
    if os.getpid() != pid:
        return
    for path in paths:  # while still locked, so that nobody's new files are taken for ours
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(fd)


def _why_not_stale(path: Path) -> TransportError | None:
    """Why what stands at a path whose lock nobody holds may not be removed; ``None`` if it may, or nothing does."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return TransportError(f"cannot look at {path}: {error.strerror}")
    if not stat.S_ISSOCK(found.st_mode):
        return TransportError(f"{path} exists and is not a socket; it is left alone; choose another run id")
    if found.st_uid != os.getuid():
        return TransportError(f"{path} belongs to user {found.st_uid}, not {os.getuid()}; it is left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except BlockingIOError:
            pass  # its backlog is full: somebody owns it
        except OSError as error:
            return TransportError(f"cannot tell whether {path} is in use: {error.strerror}")
    return EndpointBusyError(f"somebody answers on {path} without holding its lock; stop that process first")


def _forget_after_fork() -> None:
    # flock belongs to the open file, which a forked child shares: unless the child closes its copy, the path
    # stays locked after the owner has died.
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
