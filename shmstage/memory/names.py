"""Names in /dev/shm: ``shmstage.<uid base36>.<6 of run hash>.<5 random>``, ≤ 30 characters with a slash."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat

SHM_DIR = "/dev/shm"
LOCK_SUFFIX = ".lock"
PREFIX = "shmstage."
MAX_NAME_LENGTH = 30
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_PATTERN = re.compile(r"shmstage\.([0-9a-z]{1,7})\.([0-9a-z]{6})\.([0-9a-z]{5})(\.lock)?")


def _base36(value: int) -> str:
    digits = ""
    while True:
        value, digit = divmod(value, 36)
        digits = _DIGITS[digit] + digits
        if not value:
            return digits


def run_hash(run_id: str) -> str:
    """Six characters that stand for the run id in a name; the full id is in the pool's header."""
    # what is no text came from a command line; it names no run, and is looked for all the same
    return hashlib.blake2b(run_id.encode(errors="surrogatepass"), digest_size=3).hexdigest()


def new_name(run_id: str) -> str:
    """A fresh file name (no slash) of this user and run."""
    tail = "".join(secrets.choice(_DIGITS) for _ in range(5))
    name = f"shmstage.{_base36(os.getuid())}.{run_hash(run_id)}.{tail}"
    assert len(name) < MAX_NAME_LENGTH  # shm_open adds a slash; macOS and some tools stop at 31
    return name


def lock_word(lock_path: str) -> int:
    """A lifetime lock of a known run as a number above 0: what fits into a shared word."""
    return int(os.path.basename(lock_path).removesuffix(LOCK_SUFFIX).rpartition(".")[2], 36) + 1


def lock_path_of(run_id: str, word: int) -> str:
    """The lock that ``lock_word`` made this number of."""
    tail = _base36(word - 1).rjust(5, "0")
    return os.path.join(SHM_DIR, f"shmstage.{_base36(os.getuid())}.{run_hash(run_id)}.{tail}{LOCK_SUFFIX}")


def is_ours(name: str, run_id: str | None = None) -> bool:
    """Whether a file name has this user's prefix (and, if given, that run's)."""
    match = _PATTERN.fullmatch(name)
    if match is None or match[1] != _base36(os.getuid()):
        return False
    return run_id is None or match[2] == run_hash(run_id)


def owned_objects(run_id: str, *, shm_dir: str = SHM_DIR) -> list[str]:
    """Of ``list_objects`` the regular files that belong to this user: anybody may have put something there."""
    names = []
    for name in list_objects(run_id, shm_dir=shm_dir):
        try:
            status = os.lstat(os.path.join(shm_dir, name))
        except OSError:  # gone meanwhile
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            names.append(name)
    return names


def list_objects(run_id: str | None = None, *, shm_dir: str = SHM_DIR) -> list[str]:
    """Names in ``shm_dir`` with this user's prefix (and of that run), pools and locks, sorted."""
    return sorted(name for name in os.listdir(shm_dir) if is_ours(name, run_id))
