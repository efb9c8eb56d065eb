"""A session with the head: hello, heartbeats, lost connections, and a head that was restarted."""

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
from session_kit import HELLO, Ends

from rlinf_actors.errors import ClusterTimeoutError, ProtocolError, ProtocolMismatchError, UsageError
from rlinf_actors.net.rpc import KeyRefusedError
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


@pytest.fixture
async def ends(network):
    made = Ends(network)
    yield made
    made.link.close("the test ends")


def refuse(ends, monkeypatch, times):
    """The head refuses this many hellos, because it does not know this process's key yet."""
    refused, greet = [KeyRefusedError("not yet")] * times, ends.link._greet

    async def refuse_at_first(*args):
        if refused:
            raise refused.pop()
        return await greet(*args)

    monkeypatch.setattr(ends.link, "_greet", refuse_at_first)


async def test_refusals_before_the_first_welcome_do_not_lengthen_later_pauses(network, monkeypatch):
    """A worker may find a restarted head before the head knows the key of the worker's job."""
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
    """The first connections fail, as many as given. The promise resolves at the last failure."""
    link, refused = network.link, []

    def made(*args, **options):
        if len(refused) == tries:
            return link(*args, **options)
        refused.append(asyncio.get_running_loop().time())
        raise OSError(errno.EMFILE, "cannot open a socket: too many open files")

    monkeypatch.setattr(network, "link", made)
    return refused


async def test_session_retries_a_connection_that_cannot_be_made(ends, monkeypatch, caplog):
    returned = asyncio.Event()
    ends.link._on_return = returned.set
    await ends.welcome(beat_s=0.01)
    refused = no_links(ends.network, monkeypatch, 3)
    await ends.next(ClientHello)  # the head is silent, and the session's first attempt has no answer
    peer, hello = await ends.next(ClientHello)
    ends.server.reply(peer, hello.id, Welcome("e2", "0.1", 60.0, 10.0))
    await asyncio.wait_for(returned.wait(), 10)
    assert len(refused) == 3
    said = [record.getMessage() for record in caplog.records if record.name.endswith("head_session")]
    assert len(said) == 2
    assert "is there again, after" in said[1]


async def test_worker_retries_its_first_connection(network, monkeypatch):
    ends = Ends(network, replace(HELLO, role="worker"))
    none = no_links(network, monkeypatch, 3)
    refuse(ends, monkeypatch, 1)
    await ends.welcome()
    assert len(none) == 3
    ends.link.close("the test ends")


async def test_worker_that_cannot_connect_in_time_says_why(network, monkeypatch):
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
        beat = (await ends.next(Beat))[1].body
        assert beat == Beat("inc", beat.at)
        assert 0 < asyncio.get_running_loop().time() - beat.at < 5  # the head repeats it, for clocks of traces


async def test_hello_that_was_lost_with_its_connection_is_sent_again(ends):
    starting = asyncio.ensure_future(ends.link.start(10))
    await ends.next(ClientHello)  # the head ends before it answers
    ends.network.reset(ends.link.identity)
    peer, request = await ends.next(ClientHello)
    ends.server.reply(peer, request.id, Welcome("e", "0.1", 0.01, 10.0, "tok"))
    assert (await starting).token == "tok"


async def test_lost_connection_is_followed_by_a_new_hello(ends):
    await ends.welcome(beat_s=10.0)
    ends.network.reset(ends.link.identity)
    peer, request = await ends.next(ClientHello)
    ends.server.reply(peer, request.id, Welcome("e", "0.1", 10.0, 10.0, "tok"))


async def test_restarted_head_gets_one_new_hello(ends):
    peer = await ends.welcome()
    for _ in range(3):
        ends.server.notify(peer, Beat(HELLO_AGAIN))
    _, again = await ends.next(ClientHello)
    assert isinstance(again, Request)
    assert again.body == replace(HELLO, token="tok")
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 1.0, 10.0, "tok2"))
    asking = asyncio.ensure_future(ends.link.request(GetStatus()))
    _, asked = await ends.next(GetStatus)  # one hello was enough: no other message came first
    ends.server.reply(peer, asked.id, Done())
    await asking
    assert ends.link.welcome.epoch == "e2"


async def test_request_is_sent_again_after_a_restarted_head_accepts_the_session(ends):
    peer = await ends.welcome(beat_s=60.0)
    asking = asyncio.ensure_future(ends.link.request(GetStatus()))
    _, asked = await ends.next(GetStatus)
    ends.server.notify(peer, Beat(HELLO_AGAIN))
    ends.server.fail(peer, asked.id, "hello", "say hello first")
    _, again = await ends.next(ClientHello)
    late = asyncio.ensure_future(
        ends.link.request(Done())
    )  # made meanwhile: not sent before the head accepts the session
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 60.0, 10.0))
    first = await ends.next(GetStatus)
    second = await ends.next(Done)
    assert first[1].id == asked.id
    ends.server.reply(peer, first[1].id, Done())
    ends.server.reply(peer, second[1].id, Done())
    assert await asyncio.wait_for(asking, 10) == await asyncio.wait_for(late, 10) == Done()


