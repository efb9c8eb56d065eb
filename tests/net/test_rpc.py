"""Typed control messages: notices, requests and their one answer, over memory and ZeroMQ."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rlinf_actors import errors
from rlinf_actors.net import rpc
from rlinf_actors.net.rpc import ControlClient, ControlServer, refusal
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.agent_messages import Beat, Goodbye
from rlinf_actors.wire.client_messages import Done, FindGroup, GetStatus, Warn
from rlinf_actors.wire.control_codec import Failed, Notice, Request


class Head:
    """A server that queues what it receives."""

    def __init__(self, wire) -> None:
        self.server = ControlServer(wire.network, self._came)
        self.endpoint = self.server.bind(wire.endpoint())
        self.envelopes: asyncio.Queue = asyncio.Queue()

    def _came(self, peer, envelope) -> None:
        self.envelopes.put_nowait((peer, envelope))

    async def next(self):
        return await asyncio.wait_for(self.envelopes.get(), 10)


@pytest.fixture
async def ends(wire):
    head = Head(wire)
    notices: asyncio.Queue = asyncio.Queue()
    client = ControlClient(wire.network, head.endpoint, b"driver:1", notices.put_nowait)
    yield head, client, notices
    client.close()
    client.close()
    head.server.close()


async def test_a_request_gets_its_own_answer(ends):
    head, client, _ = ends
    asked = [asyncio.create_task(client.request(FindGroup("ns", f"g{n}"))) for n in range(3)]
    came = [await head.next() for _ in asked]
    for peer, request in reversed(came):
        assert isinstance(request, Request)
        head.server.reply(peer, request.id, Warn(request.body.group))
    assert [(await task).text for task in asked] == ["g0", "g1", "g2"]


async def test_notices_pass_in_both_directions(ends):
    head, client, notices = ends
    client.notify(Beat("x"))
    assert await head.next() == (b"driver:1", Notice(Beat("x")))
    head.server.notify(b"driver:1", Goodbye("bye"))
    assert await asyncio.wait_for(notices.get(), 10) == Goodbye("bye")


REFUSALS = [
    ("name_in_use", errors.NameInUseError, ValueError),
    ("not_found", errors.GroupNotFoundError, ValueError),
    ("placement", errors.PlacementError, ValueError),
    ("authentication", errors.AuthenticationError, errors.RlinfActorsError),
    ("protocol", errors.ProtocolMismatchError, errors.RlinfActorsError),
    ("usage", errors.UsageError, RuntimeError),
    ("node_lost", errors.NodeLostError, errors.RlinfActorsError),
    ("timeout", errors.ClusterTimeoutError, TimeoutError),
    ("unreachable", errors.ClusterTimeoutError, TimeoutError),
    ("config", errors.ConfigError, AssertionError),
    ("something newer", errors.RlinfActorsError, Exception),
]


@pytest.mark.parametrize(("kind", "error", "base"), REFUSALS)
async def test_a_refusal_raises_its_class(ends, kind, error, base):
    head, client, _ = ends
    task = asyncio.create_task(client.request(GetStatus()))
    peer, request = await head.next()
    head.server.fail(peer, request.id, kind, "because", [3, 4], "cluster.x")
    with pytest.raises(error, match="because") as caught:
        await task
    assert isinstance(caught.value, base)
    if kind == "timeout":
        assert caught.value.missing_ranks == (3, 4)
    if kind == "config":
        assert caught.value.path == "cluster.x"


def test_refusal_of_a_config_error_keeps_its_path():
    assert str(refusal(Failed(1, "config", "wrong", path="a.b"))) == "a.b: wrong"


async def test_no_answer_in_time_names_the_head_and_the_request(ends):
    _, client, _ = ends
    with pytest.raises(errors.ClusterTimeoutError, match=f"the head at {client.endpoint} did not answer GetStatus"):
        await client.request(GetStatus(), timeout=0.01)
    assert client._pending == {}


async def test_late_answer_is_ignored(ends):
    head, client, _ = ends
    with pytest.raises(errors.ClusterTimeoutError):
        await client.request(GetStatus(), timeout=0.01)
    peer, late = await head.next()
    head.server.reply(peer, late.id, Done())
    task = asyncio.create_task(client.request(GetStatus()))
    peer, request = await head.next()
    assert request.id != late.id
    head.server.reply(peer, request.id, Warn("mine"))
    assert (await task).text == "mine"


async def test_second_answer_is_ignored(ends):
    head, client, _ = ends
    task = asyncio.create_task(client.request(GetStatus()))
    peer, request = await head.next()
    head.server.reply(peer, request.id, Warn("first"))
    head.server.reply(peer, request.id, Warn("second"))
    assert (await task).text == "first"


async def test_cancelling_forgets_the_request(ends):
    head, client, _ = ends
    task = asyncio.create_task(client.request(GetStatus()))
    await head.next()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client._pending == {}


async def test_close_fails_pending_requests(ends):
    head, client, _ = ends
    task = asyncio.create_task(client.request(GetStatus()))
    await head.next()
    client.close()
    with pytest.raises(errors.RlinfActorsError, match="was closed"):
        await task
    with pytest.raises(errors.RlinfActorsError, match="is closed"):
        await client.request(GetStatus())
    client.notify(Beat())


async def test_malformed_messages_are_counted_and_dropped(ends, wire, caplog):
    head, client, notices = ends
    stranger, _ = wire.link(head.endpoint, b"stranger#secret", join=False)
    for bad in (b"", b"\xc1garbage", b"\x82\xa4type\xa3req\xa2id\x01"):
        stranger.send(bad)
    stranger.send(control_codec.encode(Notice(Beat("well formed"))))
    assert await head.next() == (b"stranger#secret", Notice(Beat("well formed")))
    assert head.server._malformed.count == 3
    client.notify(Beat("x"))
    assert await head.next() == (b"driver:1", Notice(Beat("x")))
    with caplog.at_level(logging.WARNING):
        head.server._listener.send(b"driver:1", b"garbage")
        head.server.notify(b"driver:1", Beat("y"))
        assert await asyncio.wait_for(notices.get(), 10) == Beat("y")
    assert "dropped a message from the head" in caplog.text
    assert "dropped a message from 'stranger'" in caplog.text
    assert "secret" not in caplog.text, "who knows it can take the connection over"


# --- what is too long ---


@pytest.fixture
def short(monkeypatch):
    """Limit messages to 1,000 bytes."""
    monkeypatch.setattr("rlinf_actors.net.rpc.MAX_ASKED_BYTES", 1000)
    monkeypatch.setattr(control_codec.encode, "__defaults__", (1000,))


LONG = Warn("x" * 2000)


async def test_request_that_is_too_long_is_refused_by_its_sender(ends, short):
    head, client, _ = ends
    with pytest.raises(errors.UsageError, match=r"a Warn of 2,.* bytes is not sent: the limit is 1,000"):
        await client.request(LONG)
    task = asyncio.create_task(client.request(GetStatus()))
    peer, request = await head.next()
    head.server.reply(peer, request.id, Done())
    assert await task == Done()


async def test_request_that_is_too_long_is_refused_even_while_requests_are_held(ends, short):
    head, client, _ = ends
    client.hold()
    task = asyncio.create_task(client.request(GetStatus()))
    with pytest.raises(errors.UsageError, match=r"a Warn of 2,.* bytes is not sent"):
        await client.request(LONG)
    client.resume()
    peer, request = await head.next()
    head.server.reply(peer, request.id, Done())
    assert await task == Done()


async def test_timed_out_request_is_not_sent_again(ends, monkeypatch):
    head, client, _ = ends
    looking, done = asyncio.Event(), asyncio.Event()

    async def why() -> str:
        looking.set()
        await done.wait()
        return "it stands still"

    monkeypatch.setattr(client._verifier, "why", why)
    client.hold()
    task = asyncio.create_task(client.request(GetStatus(), 0.01))
    await looking.wait()
    client.resume()
    client.notify(Beat("x"))
    assert (await head.next())[1] == Notice(Beat("x"))
    done.set()
    with pytest.raises(errors.ClusterTimeoutError, match="it stands still"):
        await task


async def test_answer_that_is_too_long_fails_its_request(ends, short):
    head, client, _ = ends
    task = asyncio.create_task(client.request(GetStatus()))
    peer, request = await head.next()
    head.server.reply(peer, request.id, LONG)
    with pytest.raises(errors.UsageError, match=r"a Warn of 2,.* bytes is not sent"):
        await task


async def test_notice_that_is_too_long_is_logged(ends, short, caplog):
    head, client, notices = ends
    client.notify(LONG)
    client.notify(Beat("x"))
    peer, first = await head.next()
    assert first == Notice(Beat("x"))
    head.server.notify(peer, LONG)
    head.server.notify(peer, Goodbye("bye"))
    assert await asyncio.wait_for(notices.get(), 10) == Goodbye("bye")
    assert [text.count("is not told: a Warn of 2,") for text in caplog.messages] == [1, 1]


async def test_request_that_a_busy_head_has_received_is_sent_once(ends, monkeypatch):
    head, client, _ = ends
    stands, waited = [True], asyncio.Queue()
    monkeypatch.setattr(type(client._link), "stands", lambda link: bool(stands))

    async def ask():
        return await client.request(GetStatus(""), 0.05, on_waiting=waited.put_nowait)

    asking = asyncio.ensure_future(ask())
    peer, request = await head.next()
    assert "stands, but GetStatus is not answered yet" in await asyncio.wait_for(waited.get(), 10)
    await asyncio.wait_for(waited.get(), 10)
    head.server.reply(peer, request.id, Done())
    assert await asking == Done()
    assert head.envelopes.empty()
    stands.clear()
    with pytest.raises(errors.ClusterTimeoutError, match=r"did not answer GetStatus within 0\.05 s"):
        await ask()


async def test_the_wait_for_a_head_that_has_received_a_request_ends(ends, monkeypatch):
    """The kernel may keep a connection that libzmq no longer reads."""
    _, client, _ = ends
    monkeypatch.setattr(type(client._link), "stands", lambda link: True)
    monkeypatch.setattr(rpc, "ANSWER_S", 0.1)
    with pytest.raises(errors.ClusterTimeoutError, match="did not answer GetStatus"):
        await client.request(GetStatus(""), 0.05, on_waiting=lambda text: None)


async def test_replaced_connection_that_comes_late_does_not_silence_its_successor(ends, wire):
    """If a head starts meanwhile, it may accept the older connection last."""
    head, client, _ = ends
    client.reopen(b"driver:1#2")
    client.notify(Beat("new"))
    assert await head.next() == (b"driver:1#2", Notice(Beat("new")))
    late = wire.network.link(head.endpoint, b"driver:1", lambda *message: None)
    late.send(control_codec.encode(Notice(Beat("late"))))
    assert await head.next() == (b"driver:1", Notice(Beat("late")))
    asking = asyncio.create_task(client.request(GetStatus("")))
    peer, request = await head.next()
    head.server.reply(peer, request.id, Done())
    assert await asking == Done()
    late.close()


async def test_messages_of_a_replaced_connection_are_dropped_unread(ends):
    """libzmq gives such a connection a name of its own. A busy head would do the work of each attempt for nobody."""
    head, client, _ = ends
    head.server._received(b"\0\1\2\3\4", control_codec.encode(Notice(Beat("old"))), [])
    client.notify(Beat("new"))
    assert await head.next() == (b"driver:1", Notice(Beat("new")))
