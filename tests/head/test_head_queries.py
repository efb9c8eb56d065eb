"""Hardware queries: each request is answered once, and the agent is notified when no client waits any more."""

from __future__ import annotations

import pytest
from head_kit import HeadKit, agent_hello
from msgspec.structs import replace

from rlinf_actors.head.commands import Refuse
from rlinf_actors.head.operations import ANSWER_S, SPARE_S
from rlinf_actors.wire.agent_messages import (
    Beat,
    Goodbye,
    HardwareFound,
    LookForHardware,
    StopLooking,
    WorkersHealth,
)
from rlinf_actors.wire.check_values import CheckAnswer, CheckQuestion, NodeFacts, PathTest
from rlinf_actors.wire.client_messages import (
    DrainNode,
    Enumerated,
    EnumerateHardware,
    GetEvents,
    GetStatus,
)
from rlinf_actors.wire.debug_values import (
    DebugAnswer,
    DebugQuestion,
)
from rlinf_actors.wire.figure_values import FigureQuestion, NodeFigures, WorkerFigures
from rlinf_actors.wire.log_values import LogQuestion, LogSlice
from rlinf_actors.wire.node_questions import AgentAnswered, AskAgent, AskNode, NodeAnswered
from rlinf_actors.wire.stack_values import StackAnswer, StackQuestion, WorkerStacks
from rlinf_actors.wire.trace_values import SwitchedWorkers, TraceQuestion, TraceSlice, TraceSwitch
from rlinf_actors.wire.values import HardwareAnswer, HardwareQuestion, Piece, WorkerHealth, WorkerPulse

QUESTION = HardwareQuestion("Arm", 1, limit_s=10.0)
ANSWER = HardwareAnswer([Piece("Arm", "v2", "lab:ArmInfo", '{"ip": "10.0.0.1"}', "10.0.0.1")])


@pytest.fixture
def kit() -> HeadKit:
    kit = HeadKit(lease_s=30.0)
    kit.cluster(2)
    return kit


def ask(kit: HeadKit, peer: str = "d1", node: str = "n1") -> str:
    """The id of the query that the node got."""
    assert kit.ask(peer, EnumerateHardware(node, QUESTION)) is None
    (look,) = kit.sent(LookForHardware, f"a:{node}")
    assert look.question == QUESTION
    return look.id


def test_answer_of_the_node_reaches_the_client_once(kit):
    id = ask(kit)
    kit.tell("a:n1", HardwareFound(id, ANSWER))
    assert kit.answers() == [("d1", Enumerated(ANSWER))]
    kit.tell("a:n1", HardwareFound(id, ANSWER))
    assert kit.answers() == []
    kit.wait(9.0)
    assert kit.refusals() == []


def test_query_is_repeated_over_a_nodes_new_connection(kit):
    id = ask(kit)
    kit.node("n1", ip="10.0.0.2")
    assert [look.id for look in kit.sent(LookForHardware, "a:n1")] == [id]
    kit.tell("a:n1", HardwareFound(id, ANSWER))
    assert kit.answers() == [("d1", Enumerated(ANSWER))]
    kit.node("n1", ip="10.0.0.2")
    assert kit.sent(LookForHardware) == []


def test_two_queries_on_one_node_get_their_own_answers(kit):
    kit.driver("d2")
    first, second = ask(kit), ask(kit, "d2")
    kit.tell("a:n1", HardwareFound(second, ANSWER))
    assert kit.answers() == [("d2", Enumerated(ANSWER))]
    kit.tell("a:n1", HardwareFound(first, ANSWER))
    assert kit.answers() == [("d1", Enumerated(ANSWER))]


def test_answer_of_another_node_is_ignored(kit):
    id = ask(kit)
    kit.tell("a:n0", HardwareFound(id, ANSWER))
    assert kit.answers() == []
    kit.tell("a:n1", HardwareFound(id, ANSWER))
    assert len(kit.answers()) == 1


def test_client_without_a_session_may_query_hardware(kit):
    id = ask(kit, "observer")
    kit.tell("a:n1", HardwareFound(id, ANSWER))
    assert kit.answers() == [("observer", Enumerated(ANSWER))]


def test_query_of_an_absent_node_is_refused_at_once(kit):
    refused = kit.ask("d1", EnumerateHardware("n7", QUESTION))
    assert isinstance(refused, Refuse)
    assert (refused.kind, refused.text) == ("node_lost", "node n7, asked for its Arm, is not there (any more)")


