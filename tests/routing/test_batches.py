"""Splitting and merging: what is split and merged again is what it was, and what cannot be split is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors import RoutingError, get_batch_size, infer_batch_size, merge_batches, split_batch
from rlinf_actors.routing.batches import validate_batch_size


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_merging_undoes_splitting(sizes, data):
    size = sum(sizes)
    batch = {
        "numbers": data.draw(st.lists(st.integers(), min_size=size, max_size=size)),
        "array": np.arange(3 * size).reshape(size, 3),
        "nested": {"names": [f"task {n}" for n in range(size)], "nothing": None, "empty": []},
        "scale": 0.5,
        "mode": "train",
        "absent": None,
    }
    shards = split_batch(batch, sizes)
    assert [len(shard["numbers"]) for shard in shards] == sizes
    merged = merge_batches(shards)
    assert np.array_equal(merged.pop("array"), batch.pop("array"))
    assert merged == batch


def test_tensors_are_split_into_contiguous_shards():
    torch = pytest.importorskip("torch")
    batch = torch.arange(24).reshape(4, 6).t()  # 6 elements, not contiguous
    shards = split_batch({"x": batch}, [2, 4])
    assert all(shard["x"].is_contiguous() for shard in shards)
    assert torch.equal(merge_batches(shards)["x"], batch)
    assert infer_batch_size(batch) == 6


def test_the_size_of_a_dict_is_that_of_its_first_value():
    assert infer_batch_size({"a": None, "b": {"c": None, "d": np.zeros((7, 2))}}) == 7
    assert get_batch_size("anything", lambda data: 3) == 3


@pytest.mark.parametrize("data", [{"a": None}, (1, 2), np.float64(3), np.array(3)])
def test_data_without_a_size_is_refused(data):
    with pytest.raises(ValueError, match="batch size"):
        infer_batch_size(data)


@pytest.mark.parametrize("value", [[1, 2, 3], np.zeros(3), np.zeros((5, 2))])
def test_a_value_of_another_size_is_named(value):
    with pytest.raises(
        RoutingError, match=r"data\['obs'\]\['states'\] has [35] elements, but its shards of sizes \[2, 2\]"
    ):
        split_batch({"obs": {"states": value}}, [2, 2])


def test_a_type_that_cannot_be_split_is_named():
    with pytest.raises(ValueError, match=r"data\['set'\] is a set, which cannot be split"):
        split_batch({"set": {1, 2}}, [1, 1])


def test_shards_that_do_not_fit_are_named():
    with pytest.raises(RoutingError, match="there is no shard"):
        merge_batches([])
    with pytest.raises(RoutingError, match=r"data\['x'\] is None in the shards \[1\]"):
        merge_batches([{"x": [1]}, {"x": None}])
    with pytest.raises(RoutingError, match="shard 1 and shard 0 do not have the same keys; 'last' is in one"):
        merge_batches([{"x": [1]}, {"x": [2], "last": [True]}])
    with pytest.raises(RoutingError, match=r"data\['scale'\] is a float with different values"):
        merge_batches([{"scale": 0.5}, {"scale": 0.6}])
    assert merge_batches([None, None]) is None


def test_a_shard_of_another_size_is_refused():
    validate_batch_size([1, 2], 2)
    validate_batch_size([1, 2], None)
    with pytest.raises(ValueError, match="Expected batch size 3, but received 2"):
        validate_batch_size([1, 2], 3)
