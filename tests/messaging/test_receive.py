"""PendingReceive: a receive that is cancelled, awaited again or dropped."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rlinf_actors import WorkerAddress
from rlinf_actors.messaging.mailbox import ArrivedMessage
from rlinf_actors.messaging.receive import PendingReceive
from rlinf_actors.wire import payload
from rlinf_actors.wire.payload import AuthenticatedParts

SENDER = WorkerAddress("a", 0)


class FakeMessenger:
    def __init__(self):
        self.calls = []
        self.directory = self

    def peer(self, member, found):
        assert member == SENDER
        self.calls.append("enter")

    def withdraw(self, posted):
        self.calls.append("leave")
        return True

    def unread(self, key, message):
        self.calls.append(message)


def message(value):
    return ArrivedMessage("1", 0, AuthenticatedParts(payload.encode(value)))


async def test_a_cancelled_receive_leaves_the_mailbox_and_enters_again_when_awaited():
    messenger = FakeMessenger()
    work = PendingReceive("recv()", messenger, SENDER)
    waiting = asyncio.ensure_future(work.async_wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert messenger.calls == ["leave"]
    waiting = asyncio.ensure_future(work.async_wait())
    await asyncio.sleep(0)
    assert messenger.calls == ["leave", "enter"]
    work.take(message("x"))
    assert await waiting == "x"


async def test_a_receive_stays_while_another_task_awaits_it():
    messenger = FakeMessenger()
    work = PendingReceive("recv()", messenger, SENDER)
    first, second = (asyncio.ensure_future(work.async_wait()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert messenger.calls == []
    work.take(message("x"))
    assert await second == "x"


def test_an_unseen_message_is_given_back():
    messenger = FakeMessenger()
    work = PendingReceive("recv()", messenger, SENDER)
    got = message("x")
    work.take(got)
    del work
    gc.collect()
    assert messenger.calls == [got]


def test_a_seen_message_is_not_given_back():
    messenger = FakeMessenger()
    work = PendingReceive("recv()", messenger, SENDER, lambda value: value * 2)
    work.take(message(4))
    assert (work.wait(), work.wait()) == (8, 8)
    del work
    gc.collect()
    assert messenger.calls == []


def test_an_object_that_cannot_be_converted_is_the_waiters_error():
    def refuse(value):
        raise ValueError(f"no {value}")

    work = PendingReceive("recv()", FakeMessenger(), SENDER, refuse)
    work.take(message(4))
    for _ in range(2):
        with pytest.raises(ValueError, match="no 4"):
            work.wait()


def test_a_dropped_receive_is_abandoned():
    work = PendingReceive("recv()", FakeMessenger(), SENDER)
    posted = work.posted
    assert not posted.abandoned
    del work
    gc.collect()
    assert posted.abandoned
