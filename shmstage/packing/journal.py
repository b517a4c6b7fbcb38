"""Groups of a source that cannot be replayed, kept durably from before they are planned until a checkpoint covers them.

`OUT/journal/segment-<number of its first group>.journal`, appended to and rotated; `first.journal` holds the first
group with a trajectory for as long as the run lives, since the shape of a micro-batch is taken from it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from shmstage.errors import BundleError
from shmstage.packing.group_record import REMEDY, decode_group, encode_group
from shmstage.packing.journal_segment import frame, read_body, scan
from shmstage.packing.trajectory import Group

SEGMENT_NBYTES = 64 << 20
FIRST = "first.journal"
#: a launch keeps a journal per store, in directories that begin with it
STORE = "store-"
_SEGMENT = re.compile(r"segment-([0-9]{12})\.journal")


@final
class Journal:
    """One writer at a time, readers in the same process. Every method may be called from any thread.

    Attribute `count`: groups journaled so far, those released included; the next one gets this number. Everything
    raises `BundleError` for what cannot be written, read or trusted.
    """

    def __init__(self, directory: Path, *, segment_nbytes: int = SEGMENT_NBYTES) -> None:
        """Opens the journal in `directory`, or begins it; the torn tail that a kill may leave is dropped."""
        self.directory = directory
        self._segment_nbytes = segment_nbytes
        self._lock = threading.Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = os.listdir(directory)
            for name in names:
                if name.startswith(f".{FIRST}."):  # half written when its writer was killed
                    (directory / name).unlink(missing_ok=True)
            self._segments = sorted(int(found[1]) for name in names if (found := _SEGMENT.fullmatch(name)))
            self._descriptor = self._open_last()
        except OSError as error:
            raise BundleError(f"{directory} cannot be opened: {error.strerror}; check it and its permissions") from None

    @property
    def begin(self) -> int:
        """Number of the first group that is still held."""
        with self._lock:
            return self._segments[0]

    def append(self, group: Group) -> int:
        """Returns the group's number when it is durable."""
        pieces = encode_group(group)
        with self._lock:
            self._check_open()
            if self._end >= self._segment_nbytes:
                self._rotate()
            self._write([frame(self.count, pieces), *pieces])
            self.count += 1
            return self.count - 1

    def read(self, cursor: int) -> Iterator[Group]:
        """Groups `cursor`, `cursor + 1`, ... up to the newest at the time it is asked for the next one."""
        while True:
            with self._lock:
                if cursor >= self.count:
                    return
                if cursor < self._segments[0]:
                    raise BundleError(
                        f"{self.directory}: group {cursor} was released, the first one held is {self._segments[0]}; "
                        "resume from the newest checkpoint"
                    )
                first = max(number for number in self._segments if number <= cursor)
                is_last, count = first == self._segments[-1], self.count
                file = self._path(first)
                try:
                    # opened under the lock: a release cannot come between
                    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                except OSError as error:
                    raise BundleError(f"{file} cannot be read: {error.strerror}; {REMEDY}") from None
            number = first
            with os.fdopen(descriptor, "rb"):
                # what is being appended meanwhile looks like a torn tail
                for record in scan(descriptor, file, first, may_be_torn=is_last):
                    if record.number >= count:
                        break
                    number = record.number + 1
                    if record.number >= cursor:
                        yield decode_group(read_body(descriptor, record, file), file)
            if number <= cursor:
                raise BundleError(f"{file} ends before group {cursor}; {REMEDY}")
            cursor = number

    def release(self, cursor: int) -> None:
        """Groups before number `cursor` are needed no more."""
        with self._lock:
            self._check_open()
            if cursor >= self.count and self._end:
                self._rotate()  # its name keeps the count
            while len(self._segments) > 1 and self._segments[1] <= cursor:
                try:
                    self._path(self._segments[0]).unlink(missing_ok=True)
                except OSError as error:
                    raise BundleError(
                        f"{self._path(self._segments[0])} cannot be removed: {error.strerror}; check its permissions"
                    ) from None
                del self._segments[0]

    def keep_first(self, group: Group) -> None:
        """Keep `group` beyond any release, as the first one with a trajectory."""
        pieces = encode_group(group)
        partial = self.directory / f".{FIRST}.{os.getpid()}"
        try:
            with open(_create(partial), "wb") as opened:
                opened.writelines([frame(0, pieces), *pieces])
                opened.flush()
                os.fsync(opened.fileno())
            partial.replace(self.directory / FIRST)
            self._sync_directory()
        except OSError as error:
            raise BundleError(f"{partial} cannot be written: {error.strerror}; free space") from None

    def first(self) -> Group | None:
        """What `keep_first` was given, in this process or an earlier one."""
        file = self.directory / FIRST
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BundleError(f"{file} cannot be read: {error.strerror}; {REMEDY}") from None
        with os.fdopen(descriptor, "rb"):
            for record in scan(descriptor, file, 0, may_be_torn=False):
                return decode_group(read_body(descriptor, record, file), file)
        raise BundleError(f"{file} is empty; {REMEDY}")

    def close(self) -> None:
        """What is journaled stays; appending is over."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    # --- under the lock -------------------------------------------------------------------------------------

    def _path(self, first: int) -> Path:
        return self.directory / f"segment-{first:012d}.journal"

    def _open_last(self) -> int:
        if not self._segments:
            self._segments.append(0)
        file = self._path(self._segments[-1])
        is_new = not file.exists()
        descriptor = _create(file, truncate=False)
        self.count, self._end = self._segments[-1], 0
        try:
            for record in scan(descriptor, file, self.count, may_be_torn=True):
                self.count, self._end = record.number + 1, record.end
            if os.fstat(descriptor).st_size > self._end:
                os.ftruncate(descriptor, self._end)
                os.fsync(descriptor)
            if is_new:
                self._sync_directory()
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _rotate(self) -> None:
        file = self._path(self.count)
        try:
            descriptor = _create(file)
            self._sync_directory()
        except OSError as error:
            raise BundleError(f"{file} cannot be made: {error.strerror}; free space") from None
        os.close(self._descriptor)
        self._descriptor, self._end = descriptor, 0
        self._segments.append(self.count)

    def _write(self, pieces: Sequence[bytes]) -> None:
        end = self._end
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    written = os.pwrite(self._descriptor, view, end)
                    view, end = view[written:], end + written
            os.fdatasync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # left there it is a torn tail, which the next start drops
                os.ftruncate(self._descriptor, self._end)
            raise BundleError(
                f"{self._path(self._segments[-1])} cannot be written: {error.strerror}, at byte {end - self._end} of a "
                f"group of {sum(map(len, pieces))}; free space, or set checkpoint_every so that the journal is released"
            ) from None
        self._end = end

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise BundleError(f"{self.directory}: the journal is closed")

    def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _create(file: Path, *, truncate: bool = True) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_TRUNC if truncate else 0)
    return os.open(file, flags, 0o600)
