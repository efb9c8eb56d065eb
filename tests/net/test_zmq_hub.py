"""The links of a process to many listeners on other machines share one socket."""

from __future__ import annotations

import asyncio

import keyed_kit
import net_kit
import pytest
from descriptor_kit import descriptors
from tcp_kit import tcp_server
from test_lost_connections import Middlebox

from rlinf_actors.net.host import free_port
from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_hub import HubLink, hub_takes
from rlinf_actors.net.zmq_network import ZmqLink
from rlinf_actors.security.job import job_pair
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import LOCAL


@pytest.fixture
async def hub(short_dir):
    async with net_kit.wire("hub", short_dir) as wire:
        yield wire


async def test_each_link_costs_one_descriptor(hub, short_dir):
    async with net_kit.wire("tcp", short_dir) as far:
        listeners = [far.listen() for _ in range(20)]
        first, _ = hub.link(listeners[0][1], b"link0")  # the hub itself
        first.send(b"hello")
        await listeners[0][2].until(1)
        before = descriptors()
        links = [hub.link(endpoint, b"link%d" % n)[0] for n, (_, endpoint, _) in enumerate(listeners) if n]
        for link in links:
            link.send(b"hello")
        for _, _, inbox in listeners:
            await inbox.until(1)
        more = descriptors() - before
        assert len(more) == 2 * len(links), more  # the other end is in this process too
        assert [inbox.messages[0][0] for _, _, inbox in listeners] == [b"link%d" % n for n in range(20)]


async def test_answers_reach_the_link_that_asked(hub):
    ends = [hub.listen() for _ in range(3)]
    links = [hub.link(endpoint, b"link%d" % n) for n, (_, endpoint, _) in enumerate(ends)]
    for n, (link, _) in enumerate(links):
        link.send(b"%d" % n)
    for (listener, _, inbox), (_, answers) in zip(ends, links, strict=True):
        [(peer, header, _)] = (await inbox.until(1)).messages
        listener.send(peer, header + b"!")
        await answers.until(1)
    assert [answers.headers for _, answers in links] == [[b"0!"], [b"1!"], [b"2!"]]


async def test_closed_link_can_be_followed_by_another_to_the_same_endpoint(hub):
    listener, endpoint, inbox = hub.listen()
    old, old_answers = hub.link(endpoint, b"old")
    old.send(b"1")
    await inbox.until(1)
    old.close()
    listener.send(b"old", b"too late")
    new, answers = hub.link(endpoint, b"new")
    assert isinstance(new, HubLink)
    new.send(b"2")
    await inbox.until(2)
    listener.send(b"new", b"answer")
    await answers.until(1)
    assert old_answers.headers == []
    assert [peer for peer, _, _ in inbox.messages] == [b"old", b"new"]


async def test_second_link_to_an_endpoint_has_a_socket_of_its_own(hub):
    _, endpoint, inbox = hub.listen()
    first, _ = hub.link(endpoint, b"first")
    second, _ = hub.link(endpoint, b"second")
    assert isinstance(second, ZmqLink)
    second.send(b"2")
    await inbox.until(1)
    second.close()
    first.send(b"1")
    await inbox.until(2)
    assert sorted(peer for peer, _, _ in inbox.messages) == [b"first", b"second"]


async def test_messages_wait_for_a_listener_that_comes_later(hub):
    port = free_port()
    link, _ = hub.link(f"tcp://127.0.0.1:{port}")
    link.send(b"early")
    inbox = net_kit.Inbox()
    hub.network.listener(inbox).bind(f"tcp://127.0.0.1:{port}")
    assert (await inbox.until(1)).headers == [b"early"]


async def test_lost_connection_is_reported_to_its_link_alone(hub):
    lost, resets = asyncio.Event(), []
    _, near, inbox = hub.listen()
    _, far, others = hub.listen()
    box = Middlebox(int(near.rpartition(":")[2]))
    async with tcp_server(box.forward) as port:
        link = hub.network.link(
            f"tcp://127.0.0.1:{port}",
            b"me",
            net_kit.Inbox(),
            LinkOptions(to="g:0", on_reset=lambda: (resets.append(0), lost.set())),
        )
        other = hub.network.link(
            far, b"other", net_kit.Inbox(), LinkOptions(to="g:1", on_reset=lambda: resets.append(1))
        )
        link.send(b"before")
        other.send(b"before")
        await inbox.until(1)
        await others.until(1)
        box.reset()
        await asyncio.wait_for(lost.wait(), 20)
        link.send(b"after")
        await inbox.until(2)
        other.send(b"as before")
        await others.until(2)
        assert resets == [0]


@pytest.mark.parametrize(
    ("endpoint", "taken"),
    [
        ("tcp://10.0.0.1:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://localhost:5", False),
        ("ipc:///tmp/x", False),
        ("tcp://010.0.0.1:5", False),
    ],
)
def test_hub_takes_numeric_tcp_addresses(endpoint, taken):
    assert hub_takes(endpoint) == taken


async def test_each_link_proves_the_key_of_its_own_job():
    """The keys of one connection are not used for the next one of the hub."""
    with keyed_kit.guarded() as world:
        sender, inboxes = world.net(Security(pair=KeyPair.make(), head="x" * 40)), []
        for job in ("one", "two", "one"):
            pair, inbox = job_pair(job), net_kit.Inbox()
            gate = keyed_kit.ListGate()
            gate.members[pair.public] = LOCAL
            listener = world.net(Security(pair=pair, head="x" * 40)).listener(inbox, gate=gate)
            link = sender.link(
                listener.bind("tcp://127.0.0.1:0"), b"me", net_kit.Inbox(), LinkOptions(token=job, to="g:0")
            )
            assert isinstance(link, HubLink)
            link.send(job.encode())
            inboxes.append(inbox)
        assert [(await inbox.until(1)).headers for inbox in inboxes] == [[b"one"], [b"two"], [b"one"]]


async def test_refused_key_is_reported_to_its_link_alone():
    with keyed_kit.guarded() as world:
        world.gate.enlist()
        world.bind()
        pair = world.pair
        sender = world.net(Security(pair=KeyPair.make(), head=pair.public))
        good, inbox = keyed_kit.ListGate(), net_kit.Inbox()
        theirs = job_pair("theirs")
        good.members[theirs.public] = LOCAL
        listener = world.net(Security(pair=theirs, head="x" * 40)).listener(inbox, gate=good)
        refused, admitted = keyed_kit.Facts(), keyed_kit.Facts()
        link = sender.link(
            listener.bind("tcp://127.0.0.1:0"),
            b"me",
            net_kit.Inbox(),
            LinkOptions(token="theirs", to="g:0", on_rejected=admitted),
        )
        wrong = sender.link(
            world.endpoint, b"me", net_kit.Inbox(), LinkOptions(token="ours", to="g:1", on_rejected=refused)
        )
        wrong.send(b"no")
        link.send(b"yes")
        await refused.until(1)
        await inbox.until(1)
        assert admitted.all == []
