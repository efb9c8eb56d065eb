"""What a message holds: checks, parts, and the object that comes back."""

from __future__ import annotations

import subprocess
import sys

import message_zoo as zoo
import numpy as np
import pytest

from rlinf_actors import SerializationError
from rlinf_actors.messaging import contents
from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts


def there_and_back(value, piggyback=None):
    parts, _ = contents.encode(value, piggyback)
    return payload.decode(AuthenticatedParts([bytes(part) for part in parts]))


@pytest.mark.parametrize(
    "value",
    [
        None,
        0,
        "text",
        b"bytes",
        b"x" * 100_000,
        (1, [2, {"three": (4,)}]),
        {"a": {"b": [zoo.Step(1, 2.0, done=False)]}, (1, 2): {3, 4}},
        zoo.Frozen(1, zoo.Frozen(2)),
        zoo.Tree(a=1, b=[2, 3]),
    ],
    ids=repr,
)
def test_an_object_comes_back_as_sent(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_a_dataclass_is_not_constructed_again():
    sent = zoo.Made(3, 5)
    made = zoo.Made.made
    back = there_and_back({"item": [sent]})["item"][0]
    assert (back.value, back.scaled, back.late) == (3, 15, "set after")
    assert zoo.Made.made == made


@pytest.mark.parametrize("error", [ValueError("x"), zoo.TwoArguments(4, "four"), KeyboardInterrupt()], ids=repr)
def test_exceptions_are_sent_as_objects(error):
    back = there_and_back(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(12)[::2],
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.zeros((0, 3)),
        np.array(5.0),
        np.array(["text", None], dtype=object),
        np.array(["2020-01-01"], dtype="M8[D]"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_writable(array):
    contents.check_contiguous([array])
    back = there_and_back(array)
    assert (back.dtype, back.shape, back.flags.writeable) == (array.dtype, array.shape, True)
    np.testing.assert_array_equal(back, array)


def test_a_piggyback_comes_in_a_pair():
    assert there_and_back([1], {"step": 2}) == ([1], {"step": 2})
    assert there_and_back(None, 0) == (None, 0)


def test_only_large_parts_are_the_senders_memory():
    small, large = np.zeros(1000, np.uint8), np.zeros(contents.LARGE, np.uint8)
    parts, shared = contents.encode(small)
    assert not shared
    assert all(type(part) is bytes for part in parts)
    parts, shared = contents.encode([small, large])
    assert shared
    large[0] = 9
    assert memoryview(parts[-1])[0] == 9
    assert contents.size_of(parts) == sum(memoryview(part).nbytes for part in parts)


def test_what_cannot_be_pickled_names_its_path():
    with pytest.raises(SerializationError) as caught:
        contents.encode({"a": [1, (n for n in ())]})
    assert caught.value.path == "object['a'][1]"


def test_without_torch_nothing_is_loaded():
    code = (
        "from rlinf_actors.messaging import contents; import sys;"
        "contents.check_contiguous([1]); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_check_tensor_refuses_other_objects():
    with pytest.raises(TypeError, match=r"send_tensor\(\) takes a torch.Tensor, not list"):
        contents.check_tensor([1], "send_tensor()")
