"""A directory that appears whole or not at all, and its files, none of which is trusted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shmstage.errors import BundleError, named


@contextlib.contextmanager
def appearing(path: Path, made_in: Path | None = None) -> Iterator[Path]:
    """A directory to fill; at the end it is renamed to `path`, or removed. `BundleError` if `path` exists.

    Until then it is in `made_in`, on the file system of `path`; else beside `path`.
    """
    if os.path.lexists(path):
        raise BundleError(f"{path} exists; a bundle is never overwritten, choose another name or remove it")
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a sibling: a rename stays on one file system
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.", dir=made_in or path.parent))
        yield temporary
        temporary.chmod(0o755)
        sync_directory(temporary)
        temporary.rename(path)
        temporary = None
        sync_directory(path.parent)
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror}; choose another place") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def names_in(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}; check its permissions") from None


def read_file(file: Path, limit: int) -> bytes:
    """At most `limit` + 1 bytes of a regular file; a link, a pipe or a device is refused."""
    try:
        # non-blocking: opening a pipe would wait for a writer
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            if not os.path.isfile(descriptor):
                raise BundleError(f"{file} is not a regular file; a bundle holds nothing else")
            size = os.fstat(descriptor).st_size
            if size > limit:
                raise BundleError(f"{file} has {size} bytes, at most {limit} were expected; make the bundle anew")
            return opened.read(size + 1)
    except OSError as error:
        raise BundleError(f"{file} cannot be read: {error.strerror}; copy the bundle again") from None


def check_sha256(file: Path, data: bytes, want: str) -> None:
    got = hashlib.sha256(data).hexdigest()
    if got != want:
        raise BundleError(
            f"{file} has sha256 {got}, want {named(want)}: it was altered or damaged; "
            "copy the bundle again or make it anew"
        )


def write_durably(file: Path, data: bytes) -> None:
    with open(file, "xb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def sync_file(file: Path) -> None:
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
