"""Calls whose large arguments come by another worker of the node: once, in order, and also if that worker is gone."""

from __future__ import annotations

import asyncio

import pytest
from test_worker_server import Ends, Inline

from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.worker import shared_calls
from rlinf_actors.worker.shared_calls import EARLY, SharedCalls

LINK, OTHER = b"driver:abc#1#secret", b"driver:def#1#secret"


class Recorder:
    """SharedCalls, and the frames that it handles and sends."""

    def __init__(self) -> None:
        self.handled: list[tuple[bytes, frames.AnyFrame, list]] = []
        self.sent: list[tuple[bytes, frames.AnyFrame]] = []
        self.asked = asyncio.Event()
        self.calls = SharedCalls(self.handle, self.send)

    def send(self, peer, frame) -> None:
        self.sent.append((peer, frame))
        self.asked.set()

    def handle(self, link, frame, parts) -> None:
        if isinstance(frame, frames.SharedCall):
            self.calls.call(link, frame, parts)
        else:
            self.handled.append((link, frame, list(parts)))

    def come(self, frame, *parts, link=LINK) -> None:
        """A frame arrives, as at the server."""
        authenticated = AuthenticatedParts(parts)
        if not self.calls.defers(link, frame, authenticated):
            self.handle(link, frame, authenticated)

    def shared(self, id, *parts, origin="abc", link=b"worker:w#1#secret") -> None:
        self.calls.arrived(link, frames.SharedParts(origin, id), AuthenticatedParts(parts))

    @property
    def ids(self) -> list[int]:
        return [frame.id for _, frame, _ in self.handled]


@pytest.fixture
async def recorder():
    return Recorder()


@pytest.mark.parametrize("parts_first", [False, True])
async def test_call_runs_once_with_its_parts(recorder, parts_first):
    if parts_first:
        recorder.shared(7, b"large")
    recorder.come(frames.SharedCall(7, "step", 2.5), b"small")
    recorder.shared(7, b"large")
    recorder.shared(7, b"large")  # from the caller too
    assert recorder.handled == [(LINK, frames.Call(7, "step", 2.5), [b"small", b"large"])]
    assert recorder.calls.held == {}


async def test_parts_may_come_from_the_caller(recorder):
    recorder.come(frames.SharedCall(7, "step"), b"small")
    recorder.shared(7, b"large", origin="", link=LINK)
    assert recorder.ids == [7]


async def test_parts_of_another_caller_are_not_taken(recorder):
    recorder.come(frames.SharedCall(7, "step"), b"small")
    recorder.shared(7, b"theirs", origin="def")
    assert recorder.handled == []
    recorder.shared(7, b"ours")
    assert recorder.handled[0][2] == [b"small", b"ours"]


async def test_later_frames_of_the_link_wait_and_keep_their_order(recorder):
    recorder.come(frames.SharedCall(1, "step"))
    recorder.come(frames.Call(2, "step"))
    recorder.come(frames.SharedCall(3, "step"))
    recorder.come(frames.Stream(4, "items", 8))
    recorder.come(frames.Call(5, "step"), link=OTHER)
    assert recorder.ids == [5], "other callers do not wait"
    recorder.shared(3)
    recorder.shared(1)
    assert recorder.ids == [5, 1, 2, 3, 4]


async def test_second_call_without_parts_holds_what_follows_it(recorder):
    for frame in (frames.SharedCall(1, "step"), frames.Call(2, "s"), frames.SharedCall(3, "step"), frames.Call(4, "s")):
        recorder.come(frame)
    recorder.shared(1)
    assert recorder.ids == [1, 2]
    recorder.come(frames.Call(5, "s"))
    recorder.shared(3)
    assert recorder.ids == [1, 2, 3, 4, 5]


async def test_questions_do_not_wait(recorder):
    recorder.come(frames.SharedCall(1, "step"))
    recorder.come(frames.WhatRuns(9))
    assert recorder.ids == [9]


@pytest.mark.parametrize(("cancelled", "left"), [(1, [2, 3]), (3, [1, 2])])
async def test_cancelled_call_never_runs_and_holds_nothing(recorder, cancelled, left):
    for frame in (frames.SharedCall(1, "step"), frames.Call(2, "step"), frames.SharedCall(3, "step")):
        recorder.come(frame)
    recorder.come(frames.Cancel(cancelled))
    for id in (1, 3):
        recorder.shared(id)
    assert [frame.id for _, frame, _ in recorder.handled if isinstance(frame, frames.Call)] == left
    assert recorder.calls.held == {}


