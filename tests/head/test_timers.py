"""The head's timer heap, and the cost of an event, which does not grow with the cluster."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
from head_kit import HeadKit, agent_hello, client_hello, specs
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.head.commands import Answer, RequestReceived
from rlinf_actors.head.timers import TimerHeap
from rlinf_actors.wire.agent_messages import AgentHello, Beat, LogLines, WorkerExited, WorkerReady
from rlinf_actors.wire.client_messages import FindGroup, GetEvents, Launch, StopGroup
from rlinf_actors.wire.values import Endpoint, ExitReport


def test_timers_run_by_deadline_and_then_by_creation():
    timers, ran = TimerHeap(), []
    for at, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "d")):
        timers.at(at, lambda name=name: ran.append(name))
    assert timers.next_deadline() == 1.0
    timers.run_due(0.9)
    assert ran == []
    timers.run_due(2.0)
    assert (ran, timers.next_deadline(), len(timers)) == (["a", "b", "c"], 3.0, 1)


def test_cancelled_timer_never_runs():
    timers, ran = TimerHeap(), []
    first = timers.at(1.0, lambda: timers.cancel(second))
    second = timers.at(1.0, lambda: ran.append("second"))
    third = timers.at(0.5, lambda: ran.append("third"))
    timers.cancel(third)
    timers.cancel(third)
    timers.cancel(None)
    timers.run_due(1.0)
    timers.cancel(first)  # the timer has run
    assert (ran, timers.next_deadline(), len(timers)) == ([], math.inf, 0)


def test_timer_at_infinity_never_runs():
    timers = TimerHeap()
    timers.cancel(timers.at(math.inf, lambda: pytest.fail("never")))
    assert (timers.next_deadline(), len(timers)) == (math.inf, 0)


def test_timer_set_by_an_action_runs_at_the_next_call():
    timers, ran = TimerHeap(), []
    timers.at(1.0, lambda: timers.at(1.0, lambda: ran.append("next")))
    timers.run_due(1.0)
    assert (ran, timers.next_deadline()) == ([], 1.0)
    timers.run_due(1.0)
    assert ran == ["next"]


def test_cancelled_timers_are_removed_from_the_heap():
    timers = TimerHeap()
    for _ in range(10_000):
        timers.cancel(timers.at(60.0, lambda: None))
    assert len(timers._heap) < 200


@given(st.lists(st.tuples(st.sampled_from(["at", "cancel", "run"]), st.integers(0, 20)), max_size=60))
def test_heap_agrees_with_a_sorted_list(steps):
    timers, model, ran, expected, now = TimerHeap(), [], [], [], 0
    made = []
    for what, number in steps:
        if what == "at":
            name = len(made)
            made.append(timers.at(now + number, lambda name=name: ran.append(name)))
            model.append((now + number, name))
        elif what == "cancel" and made:
            timers.cancel(made[number % len(made)])
            model = [(at, name) for at, name in model if name != number % len(made)]
        elif what == "run":
            now += number
            timers.run_due(now)
            expected += [name for at, name in sorted(model) if at <= now]
            model = [(at, name) for at, name in model if at > now]
        assert timers.next_deadline() == min((at for at, _ in model), default=math.inf)
        assert (ran, len(timers)) == (expected, len(model))


# --- the cost of an event ---


def operations(act: Callable[[], object]) -> int:
    """Count the bytecode instructions of *act*."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def large_cluster(size: int) -> HeadKit:
    """A head with *size* nodes, drivers and groups; each driver has a group of one worker."""
    kit = HeadKit()
    for n in range(size):
        kit.node(f"n{n}", rank=n, is_head=n == 0)
        kit.driver(f"d{n}", namespace=f"ns{n}" if n else "ns")
        assert launch(kit, n) is not None
        ready(kit, n)
    return kit


def launch(kit: HeadKit, n: int, group: str = "g"):
    namespace = f"ns{n}" if n else "ns"
    return kit.ask(f"d{n}", Launch(namespace, group, "m:C", specs(group, [n], namespace, f"{group}.{n}")))


def ready(kit: HeadKit, n: int, group: str = "g") -> None:
    kit.tell(f"a:n{n}", WorkerReady(f"{group}.{n}-0", 77, Endpoint("h", "ipc://x"), 0, 4000))


def handle_hello(kit: HeadKit, peer: str, hello: AgentHello) -> None:
    """Let only the head handle a hello, since the kit's `disk` would count too."""
    out = kit.head.handle(RequestReceived(peer.encode(), 0, hello), kit.now)
    assert [command for command in out if isinstance(command, Answer)]


EVENTS: dict[str, Callable[[HeadKit], object]] = {
    "an agent's beat": lambda kit: kit.tell("a:n7", Beat("n7-1")),
    "a client's beat": lambda kit: kit.tell("d7", Beat("d7")),
    "lines of output": lambda kit: kit.tell("a:n7", LogLines("ns7", "n7", [], 10)),
    "a worker is ready": lambda kit: kit.tell("a:n7", WorkerReady("g.7-0", 78, Endpoint("h", "ipc://y"), 0, 4000)),
    "a worker exits": lambda kit: kit.tell("a:n8", WorkerExited("g.8-0", ExitReport("exited", 1))),
    "a group is launched": lambda kit: launch(kit, 7, "h"),
    "a group is looked up": lambda kit: kit.ask("d7", FindGroup("ns7", "g")),
    "a group is stopped": lambda kit: kit.ask("d9", StopGroup("ns9", "g", 1.0)),
    "a reader waits for events": lambda kit: kit.ask("d7", GetEvents(-1, namespace="ns7", wait_s=5.0)),
    "a driver says hello": lambda kit: kit.ask("new", client_hello("new", namespace="other")),
    "a new agent says hello": lambda kit: handle_hello(kit, "a:new", agent_hello("new", rank=5000)),
    "an agent says hello again": lambda kit: handle_hello(kit, "a:n6", agent_hello("n6", rank=6)),
    "a deadline is asked for": lambda kit: kit.head.next_deadline(),
}


@pytest.fixture(scope="module")
def heads() -> list[HeadKit]:
    return [large_cluster(100), large_cluster(1000)]


@pytest.mark.parametrize("name", EVENTS)
def test_cost_of_an_event_does_not_grow_with_the_cluster(heads, name):
    costs = [operations(lambda: EVENTS[name](kit)) for kit in heads]  # noqa: B023
    assert costs[1] <= costs[0] * 1.1, f"{name}: {costs[0]} operations at 100, {costs[1]} at 1,000"
