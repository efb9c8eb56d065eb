"""Messages that are one array or one tensor: they arrive as they were, without pickle."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf_actors.wire import arrays, payload
from rlinf_actors.wire.payload import AuthenticatedParts

torch = pytest.importorskip("torch")


def arrived(parts):
    return payload.decode(AuthenticatedParts([bytes(parts[0]), memoryview(bytearray(parts[1]))]))


@pytest.mark.parametrize("dtype", ["u1", "<i8", ">f4", "f2", "c16", "?"])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_an_array_arrives_writable_with_its_dtype_and_shape(dtype, shape):
    sent = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    sent.flags.writeable = False
    found = arrived(arrays.encode(sent))
    assert (type(found), found.dtype, found.shape) == (np.ndarray, sent.dtype, shape)
    assert found.flags.writeable
    assert np.array_equal(found, sent)


DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_each_dtype_arrives(name):
    kind = getattr(torch, name)
    sent = torch.frombuffer(bytearray(64), dtype=torch.uint8).view(kind).view(2, -1)
    sent.view(torch.uint8)[:] = 1
    parts = arrays.encode(sent)
    found = arrived(parts)
    assert (found.dtype, found.shape) == (kind, sent.shape)
    assert bytes(arrays.bytes_of(found)) == bytes(parts[1]) == b"\1" * 64


def test_gradients_are_required_of_a_tensor_that_arrives_if_they_were():
    for grad in (False, True):
        assert arrived(arrays.encode(torch.ones(3, requires_grad=grad))).requires_grad is grad


def test_received_bytes_are_copied_so_that_the_array_can_be_written_to():
    head, part = arrays.encode(np.ones(3))
    found = payload.decode(AuthenticatedParts([head, bytes(part)]))
    found[0] = 2
    assert list(found) == [2, 1, 1]


def test_all_other_objects_are_left_to_pickle():
    class Array(np.ndarray):
        pass

    complex_ones, named = torch.ones(2, 2, dtype=torch.complex64), torch.ones(2)
    named.name_of_mine = "x"
    others = [
        None, 1, b"x", [np.ones(3)], np.ones((2, 3)).T, np.ones(3).view(Array), np.array([object()]), np.empty(0),
        np.ones(2, dtype=[("a", "i4")]), np.array(["text"]), np.array(["2026-01-01"], dtype="M8[D]"),
        np.ones(2, np.dtype("f8", metadata={"unit": "m"})), torch.ones(2, 3).T, torch.empty(0),
        torch.nn.Parameter(torch.ones(2)), torch.ones(2, 2).to_sparse(), complex_ones.conj(),
        complex_ones.conj().imag, torch.ones(2, device="meta"), named,
    ]  # fmt: skip
    assert [arrays.encode(other) for other in others] == [None] * len(others)


def test_dtypes_that_other_packages_add_to_numpy_are_left_to_pickle():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e5m2"):  # the kind of the second is numpy's "f"
        assert arrays.encode(np.ones(3, getattr(ml_dtypes, name))) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_memory_of_their_own_are_left_to_pickle():
    found = [arrays.encode(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))]
    torch.func.grad(lambda x: (found.append(arrays.encode(x)), x.sum())[1])(torch.ones(3))
    assert found == [None, None]


def test_the_parts_are_views_of_the_memory_that_keep_it_alive():
    sent = torch.zeros(300_000, dtype=torch.uint8)
    _, part = arrays.encode(sent)
    sent[7] = 1
    del sent
    assert (part[7], part.nbytes) == (1, 300_000)
