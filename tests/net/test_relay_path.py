"""Links by a relay: few frames for many workers, order, at most once whatever the relay's end, and bounded memory."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading

import pytest
import relay_kit
from relay_kit import Caller
from stream_kit import until

from rlinf_actors.errors import RlinfActorsError
from rlinf_actors.net import relay_path
from rlinf_actors.wire import frames
from rlinf_actors.worker import relay


async def test_call_to_all_ranks_of_a_node_is_one_frame_with_one_body(short_dir):
    async with relay_kit.node(short_dir, 32) as node:
        before = len(node.cable.sent)
        node.call(b"step", [b"x" * 100])
        await until(lambda: all(caller.answers == [b"step!"] for caller in node.callers))
        sent = node.cable.sent[before:]
        assert len(sent) == 1
        assert [(count, len(routes)) for count, routes in sent[0].rows] == [(1, 32)]
        assert all(rank.heard == [b"step"] for rank in node.ranks)


async def test_equal_answers_of_one_turn_travel_once_and_others_apart(short_dir):
    async with relay_kit.node(short_dir, 3) as node:
        caller = node.cable.relay._callers[b"caller"]
        routes = [link.link.route for link in node.callers]
        for header, parts in ((b"same", [b"None"]), (b"same", [b"None", b"buffer"])):
            for route in routes:
                caller.arrived(route, header, list(parts))
        caller.arrived(routes[0], b"same", [b"other"])
        assert caller._rows == [(1, routes), *((2, [route]) for route in routes), (1, routes[:1])]
        await until(lambda: len(node.callers[0].answers) == 3)
        assert [made.answers for made in node.callers] == [[b"same"] * 3, [b"same"] * 2, [b"same"] * 2]


async def test_worker_knows_the_caller_and_not_the_relay(short_dir):
    async with relay_kit.node(short_dir, 2) as node:
        assert [rank.peers for rank in node.ranks] == [{b"me#0"}, {b"me#1"}]


@pytest.mark.parametrize("seed", range(8))
async def test_each_link_keeps_its_order(short_dir, seed):
    """Group calls, single calls at once and queued ones, from two threads."""
    some = random.Random(seed)
    async with relay_kit.node(short_dir, 4) as node:
        sent = [[] for _ in node.callers]

        def send(name: bytes) -> None:
            for n in range(50):
                header = b"%s%d" % (name, n)
                for index in some.sample(range(4), some.choice([1, 1, 4])):
                    sent[index].append(header)
                    node.callers[index].link.send(header, now=some.random() < 0.3)

        other = asyncio.get_running_loop().run_in_executor(None, send, b"t")
        send(b"l")
        await other
        await until(lambda: all(len(c.answers) == len(s) for c, s in zip(node.callers, sent, strict=True)))
        for index, rank in enumerate(node.ranks):
            assert sorted(rank.heard) == sorted(sent[index])
            for name in (b"l", b"t"):
                numbers = [int(header[1:]) for header in rank.heard if header.startswith(name)]
                assert numbers == sorted(numbers)
            assert node.callers[index].answers == [header + b"!" for header in rank.heard]


async def test_close_follows_what_was_sent(short_dir):
    async with relay_kit.node(short_dir, 2) as node:
        for caller in node.callers:
            caller.link.send(b"last")
            caller.link.close()
        await until(lambda: all(rank.heard == [b"last"] for rank in node.ranks))
        await until(lambda: not node.cable.relay._callers[b"caller"]._links)


@pytest.mark.parametrize("after", range(1, 12))
async def test_dead_relay_resets_each_link_once_and_no_rank_has_a_call_twice(short_dir, after, monkeypatch):
    """At every point: the relay dies after *after* frames; each rank has had a prefix of what was sent to it."""
    monkeypatch.setattr(relay_path, "RESET_S", 0.01)
    async with relay_kit.node(short_dir, 3) as node:
        node.cable.most = after
        for n in range(12):
            node.call(b"%d" % n)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await until(lambda: all(caller.resets for caller in node.callers))
        await asyncio.sleep(0.05)
        assert [caller.resets for caller in node.callers] == [1, 1, 1]
        assert node.cable.path.ended
        for caller in node.callers:
            assert caller.rank.heard == [b"%d" % n for n in range(len(caller.rank.heard))]
            assert caller.answers == [b"%d!" % n for n in range(len(caller.answers))]
            assert len(caller.answers) <= len(caller.rank.heard)
        before = [len(rank.heard) for rank in node.ranks]
        node.call(b"later")
        await asyncio.sleep(0.02)
        assert [len(rank.heard) for rank in node.ranks] == before


async def test_link_that_closes_before_the_reset_is_not_reset(short_dir, monkeypatch):
    """The head has reported the end of the worker meanwhile: its calls fail by that."""
    monkeypatch.setattr(relay_path, "RESET_S", 0.02)
    async with relay_kit.node(short_dir, 2) as node:
        node.cable.cut()
        await asyncio.sleep(0)
        node.callers[0].link.close()
        await until(lambda: node.callers[1].resets)
        assert node.callers[0].resets == 0


async def test_stopped_relay_is_given_up_after_its_time_and_a_slow_one_is_not(short_dir, monkeypatch):
    monkeypatch.setattr(relay_path, "RESET_S", 0)
    async with relay_kit.node(short_dir, 2) as node:
        path, now = node.cable.path, 100.0
        path.tend(now, 0.0)
        path.tend(now + relay_path.ASK_S + 1, 0.0)  # asks
        await until(lambda: not node.cable.down and not node.cable.up)
        path.tend(now + 50, 0.0)
        assert not path.ended
        node.cable.stopped = True
        node.call(b"step")
        path.tend(now + 60, 0.0)
        path.tend(now + 61 + relay_path.SILENT_S, 50.0)  # this process itself stood still
        assert not path.ended
        path.tend(now + 140 + relay_path.SILENT_S, 0.0)
        assert path.ended
        await until(lambda: all(caller.resets == 1 for caller in node.callers))


async def test_rank_that_does_not_read_stops_no_other_and_is_bounded(short_dir, monkeypatch):
    monkeypatch.setattr(relay_path, "WINDOW", 1 << 20)
    monkeypatch.setattr(relay, "CREDIT", 1 << 16)
    async with relay_kit.node(short_dir, 3) as node:
        stuck = node.callers[0]
        streams = stuck.rank.listener._streams
        connection = streams.peers[b"me#0"]
        streams._loop.remove_reader(connection.fd)
        for n in range(200):
            node.call(b"%d" % n, [b"x" * 30_000])
            await until(lambda n=n: all(len(caller.answers) == n + 1 for caller in node.callers[1:]))
        assert len(stuck.link.held) > 100
        streams._loop.add_reader(connection.fd, streams._read, connection, True)
        await until(lambda: len(stuck.answers) == 200)
        assert stuck.rank.heard == [b"%d" % n for n in range(200)]


async def test_caller_that_does_not_read_is_bounded(short_dir, monkeypatch):
    """The relay reads no more from the ranks, and goes on when the caller has handled what came."""
    monkeypatch.setattr(relay, "WINDOW", 1 << 20)
    monkeypatch.setattr(relay_path, "CREDIT", 1 << 16)
    async with relay_kit.node(short_dir, 2) as node:
        node.cable.deaf = True
        for n in range(200):
            node.call(b"%d" % n, [b"x" * 30_000])
        await until(lambda: all(len(rank.heard) == 200 for rank in node.ranks))
        for _ in range(20):
            await asyncio.sleep(0.005)
        held = sum(len(part) for _, parts in node.cable.up for part in parts)
        assert held < 4 << 20, "6 MB were said, most by ranks whose words wait with them"
        node.cable.go_on()
        await until(lambda: all(len(caller.answers) == 200 for caller in node.callers))
        assert node.callers[0].answers == [b"%d!" % n for n in range(200)]


@pytest.mark.parametrize(
    ("size", "window"),
    [(40, 2 << 20), (200, 2 << 20), (20, 1 << 17)],
    ids=["all at the relay", "some wait for room", "all are queued, and some find no room"],
)
async def test_closed_link_delivers_what_was_sent_when_the_rank_reads_again(short_dir, size, window, monkeypatch):
    monkeypatch.setattr(relay_path, "WINDOW", window)
    monkeypatch.setattr(relay, "CREDIT", 1 << 16)
    async with relay_kit.node(short_dir, 1) as node:
        (caller,) = node.callers
        streams = caller.rank.listener._streams
        connection = streams.peers[b"me#0"]
        streams._loop.remove_reader(connection.fd)
        for n in range(size):
            caller.link.send(b"%d" % n, [b"x" * 30_000])
        caller.link.close()
        await until(lambda: not node.cable.down)
        streams._loop.add_reader(connection.fd, streams._read, connection, True)
        await until(lambda: len(caller.rank.heard) == size)
        assert caller.rank.heard == [b"%d" % n for n in range(size)]
        await until(lambda: b"me#0" not in streams.peers)
        assert not caller.answers
        assert not caller.resets


async def test_message_that_is_sent_while_another_link_closes_leaves(short_dir):
    async with relay_kit.node(short_dir, 2) as node:
        (closing, other), path = (caller.link for caller in node.callers), node.cable.path
        write = path._write

        def sends_meanwhile(now):
            path._write = write
            write(now)
            sending = threading.Thread(target=other.send, args=(b"step",), kwargs={"now": True})
            sending.start()
            sending.join()

        closing.room = 0
        closing.send(b"late", now=True)
        assert closing.held
        path._write = sends_meanwhile
        closing.close()
        await until(lambda: node.ranks[1].heard == [b"step"])
        path._credited(closing.route, relay_path.WINDOW)
        await until(lambda: node.ranks[0].heard == [b"late"])


async def test_closed_link_to_a_rank_that_never_reads_ends(short_dir, monkeypatch):
    monkeypatch.setattr(relay_path, "WINDOW", 1 << 20)
    monkeypatch.setattr(relay_path, "LINGER_S", 0.05)
    monkeypatch.setattr(relay, "LINGER_S", 0.05)
    async with relay_kit.node(short_dir, 1) as node:
        (caller,) = node.callers
        streams = caller.rank.listener._streams
        streams._loop.remove_reader(streams.peers[b"me#0"].fd)
        for n in range(100):
            caller.link.send(b"%d" % n, [b"x" * 30_000])
        await until(lambda: caller.link.held)
        caller.link.close()
        links = node.cable.relay._callers[b"caller"]._links
        (link,) = links.values()
        await until(lambda: link._closed)
        assert not node.cable.path._links
        assert not links


class Struck(Exception):
    """What the test's signal handler raises."""


