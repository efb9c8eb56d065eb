"""The worker's listening side: members only, calls held until the class is there, each answered once."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import sys

import msgspec
import pytest

from rlinf_actors.runtime.head_session import WatchedClients
from rlinf_actors.testing import faults
from rlinf_actors.wire import frames, payload
from rlinf_actors.wire.client_messages import WatchClients
from rlinf_actors.wire.payload import AuthenticatedParts
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.worker.remote_peers import RemotePeers
from rlinf_actors.worker.worker_server import WorkerServer
from tests.memory_network import MemoryNetwork


class Inline:
    """An executor that runs a call as soon as it comes, if it may."""

    def __init__(self) -> None:
        self.paused = False
        self.queue: list = []

    def submit(self, invocation) -> None:
        self.queue.append(invocation)
        if not self.paused:
            self.run()

    def submit_all(self, invocations) -> None:
        self.queue += invocations
        self.run()

    def run(self) -> None:
        queue, self.queue = self.queue, []
        for invocation in queue:
            invocation.run(self)

    def waiting(self) -> int:
        return len(self.queue)

    def double(self, x):
        return 2 * x


class Ends:
    """A server and a driver's link to it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(asyncio.get_running_loop())
        self.server = WorkerServer(self.network, "id-0", "g:0", "token")
        self.endpoint = self.server.bind("ipc:///w")
        self.came: list = []
        self._event = asyncio.Event()
        self.link = self.network.link(self.endpoint, b"driver#secret", self._received)

    def _received(self, peer, header, parts) -> None:
        self.came.append((frames.decode(header), [bytes(part) for part in parts]))
        self._event.set()

    def say(self, frame, parts=()) -> None:
        self.link.send(frames.encode(frame), parts)

    def join(self, **changes) -> None:
        good = frames.Join(PROTOCOL, "0", "3", "driver", "token", "id-0")
        self.say(msgspec.structs.replace(good, **changes))

    def call(self, call, x=1, method="double") -> None:
        self.say(frames.Call(call, method), payload.encode_call((x,), {}))

    async def until(self, count):
        while len(self.came) < count:
            self._event.clear()
            await asyncio.wait_for(self._event.wait(), 10)
        return self.came

    async def settled(self) -> None:
        """Whatever was sent before this has arrived."""
        arrived = asyncio.Event()
        asyncio.get_running_loop().call_soon(arrived.set)
        await arrived.wait()
        await asyncio.sleep(0)


@pytest.fixture
async def ends():
    return Ends()


async def test_calls_of_a_member_are_answered(ends):
    ends.server.open(Inline())
    ends.join()
    ends.call(1, 21)
    (answer, parts), *_ = await ends.until(1)
    assert isinstance(answer, frames.Ok)
    assert payload.decode(AuthenticatedParts(parts)) == 42
    assert len(ends.server._calls) == 0


async def test_calls_in_one_frame_run_in_order_and_once_each(ends):
    args = [part for n in range(5) for part in payload.encode_call((n,), {})]
    ends.join()
    ends.say(frames.Calls([1, 2], "double"), args[:2])
    await ends.settled()
    ends.server.open(Inline())
    ends.say(frames.Calls([3, 4, 5], "double"), args[2:])
    ends.say(frames.Calls([4, 5], "double"), args[3:])  # a second time: a fault
    ends.call(6, 10)
    came = await ends.until(6)
    assert [frame.id for frame, _ in came] == [1, 2, 3, 4, 5, 6]
    assert [payload.decode(AuthenticatedParts(parts)) for _, parts in came] == [0, 2, 4, 6, 8, 20]
    assert len(ends.server._calls) == 0


async def test_calls_of_one_frame_are_answered_if_they_cannot_be_handled(ends, monkeypatch):
    def fails(*_):
        raise RuntimeError("a bug")

    ends.server.open(Inline())
    ends.join()
    monkeypatch.setattr(ends.server, "_submit_all", fails)
    ends.say(frames.Calls([1, 2], "double"))
    for (frame, _), call in zip(await ends.until(2), (1, 2), strict=True):
        assert (frame.id, frame.error) == (call, "rlinf_actors.errors.InternalError")


