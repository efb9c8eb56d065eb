"""A signal handler that raises while a thread begins or ends to wait, anywhere: the next thread can read."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlinf_actors.errors import CallTimeoutError
from rlinf_actors.net import held_signals
from rlinf_actors.net.idle_select import IdleSelect
from rlinf_actors.net.loop import call_threadsafe
from rlinf_actors.net.reading import Reading
from rlinf_actors.runtime.future import Promise


class Struck(Exception):
    """What the signal handler raises."""


def struck_at(place: int, action: Callable[[], Any]) -> bool:
    """Run *action*, and raise at the *place*-th point at which Python may run a signal handler.

    Python runs handlers where a function begins and after each call of a function in C. Return False if *action* ends
    before that place.
    """
    passed = 0

    def strike(frame: Any, event: str, _arg: Any) -> None:
        nonlocal passed
        if event not in ("call", "c_return") or held_signals.main.held:
            return
        if frame.f_code.co_filename == held_signals.__file__ or frame.f_code is struck_at.__code__:
            return
        passed += 1
        if passed == place:
            raise Struck

    sys.setprofile(strike)
    try:
        action()
    except Struck:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.fixture
def reading() -> Iterator[Reading]:
    loop = asyncio.new_event_loop()
    made = Reading(loop)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield made
    call_threadsafe(loop, made.close)
    call_threadsafe(loop, loop.stop)
    thread.join(10)
    loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck in a weak reference's callback
def test_thread_that_is_struck_gives_back_the_turn(reading):
    def wait_in_vain() -> None:
        with contextlib.suppress(CallTimeoutError):
            promise.wait(0.001)

    place = 1
    while True:
        promise: Promise[None] = Promise("a result")
        if not struck_at(place, wait_in_vain):
            break
        assert not reading.taken, place
        assert reading.ring not in promise._callbacks, place
        place += 1
    assert place > 20


def test_event_loop_that_is_struck_gives_back_the_turn(reading):
    loop = asyncio.new_event_loop()
    select = IdleSelect(reading, loop._selector, loop._selector.select)
    select.awaited = 1
    place = 1
    while struck_at(place, lambda: select(0.001)):
        assert not reading.taken, place
        place += 1
    assert place > 8
    reading.part(select)
    loop.close()


def test_thread_that_is_struck_takes_nothing_from_the_one_that_reads(reading):
    """Two threads wait for one result. The one without the turn is struck; the other must be woken all the same."""
    promise: Promise[int] = Promise("a result")
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.append(promise.wait(10)))
    reader.start()
    while reading.ring not in promise._callbacks:
        pass
    place = 1
    while struck_at(place, lambda: promise._block_until_done(0.001)):
        place += 1
    assert len(promise._callbacks) < 6, "a wait that is struck leaves nothing, unless that is in its clean-up"
    promise.resolve(7)
    reader.join(5)
    assert found == [7]
