"""Values of a record as arrays of one value per token; whatever else they are is refused with field, want and got."""

from __future__ import annotations

import math
from typing import Any, NoReturn, final

import numpy as np
import numpy.typing as npt

from shmstage.errors import shown
from shmstage.packing.import_rows import Row

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@final
class Values:
    """What `row` has under the names that others gave it."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def tokens(self, name: str) -> Int32:
        """Token ids `[n]`."""
        given = self._listed(name)
        if given.dtype.kind not in "iu":
            self._refuse(name, "a list of token ids", f"dtype {given.dtype}")
        limit = int(np.iinfo(np.int32).max)
        if given.size and not (int(given.min()) >= 0 and int(given.max()) <= limit):
            self._refuse(name, f"token ids from 0 to {limit}", f"{given.min()} to {given.max()}")
        return given.astype(np.int32)

    def mask(self, name: str, length: int) -> Bools:
        """0 and 1 `[length]`, as bool."""
        given = self._listed(name)
        self._check_length(name, given, length)
        if given.dtype.kind not in "iufb" or ((given != 0) & (given != 1)).any():
            self._refuse(name, "0 or 1 for each token", shown(given.tolist(), 200))
        return given.astype(bool)

    def numbers(self, name: str, length: int) -> Float32:
        """float32 `[length]`, rounded from what came; padding may be anything."""
        given = self._listed(name)
        self._check_length(name, given, length)
        if given.dtype.kind not in "iuf":
            self._refuse(name, "a list of numbers", f"dtype {given.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            return given.astype(np.float32)

    def spread(self, names: tuple[str, ...], real: Bools) -> Float32 | None:
        """The first of these, one number for all tokens or one for each; of those that are `real`. None without any."""
        found = self.row.first_of(names)
        if found is None:
            return None
        name, value = found
        if isinstance(value, (list, np.ndarray)):
            return self.numbers(name, len(real))[real]
        return np.full(int(real.sum()), self.total(name), np.float32)

    def total(self, name: str, *, gaps: bool = False) -> float:
        """A number, or the sum of a list of them; `gaps`: NaN and null in a list count nothing."""
        value = self.row.values[name]
        items = value.tolist() if isinstance(value, np.ndarray) else value if isinstance(value, list) else [value]
        numbers = [_finite(item) for item in items if not gaps or (item is not None and item == item)]
        if not numbers or None in numbers:
            self._refuse(name, "a finite number, or a list of them", shown(items, 200))
        return math.fsum(number for number in numbers if number is not None)

    def identity(self, name: str) -> str:
        """Text, or a number as text: datasets number their samples."""
        value = self.row.values[name]
        if type(value) not in (str, int):
            self._refuse(name, "text or an integer", shown(value, 200))
        return str(value)

    def count(self, names: tuple[str, ...], default: int) -> int:
        """The first of these that is there; whoever takes it checks its range."""
        found = self.row.first_of(names)
        if found is None:
            return default
        name, value = found
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # data frames turn counts into floats where one is missing
        if type(value) is not int or value < 0:
            self._refuse(name, "an integer from 0", shown(value, 200))
        return value

    def need(self, names: tuple[str, ...], what: str, remedy: str) -> str:
        """The first of these that has a value."""
        found = self.row.first_of(names)
        if found is None:
            self.row.refuse(f"wants {' or '.join(names)} ({what}), got only {self.row.names}; {remedy}")
        return found[0]

    def _listed(self, name: str) -> npt.NDArray[Any]:
        value = self.row.values[name]
        if isinstance(value, list):
            # before numpy sees it: one long text among numbers would make it an array of long texts
            odd = next((place for place, item in enumerate(value) if type(item) not in (int, float, bool)), None)
            if odd is not None:
                self._refuse(name, "a list of one value per token", f"{shown(value[odd])} at [{odd}]")
        elif not isinstance(value, np.ndarray):
            self._refuse(name, "a list of one value per token", shown(value, 200))
        given = np.asarray(value) if len(value) else np.zeros(0, np.int32)
        if given.ndim != 1:
            self._refuse(name, "a list of one value per token", f"shape {list(given.shape)}")
        return given

    def _check_length(self, name: str, given: npt.NDArray[Any], length: int) -> None:
        if len(given) != length:
            self._refuse(name, f"{length} values, one per token", f"{len(given)}")

    def _refuse(self, name: str, want: str, got: str) -> NoReturn:
        self.row.refuse(f"{name} wants {want}, got {got}")


def _finite(item: object) -> float | None:
    if type(item) not in (int, float, bool):
        return None
    try:
        value = float(item)  # type: ignore[arg-type]
    except OverflowError:
        return None
    return value if math.isfinite(value) else None
