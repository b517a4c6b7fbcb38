"""What each host holds of a micro-batch: its layout and its window, from the ranges that its trainer tells. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from shmstage.errors import LayoutError, ProtocolError, SettingsError, shown
from shmstage.memory.layout import Layout
from shmstage.packing.window import Window

#: the field that says how rows and tokens are cut
LEADING = "completion_ids"


@final
@dataclass(frozen=True, slots=True)
class HostRanges:
    """What a trainer said of one layout: per field ``(begin, end)`` of each axis, and how often rows and tokens are
    cut, over all hosts."""

    fields: Mapping[str, tuple[tuple[int, int], ...]]
    tiles: tuple[int, int]

    @property
    def window(self) -> Window:
        rows, tokens = self.fields[LEADING][:2]
        return Window(*rows, *tokens)


def read_ranges(answer: Mapping[str, Any], layout: Layout, who: str) -> HostRanges:
    """The answer to ``ranges`` for ``layout``. Raises ``ProtocolError`` for anything else."""
    ranges: Any = answer.get("ranges")
    tiles: Any = answer.get("tiles")
    shapes = {field.name: field.shape for field in layout.fields}
    if type(ranges) is not dict or ranges.keys() != shapes.keys() or not _are_counts(tiles, 2) or 0 in tiles:
        raise ProtocolError(f"{who}, ranges: want those of {sorted(shapes)} and tiles [R, T], got {shown(answer)}")
    found = {}
    for name, shape in shapes.items():
        pairs = ranges[name]
        good = type(pairs) is list and len(pairs) == len(shape) and all(_are_counts(pair, 2) for pair in pairs)
        if not good or not all(begin <= end <= size for (begin, end), size in zip(pairs, shape, strict=True)):
            raise ProtocolError(f"{who}, ranges: {name} {list(shape)} cannot lie at {shown(pairs)}")
        found[name] = tuple((begin, end) for begin, end in pairs)
    return HostRanges(found, (tiles[0], tiles[1]))


def local_layout(layout: Layout, ranges: HostRanges) -> Layout:
    """The part of a whole micro-batch's layout that a host's slots hold."""
    return Layout.of(
        {f.name: (f.dtype, tuple(end - begin for begin, end in ranges.fields[f.name])) for f in layout.fields},
        late=layout.late_names,
    )


def the_same_on_all(layouts: Sequence[Layout], names: Sequence[str]) -> Layout:
    """Handles name a layout by one id on all hosts. Raises ``SettingsError`` naming two hosts that differ."""
    for name, layout in zip(names, layouts, strict=True):
        if layout != layouts[0]:
            one, other = ({f.name: f.shape for f in each.fields} for each in (layouts[0], layout))
            field = next(field for field in one if one[field] != other[field])
            raise SettingsError(
                f"{names[0]} holds {field} {list(one[field])} and {name} {list(other[field])}; let the engine's mesh "
                "cut micro-batches into parts of one shape, with the same number of devices on each host"
            )
    return layouts[0]


def check_cover(windows: Sequence[Window], rows: int, tokens: int) -> None:
    """Raises ``LayoutError`` for a place of the micro-batch that no host holds: nobody would train it."""
    row_cuts = sorted({0, rows, *(w.row_begin for w in windows), *(w.row_end for w in windows)})
    token_cuts = sorted({0, tokens, *(w.token_begin for w in windows), *(w.token_end for w in windows)})
    for row in row_cuts[:-1]:
        for token in token_cuts[:-1]:
            if not any(w.row_begin <= row < w.row_end and w.token_begin <= token < w.token_end for w in windows):
                raise LayoutError(
                    f"row {row}, token {token} of a micro-batch lies on no host; let the engine's mesh have devices of "
                    "all hosts"
                )


def _are_counts(value: Any, count: int) -> bool:
    return type(value) is list and len(value) == count and all(type(each) is int and each >= 0 for each in value)
