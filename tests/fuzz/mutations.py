"""Bytes and JSON that are almost right: what a disk, another release or bad intent makes of good ones."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

NUMBERS = [
    0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    (1 << 47) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1,
]  # fmt: skip

#: JSON texts for one value; some of them no JSON at all
JSON_TEXTS = [
    "null", "true", "false", "0", "-1", "1", "2", "1.5", "-0.0", "1e400", "-1e400", "NaN", "Infinity",
    str(2**31), str(2**53), str(2**53 + 1), str(2**63), str(2**64), "9" * 4300, "9" * 4301, "-" + "9" * 4000,
    '""', '"x"', '"\\ud800"', '"\\u0000"', '"\\u001b[2J\\n"', '"' + "x" * 5000 + '"', '"../../etc/passwd"', '"²"',
    "[]", "{}", "[[]]", '{"a": 1, "a": 2}', "[" + "0," * 5000 + "0]", "[" * 200 + "]" * 200, "[" * 100000,
    '{"a":' * 90 + "1" + "}" * 90, '{"' + "k" * 3000 + '": 1}', "", "]", "tru", "'x'", "\x00",
]  # fmt: skip
_MARK = "@hostile@"


def deep(levels: int) -> Any:
    """A list in a list in a list."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


class Rng(random.Random):
    """Repeatable, and it says how."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __repr__(self) -> str:
        return f"Rng({self.number})"


def mutated(data: bytes, rng: random.Random, most: int = 4) -> bytes:
    """1 to ``most`` small changes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, most)):
        _change(changed, rng)
    return bytes(changed)


def _change(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(9)
    if kind == 0 and data:
        data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[min(at, len(data) - 1)] = rng.randrange(256)
    elif kind == 2:
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice(NUMBERS) % (1 << 8 * size)
        data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
    elif kind == 3:
        aligned = at // 8 * 8  # of the fields of a header
        data[aligned : aligned + 8] = struct.pack("<Q", rng.choice(NUMBERS))
    elif kind == 4:
        del data[at:]
    elif kind == 5:
        del data[at : at + rng.randint(1, 16)]
    elif kind == 6:
        data[at:at] = rng.randbytes(rng.randint(1, 16))
    elif kind == 7:
        other = rng.randrange(len(data) + 1)
        data[at:at] = data[other : other + rng.randint(1, 64)]
    else:
        data[at : at + 32] = bytes([rng.choice((0, 0xFF))]) * 32


def hostile_json(value: Any, rng: random.Random) -> bytes:
    """``value`` as JSON with one or two of its nodes replaced, removed, renamed or written twice."""
    changed = copy.deepcopy(value)
    fragments = []
    for _ in range(rng.randint(1, 2)):
        fragments.append(rng.choice(JSON_TEXTS))
        changed = _with_mark(changed, rng, _MARK * len(fragments))
    text = json.dumps(changed)
    for number in range(len(fragments), 0, -1):
        text = text.replace(json.dumps(_MARK * number), fragments[number - 1])
    data = text.encode("utf-8", "surrogatepass")
    return mutated(data, rng) if rng.random() < 0.2 else data


def _with_mark(value: Any, rng: random.Random, mark: str) -> Any:
    """Walks down at random and changes what it ends at."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return mark
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    if rng.random() < 0.25:
        kind = rng.randrange(3)
        if kind == 0:
            del value[key]
        elif isinstance(value, dict):
            value[rng.choice(["", "x", "__class__", "\x1b[2J", str(key) + "s"])] = mark
        else:
            value.append(value[key] if kind == 1 else mark)
        return value
    value[key] = _with_mark(value[key], rng, mark)
    return value