@pytest.mark.parametrize("leaves", [True, False])
def test_loss_of_the_node_ends_the_query(kit, leaves):
    id = ask(kit)
    if leaves:
        kit.tell("a:n1", Goodbye("its agentd was stopped"))
    else:
        kit.node("n1", "-2", ip="10.0.0.2")  # its agentd was restarted
    (refused,) = kit.refusals()
    assert refused.kind == "node_lost"
    assert refused.text.startswith("node n1 (10.0.0.2) was lost while it looked for its Arm: its agentd was st")
    assert kit.sent(StopLooking) == []
    kit.tell("a:n1", HardwareFound(id, ANSWER))
    assert kit.answers() == []


def keep_alive(kit: HeadKit, seconds: int) -> list[Refuse]:
    """Let time pass in which all peers beat."""
    refused: list[Refuse] = []
    for _ in range(seconds):
        kit.wait(1.0)
        refused += kit.refusals()
        if kit.sent(StopLooking):
            refused.append(kit.sent(StopLooking)[0])
        for peer in ("a:n0", "a:n1", "d1"):
            kit.tell(peer, Beat("x"))
    return refused


def test_query_without_an_answer_times_out(kit):
    id = ask(kit)
    assert keep_alive(kit, int(QUESTION.limit_s + SPARE_S) - 1) == []
    refused, stop = keep_alive(kit, 2)
    assert (refused.kind, refused.text) == (
        "timeout", "node n1 (10.0.0.2) gave no answer in 15 s when asked for its Arm",
    )  # fmt: skip
    assert stop == StopLooking(id)
    kit.tell("a:n1", HardwareFound(id, ANSWER))
    assert kit.answers() == []


def test_end_of_the_client_stops_the_query(kit):
    id = ask(kit)
    kit.tell("d1", Goodbye("done"))
    assert kit.sent(StopLooking, "a:n1") == [StopLooking(id)]
    kit.tell("a:n1", HardwareFound(id, ANSWER))
    assert kit.answers() == []


def test_answer_to_an_earlier_head_is_ignored(kit):
    assert ask(kit).startswith(kit.head.identity.epoch)


# --- traces ---

PART = TraceSlice(data=b"ring")


def ask_trace(kit: HeadKit) -> str:
    assert kit.ask("d1", AskNode("n1", TraceQuestion("ns", "w-0", 4))) is None
    (order,) = kit.sent(AskAgent, "a:n1")
    assert order.question == TraceQuestion("ns", "w-0", 4)
    return order.id


def test_part_of_a_trace_reaches_the_driver_once(kit):
    id = ask_trace(kit)
    kit.tell("a:n1", AgentAnswered(id, PART))
    assert kit.answers() == [("d1", NodeAnswered(PART))]
    kit.tell("a:n1", AgentAnswered(id, PART))
    assert kit.answers() == []


def test_answer_of_another_kind_is_ignored(kit):
    trace, hardware = ask_trace(kit), ask(kit)
    kit.tell("a:n1", HardwareFound(trace, ANSWER))
    kit.tell("a:n1", AgentAnswered(hardware, PART))
    assert kit.answers() == []


def test_driver_learns_that_the_node_of_a_trace_was_lost(kit):
    ask_trace(kit)
    kit.tell("a:n1", Goodbye("stopped"))
    (refusal,) = kit.refusals()
    assert (refusal.peer, refusal.kind) == (b"d1", "node_lost")
    assert "traces" in refusal.text


# --- stacks ---

STACKS = StackQuestion("ns", ["w-0", "w-1"])
SHOWN = StackAnswer([WorkerStacks("w-0", "step", 3.0), WorkerStacks("w-1", fault="it has ended")])


def test_stacks_reach_the_client_once(kit):
    assert kit.ask("d1", AskNode("n1", STACKS)) is None
    (order,) = kit.sent(AskAgent, "a:n1")
    assert order.question == STACKS
    kit.tell("a:n1", AgentAnswered(order.id, PART))  # no answer to this order
    kit.tell("a:n0", AgentAnswered(order.id, SHOWN))  # another node's
    assert kit.answers() == []
    kit.tell("a:n1", AgentAnswered(order.id, SHOWN))
    assert kit.answers() == [("d1", NodeAnswered(SHOWN))]
    kit.tell("a:n1", AgentAnswered(order.id, SHOWN))
    assert kit.answers() == []


def test_switched_traces_are_confirmed_to_the_client(kit):
    assert kit.ask("d1", AskNode("n1", TraceSwitch("ns", 1024))) is None
    (order,) = kit.sent(AskAgent, "a:n1")
    assert order.question == TraceSwitch("ns", 1024)
    kit.tell("a:n0", AgentAnswered(order.id, SwitchedWorkers(9)))  # another node's
    kit.tell("a:n1", AgentAnswered(order.id, SwitchedWorkers(2)))
    assert kit.answers() == [("d1", NodeAnswered(SwitchedWorkers(2)))]


