"""Sizes as people write them."""

from __future__ import annotations

import pytest

from shmstage.budget.sizes import MAX_NBYTES, gib, in_words, parse_size
from shmstage.errors import SettingsError
from shmstage.memory.limits import format_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10GB", 10_000_000_000),
        ("10 gb", 10_000_000_000),
        ("64MiB", 64 << 20),
        ("1TB", 10**12),
        ("1.5GB", 1_500_000_000),
        ("0.1TB", 10**11),
        ("7kB", 7000),
        ("7KiB", 7168),
        ("2147483647", 2**31 - 1),
        ("2GiB", 2**31),
        ("4294967297", 2**32 + 1),
        ("9223372036854775807", MAX_NBYTES),
    ],
)
def test_a_size_is_read_exactly(text: str, nbytes: int) -> None:
    """S78, L3: 2 GiB - 1, 2 GiB and 4 GiB + 1 among them; GB are 1e9 and GiB 2**30 bytes."""
    assert parse_size(text) == nbytes
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-1", "is no size"),
        ("50%", "is no size"),
        ("10G", "is no size"),  # 1e9 or 2**30?
        ("10Gi", "is no size"),
        ("", "is no size"),
        ("GB", "is no size"),
        ("1e9", "is no size"),
        ("0x10", "is no size"),
        ("nan", "is no size"),
        ("١٠", "is no size"),
        ("1,5GB", "is no size"),
        ("0.5", "not a whole number of bytes"),
        ("1.0000000001GB", "not a whole number of bytes"),
        ("9223372036854775808", "more than 9223372036854775807 bytes"),
        ("99999999999999TB", "more than 9223372036854775807 bytes"),
        ("1" * 1000, "is no size"),
    ],
)
def test_what_is_no_size_is_refused_with_a_remedy(text: str, said: str) -> None:
    """S78: no percentage, no unit that could mean two things, nothing beyond int64."""
    with pytest.raises(SettingsError, match=rf"^--limit = .*{said}; give bytes, or a number with kB"):
        parse_size(text, "--limit")


def test_sizes_are_shown_with_the_unit_they_are_in() -> None:
    """L3: GB and GiB are labelled as what they are, the exact bytes stand beside."""
    assert in_words(5_150_605_312) == "5150605312 bytes (5.15 GB)"
    assert gib(5_150_605_312) == "4.80 GiB"
    assert format_nbytes(2**31) == "2.15 GB"
    assert in_words(260) == "260 bytes"