async def test_call_that_cannot_be_decoded_is_answered(ends):
    ends.server.open(Inline())
    ends.join()
    ends.say(frames.Call(1, "m" * 70_000))
    (answer, _), *_ = await ends.until(1)
    assert (answer.id, answer.kind) == (1, "usage")
    assert "of length <= 65536" in answer.text


async def test_running_call_is_reported_also_during_construction(ends):
    ends.join()
    ends.say(frames.WhatRuns(7))
    assert (await ends.until(1))[0][0] == frames.Runs(7, "")
    ends.server.constructing()
    ends.call(1)
    ends.say(frames.WhatRuns(8))
    runs = (await ends.until(2))[1][0]
    assert (runs.id, runs.method, runs.waiting) == (8, "__init__", 1)
    assert runs.seconds >= 0


async def test_calls_wait_for_the_class_in_their_order(ends):
    ends.join()
    for call in range(5):
        ends.call(call)
    await ends.settled()
    assert ends.came == []
    ends.server.open(Inline())
    assert [frame.id for frame, _ in await ends.until(5)] == [0, 1, 2, 3, 4]


async def test_failed_constructor_fails_earlier_and_later_calls(ends):
    ends.join()
    ends.call(1)
    await ends.settled()
    ends.server.refuse(ValueError("no arm"))
    ends.call(2)
    for frame, _ in await ends.until(2):
        assert isinstance(frame, frames.Raised)
        assert frame.text == "no arm"
    assert len(ends.server._calls) == 0


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"token": "guess"}, "authentication", "does not belong to the job"),
        ({"worker_id": "id-9"}, "authentication", "looked for another worker"),
        ({"protocol": PROTOCOL + 1}, "protocol", rf"\(protocol {PROTOCOL + 1}\), .*: upgrade the node of g:0"),
        ({"protocol": PROTOCOL - 1}, "protocol", rf"\(protocol {PROTOCOL - 1}\), .*: upgrade driver"),
    ],
)
async def test_links_of_non_members_are_rejected_with_the_reason(ends, changes, kind, said):
    ends.server.open(Inline())
    ends.join(**changes)
    ends.call(1)
    (answer, _), *rest = await ends.until(1)
    await ends.settled()
    assert isinstance(answer, frames.Rejected)
    assert answer.kind == kind
    assert re.search(said, answer.text)
    assert rest == []
    assert len(ends.came) == 1


async def test_link_from_a_machine_of_another_byte_order_is_rejected(ends):
    other = {"little": "big", "big": "little"}[sys.byteorder]
    ends.join(byte_order=other)
    (answer, _), *_ = await ends.until(1)
    assert isinstance(answer, frames.Rejected)
    assert answer.kind == "protocol"
    assert f"driver is on a {other}-endian machine, g:0 on a {sys.byteorder}-endian one: tensors travel" in answer.text
    ends.call(1)
    await ends.settled()
    assert len(ends.came) == 1


async def test_calls_of_a_link_without_join_do_not_run(ends, caplog):
    executor = Inline()
    executor.paused = True
    ends.server.open(executor)
    with caplog.at_level(logging.WARNING):
        ends.call(1)
        ends.say(frames.Create(2, "os:system", {}))
        ends.link.send(b"\xc1")
        await ends.settled()
    assert executor.queue == []
    assert ends.server.creations.empty()
    assert ends.came == []
    assert "'driver', which has not joined" in caplog.text
    assert "secret" not in caplog.text, "who knows it can take the connection over"


async def test_creation_goes_to_the_main_thread(ends):
    ends.join()
    ends.say(frames.Create(7, "m:C", {"MASTER_PORT": "1"}, 2), [b"payload"])
    await ends.settled()
    creation = ends.server.creations.get_nowait()
    assert (creation.frame.id, creation.frame.env, creation.parts) == (7, {"MASTER_PORT": "1"}, [b"payload"])


