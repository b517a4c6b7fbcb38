"""Records out of a `.npz` file: row i is what every array has at index i of its first axis. Nothing is unpickled."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from shmstage.errors import TrajectoryError, named
from shmstage.packing.import_rows import Row
from shmstage.packing.room import check_room

_REMEDY = "write it with np.savez(file, name=array, ...)"


def npz_rows(file: Path) -> Iterator[Row]:
    """Raises `TrajectoryError` naming file and array, `BudgetError` without room.

    Every array has one row per record: `[rows]` for numbers and text, `[rows, longest]` for what is per token, padded
    as a mask, or `length`, says.
    """
    arrays = _read(file)
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{named(name)} {count}" for name, count in sorted(counts.items()))
        raise TrajectoryError(f"{file}: arrays want as many rows as each other, got {told[:600]}; one row per record")
    for number in range(max(counts.values(), default=0)):
        values = {name: _value(array[number]) for name, array in arrays.items()}
        yield Row(f"{file}, row {number + 1}", number + 1, values, is_padded=True)


def _read(file: Path) -> dict[str, Any]:
    arrays = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            check_room(sum(member.file_size for member in members), f"{file}, unpacked", "import it in parts")
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays or name == member.filename:
                    raise TrajectoryError(f"{file}: {member.filename[:100]!r} is no array of its own; {_REMEDY}")
                with archive.open(member) as opened:
                    _check_header(opened, member.file_size, f"{file}: {named(name)}")
                with archive.open(member) as opened:
                    arrays[name] = np.lib.format.read_array(opened, allow_pickle=False)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, SyntaxError, RuntimeError) as error:
        text = named(getattr(error, "strerror", None) or " ".join(str(error).split()), 300)
        raise TrajectoryError(f"{file} cannot be read as .npz: {text}; {_REMEDY}") from None
    return arrays


def _check_header(opened: IO[bytes], file_nbytes: int, where: str) -> None:
    """An array takes what its header says before a byte of it is read: not more than the file has."""
    version = np.lib.format.read_magic(opened)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, _, dtype = read(opened)
    except Exception as error:  # it is Python text: the library raises whatever it stumbles on in it
        raise ValueError(f"{where}: {error}") from None
    if dtype.hasobject:
        raise TrajectoryError(
            f"{where} holds Python objects, which only pickle could read; pad lists of several lengths and save their "
            "mask, and save text as dtype str"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > file_nbytes:
        raise TrajectoryError(f"{where}: {dtype}{list(shape)} takes {nbytes} bytes, there are {file_nbytes}; {_REMEDY}")
    if len(shape) > 1 and not math.prod(shape[1:]):
        # rows without anything in them take no bytes: there could be any number of them
        raise TrajectoryError(f"{where}: {dtype}{list(shape)} has nothing in a row; leave it out")
    if not shape:
        raise TrajectoryError(f"{where} wants one row per record, got a single {dtype}; repeat it for each record")


def _value(item: Any) -> Any:
    return item.item() if isinstance(item, np.generic) else item
