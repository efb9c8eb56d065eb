"""Values of every kind by every way that values go, the first time and later: they arrive as pickle brings them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import live_workers as lw
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import value_workers as vw  # noqa: E402

from rlinf_actors import Channel  # noqa: E402

pytestmark = [
    pytest.mark.live,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # of an example that fails
]

LARGE = 50_000
"""Elements of arrays that go by another way than small ones: through shared memory, or as a part that is not copied."""
LENGTHS = st.sampled_from([0, 1, 6, 5000, LARGE])
DTYPES = ["u1", "<i8", ">i4", "f2", "f8", "c16", "?", "S3", "U2", "M8[D]", "O", "i4,f8"]
TENSOR_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@st.composite
def arrays(draw):
    """Arrays of each order in memory, read-only ones, and views."""
    count, dtype = draw(LENGTHS), draw(st.sampled_from(DTYPES))
    array = np.arange(count).astype("i4" if dtype == "i4,f8" else dtype.replace("S3", "i4").replace("U2", "i4"))
    if dtype in ("S3", "U2", "i4,f8"):
        array = (array % 9).astype(dtype)
    way = draw(st.sampled_from(["plain", "view", "strided", "backwards", "C", "F", "rows", "0-d", "subclass"]))
    if way in ("C", "F", "rows") and count % 2 == 0:
        array = np.array(array.reshape(2, -1), order="F" if way == "F" else "C")
        array = array[:, ::2] if way == "rows" else array
    elif way == "0-d" and count:
        array = array[:1].reshape(())
    elif way == "subclass":
        array = array.view(np.recarray if dtype == "i4,f8" else np.memmap)
    else:
        array = {"view": array[1:-1], "strided": array[::3], "backwards": array[::-1]}.get(way, array)
    array.setflags(write=draw(st.booleans()))
    return array


@st.composite
def tensors(draw):
    """Tensors of each layout and class, which may have attributes and require gradients."""
    count, dtype = draw(LENGTHS), draw(st.sampled_from(TENSOR_DTYPES))
    tensor = (torch.arange(count) % 5).to(dtype)
    ways = ["plain", "view", "2-d", "turned", "parameter", "subclass", "sparse", "csr", "lazy", "meta"]
    way = draw(st.sampled_from(ways))
    if way in ("2-d", "turned", "sparse", "csr") and count % 2 == 0:
        tensor = tensor.reshape(2, -1)
        if way == "turned":
            tensor = tensor.t()
        elif way != "2-d":
            tensor = tensor.to_sparse() if way == "sparse" else tensor.to_sparse_csr()
    elif way == "view":
        tensor = tensor[count // 2 :]
    elif way == "lazy":
        tensor = tensor.conj().imag if dtype.is_complex else tensor
    elif way == "subclass":
        tensor = tensor.as_subclass(vw.Tagged)
    elif way == "meta":
        tensor = tensor.to("meta")
    if dtype.is_floating_point and draw(st.booleans()):
        tensor = torch.nn.Parameter(tensor) if way == "parameter" else tensor.detach().requires_grad_()
    tensor = with_attributes(draw, tensor)
    return (tensor,) if way == "turned" else tensor  # send() takes it deeper in the object only


@st.composite
def nested_tensors(draw):
    lengths = draw(st.lists(st.sampled_from([0, 1, 5, LARGE]), min_size=1, max_size=3))
    layout = draw(st.sampled_from([torch.strided, torch.jagged]))
    parts = [torch.arange(float(one)).reshape(one, 1) for one in lengths]
    tensor = torch.nested.nested_tensor(parts, layout=layout, requires_grad=draw(st.booleans()))
    if layout is torch.strided:
        tensor = with_attributes(draw, tensor.transpose(1, 2) if draw(st.booleans()) else tensor)
    return tensor


def with_attributes(draw, tensor):
    if draw(st.booleans()):
        tensor.sequence_parallel = draw(st.booleans())
        tensor.sizes = np.arange(3)
    return tensor


def local_class():
    @dataclass
    class ByValue:
        value: Any

    return ByValue


LONG = st.sampled_from([0, 10, 70_000, 300_000])
BYTES = st.builds(lambda kind, length: kind(b"x" * length), st.sampled_from([bytes, bytearray, memoryview]), LONG)
PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("y" * 20_000)
LEAVES = arrays() | tensors() | nested_tensors() | BYTES | PLAIN
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.tuples(inner)
        | st.builds(vw.Held, inner, inner)
        | st.builds(local_class(), inner)
    ),
    max_leaves=3,
)


def as_pickle_does(value):
    """Return the facts about *value* after pickling and unpickling, but with all arrays writable."""
    try:
        data = pickle.dumps(value, protocol=5)
    except (TypeError, AttributeError, pickle.PicklingError):  # a memoryview, or a class by value
        data = cloudpickle.dumps(value, protocol=5)
    return vw.facts(pickle.loads(data), writable=True)  # noqa: S301 - the test's own


@pytest.fixture
def ways(cluster):
    """Sends values by every way, and returns for each way the facts about the values that arrived."""
    a, b = (lw.many(cluster, vw.Passer, 1, name=name, preload=["torch"]) for name in "ab")
    channel = Channel.create("values")

    def send(values):
        count = len(values)
        found = {
            "argument": [call.wait()[0] for call in [b.what_came(value) for value in values]],
            "result": [vw.facts(call.wait()[0]) for call in [a.echo(value) for value in values]],
            "stream": [vw.facts(value) for _rank, value in a.stream(values)],
        }
        came = b.get_all(channel, count)
        for value in values:
            channel.put(value)
        found["channel to a worker"] = came.wait()[0]
        a.put_all(channel, values)
        found["channel to the driver"] = [vw.facts(channel.get()) for _ in values]
        for way in ("first", "later", "piggyback", "broadcast"):
            came = b.receive_all(count, "a", way)
            a.send_all(values, "b", way).wait()
            found[way] = came.wait()[0]
        return found

    yield send
    channel.close()
    for group in (a, b):
        group.shutdown()


@settings(max_examples=12, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(VALUES, min_size=5, max_size=30))
def test_each_value_arrives_by_each_way_as_pickle_brings_it(ways, values):
    expected = [as_pickle_does(value) for value in values]
    for way, came in ways(values).items():
        for value, ours, theirs in zip(values, expected, came, strict=True):
            assert theirs == ours, f"{way}: {value!r}"
