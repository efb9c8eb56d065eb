"""Split batches into shards and merge shards into batches, along the first dimension. Pure.

A batch is a torch tensor, a numpy array, a list, or a dict of these, at any depth. A bool, int, float or str in a dict
belongs to the batch as a whole and goes into each shard, and so does None. torch and numpy are not imported here: a
batch can hold a tensor only if the process has imported torch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rlinf_actors.errors import RoutingError

_WHOLE = (bool, int, float, str, type(None))
"""Types of values that belong to a batch as a whole."""


def _is_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def infer_batch_size(data: Any) -> int:
    """Return the number of elements of a batch: the first dimension of a tensor or array, or the length of a list.

    For a dict it is the size of the first value that is not None.

    Raises:
        RoutingError: (a ValueError) *data* has no size, because it is of another type, or all of its values are None.
    """
    if _is_tensor(data) or _is_array(data):
        if not data.ndim:
            raise RoutingError(f"a {type(data).__name__} without dimensions has no batch size")
        return int(data.shape[0])
    if isinstance(data, list):
        return len(data)
    if isinstance(data, dict):
        for value in data.values():
            if value is not None:
                return infer_batch_size(value)
        raise RoutingError("a dict without any value that is not None has no batch size: pass batch_size=")
    raise RoutingError(
        f"the batch size of a {type(data).__name__} is not known: pass batch_size=, or infer_batch_size_fn= to the "
        "receiver"
    )


def get_batch_size(data: Any, infer_batch_size_fn: Callable[[Any], int] | None = None) -> int:
    """Return ``infer_batch_size_fn(data)``, or `infer_batch_size` of *data* if there is no such function."""
    return infer_batch_size(data) if infer_batch_size_fn is None else infer_batch_size_fn(data)


def validate_batch_size(
    data: Any, expected_batch_size: int | None, infer_batch_size_fn: Callable[[Any], int] | None = None
) -> None:
    """Raise RoutingError (a ValueError) if *data* has another size than *expected_batch_size*; None expects nothing."""
    if expected_batch_size is None:
        return
    found = get_batch_size(data, infer_batch_size_fn)
    if found != expected_batch_size:
        raise RoutingError(
            f"Expected batch size {expected_batch_size}, but received {found}. Sender and receiver must use the same "
            "batch_size, which is the number of elements of all ranks together"
        )


def split_batch(data: Any, split_sizes: Sequence[int]) -> list[Any]:
    """Split a batch into shards of the sizes *split_sizes*, in order.

    Tensors in the shards are contiguous. Arrays in the shards are views of the array in *data*.

    Raises:
        RoutingError: (a ValueError) a tensor, array or list does not have as many elements as the shards together, or
            a value has a type that cannot be split.
    """
    return _split(data, list(split_sizes), "data")


def _split(data: Any, sizes: list[int], where: str) -> list[Any]:
    if isinstance(data, _WHOLE):
        return [data for _ in sizes]
    if isinstance(data, dict):
        split = {key: _split(value, sizes, f"{where}[{key!r}]") for key, value in data.items()}
        return [{key: parts[index] for key, parts in split.items()} for index in range(len(sizes))]
    if not (_is_tensor(data) or _is_array(data) or isinstance(data, list)):
        raise RoutingError(
            f"{where} is a {type(data).__name__}, which cannot be split: use tensors, arrays, lists and dicts of them, "
            "or pass split_fn="
        )
    if isinstance(data, list) and not data:
        return [[] for _ in sizes]  # nothing of its kind in any shard
    size = infer_batch_size(data)
    if size != sum(sizes):
        raise RoutingError(
            f"{where} has {size} elements, but its shards of sizes {sizes} have {sum(sizes)} together: pass "
            "batch_size= if the first value of the batch does not have its size"
        )
    ends = list(itertools.accumulate(sizes))
    parts = [data[end - length : end] for end, length in zip(ends, sizes, strict=True)]
    return [part.contiguous() for part in parts] if _is_tensor(data) else parts


def merge_batches(batches: Sequence[Any]) -> Any:
    """Merge shards into a batch, in their order. A single shard is returned as it is.

    Raises:
        RoutingError: (a ValueError) there is no shard, the shards have different keys, or their values cannot be
            merged: some are None, or values that belong to the batch as a whole differ.
    """
    return _merge(list(batches), "data")


def _merge(batches: list[Any], where: str) -> Any:
    if not batches:
        raise RoutingError("there is no shard to merge")
    first = batches[0]
    if len(batches) == 1:
        return first
    empty = [index for index, batch in enumerate(batches) if batch is None]
    if len(empty) == len(batches):
        return None
    if empty:
        raise RoutingError(f"{where} is None in the shards {empty} and has a value in the others: pass merge_fn=")
    if _is_tensor(first):
        torch: Any = sys.modules["torch"]
        return torch.cat(batches, dim=0)
    if _is_array(first):
        numpy: Any = sys.modules["numpy"]
        return numpy.concatenate(batches, axis=0)
    if isinstance(first, list):
        return list(itertools.chain.from_iterable(batches))
    if isinstance(first, dict):
        for index, batch in enumerate(batches):
            odd = sorted(map(repr, first.keys() ^ batch.keys()))
            if odd:
                raise RoutingError(
                    f"{where}: shard {index} and shard 0 do not have the same keys; {', '.join(odd)} is in one of them "
                    "only. Send the same keys from all ranks, or pass merge_fn="
                )
        return {key: _merge([batch[key] for batch in batches], f"{where}[{key!r}]") for key in first}
    if all(batch == first for batch in batches):
        return first
    raise RoutingError(f"{where} is a {type(first).__name__} with different values in the shards: pass merge_fn=")
