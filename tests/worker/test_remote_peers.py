"""Peers on other machines: their ends come from the head, and end the streams that they are served."""

from __future__ import annotations

import asyncio

from rlinf_actors.errors import ClusterTimeoutError
from rlinf_actors.runtime.head_session import WatchedClients
from rlinf_actors.wire.client_messages import WatchClients
from rlinf_actors.worker.remote_peers import MANY, RemotePeers, client_of


class World:
    """A head that answers at once, or not."""

    def __init__(self) -> None:
        self.told: list = []
        self.gone: list[bytes] = []
        self.sessions = 0
        self.error: Exception | None = None
        self.watched = WatchedClients(self.told.append)
        self.remote = RemotePeers(self.watched.watch, self._connected, self.gone.append)

    async def _connected(self) -> None:
        self.sessions += 1
        if self.error is not None:
            raise self.error


def test_client_is_read_from_the_name_of_a_link():
    assert client_of(b"driver:3f2a#7-00ff") == client_of(b"driver:3f2a#8-11") == "3f2a"


async def test_all_links_of_a_client_end_with_it():
    world = World()
    for peer in (b"driver:a#1-x", b"driver:a#2-y", b"worker:b#1-z", b"driver:a#1-x"):
        world.remote.add(peer, now=True)
    assert world.told == [WatchClients(["a"]), WatchClients(["b"])]
    world.watched.gone("a")
    assert sorted(world.gone) == [b"driver:a#1-x", b"driver:a#2-y"]
    world.watched.gone("a")
    assert len(world.gone) == 2


async def test_few_joined_peers_make_no_session():
    world = World()
    world.remote.add(b"driver:a#1-x")
    assert world.told == [WatchClients(["a"])]  # dropped without a session, and said again by one that comes later
    assert world.remote._connecting is None
    world.remote.add(b"driver:a#1-x", now=True)
    await world.remote._connecting
    assert world.sessions == 1
    assert world.told == [WatchClients(["a"])]


async def test_all_streams_share_one_session():
    world = World()
    world.remote.add(b"driver:a#1-x", now=True)
    world.remote.add(b"driver:b#1-x", now=True)
    await world.remote._connecting
    assert world.sessions == 1


async def test_head_without_answer_is_logged_and_the_next_stream_asks_again(caplog):
    world = World()
    world.error = ClusterTimeoutError("no head")
    world.remote.add(b"driver:a#1-x", now=True)
    await world.remote._connecting
    assert "are not noticed: no head" in caplog.text
    world.remote.add(b"driver:b#1-x", now=True)
    await world.remote._connecting
    assert world.sessions == 2


async def test_all_watchers_of_a_client_are_told_of_its_end():
    world, heard = World(), []
    world.watched.watch("a", lambda: heard.append(1))
    world.watched.watch("a", lambda: heard.append(2))
    assert world.told == [WatchClients(["a"])]
    asyncio.get_running_loop().call_soon(world.watched.gone, "a")
    await asyncio.sleep(0)
    assert heard == [1, 2]


async def test_end_that_was_noticed_otherwise_removes_the_watch():
    world = World()
    for peer in (b"worker:a#1-x", b"worker:a#2-y", b"worker:b#1-z"):
        world.remote.add(peer)
    world.remote.remove(b"worker:a#1-x")
    assert set(world.watched._watched) == {"a", "b"}
    for peer in (b"worker:a#2-y", b"worker:a#2-y", b"worker:b#1-z", b"worker:c#1-z"):
        world.remote.remove(peer)
    assert world.watched._watched == world.remote._links == world.remote._unwatch == {}
    world.remote.add(b"worker:a#3-y")
    world.watched.gone("a")
    assert world.gone == [b"worker:a#3-y"]


async def test_many_joined_peers_make_a_session():
    world = World()
    for n in range(MANY):
        world.remote.add(b"worker:%d#1-x" % n)
    assert world.remote._connecting is None
    world.remote.add(b"worker:last#1-x")
    await world.remote._connecting
    assert world.sessions == 1
