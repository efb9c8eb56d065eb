"""Encode a worker's exception where it was raised, and rebuild it in the caller's process."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlinf_actors import exhaustion
from rlinf_actors.errors import CallTimeoutError, SerializationError, UsageError, WorkerError, WorkerStartError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.wire import payload
from rlinf_actors.wire.frames import Raised
from rlinf_actors.wire.payload import AuthenticatedParts

_HERE = str(Path(__file__).parent.parent)  # not resolved: in workers it is a link, and tracebacks name that
_MAX_TEXT = 256 << 10
_MAX_NAME = 1 << 16  # as bounds.Text
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE of CPython: set for every class that Python code defines."""

_NOT_MIXED: tuple[type, ...] = (StopIteration, StopAsyncIteration, WorkerError)
if sys.version_info >= (3, 11):
    _NOT_MIXED = (*_NOT_MIXED, BaseExceptionGroup)  # noqa: F821 - new in 3.11


def encode(call_id: int, error: BaseException, kind: str = "raised") -> tuple[Raised, list[Buffer]]:
    """Return the header and the parts that report *error* to the caller of the call *call_id*.

    The parts are the pickled exception; [] if it does not pickle. *kind* is one of the kinds of frames.Raised.
    """
    kind_name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a __str__ of the user's that raises must not hide the error
        text = f"<its __str__ raised {type(broken).__name__}>"
    limit = exhaustion.cause(error)
    text = f"{text[:_MAX_TEXT]}: {limit}" if limit else text[:_MAX_TEXT]
    raised = Raised(call_id, kind, _sendable(kind_name, _MAX_NAME), _sendable(text), _sendable(_format(error)))
    return raised, encode_exception(error)


def _sendable(text: str, most: int = _MAX_TEXT) -> str:
    # without lone surrogates (file names have them), which UTF-8 cannot carry; each of their escapes has 6 characters
    return text[-most:].encode("utf-8", "backslashreplace").decode()[-most:]


def encode_exception(error: BaseException) -> list[Buffer]:
    """Return *error* as parts that have been checked to unpickle; [] if that is impossible.

    The plain pickle of an exception does not unpickle if its constructor takes other arguments than it passes to its
    base. The parts then rebuild the exception from its class, arguments and attributes.
    """
    name = type(error).__name__
    with contextlib.suppress(Exception):
        parts = payload.encode(error, name)
        if type(payload.decode(AuthenticatedParts(parts))) is type(error):
            return parts
    with contextlib.suppress(SerializationError):
        args = error.args if _travels(error.args) else tuple(str(arg) for arg in error.args)
        state = {key: value for key, value in vars(error).items() if _travels(value)}
        return payload.encode(_Rebuilt(type(error), args, state), name)
    return []


