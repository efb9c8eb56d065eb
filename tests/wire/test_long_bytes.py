"""Bytes, bytearrays and memoryviews of 64 KiB or more travel beside the pickle, like arrays."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest

from rlinf_actors.wire.payload import AuthenticatedParts, decode, decode_call, encode, encode_call

LONG = 8 << 20


def peak(function):
    """Return the result of *function*, and the most bytes that were allocated meanwhile."""
    tracemalloc.start()
    try:
        result = function()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: [1, x],
        lambda x: {"a": (x, x)},
        lambda x: [np.arange(3), x, np.ones(40_000), bytearray(x)],
    ],
    ids=["alone", "list", "twice", "with arrays"],
)
def test_long_bytes_are_not_copied_by_the_sender(wrap):
    data = bytes(LONG)
    value = wrap(data)
    parts, allocated = peak(lambda: encode_call((value,), {}, copy=memoryview))
    assert any(part is data for part in parts)
    assert allocated < LONG // 8
    assert len(parts[0]) < 1000


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_receiver_copies_long_bytes_once(kind):
    parts = encode_call((kind(LONG), 1), {"b": [kind(LONG)]})
    arrived = AuthenticatedParts([parts[0], *map(memoryview, parts[1:])])
    (args, kwargs), allocated = peak(lambda: decode_call(arrived))
    assert (args, kwargs) == ((kind(LONG), 1), {"b": [kind(LONG)]})
    assert type(args[0]) is kind
    assert 2 * LONG <= allocated < 2.1 * LONG


def test_result_of_bytes_is_bytes_again():
    for value in (bytes(LONG), {"a": bytes(LONG)}):
        assert decode(AuthenticatedParts(encode(value))) == value


def test_bytearray_is_a_snapshot_and_stays_one_object():
    data = bytearray(LONG)
    parts = encode([data, data])
    data[0] = 1
    first, second = decode(AuthenticatedParts(parts))
    assert first is second
    assert first == bytearray(LONG)
    data.extend(b"x")  # no view of it is left


def read_only(array):
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    "view",
    [
        lambda data: memoryview(data).toreadonly(),
        lambda data: memoryview(memoryview(data).toreadonly())[:-1],
        lambda data: read_only(np.frombuffer(data, np.uint8)),
        lambda data: np.frombuffer(memoryview(data).toreadonly(), np.uint8)[:-1],
    ],
    ids=["memoryview", "slice", "array", "array of a view"],
)
def test_read_only_view_of_memory_that_may_change_is_a_snapshot(view):
    data = bytearray(LONG)
    parts = encode_call((view(data),), {})
    data[0] = 1
    assert decode_call(AuthenticatedParts(parts))[0][0][0] == 0


def test_read_only_array_of_dates_is_a_snapshot():
    """Such an array does not tell by the buffer protocol whether it is read-only."""
    dates = np.zeros(LONG // 8, "datetime64[s]")
    view = read_only(dates.view(np.int64))
    parts = encode_call((view,), {})
    dates[0] = 1
    assert decode_call(AuthenticatedParts(parts))[0][0][0] == 0


def test_array_over_bytes_is_not_copied():
    data = bytes(LONG)
    parts, allocated = peak(lambda: encode_call((np.frombuffer(data, np.uint8)[1:], memoryview(data)), {}))
    assert len(parts) == 3
    assert allocated < LONG // 8


@pytest.mark.parametrize("length", [1, LONG])
def test_memoryview_arrives_as_bytes(length):
    data = bytes(range(256)) * (-(-length // 256))
    parts = encode([memoryview(data)[:length], memoryview(data)[:length:2]])
    assert decode(AuthenticatedParts(parts)) == [data[:length], data[:length:2]]


@pytest.mark.parametrize("length", [(1 << 14) - 1, 1 << 14, (1 << 16) - 1, 1 << 16])
@pytest.mark.parametrize("kind", [bytes, bytearray, lambda n: "é" * n])
def test_every_length_arrives_equal(kind, length):
    args = (kind(length), [kind(length), kind(3)])
    assert decode_call(AuthenticatedParts(encode_call(args, {})))[0] == args


def test_class_by_value_with_long_bytes_arrives():
    class Local:
        data = bytes(LONG)

    parts = encode(Local())
    assert len(parts[0]) < 5000
    assert decode(AuthenticatedParts(parts)).data == Local.data


def test_plain_unpickler_of_another_version_reads_them():
    value = [bytes(LONG), bytearray(b"x" * LONG), "é" * LONG]
    parts = encode(value)
    assert pickle.loads(parts[0][1:], buffers=parts[1:]) == value  # noqa: S301
