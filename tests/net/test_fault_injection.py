"""Fault points: what each action does to messages, over memory and ZeroMQ alike, and which rules are refused."""

from __future__ import annotations

import asyncio
import os

import pytest

from rlinf_actors.errors import ClusterTimeoutError, ConfigError
from rlinf_actors.net import fault_injection
from rlinf_actors.net.rpc import ControlClient, ControlServer
from rlinf_actors.settings import FAULTS
from rlinf_actors.testing import faults
from rlinf_actors.wire.agent_messages import Beat, Goodbye
from rlinf_actors.wire.client_messages import FindGroup, Warn


@pytest.fixture
async def pair(wire):
    """A link that its listener knows, and both inboxes."""
    listener, endpoint, heard = wire.listen()
    link, answers = wire.link(endpoint)
    link.send(b"hello")
    await heard.until(1)
    yield listener, heard, link, answers
    link.close()
    listener.close()
    assert fault_injection.active is None


async def test_a_dropped_message_is_lost_and_the_next_one_is_not(pair):
    _, heard, link, _ = pair
    with faults.inject("transport.send", faults.drop(), times=1) as rule:
        link.send(b"lost")
        link.send(b"next")
        assert (await heard.until(2)).headers == [b"hello", b"next"]
    assert rule.hits == 1


async def test_a_delayed_message_is_not_overtaken(pair):
    _, heard, link, _ = pair
    with faults.inject("transport.send", faults.delay(0.05), times=1):
        for n in range(5):
            link.send(b"%d" % n, now=True)
    assert (await heard.until(6)).headers[1:] == [b"0", b"1", b"2", b"3", b"4"]


async def test_delayed_message_keeps_its_order_after_its_rule_has_ended(pair):
    _, heard, link, _ = pair
    seen = asyncio.Event()
    with faults.inject("transport.receive", faults.delay(0.05), where=lambda name: not seen.set(), times=1):
        link.send(b"late")
        await seen.wait()
    link.send(b"behind")
    assert (await heard.until(3)).headers[1:] == [b"late", b"behind"]


async def test_a_duplicate_comes_twice(pair):
    listener, _, _, answers = pair
    with faults.inject("transport.receive", faults.duplicate(), times=1):
        listener.send(b"me", b"a", [b"part"])
        listener.send(b"me", b"b")
        assert (await answers.until(3)).headers == [b"a", b"a", b"b"]


async def test_a_cut_loses_both_directions_until_its_rule_ends(pair):
    listener, heard, link, answers = pair
    seen = asyncio.Event()
    with faults.inject("transport.receive", faults.cut(), where=lambda name: name == "me" and not seen.set()):
        link.send(b"cuts")
        await seen.wait()
        listener.send(b"me", b"lost")
    listener.send(b"me", b"healed")
    link.send(b"healed")
    assert (await heard.until(2)).headers == [b"hello", b"healed"]
    assert (await answers.until(1)).headers == [b"healed"]


async def test_where_function_gets_the_names_of_peers_and_endpoints(pair):
    listener, heard, link, answers = pair
    names: list[str] = []
    with faults.inject("transport.send", faults.drop(), where=lambda name: bool(names.append(name))):
        link.send(b"x")
        listener.send(b"me", b"y")
        await heard.until(2)
        await answers.until(1)
    assert names[1] == "me"
    assert names[0].startswith(("ipc://", "tcp://"))


async def test_refused_connection_loses_its_messages_and_a_delayed_one_keeps_them(wire):
    listener, endpoint, heard = wire.listen()
    with faults.inject("transport.connect", faults.refuse(), times=1):
        refused, _ = wire.link(endpoint, b"refused")
        refused.send(b"lost")
        with faults.inject("transport.connect", faults.delay(0.05)):
            late, _ = wire.link(endpoint, b"late")
        late.send(b"came")
        assert [(peer, header) for peer, header, _ in (await heard.until(1)).messages] == [(b"late", b"came")]
    for end in (refused, late, listener):
        end.close()


@pytest.fixture
async def control(wire):
    asked: asyncio.Queue = asyncio.Queue()
    server = ControlServer(wire.network, lambda peer, envelope: asked.put_nowait((peer, envelope)))
    notices: asyncio.Queue = asyncio.Queue()
    client = ControlClient(wire.network, server.bind(wire.endpoint()), b"driver:1", notices.put_nowait)
    yield server, client, asked, notices
    client.close()
    server.close()