async def test_cancel_and_credit_reach_their_call_only(ends):
    executor = Inline()
    executor.paused = True
    ends.server.open(executor)
    ends.join()
    ends.call(1)
    ends.say(frames.Stream(2, "double", 4), payload.encode_call((1,), {}))
    ends.say(frames.Cancel(1))
    ends.say(frames.Credit(2, 3))
    ends.say(frames.Cancel(99))
    ends.say(frames.Credit(99, 1))
    await ends.settled()
    first, second = executor.queue
    assert first.cancelled
    assert not second.cancelled
    assert (second.window, second._credited) == (4, 3)


async def test_call_ids_of_different_links_are_independent(ends):
    executor = Inline()
    executor.paused = True
    ends.server.open(executor)
    ends.join()
    ends.call(1)
    other = ends.network.link(ends.endpoint, b"other", lambda *_: None)
    other.send(frames.encode(frames.Join(PROTOCOL, "0", "3", "other", "token", "id-0")))
    other.send(frames.encode(frames.Cancel(1)))
    await ends.settled()
    assert not executor.queue[0].cancelled


async def test_nonsense_from_a_member_is_dropped(ends, caplog):
    ends.server.open(Inline())
    ends.join()
    with caplog.at_level(logging.WARNING):
        ends.link.send(b"\x91\xc1")
        ends.say(frames.Ok(1))
        ends.call(5)
        await ends.until(1)
    assert "not a header" in caplog.text
    assert "dropped a Ok from 'driver'" in caplog.text
    assert "secret" not in caplog.text


async def test_a_call_that_comes_twice_runs_once(ends):
    executor = Inline()
    ends.server.open(executor)
    ends.join()
    with faults.inject("transport.send", faults.duplicate(), where="ipc:///w"):
        ends.call(7, 21)
        await ends.until(1)
        ends.call(7, 21)  # later, when the first was answered long ago
        ends.call(9, 1)
        ends.call(8, 1)  # of another thread, which was slower
        await ends.until(3)
        await ends.settled()
    assert [answer.id for answer, _ in ends.came] == [7, 9, 8]


async def test_a_call_that_comes_twice_while_the_class_is_made_runs_once(ends):
    ends.join()
    ends.call(1)
    ends.call(1)
    await ends.settled()
    ends.server.open(Inline())
    await ends.until(1)
    await ends.settled()
    assert [answer.id for answer, _ in ends.came] == [1]


async def test_successor_of_a_lost_link_ends_its_streams(ends):
    told = []
    ends.server.on_link_lost(lambda link, worker: told.append((link, worker)))
    executor = Inline()
    executor.paused = True
    ends.server.open(executor)
    ends.join()
    ends.say(frames.Stream(1, "numbers", 4), payload.encode_call((), {}))
    await ends.settled()
    (stream,) = executor.queue
    again = ends.network.link(ends.endpoint, b"driver#2", ends._received)
    good = frames.Join(PROTOCOL, "0", "3", "driver", "token", "id-0")
    again.send(frames.encode(msgspec.structs.replace(good, succeeds=[b"another"], worker="w")))
    await ends.settled()
    assert told == [], "that was another process's"
    again.send(frames.encode(msgspec.structs.replace(good, succeeds=[b"driver#secret"], worker="w")))
    third = ends.network.link(ends.endpoint, b"driver#3", ends._received)
    third.send(frames.encode(msgspec.structs.replace(good, succeeds=[b"driver#secret"], worker="w")))
    await ends.settled()
    assert told == [(b"driver#secret", "w")]
    assert stream.cancelled


