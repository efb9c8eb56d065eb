"""Tensors in messages."""

from __future__ import annotations

import message_zoo as zoo
import pytest
from message_kit import World

torch = pytest.importorskip("torch")

from rlinf_actors.messaging import contents  # noqa: E402
from rlinf_actors.net import bulk, bulk_framing  # noqa: E402
from rlinf_actors.wire import payload  # noqa: E402
from rlinf_actors.wire.payload import AuthenticatedParts  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [getattr(torch, name) for name in (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
) if hasattr(torch, name)]  # fmt: skip


def there_and_back(value):
    parts, _ = contents.encode(value)
    return payload.decode(AuthenticatedParts([bytes(part) for part in parts]))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(dtype, shape):
    tensor = (torch.rand(shape) * 10).to(dtype)
    back = there_and_back([tensor])[0]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))


BAD = torch.arange(12).reshape(3, 4).t()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (BAD, "object"),
        ([1, BAD], r"object\[1\]"),
        ({"w": BAD}, r"object\['w'\]"),
        (zoo.Batch(None, BAD), r"object\.rewards"),
        (zoo.Frozen(1, BAD), r"object\.b"),
    ],
    ids=["top", "list", "dict", "dataclass", "slots"],
)
def test_not_contiguous_is_refused_by_place(value, place):
    with pytest.raises(ValueError, match=rf"^{place} is a tensor of shape \(4, 3\) and strides \(1, 4\)"):
        contents.check_contiguous(value)


@pytest.mark.parametrize("value", [[[BAD]], {"a": {"b": BAD}}, (BAD,), zoo.Step(BAD, 0, done=True)], ids=repr)
def test_deeper_ones_are_made_contiguous(value):
    contents.check_contiguous(value)
    back = there_and_back(value)
    while not isinstance(back, torch.Tensor):
        back = next(iter(back.values() if isinstance(back, dict) else back))
    assert torch.equal(back, BAD)
    assert back.is_contiguous()


def test_contiguous_views_and_sparse_tensors_pass():
    contents.check_contiguous([torch.arange(12)[3:6], torch.zeros(()), torch.zeros(0), torch.eye(3).to_sparse()])


def test_copy_into_copies_into_any_layout():
    target = torch.zeros(3, 4).t()
    contents.copy_into(target, torch.ones(4, 3), "a:0")
    assert target.sum() == 12
    leaf = torch.zeros(2, requires_grad=True)
    contents.copy_into(leaf, torch.ones(2), "a:0")
    assert leaf.tolist() == [1, 1]


@pytest.mark.parametrize("sent", [torch.ones(4, 3), torch.ones(3, 4, dtype=torch.float64), torch.ones(12)], ids=repr)
def test_copy_into_names_another_shape_or_dtype(sent):
    target = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"a:0 sent a tensor of shape .* was given one of shape \(3, 4\)"):
        contents.copy_into(target, sent, "a:0")
    assert target.sum() == 0


def test_copy_into_refuses_other_objects():
    with pytest.raises(TypeError, match="got a list from a:0"):
        contents.copy_into(torch.zeros(1), [1], "a:0")


async def test_state_dict_of_hundreds_of_tensors_is_one_message_and_few_pieces():
    world = World()
    (a,), (b,) = world.launch("a"), world.launch("b")
    state = {f"layer{n}": torch.full(((n * 37) % 50_000 + 1,), float(n)) for n in range(400)}
    got = b.recv("a:0")
    a.send("b:0", state)
    found = await got
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert len(b.messages) == 1
    sizes = [memoryview(part).nbytes for part in contents.encode(state)[0]]
    pieces = list(bulk_framing.pieces_of(1, bulk_framing.regions_of([size for size in sizes if size >= bulk.LARGE])))
    assert len(pieces) <= sum(sizes) // bulk_framing.PIECE * 1.25 + 2
