"""The head does long work in slices: no turn of it grows with a message or with the cluster, and others get theirs.

Costs are numbers of calls of functions, those of C too. They do not depend on the machine.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from typing import Any, get_args

import pytest
from head_kit import HeadKit, agent_hello, running, specs
from msgspec import convert, inspect
from msgspec.structs import replace

from rlinf_actors.head.commands import (
    Answer,
    HoldBack,
    LongMessage,
    NoticeReceived,
    Notify,
    PeerUnreachable,
    Refuse,
    RequestReceived,
    SliceDue,
)
from rlinf_actors.security.members import Member
from rlinf_actors.wire.agent_messages import (
    Beat,
    Goodbye,
    StartWorkers,
    StopWorkers,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.client_messages import (
    EStop,
    FindGroup,
    GetStatus,
    Handles,
    Launch,
    Launched,
    StopGroup,
    WatchClients,
    WorkerChanged,
)
from rlinf_actors.wire.control_codec import Body, Envelope, Request
from rlinf_actors.wire.node_questions import NodeQuestion, QuestionMessage
from rlinf_actors.wire.resize_messages import AddRanks, ResizeGroup
from rlinf_actors.wire.values import Claim, Endpoint, ExitReport, GroupHandle, WorkerHealth, WorkerSpec

LONGEST = 20_000
"""Most calls in one turn. Most of them are of properties and comparisons, and take 0.1 us.

