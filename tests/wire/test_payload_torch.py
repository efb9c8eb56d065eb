"""Tensors to buffers and back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rlinf_actors.wire import payload  # noqa: E402
from rlinf_actors.wire.payload import AuthenticatedParts  # noqa: E402

pytestmark = pytest.mark.torch


def there(value):
    return payload.decode(AuthenticatedParts([bytes(part) for part in payload.encode(value)]))


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (3, 0, 2), (1,)])
def test_every_dtype_and_shape(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    back = there(tensor)
    assert (back.dtype, back.shape, back.requires_grad) == (dtype, tensor.shape, False)
    assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))


def test_tensors_arrive_writable_and_alone():
    tensor = torch.arange(4)
    back = there(tensor)
    back += 1
    assert tensor.tolist() == [0, 1, 2, 3]
    assert back.tolist() == [1, 2, 3, 4]


def test_at_any_depth_outside_the_pickle_stream():
    tensor = torch.zeros(10_000)
    parts = payload.encode({"a": [(tensor,)]})
    assert len(parts) == 2
    assert len(parts[0]) < 600
    assert memoryview(parts[1]).nbytes == 40_000


def test_what_is_encoded_is_a_snapshot():
    tensor = torch.zeros(10_000)
    parts = payload.encode(tensor)
    tensor[0] = 1.0
    assert bytes(memoryview(parts[1])[:4]) == b"\0\0\0\0"


def test_non_contiguous_views_are_made_contiguous():
    tensor = torch.arange(12).reshape(3, 4).t()[::2]
    assert torch.equal(there([tensor])[0], tensor)


def test_a_view_does_not_carry_its_base_along():
    view = torch.zeros(1_000_000)[:10]
    assert sum(memoryview(part).nbytes for part in payload.encode(view)) < 1000


def test_parameters_and_modules():
    parameter = torch.nn.Parameter(torch.ones(3))
    back = there(parameter)
    assert type(back) is torch.nn.Parameter
    assert back.requires_grad
    model = torch.nn.Linear(3, 2)
    loaded = there(model)
    assert torch.equal(loaded.weight, model.weight)
    assert loaded.weight.requires_grad
    state = there(model.state_dict())
    assert list(state) == ["weight", "bias"]


def test_leaf_that_requires_grad_keeps_it():
    back = there(torch.ones(2, requires_grad=True))
    assert back.requires_grad
    assert back.is_leaf


def test_result_of_a_computation_arrives_as_a_leaf_as_with_torch_save():
    tensor = torch.ones(20_000, requires_grad=True) * 2
    parts = payload.encode({"loss": tensor})
    assert len(parts) == 2
    back = payload.decode(AuthenticatedParts([bytes(part) for part in parts]))["loss"]
    assert back.is_leaf
    assert back.requires_grad
    assert back.sum().item() == 40_000


def test_sparse_and_conjugate_go_torchs_way():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there(sparse).to_dense(), torch.eye(3))
    conj = torch.tensor([1 + 2j]).conj()
    assert there(conj).tolist() == [1 - 2j]


def test_local_class_that_holds_tensors_goes_by_value_with_raw_tensors():
    class Local:
        def __init__(self):
            self.t = torch.full((5000,), 2.0)

    parts = payload.encode(Local())
    assert parts[0][:1] == b"C"
    assert max(memoryview(part).nbytes for part in parts[1:]) == 20_000
    assert payload.decode(AuthenticatedParts([bytes(p) for p in parts])).t.sum().item() == 10_000


def test_sharing_one_tensor_twice_is_one_tensor():
    tensor = torch.zeros(3)
    a, b = there([tensor, tensor])
    a[0] = 1
    assert b[0].item() == 1


def test_numbers_of_sixteen_bytes_are_aligned_wherever_their_bytes_came():
    """torch writes them by instructions that fault elsewhere; what a ZeroMQ frame holds begins at any 8 bytes."""
    sent = torch.arange(6).to(torch.complex128)
    header, data = (bytes(part) for part in payload.encode(sent))
    room = torch.zeros(len(data) + 32, dtype=torch.uint8)
    start = 24 - room.data_ptr() % 16
    room[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    back = payload.decode(AuthenticatedParts([header, memoryview(room.numpy())[start : start + len(data)]]))
    assert back.data_ptr() % 16 == 0
    assert torch.equal(back, sent)
