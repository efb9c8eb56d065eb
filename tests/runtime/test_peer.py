"""A driver's peer of a worker: the backlog, calls that end exactly once, and the worker's end."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_worker import FakeWorker, Waiter

from rlinf_actors.errors import (
    AuthenticationError,
    InternalError,
    ProtocolMismatchError,
    RemoteWireError,
    RlinfActorsError,
    WorkerDiedError,
)
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import frames
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Endpoint


def connect(peer, worker, first=lambda: None, host="here"):
    peer.connect(Endpoint("here", worker.endpoint), host, "token", first)


async def test_peer_sends_join_then_create_then_its_backlog(peer, worker):
    waiter = Waiter()
    call = peer.open(waiter)
    peer.send(frames.Call(call, "step"), [b"arg"])
    assert not peer.connected
    connect(peer, worker, lambda: (frames.encode(frames.Create(99, "m:C", {})), [b"cls"]))
    peer.send(frames.Call(call + 1, "next"))
    join, create, one, two = await worker.until(4)
    assert join.protocol == PROTOCOL
    assert (join.token, join.worker_id, join.name) == ("token", "id-0", "driver:x")
    assert isinstance(create, frames.Create)
    assert (one.method, two.method) == ("step", "next")
    assert worker.came[2][1] == [b"arg"]
    assert peer.connected


async def test_an_answer_ends_its_call_only(peer, worker):
    connect(peer, worker)
    first, second = Waiter(), Waiter()
    one, two = peer.open(first), peer.open(second)
    peer.send(frames.Call(one, "a"))
    await worker.until(2)
    worker.say(frames.Ok(two))
    await second.told.wait()
    assert first.answers == []
    assert list(peer.pending) == [one]
    worker.say(frames.Raised(one, "raised", "ValueError", "x"))
    await first.told.wait()
    assert peer.pending == {}


async def test_results_in_one_frame_end_their_calls(peer, worker):
    connect(peer, worker)
    waiting = [Waiter() for _ in range(4)]
    calls = [peer.open(waiter) for waiter in waiting]
    peer.forget(calls[1])
    peer.send(frames.Call(calls[0], "a"))
    await worker.until(3)
    worker.say(frames.Oks(calls[:3], [0.5, 0.5, 0.25]), [b"M\x00", b"M\x01", b"M\x02"])
    await waiting[2].told.wait()
    assert [waiter.answers for waiter in waiting[1::2]] == [[], []]
    assert waiting[0].answers == [frames.Ok(calls[0], 0.5)]
    assert waiting[2].answers == [frames.Ok(calls[2], 0.25)]
    assert list(peer.pending) == [calls[3]]


async def test_a_result_in_a_shared_frame_that_cannot_be_handled_fails_its_call_only(peer, worker):
    class Raises(Waiter):
        def answer(self, frame, parts):
            raise RuntimeError("a bug")

    connect(peer, worker)
    first, raises, last, other = waiting = [Waiter(), Raises(), Waiter(), Waiter()]
    calls = [peer.open(waiter) for waiter in waiting]
    peer.send(frames.Call(calls[0], "a"))
    await worker.until(2)
    worker.say(frames.Oks(calls[:3], [0.5, 0.5, 0.5]))
    await asyncio.wait_for(raises.told.wait(), 10)
    assert "a bug" in str(raises.error)
    assert [first.answers, last.answers] == [[frames.Ok(calls[n], 0.5)] for n in (0, 2)]
    assert peer.error is None, "the other calls go on"
    assert list(peer.pending) == [calls[3]]
    assert other.error is None


async def test_answer_that_cannot_be_decoded_fails_its_call(peer, worker):
    connect(peer, worker)
    first, other = Waiter(), Waiter()
    call = peer.open(first)
    peer.open(other)
    peer.send(frames.Call(call, "a"))
    await worker.until(2)
    worker.say_bytes(b"\xdd\xff\xff\xff\xff\x00")  # an array of 2^32 elements, of no call
    worker.say(frames.Raised(call, "raised", "E" * 70_000, "its name is longer than the bound"))
    await asyncio.wait_for(first.told.wait(), 10)
    assert isinstance(first.error, RemoteWireError)
    assert other.error is None
    assert peer.error is None


async def test_items_of_a_stream_keep_it_open(peer, worker):
    connect(peer, worker)
    waiter = Waiter(answers=3)
    call = peer.open(waiter)
    peer.send(frames.Stream(call, "s", 4))
    await worker.until(2)
    for frame in (frames.Item(call), frames.Item(call), frames.Ok(call), frames.Ok(call)):
        worker.say(frame)
    while len(waiter.answers) < 3:
        waiter.told.clear()
        await asyncio.wait_for(waiter.told.wait(), 10)
    assert peer.pending == {}


async def test_abandoned_call_sends_one_cancel(peer, worker):
    connect(peer, worker)
    call = peer.open(Waiter())
    peer.forget(call)
    peer.forget(call)
    peer.send(frames.Call(7, "end"))
    assert (await worker.until(3))[1:] == [frames.Cancel(call), frames.Call(7, "end")]


async def test_death_fails_open_and_later_calls(peer):
    before, after = Waiter(), Waiter()
    peer.open(before)
    error = WorkerDiedError("gone")
    peer.fail(error)
    peer.fail(WorkerDiedError("a second cause"))
    peer.open(after)
    assert before.error is after.error is error
    assert peer.pending == {}
    peer.send(frames.Call(1, "into the void"))
    assert peer._backlog == []


async def test_death_fails_all_calls_although_one_handler_raises(peer, caplog):
    class Fails(Waiter):
        def fail(self, error):
            raise RuntimeError("a bug")

    def raising(error):
        raise RuntimeError("another bug")

    waiting = [Waiter(), Fails(), Waiter()]
    for waiter in waiting:
        peer.open(waiter)
    told = []
    peer.on_gone(raising)
    peer.on_gone(told.append)
    error = WorkerDiedError("gone")
    peer.fail(error)
    assert told == [error]
    assert waiting[0].error is waiting[2].error is error
    assert sum("internal error" in record.getMessage() for record in caplog.records) == 2


async def test_call_made_during_the_failure_of_others_fails_too(peer):
    """`fail` of one call opens another, which must fail too."""
    later = Waiter()

    class Opens(Waiter):
        def fail(self, error):
            super().fail(error)
            peer.open(later)

    peer.open(Opens())
    peer.fail(WorkerDiedError("gone"))
    assert later.error is not None


@pytest.mark.parametrize(
    ("kind", "error"), [("protocol", ProtocolMismatchError), ("authentication", AuthenticationError)]
)
async def test_a_refused_join_fails_the_calls(peer, worker, kind, error):
    connect(peer, worker)
    waiter = Waiter()
    peer.open(waiter)
    await worker.until(1)
    worker.say(frames.Rejected(kind, "not you"))
    await waiter.told.wait()
    assert type(waiter.error) is error
    assert "g:0 on node0: not you" in str(waiter.error)


async def test_unix_socket_on_another_machine_is_unreachable(peer, worker):
    waiter = Waiter()
    peer.open(waiter)
    connect(peer, worker, host="elsewhere")
    assert isinstance(waiter.error, RlinfActorsError)
    assert "another machine" in str(waiter.error)


async def test_peer_uses_tcp_if_ipc_is_not_possible(network, peer):
    worker = FakeWorker(network, "tcp://10.0.0.1:0")
    peer.connect(Endpoint("there", "ipc:///nowhere", worker.endpoint), "here", "t", lambda: None)
    await worker.until(1)


async def test_malformed_frame_of_the_worker_is_dropped(peer, worker, caplog):
    connect(peer, worker)
    waiter = Waiter()
    call = peer.open(waiter)
    await worker.until(1)
    with caplog.at_level(logging.WARNING):
        worker.say_bytes(b"\x91")
        worker.say(frames.Call(call, "a worker does not call a driver"))
        worker.say(frames.Ok(call + 100))
        worker.say(frames.Ok(call))
        await waiter.told.wait()
    assert "not a header" in caplog.text
    assert "dropped a Call" in caplog.text


async def test_close_drops_the_link_and_may_be_repeated(peer, worker):
    connect(peer, worker)
    peer.close()
    peer.close()
    assert not peer.connected


async def test_listeners_and_watchers_do_not_count_as_open_calls(peer, worker):
    connect(peer, worker)
    heard, gone = [], []
    number = peer.listen(heard.append)
    peer.on_gone(gone.append)
    assert peer.pending == {}
    await worker.until(1)
    for frame in (frames.Held(number, 1), frames.Returned(number, 5), frames.Held(number + 1000, 1)):
        worker.say(frame)
    call = peer.open(last := Waiter())
    worker.say(frames.Ok(call))
    await last.told.wait()
    assert heard == [frames.Held(number, 1), frames.Returned(number, 5)]
    error = WorkerDiedError("gone")
    peer.fail(error)
    peer.fail(WorkerDiedError("a second cause"))
    assert gone == [error]
    peer.on_gone(gone.append)
    assert gone == [error, error]


async def test_memory_that_the_worker_has_dropped_is_freed_by_the_thread_that_reads(peer):
    peer.lending._lent[7] = b"large"
    assert peer._received_anywhere(b"", frames.encode(frames.Dropped([7])), [])
    assert not peer.lending.lent_bytes


async def test_first_message_requests_the_link_once(network, worker):
    asked = []
    peer = Peer(network, "driver:x", "g:0", 0, "node0", lambda _: asked.append(1))
    peer.worker_id = "id-0"
    assert not peer.wanted
    for call in (1, 2):
        peer.send(frames.Call(call, "x"))
    assert peer.wanted
    assert asked == [1]
    connect(peer, worker)
    assert [frame.id for frame in (await worker.until(3))[1:]] == [1, 2]
    dead = Peer(network, "driver:x", "g:0", 0, "node0", lambda _: asked.append(2))
    dead.fail(WorkerDiedError("gone"))
    dead.send(frames.Call(1, "x"))
    assert asked == [1]


async def test_handler_that_raises_for_several_answers_leaves_no_call_without_an_end(peer, worker, caplog):
    class Together(Waiter):
        """A call that shares its answer's frame with others of its kind."""

        @staticmethod
        def answer_all(answered, frame):
            raise ZeroDivisionError("a bug of ours")

    connect(peer, worker)
    waiters = [Together(), Together(), Waiter()]
    calls = [peer.open(waiter) for waiter in waiters]
    peer.send(frames.Call(calls[0], "a"))
    await worker.until(2)
    worker.say(frames.ChannelAccepted(calls[:2]))
    for waiter in waiters:
        await waiter.told.wait()
    assert {type(waiter.error) for waiter in waiters} == {InternalError}
    assert peer.pending == {}
