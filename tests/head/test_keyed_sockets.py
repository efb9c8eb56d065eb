"""Connected processes when keys and heads change, over CURVE on loopback. For admission see
test_socket_matrix."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest
from sockets_kit import HEAD, KeyedHead, KeyedWorker, driver_hello, refused

from rlinf_actors.errors import AuthenticationError, UsageError
from rlinf_actors.net.socket_security import Security
from rlinf_actors.runtime.head_session import HeadSession
from rlinf_actors.runtime.peer import Peer
from rlinf_actors.security.job import job_pair
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire import frames
from rlinf_actors.wire.agent_messages import ClientHello
from rlinf_actors.wire.client_messages import FindGroup, GetStatus, Warn, WatchClients
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.key_messages import RevokeKey
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import Endpoint


@pytest.fixture
async def head(rlinf_leak_check) -> AsyncIterator[KeyedHead]:
    made = KeyedHead()
    with contextlib.closing(made):
        yield made


async def test_messages_of_a_revoked_key_are_dropped(head: KeyedHead) -> None:
    pair = await head.listed("driver", "ann")
    before = head.client(pair)
    await before.request(driver_hello(), 10)
    await head.admin.request(RevokeKey("ann", "me"), 10)
    assert "did not answer" in await refused(
        before, within_s=1.0
    )  # its connection is open, but its messages are dropped


async def test_worker_waits_until_a_restarted_head_knows_its_job(head: KeyedHead) -> None:
    token = "a token from before the restart"
    hello = ClientHello(PROTOCOL, "1", "w1", "worker", "ns", "elsewhere", 0, 0, "g-0", token)
    link = HeadSession(head.net(job_pair(token)), head.endpoint, hello, lambda notice: None)
    starting = asyncio.ensure_future(link.start(15))
    try:
        await head.noted("is not listed")
        driver = head.client(await head.listed("driver", "ann"))
        await driver.request(msgspec.structs.replace(driver_hello(), token=token), 10)  # it knows the job
        with pytest.raises(
            AuthenticationError, match="worker 'g-0' is not known here"
        ):  # the later message was handled
            await starting
    finally:
        link.close("the test ends")


async def test_refusal_before_the_first_request_fails_that_request(head: KeyedHead) -> None:
    client = head.client(KeyPair.make())
    await head.noted("is not listed")
    with pytest.raises(AuthenticationError, match="is not admitted there"):
        await client.request(GetStatus(), 15)


class Lines(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._queue.put_nowait(record.getMessage())

    async def until(self, words: str) -> None:
        while words not in await asyncio.wait_for(self._queue.get(), 15):
            pass


async def test_head_replaced_by_one_with_another_key_ends_no_session(
    head: KeyedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlinf_actors.net.reachability.SURE_S", 0.1)
    driver, ends, lines = KeyPair.make(), asyncio.Queue(), Lines()
    logging.getLogger("rlinf_actors.runtime.head_session").addHandler(lines)
    head.replaced(HEAD, driver)
    link = HeadSession(head.net(driver), head.endpoint, driver_hello(), lambda notice: None, ends.put_nowait)
    try:
        await link.start(10)
        head.replaced(KeyPair.make(), driver)
        await lines.until("is not there (this is not the head")
        head.replaced(HEAD, driver)
        await lines.until("is there again")
        assert ends.empty()
    finally:
        logging.getLogger("rlinf_actors.runtime.head_session").removeHandler(lines)
        link.close("the test ends")


class Answer:
    """Waits for the end of a call."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def answer(self, frame: frames.AnyFrame, parts: list) -> bool:
        self.ended.set_result(None)
        return True

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


@pytest.fixture
async def worker(rlinf_leak_check) -> AsyncIterator[KeyedWorker]:
    made = KeyedWorker()
    made.endpoint = made.bind("tcp://127.0.0.1:0")
    with contextlib.closing(made):
        yield made


async def test_call_to_a_worker_of_another_job_fails(worker: KeyedWorker) -> None:
    """As after the job has got another token: libzmq would try for ever."""
    peer = Peer(worker.net(Security()), "driver:x", "g:0", 0, "n0")
    peer.connect(Endpoint("there", "", worker.endpoint), "here", "theirs", lambda: None)
    waiter = Answer()
    number = peer.open(waiter)
    peer.send(frames.Call(number, "step"))
    error = await asyncio.wait_for(waiter.ended, 20)
    assert isinstance(error, AuthenticationError)
    assert "g:0 on n0 refused: what listens there does not have the key that is expected" in str(error)
    peer.close()


async def test_value_beyond_its_bound_is_refused_told_and_logged(head: KeyedHead) -> None:
    told: asyncio.Queue[Body] = asyncio.Queue()
    pair = await head.listed("driver", "ann")
    driver = head.client(pair, on_notice=told.put_nowait)
    await driver.request(driver_hello(), 10)
    with pytest.raises(UsageError, match=r"refuses this FindGroup: FindGroup.group has more than 256 characters"):
        await driver.request(FindGroup("ns", "g" * 257), 10)
    driver.notify(WatchClients(["x"] * 20_000))
    warned = await asyncio.wait_for(told.get(), 10)
    assert isinstance(warned, Warn)
    assert "WatchClients.incarnations has more than 10,000 elements" in warned.text
    assert "ann" in await head.noted("refused a message of", "WatchClients.incarnations has more than")
