"""User data to buffers and back."""

from __future__ import annotations

import datetime
import decimal
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import threading
import types

import numpy as np
import payload_types as kinds
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.errors import ProtocolMismatchError, SerializationError
from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts


def sent_and_received(value):
    """Encode and decode *value*; parts are bytes, as from the transport."""
    return payload.decode(AuthenticatedParts([bytes(part) for part in payload.encode(value)]))


VALUES = [
    None,
    True,
    0,
    -1,
    2**63,
    -(2**64),
    2**70,
    1.5,
    "",
    "äöü",
    "\ud800",
    b"",
    b"x" * 100,
    b"y" * (payload._SMALL + 1),
    bytearray(b"abc"),
    (1, 2),
    [1, (2, [3])],
    [1, 2.5, True, None, "x", b"y"],
    [2**70],
    ["\ud800"],
    [],
    {},
    {"step": 1, "loss": 0.5, "name": "x"},
    {"step": {"inner": 1}},
    {True: 1},
    {"a": 1, 2: "b", (1,): None},
    {1, 2},
    frozenset({1}),
    range(3),
    slice(1, 2),
    1 + 2j,
    kinds.Frozen(1, kinds.Frozen(2)),
    kinds.Slotted(1, "y"),
    kinds.Point(1, 2),
    kinds.Color.RED,
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc),
    decimal.Decimal("1.10"),
    pathlib.Path("/tmp"),
    kinds.Frozen,
    os.path.join,
    len,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{str(value)[:20]!a}")
def test_value_arrives_as_sent(value):
    back = sent_and_received(value)
    assert type(back) is type(value)
    assert back == value


def test_few_plain_entries_are_not_pickled():
    forms = [payload.encode(value)[0][:1] for value in ({"step": 1}, [1, "x"], ["x"] * payload._FEW)]
    assert forms == [b"M"] * 3


def test_an_entry_that_is_there_many_times_is_sent_once():
    prompt = "x" * 1000
    (data,) = payload.encode([prompt] * (payload._FEW + 1))
    assert len(data) < 2 * len(prompt)


def test_nan_and_infinity_arrive_unchanged():
    values = sent_and_received([float("nan"), float("inf"), -0.0])
    assert values[0] != values[0]
    assert values[1:] == [float("inf"), 0.0]
    assert str(values[2]) == "-0.0"


def test_subclasses_of_plain_types_keep_their_type():
    class Loud(str):
        __slots__ = ()

    back = sent_and_received(Loud("x"))
    assert type(back).__name__ == "Loud"
    assert type(sent_and_received(np.float64(1.5))) is np.float64


def test_shared_and_cyclic_references_are_kept():
    shared: list = []
    value = [shared, shared]
    value.append(value)
    back = sent_and_received(value)
    assert back[0] is back[1]
    assert back[2] is back


class TestCalls:
    def test_call_without_arguments_has_no_parts(self):
        assert payload.encode_call((), {}) == []
        assert payload.decode_call(AuthenticatedParts([])) == ((), {})

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((1, "x", None, b"b", 2.0, True), {}),
            ((), {"x": 1}),
            ((2**80,), {}),
            (("\udc80",), {"k": [1]}),
            ((b"z" * 40_000,), {}),
            (({"a": np.arange(3).tolist()},), {"k": (1, 2)}),
        ],
    )
    def test_arguments_arrive_as_sent(self, args, kwargs):
        back_args, back_kwargs = payload.decode_call(
            AuthenticatedParts([bytes(p) for p in payload.encode_call(args, kwargs)])
        )
        assert tuple(back_args) == args
        assert back_kwargs == kwargs

    def test_tuple_argument_stays_a_tuple(self):
        args, _ = payload.decode_call(AuthenticatedParts(payload.encode_call((1, (2, 3)), {})))
        assert args[1] == (2, 3)
        assert type(args[1]) is tuple


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(_TREES)
def test_any_tree_of_values_arrives_as_sent(value):
    back = sent_and_received(value)
    assert back == value
    assert type(back) is type(value)


