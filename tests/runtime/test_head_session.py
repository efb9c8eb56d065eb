"""A session with the head: hello, beats, and a head that forgot us."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import pty
import struct
import sys
import termios
import threading

import pytest
from msgspec.structs import replace

from rlinf_actors.errors import ClusterTimeoutError, ProtocolError, ProtocolMismatchError, UsageError
from rlinf_actors.net.rpc import ControlServer, KeyRefusedError
from rlinf_actors.runtime.head_session import HeadSession
from rlinf_actors.runtime.log_printer import LogPrinter
from rlinf_actors.wire.agent_messages import (
    HELLO_AGAIN,
    UPDATE,
    Beat,
    ClientHello,
    Goodbye,
    LogCredit,
    LogLines,
    Welcome,
)
from rlinf_actors.wire.client_messages import Done, GetStatus, Warn
from rlinf_actors.wire.control_codec import Notice, Request

pytestmark = pytest.mark.virtual_time

HELLO = ClientHello(1, "0.1", "inc", "driver", "ns", "here", 1, 2)


class Ends:
    """A head's end and the link to it."""

    def __init__(self, network, hello=HELLO) -> None:
        self.server = ControlServer(network, lambda peer, envelope: self.came.put_nowait((peer, envelope)))
        self.came: asyncio.Queue = asyncio.Queue()
        self.notices: asyncio.Queue = asyncio.Queue()
        self.endpoint = self.server.bind("ipc:///head")
        self.network = network
        self.alone: asyncio.Queue = asyncio.Queue()
        self.given_up: asyncio.Queue = asyncio.Queue()
        self.link = HeadSession(
            network,
            self.endpoint,
            hello,
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


def refuse(ends, monkeypatch, times):
    """The head does not know this process's key yet: so many hellos are refused."""
    refused, greet = [KeyRefusedError("not yet")] * times, ends.link._greet

    async def refuse_at_first(timeout):
        if refused:
            raise refused.pop()
        return await greet(timeout)

    monkeypatch.setattr(ends.link, "_greet", refuse_at_first)


async def test_refusals_before_the_first_welcome_do_not_make_a_later_absence_longer(network, monkeypatch):
    """A worker may know of a restarted head before that knows its job's key."""
    ends = Ends(network, replace(HELLO, role="worker"))
    refuse(ends, monkeypatch, 6)
    starting = asyncio.ensure_future(ends.link.start(60))
    peer, request = await asyncio.wait_for(ends.came.get(), 60)
    ends.server.reply(peer, request.id, Welcome("e", "0.1", 60.0, 10.0, "tok"))
    await starting
    ends.server.notify(peer, Beat(HELLO_AGAIN))
    loop, times = asyncio.get_running_loop(), []
    while len(times) < 2:
        _, envelope = await asyncio.wait_for(ends.came.get(), 60)
        if isinstance(envelope.body, ClientHello):
            times.append(loop.time())
    assert times[1] - times[0] < 10.0 / 4 + 0.3, "a quarter of the lease, and the first pause"
    ends.link.close("the test ends")


def no_links(network, monkeypatch, tries):
    """So many links cannot be made, then all can; returns when they could not."""
    link, refused = network.link, []

    def made(*args, **options):
        if len(refused) == tries:
            return link(*args, **options)
        refused.append(asyncio.get_running_loop().time())
        raise OSError(errno.EMFILE, "cannot open a socket: too many open files")

    monkeypatch.setattr(network, "link", made)
    return refused


async def test_a_connection_that_cannot_be_made_just_now_is_made_later(ends, monkeypatch, caplog):
    returned = asyncio.Event()
    ends.link._on_return = returned.set
    await ends.welcome(beat_s=0.01)
    refused = no_links(ends.network, monkeypatch, 3)
    await ends.next(ClientHello)  # the head is silent, and its first try has no answer
    peer, hello = await ends.next(ClientHello)
    ends.server.reply(peer, hello.id, Welcome("e2", "0.1", 60.0, 10.0))
    await asyncio.wait_for(returned.wait(), 10)
    assert len(refused) == 3
    said = [record.getMessage() for record in caplog.records if record.name.endswith("head_session")]
    assert len(said) == 2
    assert "is there again, after" in said[1]


async def test_a_worker_s_first_connection_that_cannot_be_made_anew_is_made_later(network, monkeypatch):
    ends = Ends(network, replace(HELLO, role="worker"))
    none = no_links(network, monkeypatch, 3)
    refuse(ends, monkeypatch, 1)
    await ends.welcome()
    assert len(none) == 3
    ends.link.close("the test ends")


async def test_a_worker_that_cannot_connect_anew_in_its_time_says_why(network, monkeypatch):
    ends = Ends(network, replace(HELLO, role="worker"))
    no_links(network, monkeypatch, -1)

    async def refuse(timeout):
        raise KeyRefusedError("not yet")

    monkeypatch.setattr(ends.link, "_greet", refuse)
    with pytest.raises(ClusterTimeoutError, match=r"no connection .* can be made: cannot open a socket: too many open"):
        await ends.link.start(10)
    ends.link.close("the test ends")


async def test_hello_then_beats(ends):
    peer = await ends.welcome()
    assert peer.startswith(b"driver:inc#")
    assert ends.link.welcome.token == "tok"
    for _ in range(2):
        assert (await ends.next(Beat))[1] == Notice(Beat("inc"))


async def test_a_first_hello_that_was_lost_with_its_connection_is_said_again(ends):
    starting = asyncio.ensure_future(ends.link.start(10))
    await ends.next(ClientHello)  # and the head ends before it answers
    ends.network.reset(ends.link.identity)
    peer, request = await ends.next(ClientHello)
    ends.server.reply(peer, request.id, Welcome("e", "0.1", 0.01, 10.0, "tok"))
    assert (await starting).token == "tok"


async def test_a_connection_that_was_lost_brings_both_up_to_date(ends):
    await ends.welcome(beat_s=10.0)
    ends.network.reset(ends.link.identity)
    peer, request = await ends.next(ClientHello)
    ends.server.reply(peer, request.id, Welcome("e", "0.1", 10.0, 10.0, "tok"))


async def test_a_head_that_forgot_us_is_told_again(ends):
    peer = await ends.welcome()
    for _ in range(3):
        ends.server.notify(peer, Beat(HELLO_AGAIN))
    _, again = await ends.next(ClientHello)
    assert isinstance(again, Request)
    assert again.body == replace(HELLO, token="tok")
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 1.0, 10.0, "tok2"))
    asking = asyncio.ensure_future(ends.link.request(GetStatus()))
    _, asked = await ends.next(GetStatus)  # one hello was enough: nothing else came before this
    ends.server.reply(peer, asked.id, Done())
    await asking
    assert ends.link.welcome.epoch == "e2"


