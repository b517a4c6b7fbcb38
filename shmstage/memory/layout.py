"""How named arrays lie in a slot: ordered fields, each at a fixed 64-byte-aligned offset.

dtypes travel by canonical name from a fixed table, never by ``dtype.str`` (bfloat16's is ``<V2``), and
nothing is ever pickled. Four-bit integers are padded to one byte each, as numpy holds them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from shmstage import _native
from shmstage.errors import LayoutError, shown

ALIGNMENT = 64
PAGE_NBYTES = 4096
MAX_FIELDS = 256
MAX_DIMENSIONS = 16
MAX_NBYTES = 1 << 47
MAX_LATE_FIELDS = _native.MAX_LATE_FIELDS

_NUMPY_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_ML_NAMES = (
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int4", "uint4"),
)
_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NUMPY_NAMES}
_DTYPES.update({name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)})
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype with this canonical name. Raises ``LayoutError`` for a name outside the table."""
    try:
        return _DTYPES[name]
    except (KeyError, TypeError):
        raise LayoutError(f"dtype {shown(name)} is not one of {', '.join(_DTYPES)}") from None


def dtype_name(dtype: object) -> str:
    """The canonical name of a dtype; object, text, structured, complex and big-endian ones are refused."""
    if isinstance(dtype, str) and dtype in _DTYPES:
        return dtype
    try:
        found = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError:
        raise LayoutError(f"{dtype!r} is not a dtype; use one of {', '.join(_DTYPES)}") from None
    name = _NAMES.get(found)
    # numpy hashes big-endian and native dtypes apart, but a table lookup must not depend on that.
    if name is None or not found.isnative:
        remedy = f"use one of {', '.join(_DTYPES)}" if found.isnative else "byteswap to native order first"
        raise LayoutError(f"dtype {found!s} cannot lie in a slot; {remedy}")
    return name


