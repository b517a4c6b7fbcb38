"""Layouts: placement, dtypes bit for bit, and descriptions that lie."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmstage.errors import LayoutError
from shmstage.memory.layout import _DTYPES, MAX_NBYTES, Field, Layout, dtype_name, numpy_dtype


def test_fields_are_64_byte_aligned_and_keep_their_order() -> None:
    layout = Layout.of({"a": ("int8", (3,)), "b": ("float64", (2, 2)), "c": ("bool", ())})
    assert [(f.name, f.offset, f.nbytes) for f in layout.fields] == [("a", 0, 3), ("b", 64, 32), ("c", 128, 1)]
    assert (layout.nbytes, layout.payload_nbytes) == (4096, 36)


def test_late_fields_lie_last_in_pages_of_their_own() -> None:
    layout = Layout.of({"late": ("float32", (4,)), "a": ("int8", (5000,)), "b": ("int8", (1,))}, late=["late"])
    assert [(f.name, f.offset, f.late) for f in layout.fields] == [
        ("a", 0, False), ("b", 5056, False), ("late", 8192, True),
    ]  # fmt: skip
    assert (layout.late_offset, layout.nbytes, layout.late_names) == (8192, 12288, ("late",))


@pytest.mark.parametrize("name", sorted(_DTYPES))
def test_every_dtype_round_trips_bit_exact_through_shared_bytes(name: str) -> None:
    """S64, S66"""
    dtype = numpy_dtype(name)
    every_byte = np.arange(256 * dtype.itemsize, dtype=np.uint8) if name != "bool" else np.arange(256) % 2
    if name in ("int4", "uint4"):
        array = np.arange(-8, 8).astype(dtype) if name == "int4" else np.arange(16).astype(dtype)
    else:
        array = every_byte.astype(np.uint8).view(dtype)  # NaN payloads included
    layout = Layout.from_wire(Layout.from_arrays({"x": array}).to_wire())
    with mmap.mmap(-1, layout.nbytes) as memory:
        views = layout.views(memory, 0)
        views["x"][...] = array
        again = layout.views(memory, 0)["x"]
        assert again.dtype == dtype and again.shape == array.shape
        assert again.tobytes() == array.tobytes()
        del views, again


def test_four_bit_integers_are_padded_to_a_byte_each() -> None:
    """S70"""
    assert Layout.of({"x": ("int4", (7,))}).payload_nbytes == 7


@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_four_bit_integers_that_come_packed_two_to_a_byte_are_refused(name: str) -> None:
    """S70: as a description with half the bytes, and as bytes laid into a field."""
    padded = Layout.of({"x": (name, (8,))})
    packed = [["x", name, [8], 0, 4, False]]
    with pytest.raises(LayoutError, match="nbytes=8.*nbytes=4"):
        Layout.from_wire(packed)
    assert Layout.from_wire([["x", name, [8], 0, 8, False]]) == padded
    with mmap.mmap(-1, padded.nbytes) as memory:
        view = padded.views(memory, 0)["x"]
        assert (view.itemsize, view.nbytes) == (1, 8)
        with pytest.raises(ValueError, match="broadcast"):
            view.view(np.uint8)[...] = np.zeros(4, np.uint8)
        del view


def test_zero_size_and_zero_dimensional_arrays_keep_shape_and_dtype() -> None:
    """S69"""
    layout = Layout.from_arrays({"empty": np.zeros((0, 4), np.float32), "scalar": np.array(7, np.int64)})
    with mmap.mmap(-1, layout.nbytes) as memory:
        views = layout.views(memory, 0)
        views["scalar"][...] = 7
        assert (views["empty"].shape, views["empty"].dtype) == ((0, 4), np.float32)
        assert (views["scalar"].shape, views["scalar"][()]) == ((), 7)
        del views


def test_a_layout_of_no_fields_or_only_empty_ones_still_has_a_page() -> None:
    """S69"""
    assert Layout.of({}).nbytes == 4096
    assert Layout.of({"empty": ("int8", (0,))}).nbytes == 4096


def test_absent_optional_fields_stay_absent() -> None:
    assert [f.name for f in Layout.of({"tokens": ("int32", (2,))}).fields] == ["tokens"]


@pytest.mark.parametrize(
    "dtype", ["O", "U3", "S3", ">i4", ">f8", "c8", "M8[s]", "V2", "f16", [("a", "i4")], object(), "nonsense"]
)
def test_other_dtypes_are_refused(dtype: Any) -> None:
    """S71"""
    with pytest.raises(LayoutError):
        dtype_name(dtype)


def test_object_arrays_are_refused_before_anything_is_laid_out() -> None:
    """S71"""
    with pytest.raises(LayoutError, match="object"):
        Layout.from_arrays({"x": np.array([{}], dtype=object)})


def test_bfloat16_travels_by_name_not_by_dtype_str() -> None:
    """S64"""
    assert dtype_name(np.dtype(ml_dtypes.bfloat16)) == "bfloat16"
    with pytest.raises(LayoutError):
        dtype_name(np.dtype("<V2"))


def test_a_non_contiguous_array_is_copied_in_c_order_never_misread() -> None:
    """S67"""
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    layout = Layout.from_arrays({"x": array})
    with mmap.mmap(-1, layout.nbytes) as memory:
        layout.views(memory, 0)["x"][...] = array
        assert np.frombuffer(memory[:48], np.int32).tolist() == array.flatten().tolist()


def test_equal_descriptions_have_equal_ids_and_others_do_not() -> None:
    one = Layout.of({"a": ("int8", (3,))})
    assert one.layout_id == Layout.from_wire(one.to_wire()).layout_id > 0
    others = [Layout.of({"a": ("int8", (4,))}), Layout.of({"b": ("int8", (3,))}), Layout.of({"a": ("uint8", (3,))})]
    assert one.layout_id not in {layout.layout_id for layout in others}
    assert one.layout_id != Layout.of({"a": ("int8", (3,))}, late=["a"]).layout_id


@pytest.mark.parametrize(
    "wire",
    [
        None, 7, "x", {"a": 1}, [1], [["a"]], [[1, "int8", [1], 0, 1, False]],
        [["a", "int8", [1], 64, 1, False]],  # not where it would be placed
        [["a", "int8", [1], 0, 2, False]],  # more bytes than its shape has
        [["a", "int8", [-1], 0, -1, False]],
        [["a", "int8", [1 << 62, 4], 0, 0, False]],  # overflows to 0 in 64 bits
        [["a", "int8", [1 << 70], 0, 1 << 70, False]],
        [["a", "int8", [True], 0, 1, False]], [["a", "int8", [1.0], 0, 1, False]], [["a", "int8", [1], 0, 1, 0]],
        [["a", "object", [1], 0, 8, False]], [["", "int8", [1], 0, 1, False]], [["a" * 101, "int8", [1], 0, 1, False]],
        [["a", "int8", [1], 0, 1, False], ["a", "int8", [1], 64, 1, False]],
        [["a", "int8", [1], 0, 1, True], ["b", "int8", [1], 64, 1, False]],  # early after late
        [["a", "int8", [1] * 17, 0, 1, False]],
        [[f"f{i}", "int8", [0], 0, 0, False] for i in range(257)],
        [[f"f{i}", "int8", [0], 0, 0, True] for i in range(17)],
    ],
)  # fmt: skip
def test_a_description_that_lies_is_refused(wire: object) -> None:
    """S71, S75"""
    with pytest.raises(LayoutError):
        Layout.from_wire(wire)


def test_a_field_constructed_out_of_place_is_refused() -> None:
    with pytest.raises(LayoutError, match="want"):
        Layout((Field("a", "int8", (1,), 0, 1), Field("b", "int8", (1,), 1, 1)))


_shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


_specs = st.dictionaries(
    st.text(min_size=1, max_size=5), st.tuples(st.sampled_from(sorted(_DTYPES)), _shapes), max_size=6
)


@settings(max_examples=25, deadline=None)
@given(_specs)
def test_fields_never_overlap_and_survive_the_wire(specs: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    layout = Layout.of(specs, late=[name for name in specs if name < "M"][:16])
    assert Layout.from_wire(layout.to_wire()) == layout
    end = 0
    for field in layout.fields:
        assert field.offset % 64 == 0 and field.offset >= end
        end = field.offset + field.nbytes
    assert end <= layout.nbytes and layout.nbytes % 4096 == 0


def test_views_outside_the_mapping_are_refused() -> None:
    """S75"""
    layout = Layout.of({"a": ("int8", (100,))})
    memory = bytearray(200)
    assert layout.views(memory, 100)["a"].shape == (100,)
    for base in (101, 200, 1 << 62, 1 << 64, -1, -0x20):
        with pytest.raises(LayoutError):
            layout.views(memory, base)


def test_views_keep_the_mapping_they_were_made_over() -> None:
    """S56"""
    memory = mmap.mmap(-1, 4096)
    view = Layout.of({"a": ("int8", (100,))}).views(memory, 0)["a"][10:20]
    with pytest.raises(BufferError):  # instead of a crash at the next read
        memory.close()
    del view
    memory.close()


def test_sizes_beyond_four_gigabytes_are_addressed_in_64_bits(tmp_path: Path) -> None:
    """S74, S78"""
    # Sparse: only the touched pages exist.
    sizes = {"a": (1 << 31) - 1, "b": 1 << 31, "c": (1 << 32) + 1}
    layout = Layout.of({name: ("uint8", (size,)) for name, size in sizes.items()})
    assert layout.fields[2].offset == (1 << 32) and layout.nbytes > 8 << 30
    with open(tmp_path / "sparse", "w+b") as file:
        file.truncate(layout.nbytes)
        with mmap.mmap(file.fileno(), layout.nbytes) as memory:
            views = layout.views(memory, 0)
            for number, name in enumerate(sizes, 1):
                assert views[name].nbytes == sizes[name]
                views[name][-1] = number
            del views
            ends = [f.offset + f.nbytes - 1 for f in layout.fields]
            assert [memory[end] for end in ends] == [1, 2, 3]


def test_a_layout_beyond_the_address_space_is_refused() -> None:
    """S75"""
    with pytest.raises(LayoutError, match=str(MAX_NBYTES)):
        Layout.of({"a": ("float64", (1 << 45,))})
    with pytest.raises(LayoutError):
        Layout.of(dict.fromkeys("abc", ("uint8", (1 << 46,))))
