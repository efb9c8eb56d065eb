"""A worker's exception on its way to the caller."""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import pickle
import subprocess
import sys
import threading

import payload_types as kinds
import pytest

from rlinf_actors import errors
from rlinf_actors.errors import CallTimeoutError, ConfigError, UsageError, WorkerError, WorkerStartError
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.payload import AuthenticatedParts


def raised(error: BaseException) -> BaseException:
    """*error* with a traceback."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


def over_the_wire(error: BaseException, kind: str = "raised") -> Exception:
    frame, parts = failure.encode(7, raised(error), kind)
    frame = frames.decode(frames.encode(frame))
    return failure.decode(frame, AuthenticatedParts([bytes(part) for part in parts]), worker="g:3", rank=3, node="n1")


MIXED = [
    ValueError("boom"),
    KeyError("missing"),
    IndexError(3),
    RuntimeError(),
    TimeoutError("slow"),
    NotImplementedError("later"),
    ZeroDivisionError("by zero"),
    AssertionError("no"),
    FileNotFoundError(errno.ENOENT, "No such file", "/x"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "ä", 0, 1, "ordinal not in range"),
    json.JSONDecodeError("Expecting value", "x", 0),
    subprocess.CalledProcessError(3, ["false"]),
    ModuleNotFoundError("No module named 'x'", name="x"),
    AttributeError("no attribute"),
    MemoryError("cannot allocate 8 GiB"),
    kinds.KeywordOnly(where="here"),
    kinds.NeedsTwo(5, "lost"),
    kinds.NeedsTwoInNew(1, "x"),
    kinds.Unpicklable("stuck"),
    kinds.BadStr(),
    kinds.LikesProperties(4),
    ConfigError("wrong", path="cluster.x"),
]


@pytest.mark.parametrize("error", MIXED, ids=lambda e: type(e).__name__)
def test_remote_error_is_a_worker_error_of_the_originals_type(error):
    caught = over_the_wire(error)
    assert isinstance(caught, WorkerError)
    assert isinstance(caught, type(error))
    assert isinstance(caught.__cause__, type(error))
    assert not isinstance(caught.__cause__, WorkerError)
    assert (caught.worker, caught.rank, caught.node) == ("g:3", 3, "n1")
    text = str(caught)
    assert "g:3" in text
    assert "n1" in text
    assert type(error).__name__ in text
    assert "raise error" in caught.remote_traceback
    assert caught.remote_traceback.rstrip() in text
    repr(caught)


def test_remote_error_keeps_the_originals_attributes():
    missing = over_the_wire(FileNotFoundError(errno.ENOENT, "No such file", "/x"))
    assert (missing.errno, missing.filename, missing.strerror) == (errno.ENOENT, "/x", "No such file")
    failed = over_the_wire(subprocess.CalledProcessError(3, ["false"]))
    assert (failed.returncode, failed.cmd) == (3, ["false"])
    assert over_the_wire(ModuleNotFoundError("no", name="x")).name == "x"
    decode = over_the_wire(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"))
    assert decode.__cause__.object == b"\xff"
    assert over_the_wire(kinds.LikesProperties(4)).doubled == 8
    assert over_the_wire(ConfigError("wrong", path="cluster.x")).path == "cluster.x"


def test_text_of_a_key_error_is_not_quoted_twice():
    assert str(over_the_wire(KeyError("missing"))).splitlines()[0] == "g:3 on n1 raised KeyError: 'missing'"


NOT_MIXED = [
    asyncio.CancelledError(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(5),
    StopAsyncIteration(),
    kinds.ExitLike("x"),
]
if sys.version_info >= (3, 11):
    NOT_MIXED += [ExceptionGroup("many", [ValueError("a")]), BaseExceptionGroup("all", [KeyboardInterrupt()])]  # noqa: F821


@pytest.mark.parametrize("error", NOT_MIXED, ids=lambda e: type(e).__name__)
def test_type_that_cannot_be_a_base_becomes_a_plain_worker_error(error):
    caught = over_the_wire(error)
    assert type(caught) is WorkerError
    assert type(error).__name__ in str(caught)
    assert caught.__cause__ is not None


def test_exceptions_with_other_constructor_arguments_arrive_complete():
    caught = over_the_wire(kinds.NeedsTwo(5, "lost"))
    assert caught.code == 5
    assert caught.__cause__.args == ("5: lost",)
    assert over_the_wire(kinds.KeywordOnly(where="here")).where == "here"


def test_unpicklable_attributes_are_dropped():
    caught = over_the_wire(kinds.Unpicklable("stuck"))
    assert "payload_types.Unpicklable: stuck" in str(caught)
    assert not hasattr(caught, "lock")
    caught = over_the_wire(ValueError(threading.Lock()))
    assert isinstance(caught, ValueError)
    assert "<unlocked _thread.lock" in caught.__cause__.args[0]


def test_class_that_cannot_be_imported_arrives_as_text():
    frame, parts = failure.encode(1, raised(kinds.NeedsTwo(5, "lost")))
    moved = [bytes(part).replace(b"payload_types", b"payload_typos") for part in parts]
    caught = failure.decode(frame, AuthenticatedParts(moved), worker="g:0", rank=0, node="n")
    assert type(caught) is WorkerError
    assert "payload_types.NeedsTwo: 5: lost" in str(caught)
    assert "5: lost" in str(caught.__cause__)


def test_exception_whose_str_raises_arrives():
    caught = over_the_wire(kinds.BadStr())
    assert isinstance(caught, WorkerError)
    assert "BadStr" in str(caught)


def test_the_cause_and_context_are_in_the_remote_traceback():
    try:
        try:
            {}["inner"]
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        caught = over_the_wire(error)
    assert "KeyError: 'inner'" in caught.remote_traceback
    assert "direct cause" in caught.remote_traceback


def test_remote_error_can_be_raised_again_in_another_worker():
    """A worker that calls another worker raises that worker's error to its own caller."""
    inner = over_the_wire(ValueError("deep"))
    frame, parts = failure.encode(1, raised(inner))
    outer = failure.decode(frame, AuthenticatedParts(parts), worker="h:0", rank=0, node="n2")
    assert isinstance(outer, WorkerError)
    assert isinstance(outer, ValueError)
    assert outer.worker == "h:0"
    assert "deep" in outer.remote_traceback
    assert "g:3" in str(outer)