def test_a_driver_is_asked_for_its_own_trace(kit):
    switch, question = TraceSwitch("ns", 1000), TraceQuestion("ns", "driver")
    assert kit.ask("tool", AskNode("d1", switch)) is None
    (order,) = kit.sent(AskAgent, "d1")
    kit.tell("d1", AgentAnswered(order.id, SwitchedWorkers(1)))
    assert kit.answers() == [("tool", NodeAnswered(SwitchedWorkers(1)))]

    assert kit.ask("tool", AskNode("d1", question)) is None
    kit.driver("d1")  # by a new connection
    (order,) = kit.sent(AskAgent, "d1")[-1:]
    kit.driver("d2")
    kit.tell("d2", AgentAnswered(order.id, TraceSlice(data=b"forged")))
    kit.tell("d1", AgentAnswered(order.id, TraceSlice(data=b"ring")))
    assert kit.answers()[-1:] == [("tool", NodeAnswered(TraceSlice(data=b"ring")))]


def test_a_driver_is_asked_for_nothing_else_and_its_end_is_told(kit):
    for asked in (AskNode("d1", LogQuestion("ns")), AskNode("d1", TraceSwitch("other", 1000))):
        refusal = kit.ask("tool", asked)
        assert isinstance(refusal, Refuse)
        assert refusal.kind == "node_lost"
    kit.ask("tool", AskNode("d1", TraceSwitch("ns", 1000)))
    kit.tell("d1", Goodbye("it is done"))
    (refusal,) = kit.refusals()
    assert refusal.kind == "node_lost"
    assert "driver d1" in refusal.text


def test_a_part_of_a_log_file_reaches_the_client_also_after_a_long_wait(kit):
    assert kit.ask("d1", AskNode("n1", LogQuestion("ns", "g-0.out", wait_s=20.0))) is None
    (order,) = kit.sent(AskAgent, "a:n1")
    kit.wait(ANSWER_S + 5.0)
    assert kit.refusals() == []
    kit.tell("a:n1", AgentAnswered(order.id, LogSlice(data=b"x")))
    assert kit.answers() == [("d1", NodeAnswered(LogSlice(data=b"x")))]


def test_node_that_sends_no_stacks_in_time_is_named(kit):
    assert kit.ask("d1", AskNode("n1", STACKS)) is None
    kit.wait(ANSWER_S + 1.0)
    (refusal,) = kit.refusals()
    assert (refusal.peer, refusal.kind) == (b"d1", "timeout")
    assert "stacks" in refusal.text


def test_figures_reach_the_client_once(kit):
    found = NodeFigures([WorkerFigures("w-0", queued=2)], cpus=8)
    assert kit.ask("d1", AskNode("n1", FigureQuestion("ns"))) is None
    (order,) = kit.sent(AskAgent, "a:n1")
    kit.tell("a:n1", AgentAnswered(order.id, SHOWN))  # no answer to this order
    assert kit.answers() == []
    kit.tell("a:n1", AgentAnswered(order.id, found))
    assert kit.answers() == [("d1", NodeAnswered(found))]
    kit.tell("a:n1", AgentAnswered(order.id, found))
    assert kit.answers() == []


def test_facts_reach_the_client(kit):
    assert kit.ask("d1", AskNode("n1", CheckQuestion(facts=True))) is None
    (order,) = kit.sent(AskAgent, "a:n1")
    found = CheckAnswer(1.5, NodeFacts("1.0"))
    kit.tell("a:n1", AgentAnswered(order.id, found))
    assert kit.answers() == [("d1", NodeAnswered(found))]


def test_a_node_connects_to_addresses_of_nodes_only(kit):
    """Else a driver could have an agentd connect to any machine that it reaches."""
    kit.ask("a:n2", agent_hello("n2"))
    test = PathTest("measure", "10.9.9.9", far="n2", port=22)
    refusal = kit.ask("d1", AskNode("n1", CheckQuestion(path=test)))
    assert isinstance(refusal, Refuse)
    assert "'10.9.9.9' is no address of node" in refusal.text
    refusal = kit.ask("d1", AskNode("n1", CheckQuestion(path=PathTest("measure", "10.9.9.9", far="n9"))))
    assert isinstance(refusal, Refuse)
    assert "not there" in refusal.text
    ip = kit.head.nodes.get("n2").report.ip
    good = CheckQuestion(path=PathTest("measure", ip, far="n2", port=22))
    assert kit.ask("d1", AskNode("n1", good)) is None
    assert [order.question for order in kit.sent(AskAgent, "a:n1")] == [good]


