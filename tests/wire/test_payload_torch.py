"""Tensors to buffers and back."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from rlinf_actors.errors import SerializationError  # noqa: E402
from rlinf_actors.messaging import contents  # noqa: E402
from rlinf_actors.messaging.tensor_transfer import DetachedTensors  # noqa: E402
from rlinf_actors.wire import payload  # noqa: E402
from rlinf_actors.wire.payload import AuthenticatedParts  # noqa: E402

pytestmark = pytest.mark.torch


def sent_and_received(value):
    return payload.decode(AuthenticatedParts([bytes(part) for part in payload.encode(value)]))


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (3, 0, 2), (1,)])
def test_tensors_of_every_dtype_and_shape_arrive_equal(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    back = sent_and_received(tensor)
    assert (back.dtype, back.shape, back.requires_grad) == (dtype, tensor.shape, False)
    assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))


def test_received_tensor_is_writable_and_independent():
    tensor = torch.arange(4)
    back = sent_and_received(tensor)
    back += 1
    assert tensor.tolist() == [0, 1, 2, 3]
    assert back.tolist() == [1, 2, 3, 4]


def test_tensors_at_any_depth_travel_outside_the_pickle_stream():
    tensor = torch.zeros(10_000)
    parts = payload.encode({"a": [(tensor,)]})
    assert len(parts) == 2
    assert len(parts[0]) < 600
    assert memoryview(parts[1]).nbytes == 40_000


def test_encoding_takes_a_snapshot():
    tensor = torch.zeros(10_000)
    parts = payload.encode(tensor)
    tensor[0] = 1.0
    assert bytes(memoryview(parts[1])[:4]) == b"\0\0\0\0"


def test_non_contiguous_views_are_made_contiguous():
    tensor = torch.arange(12).reshape(3, 4).t()[::2]
    assert torch.equal(sent_and_received([tensor])[0], tensor)


def test_non_contiguous_views_are_copied_once():
    copied = []
    payload.encode([torch.rand(100, 200).t()], copy=lambda part: copied.append(part) or part)
    assert copied == []


def test_view_is_sent_without_its_base():
    view = torch.zeros(1_000_000)[:10]
    assert sum(memoryview(part).nbytes for part in payload.encode(view)) < 1000


def test_parameters_and_modules_arrive_equal():
    parameter = torch.nn.Parameter(torch.ones(3))
    back = sent_and_received(parameter)
    assert type(back) is torch.nn.Parameter
    assert back.requires_grad
    model = torch.nn.Linear(3, 2)
    loaded = sent_and_received(model)
    assert torch.equal(loaded.weight, model.weight)
    assert loaded.weight.requires_grad
    state = sent_and_received(model.state_dict())
    assert list(state) == ["weight", "bias"]


def test_leaf_keeps_requires_grad():
    back = sent_and_received(torch.ones(2, requires_grad=True))
    assert back.requires_grad
    assert back.is_leaf


def test_result_of_a_computation_arrives_as_a_leaf():
    tensor = torch.ones(20_000, requires_grad=True) * 2
    parts = payload.encode({"loss": tensor})
    assert len(parts) == 2
    back = payload.decode(AuthenticatedParts([bytes(part) for part in parts]))["loss"]
    assert back.is_leaf
    assert back.requires_grad
    assert back.sum().item() == 40_000


def test_sparse_and_conjugate_tensors_arrive_equal():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(sent_and_received(sparse).to_dense(), torch.eye(3))
    conj = torch.tensor([1 + 2j]).conj()
    assert sent_and_received(conj).tolist() == [1 - 2j]


def contents_of(nested):
    return [one.tolist() for one in nested.unbind()]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_arrive_equal(layout):
    parts = [torch.arange(2.0), torch.arange(5.0)]
    sent = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    back = sent_and_received({"responses": sent})["responses"]
    assert (back.is_nested, back.layout, back.requires_grad) == (True, layout, True)
    assert contents_of(back) == [[0, 1], [0, 1, 2, 3, 4]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_that_is_not_contiguous_arrives_equal():
    sent = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)]).transpose(1, 2)
    contents.check_contiguous([sent])
    assert contents_of(sent_and_received(sent)) == contents_of(sent)


def test_tensors_arrive_with_the_attributes_that_they_were_given():
    sent = torch.arange(3)
    sent.group, sent.me, sent.grad_norm = "experts", sent, torch.ones(2)
    back = sent_and_received([sent])[0]
    assert (back.group, back.grad_norm.tolist()) == ("experts", [1, 1])
    assert back.me is back
    assert vars(sent_and_received(torch.arange(3))) == {}


def test_tensors_that_travel_beside_their_object_keep_their_attributes():
    sent = torch.zeros(contents.LARGE)
    sent.group = "experts"
    taken = DetachedTensors(cpu=True)
    parts = payload.encode([sent], taker=taken)
    assert len(taken.tensors) == 1
    assert payload.decode(AuthenticatedParts(parts), taken.tensors)[0].group == "experts"


def test_parameters_arrive_with_their_attributes():
    sent = torch.nn.Parameter(torch.ones(3))
    sent.sequence_parallel = True
    assert sent_and_received(sent).sequence_parallel


def test_attribute_that_cannot_be_pickled_is_named():
    sent = torch.ones(2)
    sent.lock = threading.Lock()
    with pytest.raises(SerializationError) as caught:
        payload.encode_call(([sent],), {})
    assert caught.value.path == "args[0][0].lock"


def test_local_class_with_tensors_is_sent_by_value_with_raw_tensors():
    class Local:
        def __init__(self):
            self.t = torch.full((5000,), 2.0)

    parts = payload.encode(Local())
    assert parts[0][:1] == b"C"
    assert max(memoryview(part).nbytes for part in parts[1:]) == 20_000
    assert payload.decode(AuthenticatedParts([bytes(p) for p in parts])).t.sum().item() == 10_000


def test_tensor_sent_twice_arrives_as_one_tensor():
    tensor = torch.zeros(3)
    a, b = sent_and_received([tensor, tensor])
    a[0] = 1
    assert b[0].item() == 1


def test_tensors_of_16_byte_numbers_are_aligned():
    """torch's instructions for them fault at unaligned addresses; a ZeroMQ frame's data is aligned to 8 bytes only."""
    sent = torch.arange(6).to(torch.complex128)
    header, data = (bytes(part) for part in payload.encode(sent))
    room = torch.zeros(len(data) + 32, dtype=torch.uint8)
    start = 24 - room.data_ptr() % 16
    room[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    back = payload.decode(AuthenticatedParts([header, memoryview(room.numpy())[start : start + len(data)]]))
    assert back.data_ptr() % 16 == 0
    assert torch.equal(back, sent)
