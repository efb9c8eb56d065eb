"""Unexpected exceptions, on every transport: a daemon ends; another process fails the request concerned."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from rlinf_actors.errors import InternalError, RlinfActorsError
from rlinf_actors.net import daemon
from rlinf_actors.net import loop as loops
from rlinf_actors.net.rpc import ControlClient, ControlServer
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.wire import failure, frames
from rlinf_actors.wire.agent_messages import Beat, Goodbye
from rlinf_actors.wire.control_codec import Request
from rlinf_actors.wire.values import Endpoint
from rlinf_actors.worker.worker_server import WorkerServer


class BugError(Exception):
    """Raised by a handler."""


def broken(*_: object) -> None:
    raise BugError("a bug")


@pytest.fixture
async def reported():
    """The contexts passed to the loop's exception handler; the process goes on."""
    seen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    return seen


@pytest.fixture
async def ended(monkeypatch):
    """Set when a daemon would end its process."""
    happened = asyncio.Event()
    monkeypatch.setattr(daemon, "end_process", happened.set)
    daemon.end_on_internal_error(asyncio.get_running_loop())
    return happened


class PendingAnswer:
    """A request that waits for its answer."""

    def __init__(self, *, bug: bool = False) -> None:
        self.outcome: asyncio.Future[frames.AnyFrame] = asyncio.get_running_loop().create_future()
        self._bug = bug

    def answer(self, frame, parts) -> bool:
        if self._bug:
            broken()
        if type(frame) is frames.Raised:
            self.outcome.set_exception(failure.decode(frame, parts, worker="w:0", rank=0, node="n"))
        else:
            self.outcome.set_result(frame)
        return True

    def fail(self, error) -> None:
        self.outcome.set_exception(error)

    async def error(self) -> Exception:
        with pytest.raises(RlinfActorsError) as caught:
            await asyncio.wait_for(self.outcome, 10)
        return caught.value


class Pair:
    """A worker's server and another process's link to it; `served` gets the frames of channels."""

    def __init__(self, wire) -> None:
        self.server = WorkerServer(wire.network, "w-0", "w:0", "token")
        self.lost: list[str] = []
        self.server.on_link_lost(lambda _, worker: self.lost.append(worker))
        self.server.serve((frames.ChannelLook,), lambda peer, frame, _: self.server.answer(peer, frames.Ok(frame.id)))
        where = self.server.bind(wire.endpoint())
        self.peer = Peer(wire.network, "worker:a", "w:0", 0, "n", me="a-0")
        self.peer.worker_id = "w-0"
        tcp = where if where.startswith("tcp") else ""
        self.peer.connect(Endpoint("here", "" if tcp else where, tcp), "here", "token", lambda: None)

    def look(self, *, bug: bool = False) -> PendingAnswer:
        """Send a request that is answered while both ends go on."""
        waiting = PendingAnswer(bug=bug)
        call = self.peer.open(waiting)
        self.peer.send(frames.ChannelLook(call, b"k"))
        return waiting

    async def assert_goes_on(self) -> None:
        assert isinstance(await asyncio.wait_for(self.look().outcome, 10), frames.Ok)


async def test_message_whose_handler_raises_ends_a_daemon(wire, ended, caplog):
    listener = wire.network.listener(broken)
    link = wire.network.link(listener.bind(wire.endpoint()), b"me", broken)
    link.send(b"hello")
    await asyncio.wait_for(ended.wait(), 10)
    assert "BugError: a bug" in caplog.text


async def test_timer_that_raises_ends_a_daemon(wire, ended):
    asyncio.get_running_loop().call_soon(broken)
    await asyncio.wait_for(ended.wait(), 10)


async def fail() -> None:
    broken()


async def test_task_that_fails_ends_a_daemon(ended, caplog):
    loops.Tasks().start(fail(), "counting")
    await asyncio.wait_for(ended.wait(), 10)
    assert "internal error: counting failed" in caplog.text
    assert "BugError: a bug" in caplog.text


async def test_failed_task_reports_its_error_to_its_dependent(reported):
    failed: asyncio.Queue = asyncio.Queue()
    task = loops.Tasks().start(fail(), "counting", failed=failed.put_nowait)
    error = await asyncio.wait_for(failed.get(), 10)
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, BugError)
    assert [context["message"] for context in reported] == ["internal error: counting failed"]
    assert task.done()


async def test_expected_error_of_a_task_is_raised_where_it_is_awaited_only(reported):
    with pytest.raises(BugError):
        await loops.Tasks().start(fail(), "counting", expected=BugError)
    assert reported == []


async def test_tasks_end_with_their_owner(reported):
    tasks = loops.Tasks()
    waiting = [tasks.start(asyncio.Event().wait(), "waiting") for _ in range(2)]
    await tasks.close()
    assert all(task.cancelled() for task in waiting)
    await tasks.close()
    assert reported == []