async def test_a_request_waits_for_a_head_that_forgot_us_and_is_asked_again(ends):
    peer = await ends.welcome(beat_s=60.0)
    asking = asyncio.ensure_future(ends.link.request(GetStatus()))
    _, asked = await ends.next(GetStatus)
    ends.server.notify(peer, Beat(HELLO_AGAIN))
    ends.server.fail(peer, asked.id, "hello", "say hello first")
    _, again = await ends.next(ClientHello)
    late = asyncio.ensure_future(ends.link.request(Done()))  # made meanwhile: not sent to who does not know us
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 60.0, 10.0))
    first = await ends.next(GetStatus)
    second = await ends.next(Done)
    assert first[1].id == asked.id
    ends.server.reply(peer, first[1].id, Done())
    ends.server.reply(peer, second[1].id, Done())
    assert await asyncio.wait_for(asking, 10) == await asyncio.wait_for(late, 10) == Done()


async def test_a_silent_head_is_greeted_until_it_answers_and_beats_stop_meanwhile(ends, caplog):
    returned = asyncio.Event()
    ends.link._on_return = returned.set
    await ends.welcome(beat_s=0.01)
    for _ in range(3):
        await ends.next(ClientHello)
    while not ends.came.empty():
        ends.came.get_nowait()
    peer, hello = await asyncio.wait_for(ends.came.get(), 10)  # nothing but hellos by now
    assert isinstance(hello.body, ClientHello)
    asking = asyncio.ensure_future(ends.link.request(GetStatus()))
    ends.server.reply(peer, hello.id, Welcome("e2", "0.1", 60.0, 10.0))
    await asyncio.wait_for(returned.wait(), 10)
    peer, asked = await ends.next(GetStatus)
    ends.server.reply(peer, asked.id, Done())
    await asking
    said = [record.getMessage() for record in caplog.records if record.name.endswith("head_session")]
    assert len(said) == 2
    assert "is not there (no answer); calls between workers go on" in said[0]
    assert "is there again, after" in said[1]