@given(st.lists(_LEAVES, max_size=4), st.dictionaries(st.text(max_size=5), _LEAVES, max_size=3))
def test_any_plain_call_arrives_as_sent(args, kwargs):
    back_args, back_kwargs = payload.decode_call(
        AuthenticatedParts([bytes(p) for p in payload.encode_call(tuple(args), kwargs)])
    )
    assert list(back_args) == args
    assert back_kwargs == kwargs


class TestArrays:
    @pytest.mark.parametrize(
        "array",
        [
            np.arange(12).reshape(3, 4),
            np.asfortranarray(np.arange(12).reshape(3, 4)),
            np.arange(12)[::2],
            np.zeros((0, 3)),
            np.array(5),
            np.array([True, False]),
            np.array(["a", "bc"]),
            np.array([1, None], dtype=object),
            np.zeros(3, dtype=[("x", "i4"), ("y", "f8")]),
            np.arange(3).astype(">i4"),
            np.arange(100_000, dtype=np.float32),
        ],
        ids=lambda a: f"{a.dtype}-{a.shape}",
    )
    def test_arrays_arrive_equal_and_writable(self, array):
        back = sent_and_received(array)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        np.testing.assert_array_equal(back, array)
        back[...] = back
        assert back.flags.writeable

    def test_arrays_travel_outside_the_pickle_stream(self):
        array = np.arange(10_000, dtype=np.uint8)
        parts = payload.encode({"deep": [array]})
        assert len(parts) == 2
        assert len(parts[0]) < 500
        assert memoryview(parts[1]).nbytes == array.nbytes

    def test_encoding_takes_a_snapshot(self):
        """Another thread sends the parts later, and the caller may reuse the array at once."""
        array = np.zeros(10_000, dtype=np.uint8)
        parts = payload.encode(array)
        array[0] = 7
        assert memoryview(parts[1])[0] == 0

    def test_read_only_array_is_not_copied(self):
        array = np.zeros(10_000, dtype=np.uint8)
        array.setflags(write=False)
        assert np.shares_memory(np.frombuffer(payload.encode(array)[1], np.uint8), array)

    @pytest.mark.parametrize(
        "array",
        [
            np.arange(12).reshape(3, 4),
            np.asfortranarray(np.arange(12).reshape(3, 4)),
            np.arange(12)[::2],
            np.arange(12)[3:7],
            np.zeros((0, 3)),
            np.array(5),
            np.frombuffer(b"constant", np.uint8),
            np.zeros(3, dtype=[("x", "i4"), ("y", "f8")]),
            np.arange(3).astype(">i4"),
            np.arange(100_000, dtype=np.float32),
        ],
        ids=lambda a: f"{a.dtype}-{a.shape}",
    )
    def test_read_only_arrays_arrive_writable(self, array):
        array.setflags(write=False)
        for back in (sent_and_received(array), *sent_and_received([array, (array.copy(),)])[:1]):
            np.testing.assert_array_equal(back, array)
            assert (back.dtype, back.flags.f_contiguous) == (array.dtype, array.flags.f_contiguous or back.ndim == 1)
            back[...] = 0
        back = sent_and_received([lambda: None, array])[1]  # by cloudpickle
        assert back.flags.writeable

    def test_read_only_view_of_memory_that_may_change_is_copied(self):
        memory = np.zeros(10_000, dtype=np.uint8)
        view = memory[10:]
        view.setflags(write=False)
        parts = payload.encode([view])
        memory[:] = 7
        assert payload.decode(AuthenticatedParts(parts))[0].max() == 0

    def test_buffers_of_a_class_of_its_own_stay_read_only(self):
        assert sent_and_received([kinds.Buffers(b"constant")])[0].raw.readonly
        assert not sent_and_received([kinds.Buffers(bytearray(b"other"))])[0].raw.readonly

    def test_array_sent_twice_arrives_as_one_array(self):
        array = np.arange(3)
        back = sent_and_received([array, array])
        back[0][0] = 9
        assert back[1][0] == 9


