"""Faults of the in-process network."""

from __future__ import annotations

import asyncio

import net_kit
import pytest

from rlinf_actors.errors import ConfigError


@pytest.fixture
async def ends():
    wire = net_kit.Wire("memory", "x")
    listener, endpoint, inbox = wire.listen()
    link, answers = wire.link(endpoint)
    return wire.network, listener, link, inbox, answers


async def test_cut_loses_both_directions_until_it_is_healed(ends):
    network, listener, link, inbox, answers = ends
    link.send(b"1")
    await inbox.until(1)
    network.cut(b"me")
    link.send(b"2")
    listener.send(b"me", b"2")
    await asyncio.sleep(0)
    network.heal(b"me")
    link.send(b"3")
    listener.send(b"me", b"3")
    await inbox.until(2)
    await answers.until(1)
    assert inbox.headers == [b"1", b"3"]
    assert answers.headers == [b"3"]


async def test_drop_loses_the_selected_messages_only(ends):
    network, _, link, inbox, _ = ends
    network.drop = lambda identity, header: header == b"2"
    for header in (b"1", b"2", b"3"):
        link.send(header)
    await inbox.until(2)
    assert inbox.headers == [b"1", b"3"]


async def test_delay_keeps_order(ends):
    network, _, link, inbox, _ = ends
    network.delay = 0.001
    link.send(b"1")
    link.send(b"2")
    assert inbox.headers == []
    await inbox.until(2)
    assert inbox.headers == [b"1", b"2"]


async def test_second_listener_of_an_endpoint_is_refused(ends):
    network, listener, *_ = ends
    with pytest.raises(ConfigError, match="in use"):
        network.listener(net_kit.Inbox()).bind(listener._endpoint)


async def test_parts_are_copies(ends):
    _, _, link, inbox, _ = ends
    part = bytearray(b"before")
    link.send(b"h", [part])
    part[:] = b"after!"
    await inbox.until(1)
    assert inbox.messages[0][2] == [b"before"]