Before there were slices, a launch of so many workers took 360,000 calls at once.
"""
LONG = 4_000
"""Elements of the longest lists in these tests. Bounds are larger, which shows nothing more."""
BODIES: dict[str, type] = {
    kind.cls.__name__: kind.cls
    for one in inspect.type_info(Envelope).types
    if one.cls is Request
    for field in one.fields
    if field.name == "body"
    for kind in field.type.types
}
"""Every control message."""


class Calls:
    """Counts the calls of functions while it is entered."""

    def __enter__(self) -> Calls:
        self.calls = 0
        sys.setprofile(self._count)
        return self

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event in ("call", "c_call")

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


class Turns(HeadKit):
    """A head whose turns are counted: `longest` is the number of calls in the longest turn since `begin`."""

    longest = 0

    def begin(self, event: Any) -> list[Any]:
        """Pass an event to the head, and return the commands of this turn; further slices wait for `turn`."""
        self.longest = 0
        return self._turn(event)

    def turn(self) -> list[Any]:
        return self._turn(SliceDue())

    def rest(self) -> list[Any]:
        """Run all slices that are left; return the commands."""
        done: list[Any] = []
        while self.head.unfinished():
            done += self.turn()
        return done

    def _turn(self, event: Any) -> list[Any]:
        with Calls() as counter:
            done = self.head.apply(event, self.now, self.wall)
            done = done + self.head.finish_turn()
        self.longest = max(self.longest, counter.calls)
        return self._keep(done)

    def asking(self, peer: str, body: Body) -> Any:
        return RequestReceived(peer.encode(), next(self.ids), body)

    def telling(self, peer: str, body: Body) -> Any:
        return NoticeReceived(peer.encode(), body)


def cluster(nodes: int, workers: int = 0) -> Turns:
    """*nodes* nodes, the driver d1, and a group "g" of so many running workers."""
    kit = Turns()
    for n in range(nodes):
        kit.node(f"n{n}", ip=f"10.0.{n >> 8}.{n & 255}", rank=n)
    kit.driver("d1")
    if workers:
        assert isinstance(kit.launch("g", [rank % nodes for rank in range(workers)]), Launched)
        for group in kit.head.groups.all():
            for worker in group.workers.values():
                worker.step("ready")
                worker.endpoint = Endpoint("h", "ipc://x")
    return kit


def launch(nodes: int, count: int = LONG) -> Launch:
    return Launch("ns", "new", "m:C", specs("new", [rank % nodes for rank in range(count)]))


def added(nodes: int, count: int = LONG) -> list[WorkerSpec]:
    """As many further ranks of the group "g" as it has."""
    every = specs("g", [rank % nodes for rank in range(2 * count)])
    return [replace(spec, id=f"{spec.id}a", resizes=-1) for spec in every[count:]]


def names(count: int = LONG) -> list[str]:
    return [f"g-{n}" for n in range(count)]


def workers_of(kit: Turns) -> list:
    return list(kit.head.groups.get("ns", "g").workers.values())


LARGE = {
    "launch": lambda kit: kit.asking("d1", launch(len(list(kit.head.nodes.all())))),
    "group is stopped": lambda kit: kit.asking("d1", StopGroup("ns", "g", 1.0)),
    "group is found": lambda kit: kit.asking("d1", FindGroup("ns", "g")),
    "status": lambda kit: kit.asking("tool", GetStatus()),
    "handles": lambda kit: kit.telling(
        "d1",
        Handles([GroupHandle("ns", "g", [one.state() for one in kit.head.groups.get("ns", "g").workers.values()])]),
    ),
    "owner's end": lambda kit: kit.telling("d1", Goodbye("bye")),
    "ranks are added": lambda kit: kit.asking("d1", AddRanks("ns", "g", added(len(list(kit.head.nodes.all()))))),
    "group shrinks": lambda kit: kit.asking("d1", ResizeGroup("ns", "g", "g", 1)),
    "health": lambda kit: kit.telling(
        "a:n0", WorkersHealth([WorkerHealth("g-0", "hangs"), WorkerHealth("g-0")] * LONG)
    ),
    "another group is stopped": lambda kit: kit.asking(
        "d1", StopGroup("ns", "g", 1.0, [f"h-{n}" for n in range(LONG)])
    ),
    "group is launched again": lambda kit: kit.asking(
        "d1", replace(launch(1), group="g", workers=specs("g", [0] * LONG))
    ),
}


@pytest.mark.parametrize("nodes", [100, 1000])
@pytest.mark.parametrize("work", LARGE)
def test_no_turn_grows_with_a_group(work, nodes):
    kit = cluster(nodes, LONG)
    kit.begin(LARGE[work](kit))
    kit.rest()
    assert kit.longest < LONGEST


def test_no_turn_grows_with_the_workers_of_a_node():
    kit = cluster(2)
    assert isinstance(kit.launch("g", [0] * LONG), Launched)
    node = kit.head.nodes.known("n0")
    kit.begin(kit.telling("a:n0", Goodbye("maintenance")))
    kit.rest()
    assert kit.longest < LONGEST
    assert node is not None
    kit = cluster(1)
    workers = [running(spec, "d1", endpoint=Endpoint("h", "ipc://x")) for spec in specs("g", [0] * LONG)]
    token = kit.head.jobs.token("ns")
    told = [replace(one, spec=replace(one.spec, token=token)) for one in workers]
    kit.begin(kit.asking("a:n1", agent_hello("n1", rank=1, workers=told)))
    assert [type(c) for c in kit.rest() if isinstance(c, (Answer, Refuse))] == [Answer]
    assert kit.longest < LONGEST
    assert len(kit.head.groups.get("ns", "g").workers) == LONG


def test_no_turn_grows_with_the_groups_of_an_owner():
    kit = cluster(10)
    for n in range(500):
        kit.launch(f"g{n}", [n % 10])
    kit.begin(kit.telling("d1", Goodbye("bye")))
    assert {group.stopping for group in kit.head.groups.all()} == {True, False}
    kit.rest()
    assert kit.longest < LONGEST
    assert {group.stopping for group in kit.head.groups.all()} == {True}


def filled(info: inspect.Type, count: int, depth: int = 0, choice: int = -1) -> Any:
    """Return a plain value of the type; each list or map in a message has *count* elements, those below it one.

    *choice* chooses the type in unions that are not in a list or map.
    """
    if isinstance(info, inspect.Metadata):
        return filled(info.type, count, depth, choice)
    if isinstance(info, inspect.UnionType):
        long = [one for one in info.types if not isinstance(one, inspect.NoneType)]
        return filled(long[choice % len(long)], count, depth, choice)
    if isinstance(info, (inspect.StructType, inspect.DataclassType)):
        fields = {one.encode_name: filled(one.type, count, depth, choice) for one in info.fields}
        if isinstance(info, inspect.DataclassType):
            return {}
        tag = {info.tag_field: info.tag} if info.tag_field else {}
        return list(fields.values()) if info.array_like else {**fields, **tag}
    most = min(getattr(info, "max_length", None) or 1, count)
    if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
        one = filled(info.item_type, 1, depth + 1)
        if isinstance(one, dict) and "id" in one:
            return [{**one, "id": f"x-{n}"} for n in range(most)]
        return [f"x-{n}" if isinstance(one, str) else one for n in range(most)]
    if isinstance(info, inspect.DictType):
        value = filled(info.value_type, 1, depth + 1)
        return {f"x-{n}": value for n in range(most)}
    if isinstance(info, inspect.TupleType):
        return [filled(one, 1, depth + 1) for one in info.item_types]
    if isinstance(info, inspect.LiteralType):
        return info.values[0]
    if isinstance(info, inspect.IntType):
        return max(1, info.ge or 0)
    if isinstance(info, inspect.FloatType):
        return 1.0
    if isinstance(info, inspect.BoolType):
        return False
    if isinstance(info, inspect.BytesType):
        return b"x" * (info.min_length or 1)
    return "ns" if isinstance(info, inspect.StrType) else None


@pytest.fixture(scope="module")
def busy() -> Turns:
    return cluster(100, 1000)


@pytest.mark.parametrize("verb", sorted(BODIES))
def test_no_legal_message_makes_a_long_turn(busy, verb):
    """Each message that a member may send, with its lists as long as they may be, from a driver and from an agentd."""
    kit = busy
    kinds = get_args(NodeQuestion) if BODIES[verb] in get_args(QuestionMessage) else [None]
    for peer, choice in itertools.product(("d1", "a:n7", "stranger"), range(len(kinds))):
        plain = filled(inspect.type_info(BODIES[verb]), LONG, choice=choice)
        if verb == "AgentHello":
            plain["node"]["resources"] = []
        body = convert(plain, BODIES[verb])
        for event in (kit.asking(peer, body), kit.telling(peer, body)):
            kit.begin(event)
            kit.rest()
            assert kit.longest < LONGEST, f"{kit.longest} calls in one turn, from {peer}"
    assert kit.head.unfinished() is False


# --- others in between ---


def test_beats_and_emergency_stops_are_handled_between_the_slices_of_a_launch():
    kit = cluster(100)
    out = kit.begin(kit.asking("d1", launch(100)))
    assert kit.head.unfinished()
    assert not [c for c in out if isinstance(c, Answer)]
    answered = kit.begin(kit.telling("d1", Beat("d1")))  # its own beat too
    assert [type(c.body) for c in answered if isinstance(c, Notify) and c.peer == b"d1"] == [Beat]
    assert [type(c) for c in kit.begin(kit.asking("tool", EStop("me"))) if isinstance(c, Answer)] == [Answer]
    kit.driver("d2", namespace="other")
    answers = [c for c in kit.out + kit.rest() if isinstance(c, Answer) and isinstance(c.body, Launched)]
    assert answers or kit.head.groups.get("ns", "new") is not None


def test_later_messages_of_the_sender_wait_and_keep_their_order():
    kit = cluster(10)
    asked = kit.asking("d1", launch(10, 1000))
    later = [kit.asking("d1", StopGroup("ns", "new", 0.0)), kit.asking("d1", FindGroup("ns", "else"))]
    out = kit.begin(asked)
    for event in later:
        out += kit.begin(event)
    out += kit.rest()
    done = [c.id for c in out if isinstance(c, (Answer, Refuse))]
    assert done == [asked.id, later[1].id]  # the group's workers end first
    assert kit.head.groups.get("ns", "new").stopping


def test_a_long_message_is_handled_before_later_ones_of_its_connection():
    kit = cluster(10)
    kit.driver("d2")
    long, later = kit.asking("d1", launch(10, 50)), kit.asking("d1", FindGroup("ns", "new"))

    def decoding():
        for _ in range(3):
            yield
        return long

    out = kit.begin(LongMessage(b"d1", decoding()))
    assert [c for c in out if isinstance(c, HoldBack)] == [HoldBack(b"d1", True)]
    out = kit.begin(later)  # it was in the listener's hands already
    assert [type(c) for c in kit.begin(kit.asking("d2", GetStatus())) if isinstance(c, Answer)] == [Answer]
    out += kit.rest()
    assert [c.id for c in out if isinstance(c, (Answer, Refuse))] == [long.id, later.id]
    assert [c for c in out if isinstance(c, HoldBack)] == [HoldBack(b"d1", False)]
    assert not kit.head.slices.pending


def test_a_long_message_that_is_malformed_ends_without_an_answer():
    kit = cluster(1)

    def decoding():
        yield
        return None

    out = kit.begin(LongMessage(b"d1", decoding())) + kit.rest()
    assert out == [HoldBack(b"d1", True), HoldBack(b"d1", False)]


def test_members_take_turns_however_many_connections_they_have():
    kit, order = cluster(1), []

    def work(name):
        for _ in range(4):
            order.append(name)
            yield

    for n in range(3):
        kit.head.slices.start(work("many"), [b"m%d" % n], Member("driver", "many"))
    kit.head.slices.start(work("one"), [b"o"], Member("driver", "one"))
    kit.rest()
    assert order[4:10] == ["many", "one"] * 3


def test_a_group_is_shown_to_others_when_its_launch_is_complete():
    kit = cluster(10)
    kit.driver("d2")
    kit.begin(kit.asking("d1", launch(10, 2000)))
    while kit.head.groups.get("ns", "new") is None:
        kit.turn()
    find = kit.asking("d2", FindGroup("ns", "new"))
    assert not [c for c in kit.begin(find) if isinstance(c, (Answer, Refuse))]
    answers = [c for c in kit.rest() if isinstance(c, (Answer, Refuse)) and c.id == find.id]
    assert [len(c.body.group.workers) for c in answers] == [2000]
    assert {worker.state for worker in answers[0].body.group.workers} == {"starting"}


@pytest.mark.parametrize("turns", [0, 3, 12, 25])
def test_a_launcher_that_dies_between_two_slices_leaves_nothing(turns):
    kit = cluster(10)
    out = kit.begin(kit.asking("d1", launch(10, 2000)))
    for _ in range(turns):
        out += kit.turn()
    client = kit.head.clients.get("d1")
    kit.head.now, kit.head.out = kit.now, []
    kit.head.clients.gone(client, "killed")
    out += kit.head.out + kit.begin(PeerUnreachable(b"d1")) + kit.rest()
    started = {s.id for c in out if isinstance(c, Notify) and isinstance(c.body, StartWorkers) for s in c.body.workers}
    stopped = {id for c in out if isinstance(c, Notify) and isinstance(c.body, StopWorkers) for id in c.body.ids}
    assert started <= stopped
    for n in range(10):
        for id in sorted(started):
            kit.tell(f"a:n{n}", WorkerExited(id, ExitReport("stopped")))
    assert kit.head.groups.get("ns", "new") is None
    assert not kit.head.unfinished()


def test_all_robots_of_a_launch_are_granted_together():
    kit = cluster(10)
    kit.driver("d2", namespace="two")
    robots = [(Claim(f"arm{n}", f"arm {n}"),) if n % 10 == 9 else () for n in range(1000)]
    asked = launch(10, 1000)
    asked = replace(asked, workers=[replace(s, claims=c) for s, c in zip(asked.workers, robots, strict=True)])
    kit.begin(kit.asking("d1", asked))
    held = set()
    while kit.head.unfinished():
        held.add(len(kit.head.groups.claims.states(kit.now)))
        kit.turn()
    assert held <= {0, 100}


def test_a_node_that_returns_waits_until_its_loss_is_done():
    kit = cluster(2)
    kit.launch("g", [0] * 1000)
    kit.begin(kit.telling("a:n0", Goodbye("maintenance")))
    assert kit.head.unfinished()
    hello = kit.asking("a:n0-2", agent_hello("n0", "n0-2", rank=0))
    out = kit.begin(hello)
    assert not [c for c in out if isinstance(c, (Answer, Refuse))]
    out += kit.rest()
    assert [type(c) for c in out if isinstance(c, (Answer, Refuse)) and c.id == hello.id] == [Answer]
    told = [w for c in out if isinstance(c, Notify) and isinstance(c.body, WorkerChanged) for w in c.body.workers]
    assert {worker.state for worker in told} == {"gone"}


def test_short_work_takes_one_turn():
    kit = cluster(4)
    out = kit.begin(kit.asking("d1", launch(4, 40)))
    assert [type(c.body) for c in out if isinstance(c, Answer)] == [Launched]
    assert not kit.head.unfinished()
    kit.begin(kit.telling("d1", WatchClients(names(50))))
    assert not kit.head.unfinished()


@pytest.mark.parametrize("late", [0, 40, 41, 42, 43, 44, 45, 46])
def test_a_launcher_learns_of_all_workers_that_come_up_before_its_answer(late):
    """It takes no notice of a group before the answer to its launch. Each worker is up *late* turns after its order."""
    kit = cluster(2)
    states: dict[int, Any] = {}
    starts: list[list[tuple[str, str]]] = [[] for _ in range(late + 1)]
    answered, done = False, kit.begin(kit.asking("d1", launch(2)))
    while done or any(starts) or kit.head.unfinished():
        starts.append([])
        for one in done:
            if isinstance(one, Notify) and isinstance(one.body, StartWorkers):
                starts[-1] += [(one.peer.decode(), spec.id) for spec in one.body.workers]
            elif isinstance(one, Answer) and isinstance(one.body, Launched):
                answered = True
                states.update((state.rank, state.state) for state in one.body.group.workers)
            elif isinstance(one, Notify) and isinstance(one.body, WorkerChanged) and answered:
                states.update((state.rank, state.state) for state in one.body.workers)
        done = kit.turn()
        for peer, id in starts.pop(0):
            done += kit.begin(kit.telling(peer, WorkerReady(id, 77, Endpoint("h", "ipc://x"))))
    assert Counter(states.values()) == {"running": LONG}