async def test_its_own_beats_are_no_answer(ends):
    """TCP can connect to itself where nobody listens: then a link hears what it says."""
    await ends.welcome(beat_s=0.01)
    said = []
    while len(said) < 20:
        peer, envelope = await asyncio.wait_for(ends.came.get(), 10)
        said.append(type(envelope.body))
        if isinstance(envelope.body, Beat):
            ends.server.notify(peer, envelope.body)
    assert ClientHello in said


async def test_a_deadline_that_passes_meanwhile_says_for_how_long_the_head_was_away(ends):
    await ends.welcome(beat_s=0.01)
    await ends.next(ClientHello)
    with pytest.raises(ClusterTimeoutError, match=r"has not answered for 0 s; GetStatus waited 0\.05 s for it"):
        await ends.link.request(GetStatus(), 0.05)


@pytest.mark.parametrize(("kind", "told"), [("node_lost", "given_up"), ("usage", "alone")])
async def test_a_head_that_does_not_take_us_back_ends_the_session(ends, kind, told):
    peer = await ends.welcome()
    ends.server.notify(peer, Beat(HELLO_AGAIN))
    _, again = await ends.next(ClientHello)
    ends.server.fail(peer, again.id, kind, "the head has given up on this driver")
    assert await asyncio.wait_for(getattr(ends, told).get(), 10) == "the head has given up on this driver"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("authentication", "worker 'w' is not known here"),  # its agent is not back yet
        ("protocol", "upgrade the head first"),  # the head that was there before may come back
    ],
)
async def test_a_head_that_may_take_us_back_later_is_asked_again(ends, kind, why):
    peer = await ends.welcome()
    for _ in range(2):
        ends.server.notify(peer, Beat(HELLO_AGAIN))
        _, again = await ends.next(ClientHello)
        ends.server.fail(peer, again.id, kind, why)
    _, again = await ends.next(ClientHello)
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 60.0, 10.0))


async def test_beats_are_the_sessions_own_other_notices_are_not(ends):
    peer = await ends.welcome()
    ends.server.notify(peer, Beat("e"))
    ends.server.notify(peer, Warn("careful"))
    assert await asyncio.wait_for(ends.notices.get(), 10) == Warn("careful")


async def test_what_is_asked_of_a_head_that_restarts_waits_for_it(ends):
    peer = await ends.welcome()
    ends.server.notify(peer, Goodbye("SIGTERM", restarting=True))
    ends.server.notify(peer, Warn("the last word"))
    await asyncio.wait_for(ends.notices.get(), 10)
    asking = asyncio.ensure_future(ends.link.request(GetStatus(), 10))
    _, again = await ends.next(ClientHello)  # by its silence: nothing else was asked
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 60.0, 10.0))
    _, asked = await ends.next(GetStatus)
    ends.server.reply(peer, asked.id, Done())
    assert await asking == Done()
    assert ends.alone.empty()


async def test_a_beat_repeats_the_last_word_of_the_head_that_took_us(ends):
    peer = await ends.welcome()
    ends.server.notify(peer, Beat("e", word=77.5))
    ends.server.notify(peer, Beat("another", word=99.0))
    while (said := (await ends.next(Beat))[1].body.word) == 0.0:
        pass
    assert said == 77.5