class TestByValue:
    def test_lambda_with_a_closure_is_sent_by_value(self):
        n = 3
        assert sent_and_received(lambda x: x + n)(4) == 7

    def test_instance_of_a_local_class_is_sent_by_value(self):
        class Local:
            def __init__(self):
                self.x = np.arange(4)

            def total(self):
                return int(self.x.sum())

        back = sent_and_received(Local())
        assert back.total() == 6
        assert back.total.__func__.__code__.co_filename == __file__, "tracebacks show its lines"

    def test_class_of_main_is_sent_by_value_with_the_name_of_its_file(self, tmp_path):
        script = """
            import dataclasses, subprocess, sys
            from rlinf_actors.wire import payload
            @dataclasses.dataclass
            class Mine:
                x: int
                def double(self): return (lambda: [self.x * 2, sys._getframe().f_code.co_filename])()
            parts = [bytes(part) for part in payload.encode([Mine(21)])]
            assert parts[0][:1] == b"C", parts[0][:1]

            code = (
                "import sys; from rlinf_actors.wire.payload import decode; "
                "from rlinf_actors.wire.payload import *; "
            )
            code += "print(decode(AuthenticatedParts([sys.stdin.buffer.read()]))[0].double())"
            sys.exit(subprocess.run([sys.executable, "-c", code], input=parts[0], check=True).returncode)
        """
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(script))
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, f"[42, {str(path)!r}]"), done.stderr

    def test_code_of_another_python_version_is_refused_with_both_versions_named(self):
        parts = payload.encode(lambda: None)
        assert parts[0][:1] == b"C"
        other = b"C" + bytes((3, 99)) + bytes(parts[0][3:])
        ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
        with pytest.raises(ProtocolMismatchError, match=rf"3\.99.*{ours}"):
            payload.decode(AuthenticatedParts([other]))

    def test_importable_class_is_sent_by_reference(self):
        assert payload.encode(kinds.Frozen(1))[0][:1] == b"P"

    def test_user_data_may_contain_the_text_main(self):
        assert sent_and_received(["__main__", kinds.Frozen("__main__")]) == ["__main__", kinds.Frozen("__main__")]


class TestUnpicklable:
    @pytest.mark.parametrize(
        ("args", "kwargs", "path"),
        [
            ((threading.Lock(),), {}, "args[0]"),
            ((1, kinds.Model("m")), {}, "args[1].lock"),
            ((), {"model": kinds.Model("m")}, "model.lock"),
            (([1, {"k": (0, threading.Lock())}],), {}, "args[0][1]['k'][1]"),
            ((kinds.Holder(a=kinds.Holder(b=[kinds.Model("m")])),), {}, "args[0].a.b[0].lock"),
        ],
    )
    def test_error_names_the_path_of_the_argument(self, args, kwargs, path):
        with pytest.raises(SerializationError) as caught:
            payload.encode_call(args, kwargs)
        assert caught.value.path == path
        assert path in str(caught.value)
        assert isinstance(caught.value, TypeError)

    def test_error_names_the_closure_variable(self):
        lock = threading.Lock()
        with pytest.raises(SerializationError) as caught:
            payload.encode_call((lambda: lock,), {})
        assert caught.value.path == "args[0].<closure lock>"

    def test_error_names_the_result(self):
        with pytest.raises(SerializationError, match=r"the result of f\(\)\[1\]"):
            payload.encode([1, threading.Lock()], "the result of f()")

    def test_a_reduce_that_raises_is_reported(self):
        class Broken:
            def __reduce__(self):
                raise ZeroDivisionError("no way")

        with pytest.raises(SerializationError, match="no way") as caught:
            payload.encode_call((Broken(),), {})
        assert caught.value.path == "args[0]"

    def test_generator_is_refused_and_module_is_sent_by_name(self):
        with pytest.raises(SerializationError):
            payload.encode_call((x for x in range(3)), {}) if False else payload.encode(iter(x for x in ()))
        assert sent_and_received(types) is types  # modules go by name

    def test_path_of_an_unpicklable_value_in_a_cycle_is_found(self):
        model = kinds.Model("m")
        model.me = model
        with pytest.raises(SerializationError) as caught:
            payload.encode_call((model,), {})
        assert caught.value.path == "args[0].lock"