@pytest.mark.parametrize("error", [ValueError("boom"), StopIteration(), kinds.Unpicklable("x")])
def test_remote_error_survives_pickle(error):
    caught = over_the_wire(error)
    back = pickle.loads(pickle.dumps(caught))  # noqa: S301
    assert type(back) is type(caught)
    assert str(back) == str(caught)
    assert (back.worker, back.rank) == ("g:3", 3)


def test_start_expired_and_usage_failures_have_their_own_classes():
    start = over_the_wire(ImportError("no torch"), "start")
    assert isinstance(start, WorkerStartError)
    assert (start.worker, start.node) == ("g:3", "n1")
    expired = over_the_wire(RuntimeError("too late"), "expired")
    assert isinstance(expired, CallTimeoutError)
    assert isinstance(expired, TimeoutError)
    assert not isinstance(expired, WorkerError)
    assert isinstance(over_the_wire(RuntimeError("no method"), "usage"), UsageError)


def test_remote_timeout_error_is_no_call_timeout_error():
    remote = over_the_wire(TimeoutError("in the worker"))
    assert isinstance(remote, TimeoutError)
    assert not isinstance(remote, CallTimeoutError)


def test_long_text_and_traceback_are_truncated():
    frame, _ = failure.encode(1, raised(ValueError("x" * (1 << 20))))
    assert len(frame.text) <= failure._MAX_TEXT
    assert len(frame.traceback) <= failure._MAX_TEXT


def test_error_with_a_long_name_and_text_is_within_the_bounds_of_its_frame():
    """A frame beyond its bounds would be dropped, and its caller would wait for ever."""
    kind = type("Error" * 20_000, (Exception,), {})
    header, _ = failure.encode(1, kind("\udcff" * (1 << 20)))
    raised = frames.decode(frames.encode(header))
    assert raised.error.endswith("ErrorError")
    assert raised.text.endswith("\\udcff")


def test_traceback_omits_the_librarys_outer_frames():
    assert "wire/failure" not in over_the_wire(ValueError("x")).remote_traceback


@pytest.mark.parametrize(
    "end",
    [
        errors.WorkerDiedError("a:0 was killed", worker="a:0", rank=0, signal=9),
        errors.NodeLostError("node n1 is gone", node_rank=1),
        errors.PeerDiedError("b:0 is gone", peer="b:0"),
        errors.ChannelBrokenError("its host died", peer="q"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_ends_are_ended_errors(end):
    assert isinstance(end, errors.EndedError)
    assert vars(copy.copy(end)) == vars(end)


def test_connection_lost_error_is_no_ended_error():
    lost = copy.copy(errors.ConnectionLostError("the connection to a:0 was lost, and is there again"))
    assert not isinstance(lost, errors.EndedError)
    assert isinstance(lost, ConnectionError)
    assert str(lost) == "the connection to a:0 was lost, and is there again"
    told = over_the_wire(lost)
    assert isinstance(told, errors.ConnectionLostError)
    assert isinstance(told, errors.WorkerError)
