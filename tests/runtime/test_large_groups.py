"""What a group costs its driver grows with the number of ranks, and no faster: lines are counted, not seconds."""

from __future__ import annotations

import asyncio
import gc
import sys
import types

import pytest

from rlinf_actors.group.result import WorkerGroupFuncResult
from rlinf_actors.net.link import Reachability
from rlinf_actors.net.loop import TURN_S, Turns
from rlinf_actors.runtime.construction import Construction
from rlinf_actors.runtime.group_registry import GroupRegistry
from rlinf_actors.runtime.node_reachability import NodeReachability
from rlinf_actors.runtime.remote_group import RemoteGroup
from rlinf_actors.wire import frames
from rlinf_actors.wire.client_messages import WorkerChanged
from rlinf_actors.wire.values import Endpoint, ExitReport, GroupState, WorkerState

pytestmark = pytest.mark.model
SIZES = (100, 1000)


class Links:
    """A network whose links answer nothing and keep what was sent: (header, parts) of each message, by rank."""

    forked = False
    memory = None
    bulk = None

    def __init__(self) -> None:
        self.sent: list[list[tuple[bytes, list[bytes]]]] = []
        self.received: list[object] = []
        self.closed = 0

    def link(self, endpoint, identity, on_message, _options):
        link = types.SimpleNamespace(close=self._close)
        messages: list[tuple[bytes, list[bytes]]] = []
        link.send = lambda header, parts=(), now=False: messages.append((header, list(parts)))
        self.sent.append(messages)
        self.received.append(on_message)
        return link

    def _close(self, linger_ms=0) -> None:
        self.closed += 1

    def soon(self, function) -> None:
        asyncio.get_running_loop().call_soon(function)


class Lines:
    """Counts the lines of rlinf_actors that this thread executes, without finalizers of what other tests have left."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self):
        gc.collect()
        gc.disable()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_error) -> None:
        sys.settrace(None)
        gc.enable()

    def _enter(self, frame, event, argument):
        return self._line if "rlinf_actors" in frame.f_code.co_filename else None

    def _line(self, frame, event, argument):
        self.count += event == "line"
        return self._line


async def turns(condition) -> None:
    """Let the loop go on until *condition* returns True."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def states(size, state="running", restarts=0):
    endpoint = Endpoint("elsewhere", "", "tcp://10.0.0.1:1") if state == "running" else None
    exit = ExitReport("signalled", signal=9) if state == "gone" else None
    return [
        WorkerState(
            f"launch-{rank}" + (f".{restarts}" if restarts else ""), rank, rank // 10, "10.0.0.1", state, 1, endpoint,
            0, 4567 if state == "running" and not rank else 0, exit, restarts,
        )
        for rank in range(size)
    ]  # fmt: skip


def launched(size, network):
    group = RemoteGroup(network, "driver:x", "here", "ns", "g", ["n"] * size, Construction("m:C", [b"args"], 1))
    group.adopt(GroupState("ns", "g", "m:C", "o", "starting", states(size, "starting"), "token"))
    return group


def construct(network):
    """Answer the Create of each worker."""
    for messages, received in zip(network.sent, network.received, strict=True):
        received(b"", frames.encode(frames.Ok(frames.decode(messages[1][0]).id)), [])


async def one_by_one(size):
    group = launched(size, Links())
    with Lines() as lines:
        for worker in states(size):
            group.update([worker])
        await turns(lambda: group.peers[-1].connected)
    return lines.count


async def at_once(size):
    group = launched(size, Links())
    with Lines() as lines:
        group.update(states(size))
        await turns(lambda: group.peers[-1].connected)
    return lines.count


async def rank_0_last(size):
    group = launched(size, Links())
    with Lines() as lines:
        for worker in reversed(states(size)):
            group.update([worker])
        await turns(lambda: group.peers[-1].connected)
    return lines.count


async def answered(size):
    """All constructors answer, and the group is ready."""
    network = Links()
    group = launched(size, network)
    group.update(states(size))
    await turns(lambda: group.peers[-1].connected)
    with Lines() as lines:
        construct(network)
        assert group.ready.done()
    return lines.count


async def fan_out(size):
    network = Links()
    group = launched(size, network)
    group.update(states(size))
    await turns(lambda: group.peers[-1].connected)
    lost = types.SimpleNamespace(failed=print, seen=print)
    with Lines() as lines:
        result = WorkerGroupFuncResult(types.SimpleNamespace(lost=lost, serving_thread=0), "step", group.peers)
        result._start([b"arguments"])
        for received in network.received:
            received(b"", frames.encode(frames.Ok(result._call)), [])
        assert result.done()
    return lines.count