async def test_cancel_of_an_ordinary_call_follows_that_call(recorder):
    recorder.come(frames.SharedCall(1, "step"))
    recorder.come(frames.Call(2, "step"))
    recorder.come(frames.Cancel(2))
    recorder.shared(1)
    assert [type(frame) for _, frame, _ in recorder.handled] == [frames.Call, frames.Call, frames.Cancel]


async def test_parts_that_do_not_come_are_asked_of_the_caller(recorder, monkeypatch):
    monkeypatch.setattr(shared_calls, "WAIT_S", 0.01)
    recorder.come(frames.SharedCall(1, "step"))
    await asyncio.wait_for(recorder.asked.wait(), 10)
    assert recorder.sent == [(LINK, frames.WantParts(1))]


async def test_parts_that_have_come_are_not_asked_for(recorder, monkeypatch):
    monkeypatch.setattr(shared_calls, "WAIT_S", 0.0)
    recorder.come(frames.SharedCall(1, "step"))
    recorder.shared(1)
    await asyncio.sleep(0.02)
    assert recorder.sent == []


async def test_second_held_call_is_asked_for_too(recorder, monkeypatch):
    monkeypatch.setattr(shared_calls, "WAIT_S", 0.01)
    recorder.come(frames.SharedCall(1, "step"))
    recorder.come(frames.SharedCall(2, "step"))
    recorder.shared(1)
    await asyncio.wait_for(recorder.asked.wait(), 10)
    assert recorder.sent[-1] == (LINK, frames.WantParts(2))


async def test_parts_without_their_calls_are_limited(recorder):
    for id in range(3 * EARLY):
        recorder.shared(id)
    assert len(recorder.calls._early) == EARLY


async def test_lost_caller_is_forgotten(recorder):
    recorder.come(frames.SharedCall(1, "step"))
    recorder.shared(2)
    recorder.calls.forget(LINK)
    assert (recorder.calls.held, recorder.calls._early) == ({}, {})
    recorder.shared(1)
    assert recorder.handled == []


async def test_worker_answers_calls_with_shared_parts_once_and_in_order():
    ends = Ends()
    ends.server.open(Inline())
    ends.join()
    parts = payload.encode_call((b"x" * 100_000,), {})
    assert len(parts) > 1
    ends.say(frames.SharedCall(1, "double"), parts[:1])
    ends.call(2, 21)
    await ends.settled()
    assert ends.came == []
    for _ in range(2):
        ends.say(frames.SharedParts("", 1), parts[1:])
    answers = await ends.until(2)
    assert [answer.id for answer, _ in answers] == [1, 2]
    assert payload.decode(AuthenticatedParts(answers[0][1])) == b"x" * 200_000
    await ends.settled()
    assert len(ends.came) == 2


async def test_frames_behind_a_held_call_are_left_to_the_loop():
    """A thread that reads the sockets while it waits must not handle a call before those that wait on its link."""
    ends = Ends()
    ends.server.open(Inline())
    ends.join()
    parts = payload.encode_call((b"x" * 100_000,), {})
    ends.say(frames.SharedCall(1, "double"), parts[:1])
    await ends.settled()
    [link] = ends.server.shared_calls.held
    on_any_thread = getattr(ends.server, "_received_anywhere", lambda *_: False)
    assert not on_any_thread(link, frames.encode(frames.Call(2, "double")), payload.encode_call((1,), {}))
    ends.say(frames.SharedParts("", 1), parts[1:])
    await ends.until(1)
    assert ends.server.shared_calls.held == {}


async def test_internal_error_of_one_frame_does_not_keep_the_others(recorder, caplog):
    failing = recorder.calls._handle

    def handle(link, frame, parts):
        if frame.id == 2:
            raise ValueError("a bug")
        failing(link, frame, parts)

    recorder.calls._handle = handle
    for frame in (frames.SharedCall(1, "step"), frames.Call(2, "step"), frames.Call(3, "step")):
        recorder.come(frame)
    with pytest.raises(ValueError, match="a bug"):
        recorder.shared(1)
    await asyncio.sleep(0)
    assert recorder.ids == [1, 3]
    assert recorder.calls.held == {}
