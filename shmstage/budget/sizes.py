"""Sizes as people write them, to bytes; bytes as people read them. Exact integers throughout."""

from __future__ import annotations

import re
from fractions import Fraction

from shmstage.errors import SettingsError
from shmstage.memory.limits import format_nbytes

MAX_NBYTES = (1 << 63) - 1
_UNITS = {"": 1, "b": 1}
_UNITS.update({f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", 1)})
_UNITS.update({f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", 1)})
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)", re.ASCII)
_REMEDY = "give bytes, or a number with kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"


def parse_size(text: str, name: str = "size") -> int:
    """Bytes of `"10GB"`, `"64MiB"`, `"1.5 TB"` or `"4096"`, 0 to 2**63 - 1.

    Raises `SettingsError` for anything else: a percentage, a sign, `G` (1e9 or 2**30?), a fraction of a byte.
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise SettingsError(f"{name} = {text[:80]!r} is no size; {_REMEDY}")
    nbytes = Fraction(found[1]) * factor
    if nbytes.denominator != 1:
        raise SettingsError(f"{name} = {text[:80]!r} is not a whole number of bytes; {_REMEDY}")
    if nbytes > MAX_NBYTES:
        raise SettingsError(f"{name} = {text[:80]!r} is more than {MAX_NBYTES} bytes; {_REMEDY}")
    return int(nbytes)


def gib(nbytes: int) -> str:
    """Binary unit, two decimals: 4.80 GiB."""
    return f"{nbytes / 2**30:.2f} GiB"


def in_words(nbytes: int) -> str:
    """Exact, and as it is read: 5150605312 bytes (5.15 GB)."""
    return f"{nbytes} bytes ({format_nbytes(nbytes)})" if abs(nbytes) >= 1000 else f"{nbytes} bytes"