async def test_silent_head_gets_hellos_instead_of_beats_until_it_answers(ends, caplog):
    returned = asyncio.Event()
    ends.link._on_return = returned.set
    await ends.welcome(beat_s=0.01)
    for _ in range(3):
        await ends.next(ClientHello)
    while not ends.came.empty():
        ends.came.get_nowait()
    peer, hello = await asyncio.wait_for(ends.came.get(), 10)  # only hellos come by now
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


async def test_session_does_not_take_its_own_beats_for_an_answer(ends):
    """TCP can connect to itself where no process listens. Then a link receives what it sends."""
    await ends.welcome(beat_s=0.01)
    said = []
    while len(said) < 20:
        peer, envelope = await asyncio.wait_for(ends.came.get(), 10)
        said.append(type(envelope.body))
        if isinstance(envelope.body, Beat):
            ends.server.notify(peer, envelope.body)
    assert ClientHello in said


async def test_timeout_of_a_request_says_how_long_the_head_was_away(ends):
    await ends.welcome(beat_s=0.01)
    await ends.next(ClientHello)
    with pytest.raises(ClusterTimeoutError, match=r"has not answered for 0 s; GetStatus waited 0\.05 s for it"):
        await ends.link.request(GetStatus(), 0.05)


@pytest.mark.parametrize(("kind", "told"), [("node_lost", "given_up"), ("usage", "alone")])
async def test_session_ends_when_the_head_rejects_it(ends, kind, told):
    peer = await ends.welcome()
    ends.server.notify(peer, Beat(HELLO_AGAIN))
    _, again = await ends.next(ClientHello)
    ends.server.fail(peer, again.id, kind, "the head has given up on this driver")
    assert await asyncio.wait_for(getattr(ends, told).get(), 10) == "the head has given up on this driver"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("authentication", "worker 'w' is not known here"),  # the head waits for this worker's agentd
        ("protocol", "upgrade the head first"),  # the previous head may come back
    ],
)
async def test_session_retries_a_head_that_cannot_accept_it_yet(ends, kind, why):
    peer = await ends.welcome()
    for _ in range(2):
        ends.server.notify(peer, Beat(HELLO_AGAIN))
        _, again = await ends.next(ClientHello)
        ends.server.fail(peer, again.id, kind, why)
    _, again = await ends.next(ClientHello)
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 60.0, 10.0))


async def test_session_passes_on_all_notices_except_beats(ends):
    peer = await ends.welcome()
    ends.server.notify(peer, Beat("e"))
    ends.server.notify(peer, Warn("careful"))
    assert await asyncio.wait_for(ends.notices.get(), 10) == Warn("careful")


async def test_request_waits_for_a_head_that_restarts(ends):
    peer = await ends.welcome()
    ends.server.notify(peer, Goodbye("SIGTERM", restarting=True))
    ends.server.notify(peer, Warn("the last word"))
    await asyncio.wait_for(ends.notices.get(), 10)
    asking = asyncio.ensure_future(ends.link.request(GetStatus(), 10))
    _, again = await ends.next(ClientHello)  # the session noticed the silence: no request was under way
    ends.server.reply(peer, again.id, Welcome("e2", "0.1", 60.0, 10.0))
    _, asked = await ends.next(GetStatus)
    ends.server.reply(peer, asked.id, Done())
    assert await asking == Done()
    assert ends.alone.empty()


async def test_beat_repeats_the_last_clock_of_the_head_that_accepted_the_session(ends):
    peer = await ends.welcome()
    ends.server.notify(peer, Beat("e", word=77.5))
    ends.server.notify(peer, Beat("another", word=99.0))
    while (said := (await ends.next(Beat))[1].body.word) == 0.0:
        pass
    assert said == 77.5


async def test_clock_of_the_previous_head_is_not_repeated(ends):
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


async def test_owner_of_robots_sends_eight_beats_in_their_lease(ends):
    await ends.welcome(beat_s=1.0)
    loop = asyncio.get_running_loop()
    ends.link.own_robots()
    await ends.next(Beat)  # at once: the next heartbeat may be due only after the previous, longer interval
    await ends.next(Beat)
    begun = loop.time()
    for _ in range(4):
        await ends.next(Beat)
    assert loop.time() - begun == pytest.approx(1.0, abs=0.01)


async def test_each_message_of_the_head_restarts_the_measurement_of_its_silence(ends):
    await ends.welcome()
    loop = asyncio.get_running_loop()
    await asyncio.sleep(60)  # silence before the wait does not count
    began = loop.time()
    waiting = asyncio.ensure_future(ends.link.silent(5))
    await asyncio.sleep(4)
    assert not waiting.done()
    while not ends.came.empty():
        peer, _ = ends.came.get_nowait()  # of the newest connection: during the silence it was replaced
    ends.server.notify(peer, Beat("e"))
    await waiting
    assert loop.time() - began == pytest.approx(9, abs=0.1)
    await ends.link.silent(5)
    assert loop.time() - began == pytest.approx(9, abs=0.1), "one wait for the same silence is enough"