def test_handler_that_raises_while_a_thread_sends_loses_nothing(short_dir):
    """In the main thread, as Ctrl-C: the message has left, and the path is not held."""
    posted: list[frames.AnyFrame] = []

    class StruckPeer:
        name, node, received = "relay:0", "n1", 0

        def post(self, header, parts=(), *, now=False):
            os.kill(os.getpid(), signal.SIGUSR1)
            posted.append(frames.decode(header))

        def soon(self, function):
            raise AssertionError("not the loop")

    def strike(*_):
        raise Struck

    async def made():
        path = relay_path.RelayPath(StruckPeer(), 7)
        return path, path.link("ipc:///w/1", b"me#1", lambda *_: None)

    loop = asyncio.new_event_loop()
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        path, link = loop.run_until_complete(made())
        for _ in range(2):
            with pytest.raises(Struck):
                link.send(b"step", now=True)
        assert [len(frame.rows) for frame in posted] == [1, 1]
        assert not path._lock.locked()
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.close()


async def test_relay_connects_to_workers_of_its_node_only(short_dir):
    async with relay_kit.node(short_dir, 1) as node:
        other = f"{short_dir}/other"
        os.mkdir(other)
        rank = relay_kit.FakeRank(node.network, other, 0)
        caller = Caller(node.cable.path, rank, b"me#x")
        await until(lambda: caller.resets == 1)
        assert not rank.peers
        with pytest.raises(RlinfActorsError, match="not a socket of this node"):
            node.cable.relay._link(frames.RelayedLink(b"1", f"tcp:{short_dir}/1", b"me", "g:1"), None)


async def test_worker_whose_connection_breaks_resets_its_link_alone(short_dir):
    async with relay_kit.node(short_dir, 2) as node:
        for connection in list(node.ranks[0].listener._streams._connections):
            connection.end()
        await until(lambda: node.callers[0].resets == 1)
        node.callers[1].link.send(b"step")
        await until(lambda: node.callers[1].answers == [b"step!"])
        assert node.callers[1].resets == 0


async def test_malformed_frames_are_dropped_without_harm(short_dir):
    async with relay_kit.node(short_dir, 1) as node:
        for frame in (
            frames.Relayed(7, [(5, [b"1"])]),
            frames.Relayed(7, [(2, [b"1", b"none"])], closed=[b"none"], credit=[(b"none", 5)]),
        ):
            node.cable.relay.handle(b"stranger", frame, [])
            node.cable.path.answer(frame, [b"x"])
        node.call(b"step")
        await until(lambda: node.callers[0].answers[-1:] == [b"step!"])