def test_unknown_form_is_an_error():
    with pytest.raises(SerializationError, match="unknown form"):
        payload.decode(AuthenticatedParts([b"?x"]))


def test_module_that_is_missing_here_is_an_import_error():
    stream = b"P" + pickle.dumps(kinds.Frozen(1)).replace(b"payload_types", b"payload_typos")
    with pytest.raises(ModuleNotFoundError, match="payload_typos"):
        payload.decode(AuthenticatedParts([stream]))


def test_encoding_plain_values_loads_neither_cloudpickle_nor_torch():
    code = (
        "import sys; from rlinf_actors.wire import payload as p; "
        "from rlinf_actors.wire.payload import AuthenticatedParts as V; "
        "p.decode(V(p.encode([1, {'x': (2,)}]))); p.decode_call(V(p.encode_call((1,), {'a': b'2'}))); "
        "print({'cloudpickle', 'torch', 'numpy', 'zmq'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("parts", [[b"Pabc"], (b"Pabc",), [], b"Pabc", None])
def test_unauthenticated_parts_are_refused(parts):
    for read in (payload.decode, payload.decode_call):
        with pytest.raises(TypeError, match="refused to unpickle"):
            read(parts)


def test_text_that_names_main_is_no_code_by_value():
    value = ("if __name__ ==", "__main__")
    parts = payload.encode(value)
    assert parts[0][:1] == b"P"
    assert sent_and_received(value) == value


@pytest.mark.parametrize(
    ("module", "name", "found"),
    [
        ("pathlib._local", "PurePosixPath", pathlib.PurePosixPath),  # Python 3.13
        ("numpy.core.multiarray", "_reconstruct", np.ndarray),  # numpy 1
        ("numpy._core.multiarray", "_reconstruct", np.ndarray),  # numpy 2
        ("numpy.core.numeric", "_frombuffer", np.ndarray),
        ("numpy._core.numeric", "_frombuffer", np.ndarray),
    ],
)
@pytest.mark.parametrize("padding", [0, 100_000])
def test_names_of_other_library_versions_are_found(module, name, found, padding):
    data = f"P(V{' ' * padding}\nc{module}\n{name}\nt.".encode()  # a tuple of a text and the named object
    _, got = payload.decode(AuthenticatedParts([data]))
    assert got is found or got.__name__ == name


def test_random_generator_of_numpy_2_is_read_or_refused_with_the_reason():
    data = b"Pcnumpy.random._pickle\n__bit_generator_ctor\n(cnumpy.random._pcg64\nPCG64\ntR."
    if int(np.__version__.partition(".")[0]) >= 2:
        assert type(payload.decode(AuthenticatedParts([data]))) is np.random.PCG64
    else:
        with pytest.raises(SerializationError, match=r"a random generator of numpy 2 \(PCG64\) cannot be read"):
            payload.decode(AuthenticatedParts([data]))


def test_arrays_keep_a_foreign_byte_order():
    for array in (np.arange(3, dtype=">f4"), np.arange(50_000, dtype=">i8"), np.zeros(2, [("a", ">u2"), ("b", "<u2")])):
        got = sent_and_received(array)
        assert got.dtype == array.dtype
        assert got.tolist() == array.tolist()
