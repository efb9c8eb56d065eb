"""Convert user data to buffers and back. This is the one module that pickles and unpickles. Any thread.

Only drivers and workers import it; agentd and the head never do. It unpickles only `AuthenticatedParts`: the parts of a
message whose sender is known to be a member of this process's job. Four places make them, and a test fails if there is
a fifth (tests/security/test_one_unpickler.py):

* `worker.worker_server`: the peer's Join had the job's token, on a socket for only this user or the job's key;
* `runtime.peer`: a worker's answer, on a link to the unix socket or the key that the head named as that worker's;
* `worker.children`: the data that a worker gives to its child, over a unix socket of this user;
* `wire.failure`: parts that this very process has just pickled, to check that they unpickle.

An encoded object is a list of parts. The empty list stands for None, or for a call without arguments. The first byte of
the first part names the form:

    M  MessagePack of a plain scalar or string, or of a flat list or dict of them
    A  MessagePack of [args, kwargs], all plain        B  raw bytes, in the second part
    P  pickle protocol 5, out-of-band buffers behind it
    C  the same by cloudpickle, after two bytes with Python's major and minor version
    T, N  a tensor, or a numpy array: `wire.arrays`

Buffers (tensors, arrays) never go through pickle's stream, and arrive writable. Nor do long bytes (`pickle_stream`).
A tensor's bytes are in the machine's byte order (`frames.Join` names it). A tensor on an accelerator is copied to the
host and then to the receiver's current accelerator (to the CPU if the receiver has none). If the sender passes a
`Taker`, the taker removes such tensors from the object, and the receiver passes them to `decode`. Some names differ
between versions of Python or numpy; they are mapped while unpickling. A class that is pickled by value is made once in
each process that it comes to, and keeps its attributes there.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rlinf_actors import forks
from rlinf_actors.errors import ProtocolMismatchError, SerializationError
from rlinf_actors.model.buffers import Buffer, constant, keepable
from rlinf_actors.wire import arrays
from rlinf_actors.wire.pickle_stream import LONG, split


class AuthenticatedParts(list[Buffer]):
    """Parts that may be unpickled, because the code that makes this list knows that a member of this job sent them."""

    __slots__ = ()

    def cut(self, start: int, stop: int | None = None) -> AuthenticatedParts:
        """Return a slice of the parts, which is authenticated too."""
        return AuthenticatedParts(self[start:stop])


NO_PARTS = AuthenticatedParts()
"""The parts of a message without parts. Never changed."""

_PATHLIB = "pathlib._local"
"""Name of pathlib in the pickles of Python 3.13; no other version has a module of this name."""
_BIT_GENERATOR = ("numpy.random._pickle", "__bit_generator_ctor")


def may_be_moved(data: bytes) -> bool:
    """Return True if the pickle *data* may name a module that has another name in this process's Python or numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        elsewhere = b"numpy" in data
    elif _major(numpy) >= 2:
        elsewhere = b"numpy.core" in data
    else:
        elsewhere = b"numpy._core" in data or b"numpy.rec" in data or b"numpy.random" in data
    return elsewhere or (sys.version_info[:2] != (3, 13) and _PATHLIB.encode() in data)


def found_at(module: str, name: str) -> tuple[str, str]:
    """Return where this process's Python and numpy have the object that a pickle calls *name* of *module*."""
    if module == _PATHLIB and sys.version_info[:2] != (3, 13):
        return "pathlib", name
    if not module.startswith("numpy."):
        return module, name
    import numpy

    if _major(numpy) >= 2:
        return _below(module, "numpy.core", "numpy._core"), name
    if module == "numpy.rec":
        return "numpy.core.records", name
    return _below(module, "numpy._core", "numpy.core"), name


