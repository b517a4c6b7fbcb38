"""Which part of a micro-batch one host holds: some of its rows, and of those some of the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Window:
    """Rows `row_begin` to `row_end` and tokens `token_begin` to `token_end` of a micro-batch, ends excluded."""

    row_begin: int
    row_end: int
    token_begin: int
    token_end: int

    @property
    def rows(self) -> int:
        return self.row_end - self.row_begin

    @property
    def tokens(self) -> int:
        return self.token_end - self.token_begin