class _Rebuilt:
    """Stands for an exception that does not unpickle. Its pickle calls `_rebuild`, which returns the exception."""

    def __init__(self, cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> None:
        self._parts = (cls, args, state)

    def __reduce__(self) -> Any:
        return _rebuild, self._parts


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error: BaseException = _blank(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _blank(cls: type[BaseException], *args: Any) -> Any:
    """Return a new exception of class *cls*, made without running a constructor that is written in Python."""
    built_in: Any = cls
    while built_in.__flags__ & _HEAP_TYPE:
        built_in = built_in.__base__  # not the next in the MRO: MemoryError.__new__ refuses a class laid out by another
    return built_in.__new__(cls, *args)


def _travels(value: Any) -> bool:
    try:
        payload.decode(AuthenticatedParts(payload.encode(value)))
    except Exception:  # noqa: BLE001 - that it does not is the answer
        return False
    return True


def decode(raised: Raised, parts: AuthenticatedParts, *, worker: str, rank: int, node: str) -> Exception:
    """Return the exception for the caller: a WorkerError, or another error for some values of `raised.kind`.

    *parts* are those that `encode_exception` made; *worker* is "group:rank", *node* the name of the worker's node.
    """
    if raised.kind == "start":
        return WorkerStartError(f"{worker} on {node} could not be started: {raised.text}", worker=worker, node=node)
    if raised.kind == "expired":
        return CallTimeoutError(f"{worker} on {node}: {raised.text}")
    if raised.kind == "usage":
        return UsageError(f"{worker} on {node}: {raised.text}")
    where = {"worker": worker, "rank": rank, "node": node, "remote_traceback": raised.traceback}
    message = f"{worker} on {node} raised {raised.error}: {raised.text}"
    original: BaseException | None = None
    with contextlib.suppress(Exception):  # its class cannot be imported or rebuilt here: the text remains
        candidate = payload.decode(parts)
        original = candidate if isinstance(candidate, BaseException) else None
    if original is None:
        lost = WorkerError(message, **where)  # type: ignore[arg-type]
        lost.__cause__ = RuntimeError(f"{raised.error}: {raised.text}")
        return lost
    try:
        return mixed(original, message, where)
    except Exception:  # noqa: BLE001 - a type with surprises (a property that raises): the plain error remains
        plain = WorkerError(message, **where)  # type: ignore[arg-type]
        plain.__cause__ = original
        return plain


def unreadable(what: str, method: str, worker: str, node: str, error: Exception) -> SerializationError:
    """Return the error for the user when *what* (such as "the result") of *method* cannot be unpickled here."""
    return SerializationError(
        f"{what} of {method}() from {worker} on {node} cannot be read here: {type(error).__name__}: {error}"
    )


def describe(answer: Raised | Exception, method: str, *, worker: str, node: str) -> str:
    """Return the failure of a call of *method* as text with its traceback. Unpickles nothing."""
    if isinstance(answer, Exception):
        return f"{method}(): {answer}"
    return f"{method}() in {worker} on {node}: {answer.error}: {answer.text}\n{answer.traceback}"


def mixed(original: BaseException, message: str, where: dict[str, Any]) -> WorkerError:
    """Return a WorkerError that is also an instance of *original*'s class, so that users can catch it as that class.

    If no such instance can be made, return a plain WorkerError.

    Args:
        original: the exception that the worker raised.
        message: text of the error.
        where: WorkerError's attributes: worker, rank, node, remote_traceback.
    """
    kind: Any = type(original)
    cls = _mixed_class(getattr(kind, "_mixed_from", kind))  # an error that one worker passes on for another
    error: WorkerError = _blank(cls)
    _copy_state(original, error)
    BaseException.__init__(error, message)  # WorkerError's own would call the original's __init__
    error.__dict__.update(where)
    error.__cause__ = original
    return error


@lru_cache(maxsize=256)
def _mixed_class(kind: Any) -> type[WorkerError]:
    if not issubclass(kind, Exception) or issubclass(kind, _NOT_MIXED):
        return WorkerError
    try:
        made = type(
            kind.__name__,
            (WorkerError, kind),
            {
                "__module__": kind.__module__,
                "__qualname__": kind.__qualname__,
                "__reduce__": _reduce,
                "__str__": WorkerError.__str__,
                "__doc__": f"A {kind.__name__} raised in a worker.",
                "_mixed_from": kind,
            },
        )
        _blank(made)
    except TypeError:  # layouts that do not go together, or a class that refuses subclasses
        return WorkerError
    return made


def _reduce(error: WorkerError) -> Any:
    where = {name: getattr(error, name) for name in ("worker", "rank", "node", "remote_traceback")}
    return mixed, (error.__cause__, error.args[0], where)


def _copy_state(original: BaseException, error: BaseException) -> None:
    """Copy to *error* what users read from exceptions: errno, filename, name, code, and instance attributes.

    Attributes of built-in exception types are slots in C and are copied one by one. Properties of user classes need no
    copy: they read the instance attributes.
    """
    for base in type(original).__mro__:
        if base.__module__ != "builtins" or base in (BaseException, Exception, object):
            continue
        for name, member in vars(base).items():
            if not name.startswith("_") and inspect.isdatadescriptor(member):
                with contextlib.suppress(AttributeError, TypeError):  # read-only, or not set
                    setattr(error, name, getattr(original, name))
    error.__dict__.update(original.__dict__)


def _format(error: BaseException) -> str:
    # from the user's first frame on: our frames above it say nothing
    top = error.__traceback__
    while top is not None and top.tb_next is not None and top.tb_frame.f_code.co_filename.startswith(_HERE):
        top = top.tb_next
    return "".join(traceback.format_exception(type(error), error, top))