@dataclass(frozen=True, slots=True)
class Field:
    """One array's place in a slot; ``offset`` counts from the slot's first payload byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    late: bool = False


@dataclass(frozen=True)
class Layout:
    """Ordered fields. ``of``, ``from_arrays`` and ``from_wire`` make one: they place and check the fields.

    Late fields (written after publication) lie last, in a page-aligned region of their own.
    """

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        expected = _place([(f.name, f.dtype, f.shape, f.late) for f in self.fields])
        for want, got in zip(expected, self.fields, strict=True):
            if want != got:
                raise LayoutError(f"field is not where this version places it: want {want}, got {got}")

    @classmethod
    def of(cls, specs: Mapping[str, tuple[str, tuple[int, ...]]], late: Iterable[str] = ()) -> Layout:
        """Places fields given as name → (dtype name, shape); those named in ``late`` come last."""
        late_names = frozenset(late)
        if unknown := late_names - specs.keys():
            raise LayoutError(f"late fields {sorted(unknown)} are not among the fields {sorted(specs)}")
        ordered = sorted(specs, key=lambda name: name in late_names)  # stable: otherwise the given order
        return cls(_place([(name, *specs[name], name in late_names) for name in ordered]))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Layout:
        """Places one field per array, of its dtype and shape; memory order is the slot's, not the array's."""
        return cls.of({name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()})

    @cached_property
    def layout_id(self) -> int:
        """A hash of the description, 1 .. 2**32 - 1: the same on both sides."""
        digest = hashlib.blake2b(repr(self.to_wire()).encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") or 1

    @cached_property
    def late_offset(self) -> int:
        """Where the late region begins, from the slot's first payload byte; a multiple of the page."""
        return _round_up(self._ends[False], PAGE_NBYTES)

    @cached_property
    def nbytes(self) -> int:
        """Bytes a slot needs for this layout, in whole pages."""
        return max(_round_up(self._ends[None], PAGE_NBYTES), PAGE_NBYTES)

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of the arrays alone, without alignment."""
        return sum(field.nbytes for field in self.fields)

    @cached_property
    def late_names(self) -> tuple[str, ...]:
        """Names of the late fields, in order; the position is the index of the field's version word."""
        return tuple(field.name for field in self.fields if field.late)

    def to_wire(self) -> list[Any]:
        """Lists, strings, ints and bools only."""
        return [[f.name, f.dtype, list(f.shape), f.offset, f.nbytes, f.late] for f in self.fields]

    @classmethod
    def from_wire(cls, obj: object) -> Layout:
        """The inverse of ``to_wire``, for hostile input too: anything unexpected is a ``LayoutError``."""
        if not isinstance(obj, list | tuple) or len(obj) > MAX_FIELDS:
            raise LayoutError(f"a layout is a list of at most {MAX_FIELDS} fields, not {shown(obj)}")
        fields = []
        for item in obj:
            match item:
                case [str(name), str(dtype), list(shape) | tuple(shape), offset, nbytes, bool(late)]:
                    numbers = (offset, nbytes, *shape)
                    if any(type(number) is not int for number in numbers):
                        raise LayoutError(f"field {name[:80]!r}: shape, offset and nbytes are integers")
                    fields.append(Field(name, dtype, tuple(shape), offset, nbytes, late))
                case _:
                    wanted = "[name, dtype, shape, offset, nbytes, late]"
                    raise LayoutError(f"a field is {wanted}, not {shown(item)}")
        return cls(tuple(fields))

    def views(self, buffer: Any, base: int, *, late: bool | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays over ``buffer`` (a mapping, or a 1-D uint8 array over one) of a slot beginning at ``base``.

        ``late`` selects: ``None`` all fields, ``False`` those before the late region, ``True`` those in it.
        Every array keeps the mapping alive and is writable iff ``buffer`` is. Raises ``LayoutError`` if the
        slot does not lie within the buffer.
        """
        # np.ndarray(buffer=mapping) would keep no export on the mapping, so closing it would pull the memory
        # from under the array; frombuffer does keep one, and arrays over that array keep it in turn.
        whole = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
        # The first byte may lie before the buffer if only late fields are looked at: then they alone are mapped.
        begin, end = (self.late_offset if late else 0), self._ends[late]
        if base + begin < 0 or end > whole.nbytes - base:
            raise LayoutError(
                f"bytes {begin} to {end} at offset {base} lie outside a mapping of {whole.nbytes} bytes"
            )
        return {
            name: np.ndarray(shape, dtype, whole, base + offset)
            for name, shape, dtype, offset in self._placed[late]
        }

    @cached_property
    def _placed(self) -> dict[bool | None, list[tuple[str, tuple[int, ...], np.dtype[Any], int]]]:
        rows = [((f.name, f.shape, _DTYPES[f.dtype], f.offset), f.late) for f in self.fields]
        return {
            None: [row for row, _ in rows],
            False: [row for row, late in rows if not late],
            True: [row for row, late in rows if late],
        }

    @cached_property
    def _ends(self) -> dict[bool | None, int]:
        ends = {None: 0, False: 0, True: 0}
        for field in self.fields:
            for key in (None, field.late):
                ends[key] = max(ends[key], field.offset + field.nbytes)
        return ends


def _place(specs: list[tuple[str, str, tuple[int, ...], bool]]) -> tuple[Field, ...]:
    """Checks the fields and gives each its offset: the one place that knows the rule."""
    if len(specs) > MAX_FIELDS:
        raise LayoutError(f"{len(specs)} fields; the limit is {MAX_FIELDS}")
    late_count = sum(late for *_, late in specs)
    if late_count > MAX_LATE_FIELDS:
        raise LayoutError(f"{late_count} late fields; the limit is {MAX_LATE_FIELDS}")
    fields: list[Field] = []
    names: set[str] = set()
    offset = 0
    in_late_region = False
    for name, dtype, shape, late in specs:
        _check_name(name, names)
        itemsize = numpy_dtype(dtype).itemsize
        nbytes = _checked_nbytes(name, shape, itemsize)
        if in_late_region and not late:
            raise LayoutError(f"field {name!r} follows a late field; late fields come last")
        if late and not in_late_region:
            in_late_region = True
            offset = _round_up(offset, PAGE_NBYTES)
        fields.append(Field(name, dtype, tuple(int(n) for n in shape), offset, nbytes, late))
        offset = _round_up(offset + nbytes, ALIGNMENT)
        if offset > MAX_NBYTES:
            raise LayoutError(f"fields up to {name!r} need {offset} bytes; the limit is {MAX_NBYTES}")
    return tuple(fields)


def _check_name(name: str, seen: set[str]) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        raise LayoutError(f"a field name is 1 to 100 characters, not {str(name)[:110]!r}")
    if name in seen:
        raise LayoutError(f"field {name!r} occurs twice")
    seen.add(name)


def _checked_nbytes(name: str, shape: tuple[int, ...], itemsize: int) -> int:
    if len(shape) > MAX_DIMENSIONS:
        raise LayoutError(f"field {name!r} has {len(shape)} dimensions; the limit is {MAX_DIMENSIONS}")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 0 <= size <= MAX_NBYTES:
            raise LayoutError(f"field {name!r} has shape {shown(shape)}; a size is an integer in 0 .. {MAX_NBYTES}")
    # an array without elements is no larger than others may be: numpy counts its other dimensions
    needed = math.prod(int(size) or 1 for size in shape) * itemsize
    if needed > MAX_NBYTES:
        raise LayoutError(f"field {name!r} of shape {shown(shape)} needs {needed} bytes; the limit is {MAX_NBYTES}")
    return 0 if 0 in shape else needed


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