async def test_call_that_comes_late_by_a_lost_link_is_not_run(ends):
    """It has failed at the caller, which may have sent it again by the new link."""
    ends.server.open(Inline())
    ends.join()
    ends.call(1)
    await ends.until(1)
    again = ends.network.link(ends.endpoint, b"driver#2", ends._received)
    good = frames.Join(PROTOCOL, "0", "3", "driver", "token", "id-0")
    again.send(frames.encode(msgspec.structs.replace(good, succeeds=[b"driver#secret"])))
    await ends.settled()
    ends.call(2)
    await ends.settled()
    again.send(frames.encode(frames.Call(2, "double")), payload.encode_call((1,), {}))
    await ends.until(2)
    await ends.settled()
    assert [answer.id for answer, _ in ends.came] == [1, 2]


async def test_state_of_an_ended_remote_worker_is_removed(ends, monkeypatch):
    monkeypatch.setattr("rlinf_actors.worker.worker_server.LATE_S", 0.0)
    server, told, forgotten, over = ends.server, [], [], asyncio.Event()
    watched = WatchedClients(told.append)

    async def connected() -> None:
        pass

    server.remote_peers = RemotePeers(watched.watch, connected, server.peer_gone)
    server.on_forgotten(forgotten.append)
    server.on_forgotten(lambda link: over.set())
    server.open(Inline())
    ends.link = ends.network.link(ends.endpoint, b"worker:w1#secret", ends._received)
    ends.join(worker="id-9")
    ends.call(1, 21)
    await ends.until(1)
    assert (told, list(server._members)) == ([WatchClients(["w1"])], [b"worker:w1#secret"])
    watched.gone("w1")
    await asyncio.wait_for(over.wait(), 10)
    assert forgotten == [b"worker:w1#secret"]
    assert server._members == server._workers == server._calls._newest == server.remote_peers._links == {}


def memory_of(pid) -> frames.Memory:
    """What a peer on this machine says of itself."""
    return frames.Memory(pid, 0, 0, 0, 1)


async def test_peer_without_a_free_descriptor_for_its_pidfd_is_watched_by_the_head(ends, monkeypatch, caplog):
    told, gone = [], []
    watched = WatchedClients(told.append)

    async def connected() -> None:
        pass

    def none_left(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ends.server, "peer_gone", gone.append)
    ends.server.remote_peers = RemotePeers(watched.watch, connected, ends.server.peer_gone)
    ends.join()
    monkeypatch.setattr(os, "pidfd_open", none_left)
    ends.say(memory_of(os.getpid()))
    await ends.settled()
    assert (told, gone) == ([WatchClients(["driver"])], []), "it lives"
    assert "the head alone tells when 'driver' ends: Too many open files" in caplog.text
    watched.gone("driver")
    assert gone == [b"driver#secret"]


@pytest.mark.parametrize("number", [errno.ESRCH, errno.EINVAL, errno.ENOENT])
async def test_peer_that_ended_before_the_watch_is_gone(ends, monkeypatch, number):
    """Linux before 6.15 says EINVAL of one whose number is a session's yet."""

    def gone(pid):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", gone)
    executor = Inline()
    executor.paused = True
    ends.server.open(executor)
    ends.join()
    ends.say(frames.Stream(1, "numbers", 4), payload.encode_call((), {}))
    ends.say(memory_of(os.getpid()))
    await ends.settled()
    assert executor.queue[0].cancelled


async def test_repeated_create_is_answered_and_constructs_nothing(ends):
    """The owner has lost the link by which it sent the first one, while the constructor ran."""
    ends.join()
    ends.say(frames.Create(7, "m:C", {}))
    ends.say(frames.Create(8, "m:C", {}))
    await ends.settled()
    assert ends.server.creations.get_nowait().frame.id == 7
    assert ends.server.creations.empty()
    assert ends.came == []
    ends.server.open(Inline())
    await ends.until(1)
    ends.say(frames.Create(9, "m:C", {}))
    await ends.until(2)
    assert [(type(frame), frame.id) for frame, _ in ends.came] == [(frames.Runs, 8), (frames.Runs, 9)]
    assert ends.server.creations.empty()
