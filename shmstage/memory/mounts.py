"""The mount that shared memory lies on, and whether it gives huge pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shmstage.memory.names import SHM_DIR


def mount_of(directory: str, *, root: str | Path = "/") -> tuple[str, tuple[str, ...]]:
    """Type and options of the mount that ``directory`` lies on; of two at one place the later hides the earlier.

    Empty where that cannot be read. ``root``: where /proc is looked for.
    """
    best: tuple[str, str, tuple[str, ...]] = ("", "", ())
    for line in _read(Path(root, "proc/self/mounts")).splitlines():
        words = line.split()
        if len(words) < 4:
            continue
        point = words[1].replace("\\040", " ")
        inside = point == directory or directory.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, words[2], tuple(words[3].split(",")))
    return best[1], best[2]


def huge_option(options: Iterable[str]) -> str:
    """Of a mount's options; "" where it does not say, which is "never"."""
    return next((option[5:] for option in options if option.startswith("huge=")), "")


def kernel_huge_policy(*, root: str | Path = "/") -> str:
    """Of "always within_size [advise] never deny force" the one in brackets; "" where that cannot be read."""
    text = _read(Path(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    return text.partition("[")[2].partition("]")[0]


def huge_choice(option: str, policy: str) -> str:
    """What a file on the mount gets: "never", "advise" (where a mapping asks before the pages exist) or more freely.

    Of the kernel's policies "deny" and "force" overrule every mount; the others are for mappings that lie on none
    (Documentation/admin-guide/mm/transhuge.rst).
    """
    overruled = {"deny": "never", "force": "always"}
    return overruled.get(policy, option or "never")


def huge_pages_of(directory: str = SHM_DIR, *, root: str | Path = "/") -> str:
    """``huge_choice`` for files in ``directory``, as mount and kernel say now."""
    return huge_choice(huge_option(mount_of(directory, root=root)[1]), kernel_huge_policy(root=root))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
