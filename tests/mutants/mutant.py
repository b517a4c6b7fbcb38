"""One deliberate fault: a piece of source text, what it becomes, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_S = 10.0


@dataclass(frozen=True)
class Mutant:
    """``file`` is relative to the repository, ``old`` occurs in it exactly once. ``tests`` are pytest ids.

    At least one of the tests must fail. They pass on the unmutated source in the same run, and take at most
    ``LIMIT_S`` seconds together, fixtures and imports not counted.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
