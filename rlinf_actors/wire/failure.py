"""A worker's exception on its way to the caller, and what the caller catches."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlinf_actors.errors import CallTimeoutError, SerializationError, UsageError, WorkerError, WorkerStartError
from rlinf_actors.model.buffers import Buffer
from rlinf_actors.wire import payload
from rlinf_actors.wire.frames import Raised

_HERE = str(Path(__file__).resolve().parent.parent)
_MAX_TEXT = 256 << 10

_NOT_MIXED: tuple[type, ...] = (StopIteration, StopAsyncIteration, WorkerError)
with contextlib.suppress(NameError):
    _NOT_MIXED = (*_NOT_MIXED, BaseExceptionGroup)  # noqa: F821 - new in 3.11


def encode(call_id: int, error: BaseException, kind: str = "raised") -> tuple[Raised, list[Buffer]]:
    """What a worker answers for *error*: always a text, and the exception itself where it pickles."""
    kind_name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a __str__ of the user's that raises must not hide the error
        text = f"<its __str__ raised {type(broken).__name__}>"
    try:
        parts = payload.encode(error, type(error).__name__)
    except SerializationError:
        parts = []
    return Raised(call_id, kind, kind_name, text[:_MAX_TEXT], _format(error)[-_MAX_TEXT:]), parts


def decode(raised: Raised, parts: Sequence[Buffer], *, worker: str, rank: int, node: str) -> Exception:
    """The exception that the caller gets; see WorkerError for what it is."""
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
    return mixed(original, message, where)


def mixed(original: BaseException, message: str, where: dict[str, Any]) -> WorkerError:
    """A WorkerError that is also an instance of *original*'s type, where the two can be mixed."""
    kind: Any = type(original)
    cls = _mixed_class(kind)
    error: WorkerError = cls.__new__(cls)
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
            },
        )
        made.__new__(made)  # type: ignore[call-overload]
    except TypeError:  # layouts that do not go together, or a __new__ that needs arguments
        return WorkerError
    return made


def _reduce(error: WorkerError) -> Any:
    where = {name: getattr(error, name) for name in ("worker", "rank", "node", "remote_traceback")}
    return mixed, (error.__cause__, error.args[0], where)


def _copy_state(original: BaseException, error: BaseException) -> None:
    """Copy what users read from exceptions: errno, filename, name, code, and instance attributes."""
    for base in type(original).__mro__:
        if base in (BaseException, Exception, object):
            continue
        for name in vars(base):
            if not name.startswith("_") and name in dir(original):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(error, name, getattr(original, name)) if not callable(getattr(base, name)) else None
    error.__dict__.update(original.__dict__)


def _format(error: BaseException) -> str:
    """The traceback from the user's first frame on: ours above it say nothing."""
    top = error.__traceback__
    while top is not None and top.tb_next is not None and top.tb_frame.f_code.co_filename.startswith(_HERE):
        top = top.tb_next
    return "".join(traceback.format_exception(type(error), error, top))