async def test_a_call_keeps_one_object_a_rank_that_the_garbage_collector_counts():
    """Else the collector walks all objects of the process every few calls to a large group."""
    size = SIZES[1]
    network = Links()
    group = launched(size, network)
    group.update(states(size))
    await turns(lambda: len(network.sent) == size and network.sent[-1])
    construct(network)
    results = []

    def call() -> None:
        results.append(WorkerGroupFuncResult(types.SimpleNamespace(serving_thread=0), "step", group.peers))
        results[-1]._start([b"arguments"])
        for messages, received in zip(network.sent, network.received, strict=True):
            messages.clear()
            received(b"", frames.encode(frames.Ok(results[-1]._call)), [b"a result"])
        gc.collect()

    call()
    before = len(gc.get_objects())
    call()
    assert results[-1].done()
    assert len(gc.get_objects()) - before <= size + 20, "the list of parts, and nothing else"


async def deaths(size):
    """Each worker's end is reported alone."""
    group = launched(size, Links())
    group.ready.resolve(None)
    with Lines() as lines:
        for worker in states(size, "gone"):
            group.update([worker])
        assert group.gone.done()
    return lines.count


async def restarts(size):
    """All workers are restarted, and one message reports it."""
    group = launched(size, Links())
    group.ready.resolve(None)
    before = group.peers
    with Lines() as lines:
        group.update(states(size, "starting", restarts=1))
    assert all(old.error is not None for old in before)
    assert [peer.worker_id for peer in group.peers] == [f"launch-{rank}.1" for rank in range(size)]
    return lines.count


async def end(size):
    network = Links()
    group = launched(size, network)
    group.update(states(size))
    await turns(lambda: group.peers[-1].connected)
    with Lines() as lines:
        group.close()
        await turns(lambda: network.closed == size)
    return lines.count


async def reports(size):
    """The registry handles a report of each worker."""
    runtime = types.SimpleNamespace(identity="driver:x", host="here", network=Links(), worker_id="", io=None)
    registry = GroupRegistry(runtime)
    group = launched(size, runtime.network)
    registry._groups["ns", "g"] = group
    with Lines() as lines:
        for worker in states(size):
            registry.workers_changed(WorkerChanged("ns", "g", [worker], size))
    return lines.count


def watched(group):
    """Return a function that makes a turn of the check of other nodes, as every heartbeat does."""
    watch = NodeReachability(group._new_peer.args[0], "here", lambda: [group])

    def turn() -> int:
        with Lines() as lines:
            watch._turn(1.0, 1.0, 1.0, 10.0)
        return lines.count

    return turn


async def test_an_idle_group_costs_a_heartbeat_nothing_however_large_it_is():
    costs = []
    for size in SIZES:
        network = Links()
        group = launched(size, network)
        group.update(states(size))
        await turns(lambda: len(network.sent) == size and network.sent[-1])  # noqa: B023
        construct(network)
        assert group.ready.done()
        turn = watched(group)
        turn()
        costs.append(turn())
    assert costs[0] == costs[1]


async def awaited(size):
    """A heartbeat while all ranks are awaited."""
    group = launched(size, Links())
    group.update(states(size))
    await turns(lambda: group.peers[-1].connected)
    turn = watched(group)
    network = group._new_peer.args[0]
    network.check_reachability = lambda *_: asyncio.sleep(0, Reachability.LISTENS)
    return turn()


@pytest.mark.parametrize(
    "operation", [awaited, one_by_one, at_once, rank_0_last, answered, fan_out, deaths, restarts, end, reports]
)
async def test_cost_of_a_group_grows_linearly_with_its_ranks(operation):
    few, many = [await operation(size) for size in SIZES]
    assert many < 11 * few, f"{few} lines for {SIZES[0]} ranks, {many} for {SIZES[1]}"


async def test_many_items_leave_turns_to_others():
    handled: list[int] = []

    def handle(item: int) -> None:
        handled.append(item)
        end = loop.time() + TURN_S / 4
        while loop.time() < end:
            pass

    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def others_turn() -> bool:
        seen.append(len(handled))
        return len(handled) == 40

    Turns(handle).add(range(40))
    await turns(others_turn)
    assert handled == list(range(40))
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 5


async def test_an_item_that_raises_does_not_stop_the_others():
    handled: list[int] = []

    def handle(item: int) -> None:
        handled.append(item)
        if item == 1:
            raise ValueError(item)

    with pytest.raises(ValueError, match="1"):
        Turns(handle).add(range(3))
    await turns(lambda: len(handled) == 3)
    assert handled == [0, 1, 2]
