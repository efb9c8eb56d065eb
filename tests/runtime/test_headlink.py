"""A session with the head: hello, beats, and a head that forgot us."""

from __future__ import annotations

import asyncio
import io
import sys

import pytest

from rlinf_actors.errors import ClusterTimeoutError, ProtocolError, ProtocolMismatchError
from rlinf_actors.net.rpc import ControlServer
from rlinf_actors.runtime.headlink import HeadLink
from rlinf_actors.runtime.logprinter import LogPrinter
from rlinf_actors.wire.messages import (
    HELLO_AGAIN,
    Beat,
    ClientHello,
    Done,
    GetStatus,
    Goodbye,
    LogCredit,
    LogLines,
    Notice,
    Request,
    Warn,
    Welcome,
)

HELLO = ClientHello(1, "0.1", "inc", "driver", "ns", "here", 1, 2)


class Ends:
    """A head's end and the link to it."""

    def __init__(self, network) -> None:
        self.server = ControlServer(network, lambda peer, envelope: self.came.put_nowait((peer, envelope)))
        self.came: asyncio.Queue = asyncio.Queue()
        self.notices: asyncio.Queue = asyncio.Queue()
        self.endpoint = self.server.bind("ipc:///head")
        self.network = network
        self.alone: asyncio.Queue = asyncio.Queue()
        self.given_up: asyncio.Queue = asyncio.Queue()
        self.link = HeadLink(
            network,
            self.endpoint,
            HELLO,
            self.notices.put_nowait,
            on_silence=self.alone.put_nowait,
            on_given_up=self.given_up.put_nowait,
        )

    async def next(self, kind):
        """The next message that is not a beat, unless a beat is asked for."""
        while True:
            peer, envelope = await asyncio.wait_for(self.came.get(), 10)
            if isinstance(envelope.body, kind):
                return peer, envelope
            assert isinstance(envelope.body, Beat), envelope

    async def welcome(self, beat_s=0.01, lease_s=10.0, grace_s=120.0):
        starting = asyncio.ensure_future(self.link.start(10))
        peer, request = await self.next(ClientHello)
        self.server.reply(peer, request.id, Welcome("e", "0.1", beat_s, lease_s, "tok", head_grace_s=grace_s))
        await starting
        return peer


@pytest.fixture
async def ends(network):
    made = Ends(network)
    yield made
    made.link.close("the test ends")


async def test_hello_then_beats(ends):
    peer = await ends.welcome()
    assert peer == b"driver:inc"
    assert ends.link.welcome.token == "tok"
    for _ in range(2):
        assert (await ends.next(Beat))[1] == Notice(Beat("inc"))


async def test_a_head_that_forgot_us_is_told_again(ends):
    peer = await ends.welcome()
    for _ in range(3):
        ends.server.notify(peer, Beat(HELLO_AGAIN))
    _, again = await ends.next(ClientHello)
    assert isinstance(again, Request)
    assert again.body == HELLO
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 1.0, 10.0, "tok2"))
    asking = asyncio.ensure_future(ends.link.request(GetStatus()))
    _, asked = await ends.next(GetStatus)  # one hello was enough: nothing else came before this
    ends.server.reply(peer, asked.id, Done())
    await asking
    assert ends.link.welcome.epoch == "e2"


async def test_beats_are_the_sessions_own_other_notices_are_not(ends):
    peer = await ends.welcome()
    ends.server.notify(peer, Beat("e"))
    ends.server.notify(peer, Warn("careful"))
    assert await asyncio.wait_for(ends.notices.get(), 10) == Warn("careful")


async def test_a_head_that_does_not_answer(ends):
    with pytest.raises(ClusterTimeoutError, match="did not answer ClientHello within"):
        await ends.link.start(0.01)


async def test_a_refusal(ends):
    starting = asyncio.ensure_future(ends.link.start(10))
    peer, request = await ends.next(ClientHello)
    ends.server.fail(peer, request.id, "protocol", "protocol 1 and 2")
    with pytest.raises(ProtocolMismatchError):
        await starting


async def test_an_answer_that_is_no_welcome(ends):
    starting = asyncio.ensure_future(ends.link.start(10))
    peer, request = await ends.next(ClientHello)
    ends.server.reply(peer, request.id, Done())
    with pytest.raises(ProtocolError, match="answered a hello with Done"):
        await starting


