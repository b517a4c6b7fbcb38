"""Records out of a Parquet file: one row each, lists of numbers as numpy arrays. The only door to pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmstage.errors import MissingExtraError, TrajectoryError, named, shown
from shmstage.packing.import_rows import Row
from shmstage.packing.room import check_room

#: rows that are taken out of the file at a time
ROWS_AT_ONCE = 256


def parquet_rows(file: Path) -> Iterator[Row]:
    """Raises `TrajectoryError` naming the file, `MissingExtraError` without pyarrow, `BudgetError` without room."""
    try:
        # it has no types, and need not be there
        import pyarrow  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError(f"{file} is Parquet, which needs pyarrow; pip install 'shmstage[parquet]'") from None
    try:
        with parquet.ParquetFile(file) as opened:
            metadata = opened.metadata
            check_room(_unpacked_nbytes(metadata), f"{file}, unpacked", "import it in parts")
            number = 0
            for batch in opened.iter_batches(ROWS_AT_ONCE):
                names, columns = batch.schema.names, batch.columns
                if len(set(names)) != len(names):
                    raise TrajectoryError(f"{file}: a column occurs twice among {shown(names, 400)}; rename one")
                for place in range(batch.num_rows):
                    number += 1
                    values = {name: _value(column[place]) for name, column in zip(names, columns, strict=True)}
                    yield Row(f"{file}, row {number}", number, values)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        text = named(getattr(error, "strerror", None) or " ".join(str(error).split()), 300)
        raise TrajectoryError(f"{file} cannot be read as Parquet: {text}; write it again") from None


def _unpacked_nbytes(metadata: Any) -> int:
    """The size that a file tells is that of values as encoded: a million equal ones take a few bytes there."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(max(abs(column.total_uncompressed_size), 8 * abs(column.num_values)) for column in columns)


def _value(scalar: Any) -> Any:
    """A list of numbers as an array, everything else as Python has it."""
    from pyarrow import types

    kind = scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if scalar.is_valid and is_list and types.is_primitive(kind.value_type):
        items = scalar.values
        # what is missing inside a list would become NaN, or 0
        if not items.null_count and (types.is_integer(items.type) or types.is_floating(items.type)):
            return items.to_numpy(zero_copy_only=False)
    return scalar.as_py()