async def test_requests_are_refused_repeated_and_delayed_by_kind(control):
    server, client, asked, _ = control
    with faults.inject("rpc.request", faults.refuse(), where="FindGroup", times=1):
        with pytest.raises(ClusterTimeoutError, match="a fault point refused FindGroup"):
            await client.request(FindGroup("ns", "g"))
        with faults.inject("rpc.request", faults.duplicate()):
            answer = asyncio.create_task(client.request(FindGroup("ns", "g")))
            peer, first = await asked.get()
            assert (await asked.get())[1] == first
    with faults.inject("rpc.reply", faults.drop(), where="Warn", times=1):
        server.reply(peer, first.id, Warn("lost"))
        server.reply(peer, first.id, Warn("came"))
    assert (await answer).text == "came"


async def test_request_with_a_lost_reply_ends_by_its_timeout(control):
    server, client, asked, _ = control
    with faults.inject("rpc.reply", faults.drop()):
        answer = asyncio.create_task(client.request(FindGroup("ns", "g"), timeout=0.2))
        peer, request = await asked.get()
        server.reply(peer, request.id, Warn("lost"))
        with pytest.raises(ClusterTimeoutError, match="did not answer FindGroup"):
            await answer


async def test_notices_keep_their_order_behind_a_delayed_one(control):
    server, client, asked, notices = control
    client.notify(Beat("x"))
    peer, _ = await asked.get()
    with faults.inject("rpc.notice", faults.delay(0.05), where="Goodbye"):
        server.notify(peer, Goodbye("first"))
        server.notify(peer, Beat("second"))
    assert [await notices.get(), await notices.get()] == [Goodbye("first"), Beat("second")]


def test_refused_fork_raises_blocking_io_error():
    with faults.inject("spawn.fork", faults.refuse(), where="a:*"):
        assert fault_injection.active is not None
        fault_injection.active.start("spawn.fork", "b:0")
        with pytest.raises(BlockingIOError, match="a fault point refused a:0"):
            fault_injection.active.start("spawn.fork", "a:0")
    assert fault_injection.active is None


def test_same_seed_strikes_the_same_messages():
    def struck(seed: int) -> list[bool]:
        rule = fault_injection.Rule(faults.fault("rpc.notice", faults.drop(), chance=0.3, seed=seed))
        return [rule.strikes("rpc.notice", "Beat") for _ in range(200)]

    assert struck(1) == struck(1) != struck(2)
    assert 30 < sum(struck(1)) < 90


def test_rule_obeys_skip_times_and_the_file_that_switches_it_on(tmp_path):
    rule = fault_injection.Rule(
        faults.fault("rpc.notice", faults.drop(), skip=1, times=2, exists=str(tmp_path / "{pid}x"))
    )
    assert not rule.strikes("rpc.notice", "Beat")
    (tmp_path / f"{os.getpid()}x").touch()
    assert [rule.strikes("rpc.notice", "Beat") for _ in range(5)] == [False, True, True, False, False]


WRONG = [
    ("transport.sent", faults.drop(), {}, "'transport.sent' is no fault point; did you mean 'transport.send'"),
    ("transport.send", faults.Action("dropp"), {}, "'dropp' is no fault; did you mean 'drop'"),
    ("spawn.fork", faults.drop(), {}, "spawn.fork cannot drop; it can: delay, refuse"),
    ("transport.send", faults.delay(0), {}, "0 s is no time for a delay"),
    ("transport.send", faults.drop(), {"chance": 0}, "chance is 0"),
    ("transport.send", faults.drop(), {"times": -1}, "times and skip"),
]


@pytest.mark.parametrize(("point", "action", "more", "text"), WRONG)
def test_impossible_fault_raises_config_error(point, action, more, text):
    with pytest.raises(ConfigError, match=text), faults.inject(point, action, **more):
        pass
    assert fault_injection.active is None


def test_faults_survive_the_environment_variable_unchanged():
    one = faults.fault("transport.send", faults.delay(0.5), where="tcp:*", chance=0.5, seed=3)
    two = faults.fault("spawn.template", faults.refuse(), times=1)
    assert fault_injection.parse(faults.environment(one, two)[FAULTS]) == [one, two]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("{", "RLINF_ACTORS_FAULTS: is no list of faults in JSON"),
        ('[{"point": "rpc.reply", "action": "drop", "wher": "x"}]', "unknown field `wher`"),
        ('[{"point": "rpc.reply", "action": "cut"}]', r"RLINF_ACTORS_FAULTS\[0\]: rpc.reply cannot cut"),
    ],
)
def test_error_in_a_malformed_plan_names_its_place(plan, text):
    with pytest.raises(ConfigError, match=text):
        fault_injection.load(plan)
    assert fault_injection.active is None