async def test_closing_says_goodbye_and_ends_the_beats(ends):
    await ends.welcome()
    ends.link.close("enough")
    assert (await ends.next(Goodbye))[1] == Notice(Goodbye("enough"))
    ends.link.close("twice is fine")


class TestSilence:
    async def test_a_cut_network_is_told_after_the_lease(self, ends):
        await ends.welcome(0.01, lease_s=0.1)
        ends.network.cut(b"driver:inc")
        ends.network.dark.add(ends.endpoint)
        said = await asyncio.wait_for(ends.alone.get(), 10)
        assert said.startswith(f"the head at {ends.endpoint} was silent for 0.")
        assert said.endswith("the network between here and there is cut")

    async def test_a_head_that_is_not_back_within_its_grace_has_been_waited_for(self, ends):
        await ends.welcome(0.01, lease_s=0.1, grace_s=0.3)
        ends.server.close()
        said = await asyncio.wait_for(ends.alone.get(), 10)
        assert said.startswith(f"the head at {ends.endpoint} was silent for 0.")
        assert said.endswith("although its machine answers")

    async def test_a_stuck_connection_has_a_second_one_say_that_we_are_here(self, ends):
        await ends.welcome(0.01, lease_s=0.2)
        ends.network.cut(b"driver:inc")
        while (await ends.next(Beat))[0] != b"driver:inc~":
            pass
        for _ in range(50):  # several leases: the second connection's answers count
            peer, _ = await ends.next(Beat)
            ends.server.notify(peer, Beat("e"))
        assert ends.alone.empty()
        ends.network.heal(b"driver:inc")
        while (await ends.next(Beat))[0] != b"driver:inc":
            pass
        ends.server.notify(b"driver:inc", Beat("e"))
        for _ in range(3):
            while (await ends.next(Beat))[0] != b"driver:inc":
                pass

    async def test_who_is_given_up_on_hears_it_over_the_second_connection_too(self, ends):
        await ends.welcome(0.01, lease_s=0.2)
        ends.network.cut(b"driver:inc")
        while (await ends.next(Beat))[0] != b"driver:inc~":
            pass
        ends.server.notify(b"driver:inc~", Goodbye("given up", lost=True))
        assert await asyncio.wait_for(ends.notices.get(), 10) == Goodbye("given up", lost=True)

    async def test_a_head_that_refuses_to_take_us_back_ends_us_by_name(self, ends):
        peer = await ends.welcome()
        ends.server.notify(peer, Beat(HELLO_AGAIN))
        peer, again = await ends.next(ClientHello)
        ends.server.fail(peer, again.id, "node_lost", "the head has given up on this driver: it was silent")
        said = await asyncio.wait_for(ends.given_up.get(), 10)
        assert said == "the head has given up on this driver: it was silent"


class TestLogPrinter:
    def lines(self, *entries, skipped=0):
        return LogLines("owner", "n1", list(entries), skipped)

    def shown(self, monkeypatch, *batches):
        out, err, credits = io.StringIO(), io.StringIO(), []
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        printer = LogPrinter(credits.append)
        for batch in batches:
            printer.show(batch)
        printer.close()
        return out.getvalue(), err.getvalue(), credits

    def test_prefix_and_stream(self, monkeypatch, rlinf_leak_check):
        batch = self.lines(("g:0", "out", "one"), ("g:1", "err", "two"), ("g:0", "out", "three"))
        out, err, credits = self.shown(monkeypatch, batch)
        assert out == "[g:0@n1] one\n[g:0@n1] three\n"
        assert err == "[g:1@n1] two\n"
        assert credits == [LogCredit("owner", "n1", 11)]

    def test_skipped_lines_are_told(self, monkeypatch, rlinf_leak_check):
        _, err, _ = self.shown(monkeypatch, self.lines(skipped=7))
        assert err == "[n1] 7 lines are not shown here; the log files have them\n"

    def test_a_terminal_that_is_gone_stalls_nobody(self, monkeypatch, rlinf_leak_check):
        credits: list = []
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "stderr", None)
        printer = LogPrinter(credits.append)
        printer.show(self.lines(("g:0", "out", "x"), ("g:0", "err", "y")))
        printer.close()
        assert len(credits) == 1