def adapted(module: str, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    """Return *found*, or a wrapper of it that also accepts the arguments which other versions of numpy pickle.

    *found* is the object in this process that a pickle calls *name* of *module*. Those of cloudpickle that make a class
    and write its attributes are wrapped, so that each happens once.
    """
    if module.startswith("cloudpickle."):
        return _made_once(found) if name in _MAKE_CLASS else _written_once(found) if name in _WRITE_CLASS else found
    if (module, name) != _BIT_GENERATOR:
        return found

    def make(kind: Any = "MT19937") -> Any:
        import numpy

        if isinstance(kind, type) and _major(numpy) < 2:
            raise SerializationError(
                f"a random generator of numpy 2 ({kind.__name__}) cannot be read by numpy {numpy.__version__}: "
                "send its seed, or use the same major version of numpy on both ends"
            )
        return found(kind)

    return make


_MAKE_CLASS = frozenset({"_make_skeleton_class", "_make_skeleton_enum"})
_WRITE_CLASS = frozenset({"_class_setstate"})
"""cloudpickle's functions that make a class of a pickle, without its attributes, and that write these."""
_classes = forks.free_in_children(threading.RLock())
_unwritten: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that were made here from a pickle, and whose attributes are still to be written."""
_received: dict[tuple[str, str], type] = {}
"""The last received class of each module and name. It keeps its state while there are no instances, as in a module."""


def _made_once(make: Any) -> Callable[..., Any]:
    def make_or_find(*arguments: Any) -> Any:
        # cloudpickle makes another and drops it: bases and metaclasses would register a class that is no class
        with _classes:
            found = make.__globals__["_DYNAMIC_CLASS_TRACKER_BY_ID"].get(arguments[-2])
            if found is None:
                found = make(*arguments)
                _unwritten.add(found)
            return found

    return make_or_find


def _written_once(write: Any) -> Callable[..., Any]:
    def write_if_new(cls: type, state: Any) -> Any:
        # counters and caches of a class that lives here are not the sender's
        with _classes:
            if cls in _unwritten:
                write(cls, state)
                _unwritten.discard(cls)
                _received[cls.__module__, cls.__qualname__] = cls
        return cls

    return write_if_new


def _below(module: str, there: str, here: str) -> str:
    return here + module[len(there) :] if module == there or module.startswith(there + ".") else module


def _major(numpy: Any) -> int:
    return int(numpy.__version__.partition(".")[0])


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""Types of values that are encoded without pickle."""
_TEXT = frozenset({str})
_LONG = frozenset({str, bytes})
_FEW = 64
"""Most entries of a list or dict that is not pickled: pickle sends an object that is there many times once."""
_SMALL = 16 << 10
"""Length from which bytes and texts skip MessagePack, which would copy them twice."""
_SEARCHED = 64 << 10
"""Bytes up to which a pickle is searched for names to map; a longer pickle is always unpickled with mapping."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode

_EMPTY_CELL = types.CellType()
_Table = dict[type, Callable[[Any], Any]]


Copy = Callable[[Buffer], Buffer]


class Taker(Protocol):
    """Takes tensors out of an object while `encode` pickles the object, so that they can travel on another path."""

    def take(self, tensor: Any) -> int | None:
        """Take this dense tensor, and return the number under which `decode` gets it back.

        None if the tensor stays in the pickled object.
        """

    def clear(self) -> None:
        """Forget all tensors that were taken, because `encode` begins to pickle the object again."""


class _Hooks(threading.local):
    # of this thread's pickling and unpickling

    taker: Taker | None = None
    given: Sequence[Any] = ()


_hooks = _Hooks()


def pickled_size(value: Any) -> int:
    """Return how many bytes pickle makes of *value*. Raises what pickle raises."""
    return len(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def encode(value: Any, what: str = "value", *, copy: Copy | None = bytes, taker: Taker | None = None) -> list[Buffer]:
    """Return one object as parts. The parts are a snapshot: later changes of the object do not affect them.

    Args:
        value: any picklable object.
        what: name of the object, with which the ``path`` of an error begins.
        copy: function that copies each buffer. None for no copy: the buffers must then not change until they are sent.
        taker: takes tensors out of the object; they travel on another path.

    Raises:
        SerializationError: something in *value* cannot be pickled; the error's ``path`` names it.
    """
    plain = encode_plain(value)
    if plain is not None:
        return plain
    before, _hooks.taker = _hooks.taker, taker
    try:
        return _pickled(value, what, copy)
    finally:
        _hooks.taker = before


def encode_plain(value: Any) -> list[Buffer] | None:
    """Return a plain value, or a flat list or dict of few short ones, as parts; None if *value* is anything else."""
    if value is None:
        return []
    kind = type(value)
    if kind is bytes and len(value) >= _SMALL:
        return [b"B", value]
    if kind is dict:
        plain = len(value) <= _FEW and _TEXT.issuperset(map(type, value)) and _are_short(value.values())
    elif kind is list:
        plain = len(value) <= _FEW and _are_short(value)
    else:
        plain = kind in _PLAIN
    try:
        return [b"M" + _pack(value)] if plain else None
    except (OverflowError, UnicodeEncodeError):
        return None  # beyond 64 bits, or a lone surrogate: pickle takes both


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any], *, copy: Copy = bytes) -> list[Buffer]:
    """Return the arguments of a call as parts: a snapshot, whose buffers are copied by *copy*.

    Raises:
        SerializationError: an argument cannot be pickled; the error's ``path`` names it, such as ``args[0].lock``.
    """
    if not args and not kwargs:
        return []
    if _are_short(args) and (not kwargs or _are_short(kwargs.values())):
        try:
            packed: bytes = b"A" + _pack([args, kwargs])
            if len(packed) < _SMALL:
                return [packed]
        except (OverflowError, UnicodeEncodeError):
            pass
    return _pickled((args, kwargs), "", copy)


def _are_short(values: Collection[Any]) -> bool:
    if not _PLAIN.issuperset(map(type, values)):
        return False
    return _LONG.isdisjoint(map(type, values)) or all(len(value) < _SMALL for value in values if type(value) in _LONG)


def decode(parts: AuthenticatedParts, given: Sequence[Any] = ()) -> Any:
    """Return the object in *parts*. Unpickles.

    Args:
        parts: the parts that `encode` returned, from a member of this job.
        given: the tensors that the sender's taker took out, by number.

    Raises:
        TypeError: the parts are not authenticated; nothing was unpickled.
        ProtocolMismatchError: the object was pickled by value by another minor version of Python.
        Exception: any error of unpickling, such as ImportError for a module that is missing here.
    """
    if type(parts) is not AuthenticatedParts:
        raise TypeError(f"refused to unpickle a {type(parts).__name__}: only what a process of this job sent is read")
    if not parts:
        return None
    head = parts[0]
    kind = head[:1]
    if kind == b"M" or kind == b"A":
        return _unpack(memoryview(head)[1:])
    if kind == b"T" and len(parts) == 2:
        return arrays.tensor(head, parts[1])
    if kind == b"N" and len(parts) == 2:
        return arrays.array(head, parts[1])
    before, _hooks.given = _hooks.given, given
    try:
        return _unpickle(head, kind, parts)
    finally:
        _hooks.given = before


def _unpickle(head: Buffer, kind: Buffer, parts: Sequence[Buffer]) -> Any:
    if kind == b"P":
        return _loads(memoryview(head)[1:], parts)
    if kind == b"C":
        theirs, ours = (head[1], head[2]), sys.version_info[:2]
        if theirs != ours:
            raise ProtocolMismatchError(
                f"a class or function sent by value comes from Python {theirs[0]}.{theirs[1]} and this process runs "
                f"{ours[0]}.{ours[1]}: put it in a module that both can import, or use one Python version"
            )
        return _loads(memoryview(head)[3:], parts, by_value=True)
    if kind == b"B":
        return bytes(parts[1])
    raise SerializationError(f"data of unknown form {bytes(kind)!r}: the sender is of another version")


class _Unpickler(pickle.Unpickler):
    """Unpickler that finds objects under the names of other versions of Python and numpy, and keeps classes' state."""

    def find_class(self, module: str, name: str) -> Any:
        return adapted(module, name, super().find_class(*found_at(module, name)))


def _loads(data: memoryview, parts: Sequence[Buffer], by_value: bool = False) -> Any:
    buffers = [keepable(part) for part in parts[1:]]
    # a look-up in Python for each name costs little beside much data, and much beside little
    if by_value or data.nbytes > _SEARCHED or may_be_moved(bytes(data)):
        return _Unpickler(io.BytesIO(data), buffers=buffers).load()
    return pickle.loads(data, buffers=buffers)


def decode_call(parts: AuthenticatedParts) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments (args, kwargs) in *parts*, which `encode_call` made. Raises the same errors as `decode`."""
    if type(parts) is AuthenticatedParts and not parts:
        return (), {}
    args, kwargs = decode(parts)
    return args, kwargs


def _pickled(value: Any, what: str, copy: Copy | None) -> list[Buffer]:
    def keep(raw: memoryview) -> Buffer:
        # a snapshot: another thread sends it later, and the owner may reuse its memory meanwhile
        return raw if copy is None or constant(raw) or arrays.is_private(raw) else copy(raw)

    try:
        events: list[Any] = []
        pickler = pickle.Pickler(types.SimpleNamespace(write=events.append), 5, buffer_callback=events.append)
        pickler.dispatch_table = _dispatch_table()
        pickler.dump(value)
        data, buffers = split(events, keep)
        if b"__main__" not in data:
            return [b"P" + data, *buffers]
    except Exception:  # noqa: BLE001 - any failure means: let cloudpickle try, which reports its own
        pass
    if _hooks.taker is not None:
        _hooks.taker.clear()
    events = []
    try:
        _cloud_pickler(events).dump(value)
        data, buffers = split(events, keep)
    except Exception as error:
        path = _culprit(value, what)
        raise SerializationError(f"{path or what} cannot be pickled: {error}", path=path) from error
    if b"cloudpickle" not in data:  # nothing by value after all: some text said __main__
        return [b"P" + data, *buffers]
    return [b"C" + bytes(sys.version_info[:2]) + data, *buffers]


def _cloud_pickler(events: list[Any]) -> pickle.Pickler:
    import cloudpickle  # not at the top: most processes never need it, and it takes 50 ms

    pickler: pickle.Pickler = _cloud_pickler_class(cloudpickle.Pickler, _loaded())(
        types.SimpleNamespace(write=events.append), protocol=5, buffer_callback=events.append
    )
    return pickler


@functools.lru_cache(maxsize=4)
def _cloud_pickler_class(base: Any, loaded: tuple[Any, Any]) -> Any:
    # a class attribute: the C pickler looks once, while it is made, and an instance's attribute comes too late
    table = {**_reducers(*loaded), types.CodeType: functools.partial(_reduce_code, base.dispatch_table[types.CodeType])}
    return type("Pickler", (base,), {"dispatch_table": base.dispatch_table.new_child(table)})


_cached: tuple[int, tuple[Any, Any], Mapping[type, Callable[[Any], Any]]] = (-1, (None, None), {})


def _dispatch_table() -> Mapping[type, Callable[[Any], Any]]:
    # copyreg's table and ours: C code looks a table up, where reducer_override costs a Python call for each object
    global _cached
    loaded = _loaded()
    if _cached[:2] != (len(copyreg.dispatch_table), loaded):
        table: _Table = {**copyreg.dispatch_table, **_reducers(*loaded)}
        _cached = (len(copyreg.dispatch_table), loaded, table)
    return _cached[2]


def _loaded() -> tuple[Any, Any]:
    # the classes of tensors and of arrays; None, the type of no object, until its module is imported so far
    return getattr(sys.modules.get("torch"), "Tensor", None), getattr(sys.modules.get("numpy"), "ndarray", None)


def _reducers(tensor: Any, array: Any) -> _Table:
    return {memoryview: _reduce_memoryview, tensor: _reduce_tensor, array: _reduce_array}


_NO_FILE = "<dynamic-code>"  # cloudpickle 3.1.3 writes it in place of the file: no traceback would show a source line


def _reduce_code(reduce: Callable[[Any], Any], code: types.CodeType) -> Any:
    # as cloudpickle does, with the name of the file
    made, arguments = reduce(code)[:2]
    return made, tuple(code.co_filename if type(one) is str and one == _NO_FILE else one for one in arguments)


def _reduce_memoryview(view: memoryview) -> Any:
    # arrives as bytes, as cloudpickle sends it
    return bytes, (pickle.PickleBuffer(view) if view.c_contiguous and view.nbytes >= LONG else view.tobytes(),)


def _reduce_array(array: Any) -> Any:
    # as numpy does, but it arrives writable
    made, arguments, *state = array.__reduce_ex__(5)
    buffer = arguments[0]
    if type(buffer) is pickle.PickleBuffer and not array.flags.writeable:
        arguments = (pickle.PickleBuffer(arrays.unmarked(buffer.raw(), array)), *arguments[1:])
    return made, arguments, *state


def _reduce_tensor(tensor: Any) -> Any:
    # a dense tensor by number if it was taken out, else its bytes, and its attributes; others as torch does
    torch = sys.modules["torch"]
    if tensor.device.type == "meta" or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.__reduce_ex__(5)
    if tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(5)
    made = _reduce_dense(tensor)
    attributes = tensor.__dict__
    return (*made, attributes, None, None, torch._utils._set_obj_state) if attributes else made


def _reduce_dense(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    if _hooks.taker is not None:
        number = _hooks.taker.take(tensor)
        if number is not None:
            return _put_back, (number,)
    facts = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.requires_grad)
    raw = arrays.bytes_of(tensor)
    flat = _Made(_from_buffer(), pickle.PickleBuffer(raw)) if len(raw) else raw
    return _rebuild_tensor, (flat, *facts) if tensor.device.type == "cpu" else (flat, *facts, tensor.device.type)


class _Made:
    """Stands for a value in a pickle: it unpickles as the result of calling *function* with *arguments*."""

    __slots__ = ("_reduced",)

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


@functools.lru_cache(maxsize=1)
def _from_buffer() -> Any:
    import torch

    return functools.partial(torch.frombuffer, dtype=torch.uint8)


def _put_back(number: int) -> Any:
    return _hooks.given[number]


def _rebuild_tensor(flat: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, device: str = "cpu") -> Any:
    import torch

    kind = getattr(torch, dtype)
    if len(flat):
        if kind is torch.complex128 and flat.data_ptr() % 16:
            flat = flat.clone()  # torch uses instructions that want 16 bytes; a ZeroMQ frame's data begins at any 8
        tensor = flat.view(kind).view(shape)
    else:
        tensor = torch.empty(shape, dtype=kind)
    module = None if device == "cpu" else getattr(torch, device, None)
    if module is not None and module.is_available():
        tensor = tensor.to(device)  # its current one
    return tensor.requires_grad_() if requires_grad else tensor


def _culprit(value: Any, path: str, depth: int = 0, seen: frozenset[int] = frozenset()) -> str:
    """Return the path to the innermost part of *value* that cannot be pickled."""
    if depth > 12 or id(value) in seen:
        return path
    for name, part in _parts_of(value, path):
        if not _pickles(part):
            return _culprit(part, name, depth + 1, seen | {id(value)})
    return path


def _parts_of(value: Any, path: str) -> list[tuple[str, Any]]:
    if path == "" and type(value) is tuple and len(value) == 2:
        args, kwargs = value
        return [(f"args[{n}]", arg) for n, arg in enumerate(args)] + list(kwargs.items())
    if isinstance(value, (list, tuple)):
        return [(f"{path}[{n}]", part) for n, part in enumerate(value)]
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", part) for key, part in value.items()]
    closure = getattr(value, "__closure__", None)
    if closure:
        names = value.__code__.co_freevars
        filled = [(name, cell) for name, cell in zip(names, closure, strict=False) if cell != _EMPTY_CELL]
        return [(f"{path}.<closure {name}>", cell.cell_contents) for name, cell in filled]
    if isinstance(type(value).__reduce__, types.FunctionType):
        return []  # it says itself why it cannot be pickled
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, type):
        return [(f"{path}.{name}", part) for name, part in attributes.items()]
    return []


def _pickles(value: Any) -> bool:
    try:
        _cloud_pickler([]).dump(value)
    except Exception:  # noqa: BLE001 - that it fails is the answer
        return False
    return True