def test_failure_of_an_unawaited_task_in_the_io_thread_is_logged(caplog):
    io = loops.IoThread("of a test")
    io.start(fail(), "counting")
    io.submit(asyncio.sleep(0)).result(10)
    io.stop()
    assert "internal error: counting failed" in caplog.text


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x82\xa4type\xa3not\xa4body\x01"])
async def test_malformed_bytes_do_not_end_a_daemon(wire, ended, data):
    came = asyncio.Event()
    server = ControlServer(wire.network, lambda peer, envelope: came.set())
    endpoint = server.bind(wire.endpoint())
    wire.network.link(endpoint, b"stranger", lambda *_: None).send(data)
    client = ControlClient(wire.network, endpoint, b"agent:a", lambda body: None)
    client.notify(Beat("a"))
    await asyncio.wait_for(came.wait(), 10)
    assert not ended.is_set()
    client.close()


async def test_answer_that_is_too_long_does_not_end_a_daemon(wire, ended):
    refused = []

    def refuse(peer, envelope) -> None:
        if isinstance(envelope, Request):
            refused.append(envelope)
            server.fail(peer, envelope.id, "usage", f"{'x' * (20 << 20)!r} is no name")

    server = ControlServer(wire.network, refuse)
    client = ControlClient(wire.network, server.bind(wire.endpoint()), b"agent:a", lambda body: None)
    with pytest.raises(RlinfActorsError, match=r"'xxx.*xxx…"):
        await client.request(Beat("a"), 10)
    assert not ended.is_set()
    client.close()


async def test_failed_handling_of_an_answer_fails_that_call_only(wire, reported):
    pair = Pair(wire)
    error = await pair.look(bug=True).error()
    assert isinstance(error, InternalError)
    assert "handling a message from" in str(error)
    assert isinstance(error.__cause__, BugError)
    assert [context["exception"] for context in reported] == [error.__cause__]
    await pair.assert_goes_on()


@pytest.mark.parametrize("kind", [frames.Call, frames.Create])
async def test_failed_handling_of_a_call_fails_that_call_only(wire, reported, monkeypatch, kind):
    pair = Pair(wire)
    monkeypatch.setattr(pair.server, "_submit", broken)
    monkeypatch.setattr(pair.server, "creations", SimpleNamespace(put=broken))
    waiting = PendingAnswer()
    call = pair.peer.open(waiting)
    pair.peer.send(frames.Call(call, "step") if kind is frames.Call else frames.Create(call, "m:C", {}, 0))
    assert "a bug" in str(await waiting.error())
    assert len(reported) == 1
    await pair.assert_goes_on()


async def test_failed_channel_request_is_refused_and_others_go_on(wire, reported):
    pair = Pair(wire)
    pair.server.serve((frames.ChannelGet,), broken)
    waiting = PendingAnswer()
    pair.peer.send(frames.ChannelGet(pair.peer.open(waiting), b"k", False))
    error = await waiting.error()
    assert "a bug" in str(error)
    assert len(reported) == 1
    await pair.assert_goes_on()


async def test_message_lost_by_a_bug_ends_the_link_at_both_ends(wire, reported):
    pair = Pair(wire)
    pair.server.serve((frames.UserMessage,), broken)
    told = asyncio.get_running_loop().create_future()
    pair.peer.on_gone(told.set_result)
    pair.peer.send(frames.UserMessage(1, 0, "a:0", "a-0", "", 10))
    error = await asyncio.wait_for(told, 10)
    assert isinstance(error, InternalError)
    assert pair.lost == ["a-0"]
    assert len(reported) == 1


async def test_failed_handling_of_a_notice_is_reported_and_the_next_is_handled(wire, reported):
    notices, failed = [], []

    def notice(body) -> None:
        notices.append(body)
        if len(notices) == 1:
            broken()

    def serve(peer, envelope) -> None:
        server.notify(peer, Goodbye("first"))
        server.notify(peer, Goodbye("second"))
        server.reply(peer, envelope.id, Beat("b"))

    server = ControlServer(wire.network, serve)
    endpoint = server.bind(wire.endpoint())
    client = ControlClient(
        wire.network, endpoint, b"driver:d", notice, on_failed=lambda body, error: failed.append((body, error))
    )
    assert await client.request(Beat("a"), 10) == Beat("b")
    assert notices == [Goodbye("first"), Goodbye("second")]
    ((body, error),) = failed
    assert body == Goodbye("first")
    assert isinstance(error.__cause__, BugError)
    client.close()


@pytest.mark.parametrize("make", ["new_event_loop", "asyncio.new_event_loop"])
@pytest.mark.parametrize("kind", ["message", "descriptor", "timer"])
def test_internal_error_ends_a_daemon_with_exit_code_70(make, kind, short_dir):
    source = f"""
        import asyncio, os
        from rlinf_actors.net.daemon import end_on_internal_error
        from rlinf_actors.net.loop import new_event_loop
        from rlinf_actors.net.zmq_network import ZmqNetwork
        loop = {make}()
        end_on_internal_error(loop)
        ours, theirs = os.pipe()

        async def begin():
            if {kind!r} == "timer":
                loop.call_later(0.01, lambda: 1 / 0)
            elif {kind!r} == "descriptor":
                loop.add_reader(ours, lambda: 1 / 0)
                os.write(theirs, b"x")
            else:
                network = ZmqNetwork(loop)
                listener = network.listener(lambda *_: 1 / 0)
                network.link(listener.bind("ipc://{short_dir}/daemon"), b"me", lambda *_: None).send(b"hello")

        loop.create_task(begin())
        loop.run_forever()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 70
    assert "ZeroDivisionError" in ended.stderr
    assert "internal error (above): this process ends" in ended.stderr