def test_what_a_debugger_says_reaches_the_client_also_after_a_long_wait(kit):
    said = DebugQuestion("ns", "w-0", "s", "kim@lab\x1b", 1, "p x\n", wait_s=20.0)
    assert kit.ask("d1", AskNode("n1", said)) is None
    (order,) = kit.sent(AskAgent, "a:n1")
    assert order.question == replace(said, by="kim@lab\\x1b"), "it is passed on, with a name that can be shown"
    kit.wait(ANSWER_S + 5.0)
    kit.tell("a:n0", AgentAnswered(order.id, DebugAnswer("lie")))  # another node's
    assert (kit.refusals(), kit.answers()) == ([], [])
    kit.tell("a:n1", AgentAnswered(order.id, DebugAnswer("w-0", "waits")))
    assert kit.answers() == [("d1", NodeAnswered(DebugAnswer("w-0", "waits")))]


PLACE = "train.py:42 in step"


def stops(kit: HeadKit, id: str, place: str, **more) -> None:
    kit.tell("a:n1", WorkersHealth([WorkerHealth(id, breakpoint=place, **more)]))


def breakpoints(kit: HeadKit) -> list[tuple[str, str]]:
    found = [event for event in kit.ask("d1", GetEvents(namespace="ns")).events if event.kind.startswith("breakpoint_")]
    return [(event.kind.removeprefix("breakpoint_"), event.text) for event in found]


def test_breakpoint_of_a_worker_is_in_the_status_until_it_is_left(kit):
    kit.launch("g", [1])
    kit.ready("a:n1", "g-0")
    for place, unresponsive in ((PLACE, ""), ("", "it is silent"), ("train.py:43 in step", ""), ("", "")):
        stops(kit, "g-0", place, breakpoint_s=5.0 if place else 0.0, unresponsive=unresponsive)
        (group,) = kit.ask("d1", GetStatus()).groups
        pulse = group.workers[0].pulse or WorkerPulse()
        assert pulse.breakpoint == (PLACE if unresponsive else place), "a silent worker is where it was"
        assert pulse.breakpoint_since == (kit.head.wall - 5.0 if pulse.breakpoint else 0.0)
    assert [kind for kind, _ in breakpoints(kit)] == ["reached", "left"], "a step is no event"
    for stop in (1, 2):
        stops(kit, "g-0", f"eval.py:{stop}", stop=stop)
    later = [(kind, text.partition(" at ")[2][:9]) for kind, text in breakpoints(kit)[2:]]
    assert later == [("reached", "eval.py:1"), ("left", "eval.py:1"), ("reached", "eval.py:2")]


def test_events_of_a_breakpoint_say_whose_it_is_who_attaches_and_that_the_worker_goes_on(kit):
    kit.launch("g", [1])
    kit.ready("a:n1", "g-0")
    stops(kit, "g-0", PLACE)
    for number in (0, 1):
        kit.ask("d1", AskNode("n1", DebugQuestion("ns", "g-0", "s", "kim@lab", number)))
        (order,) = kit.sent(AskAgent, "a:n1")
        kit.tell("a:n1", AgentAnswered(order.id, DebugAnswer("g-0", "waits", 1, PLACE)))
    stops(kit, "g-0", "")
    worker, driver = "worker g:0 (process 77) of job ns on node n1", "a driver (pid 100 on a machine without an agentd)"
    assert breakpoints(kit) == [
        ("reached", f"{worker} waits in a breakpoint at {PLACE}, for {driver}: rlinf-actors attach g:0 --job ns"),
        ("attached", f"{worker} is debugged at {PLACE} by kim@lab"),
        ("left", f"{worker} goes on after a breakpoint at {PLACE}"),
    ]


def test_a_breakpoint_in_a_loop_or_of_many_ranks_does_not_flood_the_event_log(kit):
    kit.launch("g", [1] * 20)
    for rank in range(20):
        kit.ready("a:n1", f"g-{rank}")
    for _ in range(10):
        for rank in range(20):
            stops(kit, f"g-{rank}", PLACE)
            stops(kit, f"g-{rank}", "")
    reached_at = kit.head.wall
    assert [kind for kind, _ in breakpoints(kit)] == ["reached", "left"]
    kit.wait(61.0)
    later = breakpoints(kit)[2:]
    assert [kind for kind, _ in later] == ["reached", "left"]
    assert all(text.endswith("(198 more in the 60 s before)") for _, text in later)
    assert {event.at for event in kit.ask("d1", GetEvents(namespace="ns")).events if "breakpoint" in event.kind} == {
        reached_at
    }


def test_a_node_that_is_being_drained_is_still_asked(kit):
    """Its workers go on, and may hang."""
    kit.ask("d1", DrainNode("n1", "me", "new disk"))
    assert kit.ask("d1", AskNode("n1", STACKS)) is None
    assert [order.question for order in kit.sent(AskAgent, "a:n1")] == [STACKS]