async def test_another_head_s_clock_is_not_repeated(ends):
    peer = await ends.welcome()
    ends.server.notify(peer, Beat("e", word=77.5))
    ends.server.notify(peer, Beat(HELLO_AGAIN))
    peer, request = await ends.next(ClientHello)
    ends.server.reply(peer, request.id, Welcome("e2", "0.1", 0.01, 10.0, "tok"))
    ends.came = asyncio.Queue()
    ends.server.notify(peer, Beat("e2", word=5.0))
    while (said := (await ends.next(Beat))[1].body.word) == 77.5:  # on its way before the welcome
        pass
    assert said in (0.0, 5.0)


async def test_an_owner_of_robots_answers_eight_times_in_their_lease(ends):
    await ends.welcome(beat_s=1.0)
    loop = asyncio.get_running_loop()
    ends.link.own_robots()
    await ends.next(Beat)  # at once: the next may be due only in a beat as long as before
    await ends.next(Beat)
    begun = loop.time()
    for _ in range(4):
        await ends.next(Beat)
    assert loop.time() - begun == pytest.approx(1.0, abs=0.01)


async def test_a_wait_for_a_heads_silence_begins_anew_with_each_word(ends):
    peer = await ends.welcome()
    loop = asyncio.get_running_loop()
    await asyncio.sleep(60)  # silence before the wait does not count
    began = loop.time()
    waiting = asyncio.ensure_future(ends.link.silent(5))
    await asyncio.sleep(4)
    assert not waiting.done()
    ends.server.notify(peer, Beat("e"))
    await waiting
    assert loop.time() - began == pytest.approx(9, abs=0.1)
    await ends.link.silent(5)
    assert loop.time() - began == pytest.approx(9, abs=0.1), "one wait for the same silence is enough"


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


async def test_closing_ends_what_waits_for_an_answer_with_the_reason_given(ends):
    await ends.welcome()
    waiting = [asyncio.ensure_future(ends.link.request(GetStatus(None), 10)) for _ in range(2)]
    await ends.next(GetStatus)
    ends.link.close("enough", error=UsageError("the Cluster was shut down"))
    for one in waiting:
        with pytest.raises(UsageError, match="the Cluster was shut down"):
            await one


