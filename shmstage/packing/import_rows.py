"""One record of a file that somebody brings: where it stands, for errors, and its values by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

from shmstage.errors import TrajectoryError, shown

#: records that make a batch where the file does not say it
ROWS_PER_BATCH = 64


@final
@dataclass(frozen=True, slots=True)
class Row:
    """`number` counts from 1; `where` is the file and that number, as the container counts.

    `values`: what JSON has, or numpy arrays. A value that is missing is not there, or None. `is_padded`: lists have
    the same length in all rows, so that only a mask can say where one ends.
    """

    where: str
    number: int
    values: Mapping[str, Any]
    is_padded: bool = False

    def refuse(self, text: str) -> NoReturn:
        raise TrajectoryError(f"{self.where}: {text}")

    def first_of(self, names: tuple[str, ...]) -> tuple[str, Any] | None:
        """The first of these names that has a value, and the value."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return name, value
        return None

    @property
    def names(self) -> str:
        """What there is, for an error's text."""
        return shown(sorted(map(str, self.values)), 400)

    @property
    def default_batch(self) -> int:
        """Which batch it belongs to where nothing says so."""
        return (self.number - 1) // ROWS_PER_BATCH
