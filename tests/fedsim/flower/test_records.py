"""Tests of the conversion between tensors and Flower's records, which gives the same bytes as Flower's own."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis.extra import numpy as arrays

from fedsim.flower import records

KINDS = arrays.integer_dtypes() | arrays.floating_dtypes(endianness="<") | arrays.boolean_dtypes()


@given(arrays.arrays(KINDS, arrays.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=4)))
def test_packing_gives_flowers_bytes_and_viewing_gives_the_values_back(values: Any) -> None:
    ours, flowers = records.pack(values), Array(values)
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (flowers.dtype, flowers.shape, flowers.stype, flowers.data)
    for array in (ours, flowers):
        seen = records.read_array(array)
        assert seen.dtype == values.dtype
        assert seen.shape == values.shape
        assert seen.tobytes() == values.tobytes()


def test_arrays_in_fortran_order_are_read_as_flower_reads_them() -> None:
    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(records.read_array(Array(values)), values)
    assert np.array_equal(records.read_array(records.pack(values)), values)


@pytest.mark.parametrize(
    "broken",
    [
        {"shape": (3,)},
        {"dtype": "float64"},
        {"data": b""},
        {"data": b"\x93NUMPY\x01\x00"},
        {"dtype": "object"},
        {"dtype": "nonsense"},
        {"shape": (2**40, 2**40)},
    ],
)
def test_an_inconsistent_array_is_refused_or_gives_the_original_values(broken: dict[str, Any]) -> None:
    whole = Array(np.float32([1, 2]))
    array = Array(**{**{k: getattr(whole, k) for k in ("dtype", "shape", "stype", "data")}, **broken})
    try:
        seen = records.read_array(array)
    except (ValueError, EOFError, TypeError):
        return
    assert np.array_equal(seen, [1, 2])


def test_tensors_are_copies_that_may_be_written_to() -> None:
    array = Array(np.float32([1, 2]))
    tensor = records.to_tensor(array)
    tensor.add_(1)
    assert torch.equal(records.to_tensor(array), torch.tensor([1.0, 2.0]))


def test_bytes_are_counted_as_flower_counts_them_and_empty_values_as_none() -> None:
    """Flower's own count fails for empty values, which a client may send."""
    full = RecordDict({"a": ConfigRecord({"k": "text", "list": [1, 2]}), "m": MetricRecord({"n": 3})})
    assert records.count_bytes(full) == sum(record.count_bytes() for record in full.values())
    empty = RecordDict({"a": ConfigRecord({"k": "text", "list": [1, 2], "no": "", "bytes": b"", "none": []}), "m": full["m"]})
    assert records.count_bytes(empty) == records.count_bytes(full) + len("no" + "bytes" + "none")


def test_messages_about_received_arrays_give_the_sizes_or_say_that_objects_are_not_loaded() -> None:
    whole = Array(np.float32([1, 2]))
    cut = Array(dtype="float64", shape=(2,), stype=whole.stype, data=whole.data[:-1])
    with pytest.raises(ValueError, match=r"shape \(2,\) and type float32 has 7 bytes instead of 8"):
        records.read_array(cut)
    buffer = BytesIO()
    np.save(buffer, np.array([None, "a"], dtype=object))
    with pytest.raises(ValueError, match="an array of Python objects"):
        records.read_array(Array(dtype="float32", shape=(2,), stype=whole.stype, data=buffer.getvalue()))