async def test_start_times_out_if_the_head_does_not_answer(ends):
    with pytest.raises(ClusterTimeoutError, match="did not answer ClientHello within"):
        await ends.link.start(0.01)


async def test_start_raises_the_heads_refusal(ends):
    starting = asyncio.ensure_future(ends.link.start(10))
    peer, request = await ends.next(ClientHello)
    ends.server.fail(peer, request.id, "protocol", "protocol 1 and 2")
    with pytest.raises(ProtocolMismatchError):
        await starting


async def test_start_fails_if_the_answer_is_not_a_welcome(ends):
    starting = asyncio.ensure_future(ends.link.start(10))
    peer, request = await ends.next(ClientHello)
    ends.server.reply(peer, request.id, Done())
    with pytest.raises(ProtocolError, match="answered a hello with Done"):
        await starting


async def test_close_sends_goodbye_and_ends_the_beats(ends):
    await ends.welcome()
    ends.link.close("enough")
    assert (await ends.next(Goodbye))[1] == Notice(Goodbye("enough"))
    ends.link.close("twice is fine")


async def test_close_fails_open_requests_with_its_reason(ends):
    await ends.welcome()
    waiting = [asyncio.ensure_future(ends.link.request(GetStatus(None), 10)) for _ in range(2)]
    await ends.next(GetStatus)
    ends.link.close("enough", error=UsageError("the Cluster was shut down"))
    for one in waiting:
        with pytest.raises(UsageError, match="the Cluster was shut down"):
            await one


class TestSilence:
    async def test_cut_network_is_reported_after_the_lease(self, ends):
        await ends.welcome(0.01, lease_s=0.1)
        ends.network.cut(ends.link.identity)
        ends.network.dark.add(ends.endpoint)
        said = await asyncio.wait_for(ends.alone.get(), 10)
        assert said.startswith(f"the head at {ends.endpoint} was silent for 0.")
        assert said.endswith("the network between here and there is cut")

    async def test_reachability_check_that_raises_is_reported_and_repeated(self, ends):
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
    async def test_internal_error_ends_the_session(self, ends, monkeypatch, what):
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

    async def test_head_that_does_not_return_within_its_grace_is_reported(self, ends):
        await ends.welcome(0.01, lease_s=0.1, grace_s=0.3)
        ends.server.close()
        said = await asyncio.wait_for(ends.alone.get(), 10)
        assert said.startswith(f"the head at {ends.endpoint} was silent for 0.")
        assert said.endswith("although its machine answers")

    async def test_cut_that_heals_within_the_lease_does_not_end_the_session(self, ends):
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

    def cut(self, network):
        """Lose every message; the event is set when a hello was lost."""
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

    def test_progress_bar_prints_only_its_last_state_without_a_terminal(self, monkeypatch):
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

    def test_closed_printer_counts_the_lines_it_does_not_print(self, monkeypatch, rlinf_leak_check):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        printer = LogPrinter(lambda credit: None)
        printer.hurry()
        printer.show(self.lines(("g:0", "out", "one"), ("g:0", "out", "two")))
        printer.show(LogLines("owner", "n1", [], left=5, where="/logs"))
        printer.close()
        assert out.getvalue() == ""
        assert printer.left == {("n1", ""): 2, ("n1", "/logs"): 5}

    def test_blocked_terminal_does_not_delay_the_printers_end(self, monkeypatch):
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

    def test_printer_reports_skipped_lines(self, monkeypatch, rlinf_leak_check):
        _, err, _ = self.shown(monkeypatch, self.lines(skipped=7))
        assert err == "[n1] 7 lines are not shown here; the log files have all\n"

    def test_closed_terminal_does_not_stall_the_printer(self, monkeypatch, rlinf_leak_check):
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

    def test_users_stream_with_only_write_gets_every_line(self, monkeypatch, rlinf_leak_check):
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

    def test_stream_that_raises_is_reported_once_and_its_lines_are_counted(self, monkeypatch, caplog, rlinf_leak_check):
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

    def test_lines_left_by_a_printer_that_ended_early_are_counted(self, monkeypatch):
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
    """The lines that a terminal shows after it received this text."""
    return [part.rsplit(CLEAR, 1)[-1] for part in said.replace("\r\n", "\n").split("\n")]


async def test_hello_lost_with_its_connection_is_said_again_by_the_next_one(ends, monkeypatch):
    """It is not repeated while the connection stands, so that a busy head has no more work."""
    peer = await ends.welcome(beat_s=60.0)
    monkeypatch.setattr(type(ends.link._client._link), "stands", lambda link: True)
    ends.server.notify(peer, Beat(HELLO_AGAIN))
    await ends.next(ClientHello)
    ends.server.notify(peer, Beat(HELLO_AGAIN))
    await asyncio.sleep(30)
    assert ends.came.empty()
    ends.network.reset(ends.link.identity)
    peer, request = await ends.next(ClientHello)
    ends.server.reply(peer, request.id, Welcome("e", "0.1", 60.0, 10.0, "tok"))
    await ends.link._greeting