class TestSilence:
    async def test_a_cut_network_is_told_after_the_lease(self, ends):
        await ends.welcome(0.01, lease_s=0.1)
        ends.network.cut(ends.link.identity)
        ends.network.dark.add(ends.endpoint)
        said = await asyncio.wait_for(ends.alone.get(), 10)
        assert said.startswith(f"the head at {ends.endpoint} was silent for 0.")
        assert said.endswith("the network between here and there is cut")

    async def test_a_look_that_fails_by_a_bug_is_told_and_made_again(self, ends):
        reported: list = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
        look = ends.network.check_reachability

        async def fails_once(endpoint, timeout_s):
            ends.network.check_reachability = look
            raise ValueError("a bug")

        ends.network.check_reachability = fails_once
        await ends.welcome(0.01, lease_s=0.1)
        ends.network.cut(ends.link.identity)
        ends.network.dark.add(ends.endpoint)
        said = await asyncio.wait_for(ends.alone.get(), 10)
        assert said.endswith("the network between here and there is cut")
        assert [str(error) for error in reported] == ["a bug"]

    @pytest.mark.parametrize("what", ["_beat", "_on_return"])
    async def test_a_session_that_a_bug_has_broken_is_over(self, ends, monkeypatch, what):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

        def broken(*_):
            raise ValueError("a bug")

        peer = await ends.welcome(0.01, lease_s=2.0)
        monkeypatch.setattr(ends.link, what, broken)
        if what == "_on_return":
            ends.server.notify(peer, Beat(HELLO_AGAIN))
            peer, hello = await ends.next(ClientHello)
            ends.server.reply(peer, hello.id, Welcome("e", "0.1", 0.01, 2.0))
        said = await asyncio.wait_for(ends.alone.get(), 10)
        assert "which is a bug of rlinf-actors: ValueError: a bug" in said

    async def test_a_head_that_is_not_back_within_its_grace_has_been_waited_for(self, ends):
        await ends.welcome(0.01, lease_s=0.1, grace_s=0.3)
        ends.server.close()
        said = await asyncio.wait_for(ends.alone.get(), 10)
        assert said.startswith(f"the head at {ends.endpoint} was silent for 0.")
        assert said.endswith("although its machine answers")

    async def test_a_cut_that_heals_within_the_lease_costs_nothing(self, ends):
        await ends.welcome(0.01, lease_s=2.0)
        asking = asyncio.ensure_future(ends.link.request(GetStatus()))
        await ends.next(GetStatus)
        lost = self.cut(ends.network)
        ends.network.dark.add(ends.endpoint)
        await asyncio.wait_for(lost.wait(), 10)
        ends.network.dark.clear()
        ends.network.drop = lambda identity, header: False
        peer, again = await ends.next(ClientHello)  # the first was lost
        ends.server.reply(peer, again.id, Welcome("e", "0.1", 0.01, 2.0))
        peer, asked = await ends.next(GetStatus)
        ends.server.reply(peer, asked.id, Done())
        assert await asking == Done()
        assert ends.alone.empty()

    async def test_a_worker_waits_for_the_grace_its_agent_looks(self, ends):
        ends.link.close("a worker is tried")
        ends.link = HeadSession(ends.network, ends.endpoint, replace(HELLO, role="worker"), ends.notices.put_nowait)
        await ends.next(Goodbye)
        ends.network.dark.add(ends.endpoint)
        await ends.welcome(0.01, lease_s=0.02)
        await asyncio.wait_for(self.cut(ends.network).wait(), 10)
        assert ends.link._detector.next_deadline() > asyncio.get_running_loop().time() + 100

    def cut(self, network):
        """Lose everything; set when a hello was lost."""
        lost = asyncio.Event()

        def drop(identity, header):
            if b"ClientHello" in header:
                lost.set()
            return True

        network.drop = drop
        return lost


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
        assert credits == [LogCredit("owner", "n1", batch.cost)]

    def test_of_a_progress_bar_only_the_last_state_is_printed_where_there_is_no_terminal(self, monkeypatch):
        bar = [("g:0", "out", f" {n}%{UPDATE}") for n in range(0, 100, 10)]
        batch = self.lines(
            *bar, ("g:1", "out", "another"), ("g:0", "out", "100%"), ("g:1", "err", f"left at 3{UPDATE}")
        )
        out, err, _ = self.shown(monkeypatch, batch)
        assert out == "[g:1@n1] another\n[g:0@n1] 100%\n"
        assert err == "[g:1@n1] left at 3\n"

    def test_a_progress_bar_keeps_one_line_of_a_terminal(self, monkeypatch, rlinf_leak_check):
        master, slave = pty.openpty()
        with open(slave, "w", encoding="utf-8") as terminal, open(master, encoding="utf-8", newline="") as screen:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
            monkeypatch.setattr(sys, "stdout", terminal)
            monkeypatch.setattr(sys, "stderr", terminal)
            printer = LogPrinter(lambda credit: None)
            printer.show(self.lines(("g:0", "err", f"10%{UPDATE}")))
            printer.show(self.lines(("g:0", "err", f"20% {'#' * 80}{UPDATE}"), ("g:1", "out", "a line")))
            printer.show(self.lines(("g:0", "err", "100%")))
            printer.close()
            terminal.write("end\n")
            terminal.flush()
            said = ""
            while not said.endswith("end\r\n"):
                said += screen.read(1)
        assert shown_on(said) == ["[g:1@n1] a line", "[g:0@n1] 100%", "end", ""]
        assert max(len(line) for line in said.split("\r")) < 40 + len(CLEAR), "a line that wraps is not rewritten"

    def test_a_printer_that_ends_counts_what_it_does_not_print(self, monkeypatch, rlinf_leak_check):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        printer = LogPrinter(lambda credit: None)
        printer.hurry()
        printer.show(self.lines(("g:0", "out", "one"), ("g:0", "out", "two")))
        printer.show(LogLines("owner", "n1", [], left=5, where="/logs"))
        printer.close()
        assert out.getvalue() == ""
        assert printer.left == {("n1", ""): 2, ("n1", "/logs"): 5}

    def test_a_terminal_that_takes_nothing_does_not_hold_the_end(self, monkeypatch):
        taken = threading.Event()

        class Stuck(io.StringIO):
            def write(self, text):
                taken.wait()
                return len(text)

        monkeypatch.setattr(sys, "stdout", Stuck())
        printer = LogPrinter(lambda credit: None)
        printer.show(self.lines(("g:0", "out", "one")))
        printer.close(0.0)
        taken.set()

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
        assert printer.left == {("n1", ""): 1}, "of a stream that the script closed; there is none for the other"

    def test_a_stream_of_the_scripts_own_that_only_writes_shows_every_line(self, monkeypatch, rlinf_leak_check):
        class Tee:
            def __init__(self):
                self.text = ""

            def write(self, text):
                self.text += text

            def flush(self):
                pass

        tee, credits = Tee(), []
        monkeypatch.setattr(sys, "stdout", tee)
        printer = LogPrinter(credits.append)
        printer.show(self.lines(("g:0", "out", f"10%{UPDATE}"), ("g:1", "out", "a line")))
        printer.show(self.lines(("g:0", "out", "100%")))
        printer.close()
        assert tee.text == "[g:1@n1] a line\n[g:0@n1] 100%\n"
        assert len(credits) == 2
        assert printer.left == {}

    def test_a_stream_that_raises_is_told_of_once_and_its_lines_are_counted(
        self, monkeypatch, caplog, rlinf_leak_check
    ):
        class Broken(io.StringIO):
            def write(self, text):
                raise RuntimeError("a tee with a bug")

        monkeypatch.setattr(sys, "stdout", Broken())
        err, credits = io.StringIO(), []
        monkeypatch.setattr(sys, "stderr", err)
        printer = LogPrinter(credits.append)
        printer.show(self.lines(("g:0", "out", "one"), ("g:0", "err", "two"), ("g:0", "out", "three")))
        printer.show(self.lines(("g:0", "out", "four")))
        printer.close()
        assert err.getvalue() == "[g:0@n1] two\n"
        assert len(credits) == 2
        assert printer.left == {("n1", ""): 3}
        (record,) = caplog.records
        assert "a tee with a bug" in str(record.exc_info[1])
        caplog.clear()

    def test_what_a_printer_that_ended_early_has_not_printed_is_counted(self, monkeypatch):
        class Ends(io.StringIO):
            def write(self, text):
                raise SystemExit

        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        monkeypatch.setattr(sys, "stdout", Ends())
        printer = LogPrinter(lambda credit: None)
        printer.show(self.lines(("g:0", "out", "one")))
        printer.show(self.lines(("g:0", "out", "two"), skipped=7))
        printer.close()
        assert printer.left == {("n1", ""): 9}

    def test_a_character_that_a_stream_cannot_encode_is_escaped(self, monkeypatch, rlinf_leak_check):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
        printer = LogPrinter(lambda credit: None)
        printer.show(self.lines(("g:0", "out", "one"), ("g:0", "out", "zwei Größen"), ("g:0", "out", "three")))
        printer.close()
        assert written.getvalue() == b"[g:0@n1] one\n[g:0@n1] zwei Gr\\xf6\\xdfen\n[g:0@n1] three\n"
        assert printer.left == {}


CLEAR = "\r\x1b[K"


def shown_on(said: str) -> list[str]:
    """The lines of a terminal that was sent this."""
    return [part.rsplit(CLEAR, 1)[-1] for part in said.replace("\r\n", "\n").split("\n")]
